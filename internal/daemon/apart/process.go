package apart

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
)

const (
	// grace is how long the process may take to stop: requests have their time to end, and etcd closes its files.
	grace     = time.Minute
	readyPoll = 200 * time.Millisecond
	// goneWithin is how long a killed process may take to end.
	goneWithin = 10 * time.Second
	// childVariable marks the server's process.
	childVariable = "BARCHAN_APART"
)

// States of the server's process.
const (
	stateStarting = "starting"
	stateRunning  = "running"
	stateAway     = "away"
)

var errEndedWell = errors.New("exit status 0")

// process is the server's, started again when it ends.
type process struct {
	cfg   Config
	own   config.Config
	who   user
	admin *adminclient.Client

	mu sync.Mutex
	// +checklocks:mu
	state string
	// +checklocks:mu
	pid int
	// ends counts those that were not asked for; last is why.
	// +checklocks:mu
	ends int
	// +checklocks:mu
	last string
}

func newProcess(cfg Config, who user) *process {
	own := serverConfig(cfg.Config)
	return &process{cfg: cfg, own: own, who: who, admin: adminclient.New(own.AdminSocket(), own.DataDir), state: stateStarting}
}

// Admin implements adminops.ServerProcess.
func (p *process) Admin() *adminclient.Client { return p.admin }

// Component implements adminops.ServerProcess.
func (p *process) Component() adminclient.Component {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := adminclient.Component{Name: "server", State: p.state, PID: p.pid, Path: p.own.DataDir}
	if p.ends > 0 {
		c.State += fmt.Sprintf(", ended %d times unasked (last: %s)", p.ends, p.last)
	}
	return c
}

func (p *process) set(state string, pid int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state, p.pid = state, pid
}

// run keeps the process running until ctx is done. An end before it was ever ready is an error.
func (p *process) run(ctx context.Context) error {
	var pause backoff
	for everReady := false; ; {
		began := time.Now()
		ready, err := p.once(ctx, everReady)
		if ctx.Err() != nil {
			return err
		}
		if everReady = everReady || ready; !everReady {
			return fmt.Errorf("the server's process ended at its start; its own message is above: %w", cmp.Or(err, errEndedWell))
		}
		wait := pause.next(time.Since(began))
		p.ended(err)
		p.cfg.Log.ErrorContext(ctx, "server process ended; starting another", telemetry.Error, err, "in", wait)
		if !lifecycle.Sleep(ctx, wait) {
			return nil
		}
	}
}

func (p *process) ended(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.state, p.pid = stateAway, 0
	p.ends++
	p.last = cmp.Or(err, errEndedWell).Error()
}

// once runs one process. It returns nil for one that ended well, and whether it was ever ready.
func (p *process) once(ctx context.Context, again bool) (ready bool, err error) {
	cmd := p.command(context.WithoutCancel(ctx), again) // stop ends it
	ended := make(chan error, 1)
	started := make(chan error, 1)
	go func() { // the process ends with the thread that made it, which ends with this function
		runtime.LockOSThread()
		err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) // of this thread, and so of the process
		if err == nil {
			err = cmd.Start()
		}
		started <- err
		if err == nil {
			ended <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return false, fmt.Errorf("start the server's process: %w", err)
	}
	if p.cfg.Started != nil {
		p.cfg.Started(cmd.Process.Pid)
	}
	p.set(stateStarting, cmd.Process.Pid)
	p.cfg.Log.InfoContext(ctx, "server process started", "pid", cmd.Process.Pid, "uid", p.who.uid)
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	for {
		select {
		case err := <-ended:
			return ready, err
		case <-ctx.Done():
			return ready, stop(cmd, ended)
		case <-tick.C:
		}
		if s, err := p.admin.Status(ctx); err == nil && s.Ready && !ready {
			ready = true
			p.set(stateRunning, cmd.Process.Pid)
			tick.Stop()
		}
	}
}

// stop ends a process as a service manager would.
func stop(cmd *exec.Cmd, ended <-chan error) error {
	_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case err := <-ended:
		return err
	case <-time.After(grace):
	}
	_ = cmd.Process.Kill()
	return fmt.Errorf("the server's process did not stop within %s: %w", grace, <-ended)
}

// command is this program, as another user and with the settings of the server. again: it is not the first.
func (p *process) command(ctx context.Context, again bool) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "up", "--data-dir="+p.own.DataDir)
	cmd.Args[0] = "barchan"
	cmd.Env = append(foreign(os.Environ(), &p.own), p.own.Environment()...)
	cmd.Env = append(cmd.Env, config.EnvFile+"="+os.DevNull, childVariable+"=1", "HOME="+p.own.DataDir)
	if again { // a point is reached once
		cmd.Env = slices.DeleteFunc(cmd.Env, func(kv string) bool {
			return strings.HasPrefix(kv, failpoint.Variable+"=") && !strings.HasPrefix(kv, failpoint.Variable+"=@")
		})
	}
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", p.cfg.Output, p.cfg.Output
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setpgid: true, Pdeathsig: syscall.SIGKILL,
		Credential: &syscall.Credential{Uid: uint32(p.who.uid), Gid: uint32(p.who.gid), Groups: []uint32{}},
	}
	if p.bindsLow() {
		cmd.SysProcAttr.AmbientCaps = []uintptr{unix.CAP_NET_BIND_SERVICE}
	}
	return cmd
}

// foreign returns the variables that are not settings.
func foreign(env []string, cfg *config.Config) []string {
	ours := map[string]bool{config.EnvFile: true, childVariable: true, "HOME": true}
	for _, s := range cfg.Settings() {
		ours[s.Env()] = true
	}
	return slices.DeleteFunc(env, func(kv string) bool {
		key, _, _ := strings.Cut(kv, "=")
		return ours[key]
	})
}

// bindsLow reports whether the server listens on a port that needs a capability.
func (p *process) bindsLow() bool {
	for _, addr := range []string{p.own.HTTPAddr, p.own.TLSAddr, p.own.KubeAddr, p.own.SSHAddr, p.own.MetricsAddr, p.own.PeerAddr, p.own.PeerPushAddr} {
		_, text, err := net.SplitHostPort(addr)
		if port, bad := strconv.Atoi(text); err == nil && bad == nil && port > 0 && port < 1024 {
			return true
		}
	}
	return false
}

// IsServer reports whether this process was started by Run.
func IsServer() bool { return os.Getenv(childVariable) != "" }

// awaitGone waits until the process of an earlier parent, which ends with that, has released its data directory.
func awaitGone(ctx context.Context, dataDir string) error {
	for deadline := time.Now().Add(goneWithin); ; {
		held, err := isLocked(filepath.Join(ServerDir(dataDir), "lock"))
		if err != nil || !held {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s is in use by a server's process that this one has not started; stop it: %w", ServerDir(dataDir), errs.ErrConflict)
		}
		if !lifecycle.Sleep(ctx, readyPoll/4) {
			return context.Cause(ctx)
		}
	}
}

func isLocked(path string) (bool, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at the lock of the server's process: %w", err)
	}
	defer func() { _ = f.Close() }() // which unlocks
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK), nil
}
