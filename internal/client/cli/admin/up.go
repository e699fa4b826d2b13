// Package admin has the commands for the administrator of a server: up, down, status, env, net, peers, doctor and config.
package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/config"
)

// withSettings adds a flag for each setting to a command, and does its work with the settings.
func withSettings(a *app.App, cmd *cobra.Command, work func(cmd *cobra.Command, cfg *config.Resolved) error) *cobra.Command {
	flags := config.AddFlags(cmd.Flags(), func(key string) bool { return key != "dataDir" }) // the root has that one
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := a.Config(flags)
		if err != nil {
			return err
		}
		return work(cmd, cfg)
	}
	return cmd
}

// UpCommand returns `barchan up`.
func UpCommand(a *app.App) *cobra.Command {
	var detach bool
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start the server",
		Long: "Start the server of the data directory and stay with it, or with --detach leave it in the background once it is ready.\n" +
			"Running sandboxes are adopted. If the server is up, the command reports it and changes nothing.",
	}
	cmd.Flags().BoolVarP(&detach, "detach", "d", false, "run in the background, and return once the server is ready")
	cmd.Flags().DurationVar(&wait, "wait", 2*time.Minute, "with --detach: how long to wait for the server")
	return withSettings(a, cmd, func(cmd *cobra.Command, cfg *config.Resolved) error {
		if done, err := alreadyUp(cmd.Context(), a, cfg, detach, wait); done || err != nil {
			return err
		}
		if err := checkStart(cmd.Context(), a, cfg); err != nil {
			return err
		}
		if detach {
			return startDetached(cmd.Context(), a, cfg, foregroundArgs(cmd, cfg), wait)
		}
		return a.Deps.RunServer(cmd.Context(), cfg.Config, a.Stderr)
	})
}

// alreadyUp is true if a server uses the data directory; with detach it then waits for that one.
func alreadyUp(ctx context.Context, a *app.App, cfg *config.Resolved, detach bool, wait time.Duration) (bool, error) {
	client := adminclient.New(cfg.AdminSocket(), cfg.DataDir)
	s, err := client.Status(ctx)
	if errors.Is(err, adminclient.ErrNotRunning) {
		return false, nil
	}
	if errors.Is(err, errs.ErrForbidden) {
		return false, needRoot()
	}
	if err != nil {
		return false, err
	}
	fmt.Fprintf(a.Stderr, "barchan %s is already up on %s (process %d)\n", s.Version, cfg.DataDir, s.PID)
	if s.Version != "" && s.Version != a.Version().Version {
		fmt.Fprintf(a.Stderr, "this program is version %s; `barchan down`, then `barchan up` changes the server to it\n", a.Version().Version)
	}
	if detach && !s.Ready {
		return true, waitReady(ctx, a, client, nil, wait)
	}
	return true, nil
}

func needRoot() error {
	return fmt.Errorf("barchan up makes network namespaces and containers and so needs root; run it as root or with sudo: %w", errs.ErrForbidden)
}

// checkStart finds what would fail the boot, before anything is created.
func checkStart(ctx context.Context, a *app.App, cfg *config.Resolved) error {
	if a.Deps.RunServer == nil {
		return errors.New("this build of barchan has no server")
	}
	type address struct{ key, flag, addr string }
	listen := []address{{"httpAddr", "http-addr", cfg.HTTPAddr}, {"peerAddr", "peer-addr", cfg.PeerAddr}}
	if cfg.RunsSandboxes() {
		if os.Geteuid() != 0 {
			return needRoot()
		}
		if err := cfg.CheckHost(); err != nil {
			return err
		}
	}
	if cfg.ServesTraffic() {
		listen = append(listen, address{"tlsAddr", "tls-addr", cfg.TLSAddr}, address{"sshAddr", "ssh-addr", cfg.SSHAddr})
	}
	if cfg.Role == config.RoleServer {
		listen = append(listen, address{"kubeAddr", "kube-addr", cfg.KubeAddr})
	}
	for _, l := range listen {
		if l.addr == "" {
			continue
		}
		err := canListen(ctx, l.addr)
		for began := time.Now(); err != nil && cfg.Privileges == config.PrivilegesApart && time.Since(began) < killedServerEnds; {
			if !lifecycle.Sleep(ctx, 20*time.Millisecond) {
				return ctx.Err()
			}
			err = canListen(ctx, l.addr)
		}
		if err != nil {
			return fmt.Errorf("%s: %w; choose another with --%s", l.key, err, l.flag)
		}
	}
	return nil
}

