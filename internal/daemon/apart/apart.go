// Package apart runs a server as two processes. This one, as root, is the node and starts the other, which has no root and is
// everything else: API server, controllers, manager, gateway.
//
// What belongs to the other is the directory "server" in the data directory; Divide gives it that of a server that was one process,
// and Unite takes it back. Of what is in there, this process reads the node's account alone, and copies from it what it has checked:
// the other could be anyone's.
//
// It knows nothing of sandboxes. The node is a function.
package apart

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"strconv"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/adminops"
	"github.com/barchan-dev/barchan/internal/daemon/machine"
)

const (
	firstPause = 200 * time.Millisecond
	maxPause   = 30 * time.Second
	// steady is how long a process must have run for its next end to count as the first.
	steady = time.Minute
)

// NodeFunc runs the node until ctx is done, the administrator stops it or it fails. booted tells whether its boot was complete.
type NodeFunc func(ctx context.Context, cfg config.Config, server adminops.ServerProcess) (booted bool, err error)

// Config is what Run needs.
type Config struct {
	config.Config
	Log *slog.Logger
	// Output takes the log of the server's process.
	Output io.Writer
	Node   NodeFunc
	// Started receives the ID of each process of the server; nil: nothing does.
	Started func(pid int)
	// Final reports whether an error of Node ends this process too, which is started anew then.
	Final func(error) bool
}

// Run runs both processes until ctx is done, the administrator stops the node, or either does not even start.
func Run(ctx context.Context, cfg Config) (err error) {
	cfg.Log = cfg.Log.With(telemetry.Component, "apart")
	release, err := machine.Lock(cfg.DataDir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	who, err := lookupUser(UserName)
	if err != nil {
		return err
	}
	if err := who.checkFiles(&cfg.Config); err != nil {
		return err
	}
	if err := awaitGone(ctx, cfg.DataDir); err != nil {
		return err
	}
	if err := Divide(cfg.DataDir, who); err != nil {
		return err
	}
	server := newProcess(cfg, who)
	nodeCtx, stopNode := context.WithCancelCause(ctx)
	defer stopNode(nil)
	serverCtx, stopServer := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServer()
	ended := make(chan error, 1)
	go func() {
		err := server.run(serverCtx)
		stopNode(err)
		ended <- err
	}()
	err = runNode(nodeCtx, cfg, who, server)
	stopServer()
	return errors.Join(err, <-ended)
}

// runNode runs the node, again after a failure unless that is its first boot's.
func runNode(ctx context.Context, cfg Config, who user, server *process) error {
	if err := copyAccount(ctx, cfg.Config); err != nil {
		if ctx.Err() != nil {
			return nil //nolint:nilerr // it was stopped
		}
		return err
	}
	var pause backoff
	for first := true; ; {
		began := time.Now()
		booted, err := cfg.Node(ctx, nodeConfig(cfg.Config, who), server)
		first = first && !booted
		if err == nil || first || cfg.Final(err) {
			return err
		}
		wait := pause.next(time.Since(began))
		cfg.Log.ErrorContext(ctx, "node failed; starting it again", telemetry.Error, err, "in", wait)
		if !lifecycle.Sleep(ctx, wait) {
			return nil
		}
	}
}

// backoff doubles from firstPause to maxPause.
type backoff time.Duration

func (b *backoff) next(ran time.Duration) time.Duration {
	if ran >= steady || *b == 0 {
		*b = backoff(firstPause)
	} else {
		*b = min(*b*2, backoff(maxPause))
	}
	return time.Duration(*b)
}

// ServerDir is the data directory of the server's process.
func ServerDir(dataDir string) string { return filepath.Join(dataDir, serverName) }

// socket is the node's. The data directory is closed to all but root and the server's group.
func socket(dataDir string) string { return filepath.Join(dataDir, "node.sock") }

// nodeConfig returns the settings of the node.
func nodeConfig(cfg config.Config, who user) config.Config {
	account := accountDir(cfg.DataDir)
	cfg.APIKubeconfig, cfg.TokenSecret = filepath.Join(account, kubeconfigName), filepath.Join(account, secretName)
	cfg.Role, cfg.Privileges, cfg.HTTPAddr, cfg.MetricsAddr = config.RoleNode, config.PrivilegesTogether, "127.0.0.1:0", "" // its metrics are at the first
	cfg.NodeSocket, cfg.NodeSocketGroup = socket(cfg.DataDir), strconv.Itoa(who.gid)
	cfg.PeerAddr, cfg.PeerPushAddr, cfg.PeerSeeds = "", "", nil
	return cfg
}

// serverConfig returns the settings of the server's process.
func serverConfig(cfg config.Config) config.Config {
	dir := ServerDir(cfg.DataDir)
	if cfg.TokenSecret == filepath.Join(cfg.DataDir, "credentials", secretName) {
		cfg.TokenSecret = filepath.Join(dir, "credentials", secretName)
	}
	cfg.Privileges, cfg.NodeSocket = config.PrivilegesTogether, socket(cfg.DataDir)
	cfg.DataDir, cfg.RunDir = dir, filepath.Join(dir, "run")
	return cfg
}

// errNotUnited is of a divided data directory in which something is not the server's to have.
func errNotUnited(path string, what string) error {
	return fmt.Errorf("unite %s: it is %s, which no server makes; remove it: %w", path, what, errs.ErrForbidden)
}