// killedServerEnds is how long the server's process may take to end whose parent was killed.
const killedServerEnds = 2 * time.Second

func canListen(ctx context.Context, addr string) error {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("%s is in use by another program", addr)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return fmt.Errorf("%s is not an address of this machine", addr)
	case err != nil:
		return fmt.Errorf("cannot listen on %s: %w", addr, err)
	}
	return l.Close()
}

// startDetached starts this program in a new session.
func startDetached(ctx context.Context, a *app.App, cfg *config.Resolved, args []string, wait time.Duration) error {
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(cfg.LogFile()), 0o700); err != nil {
		return fmt.Errorf("make log directory: %w", err)
	}
	log, err := os.OpenFile(cfg.LogFile(), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	defer func() { _ = log.Close() }()
	start, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	child := exec.CommandContext(context.WithoutCancel(ctx), exe, args...) // it outlives this program
	child.Stdout, child.Stderr, child.Dir = log, log, "/"
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := child.Start(); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	exited := make(chan struct{})
	go func() { // ends with the server, or with this program
		_ = child.Wait()
		close(exited)
	}()
	client := adminclient.New(cfg.AdminSocket(), cfg.DataDir)
	err = waitReady(ctx, a, client, exited, wait)
	if errors.Is(err, errServerEnded) {
		return fmt.Errorf("the server did not start:\n%s(the whole log is %s)", lastLines(cfg.LogFile(), start), cfg.LogFile())
	}
	if err != nil {
		return fmt.Errorf("%w; the log is %s", err, cfg.LogFile())
	}
	return nil
}

// foregroundArgs returns the given flags except --detach.
func foregroundArgs(cmd *cobra.Command, cfg *config.Resolved) []string {
	args := []string{"up"}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if f.Name != "detach" && f.Name != "wait" && f.Name != "config" {
			args = append(args, "--"+f.Name+"="+f.Value.String())
		}
	})
	if cfg.File != "" {
		args = append(args, "--config="+app.AbsFile(cfg.File))
	}
	return args
}

var errServerEnded = errors.New("the server ended")

// waitReady shows the phases of the boot. exited may be nil.
func waitReady(ctx context.Context, a *app.App, client *adminclient.Client, exited <-chan struct{}, wait time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	shown, phase := 0, "start"
	for {
		s, err := client.Status(ctx)
		if err == nil {
			phase = s.Phase
			for ; shown < len(s.Phases) && s.Phases[shown].Done; shown++ {
				fmt.Fprintf(a.Stderr, "  %-40s %s\n", s.Phases[shown].Name, milli(s.Phases[shown].Milli))
			}
			if s.Ready && s.Role == config.RoleNode {
				fmt.Fprintf(a.Stderr, "barchan %s is up: the node of %s\n", s.Version, s.Addresses.Kube)
				return nil
			}
			if s.Ready {
				fmt.Fprintf(a.Stderr, "barchan %s is up: REST API and sandboxes on http://%s, Kubernetes API on https://%s\n",
					s.Version, s.Addresses.HTTP, s.Addresses.Kube)
				return nil
			}
		}
		select {
		case <-exited: // the log has the reason
			return errServerEnded
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return ctx.Err()
			}
			return fmt.Errorf("the server is not ready after %s, in phase %q: %w", wait, phase, errs.ErrTimeout)
		case <-tick.C:
		}
	}
}

func milli(ms float64) string {
	return (time.Duration(ms*1000) * time.Microsecond).Round(100 * time.Microsecond).String()
}

// lastLines returns the last log lines after an offset.
func lastLines(file string, from int64) string {
	b, err := os.ReadFile(file)
	if err != nil || int64(len(b)) < from {
		return ""
	}
	lines := strings.SplitAfter(string(b[from:]), "\n")
	return "  " + strings.Join(lines[max(0, len(lines)-11):], "  ")
}
