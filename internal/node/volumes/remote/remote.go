// Package remote mounts volumes whose files are elsewhere, by FUSE: with one process of barchan-volumefs for each, which outlives
// this one.
//
// It keeps nothing in memory. The kernel's list of mounts tells what is mounted; the POSIX lock of a volume's lock file, which process
// serves it; the file status, which that process writes every few seconds, whether it hangs and whether it reaches its backend. No call
// reads the mounted files, so a backend that is lost blocks none. Credentials go to the process over a pipe, and to no disk.
//
// The keyed lock of a volume is held over its calls; there is no other.
package remote

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/keyedlock"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
)

const (
	// startTimeout bounds a start with its first call of the backend, stopTimeout the uploads after an unmount.
	startTimeout = 20 * time.Second
	stopTimeout  = 40 * time.Second
	killTimeout  = 5 * time.Second
	poll         = 50 * time.Millisecond
	// stale is the age of a status beyond which its process hangs.
	stale      = time.Minute
	maxAnswer  = 4096
	user       = 65534 // nobody
	filesystem = "fuse.barchan"
	nfsPort    = 2049

	lockFile   = "lock"
	logFile    = "log"
	cacheDir   = "cache"
	statusFile = "status"
)

// Reasons of a volumetree.RemoteError, besides those of barchan-volumefs.
const (
	reasonEndpoint = "EndpointRefused"
	reasonMount    = "MountFailed"
	reasonLost     = "NotMounted"
)

// Config configures New.
type Config struct {
	// Program returns the path of barchan-volumefs.
	Program func() (string, error)
	// Endpoints are those, as host:port, whose addresses may be other than public.
	Endpoints []string
	Log       *slog.Logger
}

// Mounter mounts volumes. It is safe for concurrent use.
type Mounter struct {
	Config
	locks keyedlock.Lock[string]
}

// New returns a Mounter; it starts nothing.
func New(cfg Config) (*Mounter, error) {
	if cfg.Program == nil || cfg.Log == nil {
		return nil, fmt.Errorf("remote volumes: Program and Log are required: %w", errs.ErrInvalid)
	}
	return &Mounter{Config: cfg}, nil
}

// config is what the process reads.
type config struct {
	volumetree.Remote
	User     int
	Cache    string
	Denied   []netip.Prefix
	UID, GID uint32
}

// answer is what the process answers, and writes to its status.
type answer struct {
	Reason, Message string
}

func (a answer) err() error {
	if a.Reason == "" {
		return nil
	}
	return &volumetree.RemoteError{Reason: a.Reason, Message: a.Message}
}

// Attach mounts a volume at a directory, or checks one that is mounted: an error is a volumetree.RemoteError if the backend is the cause. state
// is a directory for what the process keeps.
func (m *Mounter) Attach(ctx context.Context, dir, state string, at volumetree.Remote) error {
	ctx, unlock, err := m.locks.Acquire(ctx, dir, false)
	if err != nil {
		return err
	}
	defer unlock()
	switch err := m.state(dir, state); {
	case err == nil:
		return nil
	case !errors.Is(err, errLost):
		return err
	}
	if err := m.clear(ctx, dir, state); err != nil {
		return err
	}
	return m.start(ctx, dir, state, at)
}

// errLost means that a volume is to be mounted again.
var errLost = errors.New("not mounted")

// Check returns nil if a volume is mounted and reaches its backend, and a volumetree.RemoteError otherwise.
func (m *Mounter) Check(dir, state string) error {
	err := m.state(dir, state)
	if errors.Is(err, errLost) {
		return &volumetree.RemoteError{Reason: reasonLost, Message: "the volume is not mounted; the node mounts it again"}
	}
	return err
}

func (m *Mounter) state(dir, state string) error {
	at, err := mounted(dir)
	if err != nil {
		return err
	}
	if !at || holder(filepath.Join(state, lockFile)) == 0 {
		return errLost
	}
	file, err := os.OpenFile(filepath.Join(state, cacheDir, statusFile), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return errLost
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil || time.Since(info.ModTime()) > stale {
		return errLost
	}
	var a answer
	if err := json.NewDecoder(io.LimitReader(file, maxAnswer)).Decode(&a); err != nil {
		return errLost
	}
	return a.err()
}

// Detach unmounts a volume, and waits until its process has uploaded what it can and ended. Nothing is mounted there if it returns nil.
func (m *Mounter) Detach(ctx context.Context, dir, state string) error {
	ctx, unlock, err := m.locks.Acquire(ctx, dir, false)
	if err != nil {
		return err
	}
	defer unlock()
	return m.clear(ctx, dir, state)
}

// clear ends what serves a volume: at once if it hangs.
func (m *Mounter) clear(ctx context.Context, dir, state string) error {
	lock, limit := filepath.Join(state, lockFile), stopTimeout
	if info, err := os.Stat(filepath.Join(state, cacheDir, statusFile)); err == nil && time.Since(info.ModTime()) > stale {
		limit = 0
	}
	for {
		at, err := mounted(dir)
		if err != nil {
			return err
		}
		if !at {
			break
		}
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount volume: %w", err)
		}
	}
	pid := holder(lock)
	if pid == 0 {
		return nil
	}
	process, err := lifecycle.ProcessOf(pid)
	if err != nil {
		return nil //nolint:nilerr // it has ended
	}
	signals := []struct {
		signal syscall.Signal
		limit  time.Duration
	}{{syscall.SIGTERM, limit}, {syscall.SIGKILL, killTimeout}}
	for _, s := range signals {
		if s.limit == 0 {
			continue
		}
		if err := process.Signal(s.signal); err != nil {
			return fmt.Errorf("end process of volume: %w", err)
		}
		waiting, cancel := context.WithTimeout(ctx, s.limit)
		err := process.Wait(waiting)
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return errs.Retryable(ctx.Err())
		}
	}
	return errs.Retryable(fmt.Errorf("process %d of volume does not end", pid))
}

// start mounts and starts. The mount comes first: the process that serves it has no right to.
func (m *Mounter) start(ctx context.Context, dir, state string, at volumetree.Remote) (err error) {
	denied, err := m.denied(&at)
	if err != nil {
		return err
	}
	program, err := m.Program()
	if err != nil {
		return &volumetree.RemoteError{Reason: reasonMount, Message: errs.Text(err)}
	}
	cache := filepath.Join(state, cacheDir)
	if err := makeState(cache); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(state, lockFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return fmt.Errorf("open lock of volume: %w", err)
	}
	defer func() { _ = lock.Close() }()
	device, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return &volumetree.RemoteError{Reason: reasonMount, Message: "this kernel has no FUSE: " + err.Error()}
	}
	defer func() { _ = device.Close() }()
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV)
	if at.ReadOnly {
		flags |= unix.MS_RDONLY
	}
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d,allow_other", device.Fd(), user, user)
	if err := unix.Mount("volume", dir, filesystem, flags, options); err != nil {
		return &volumetree.RemoteError{Reason: reasonMount, Message: "mount: " + err.Error()}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, unix.Unmount(dir, unix.MNT_DETACH))
		}
	}()
	failpoint.Reach("volume/mounted")
	text, err := json.Marshal(config{Remote: at, User: user, Cache: cache, Denied: denied, UID: volumetree.Owner, GID: volumetree.Owner})
	if err != nil {
		return fmt.Errorf("encode configuration: %w", err)
	}
	if err := m.serve(ctx, program, state, text, device, lock); err != nil {
		return err
	}
	failpoint.Reach("volume/served")
	return nil
}

func makeState(cache string) error {
	if err := os.MkdirAll(cache, 0o700); err != nil {
		return fmt.Errorf("make cache of volume: %w", err)
	}
	if err := os.Remove(filepath.Join(cache, statusFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove status of volume: %w", err)
	}
	if err := os.Chown(cache, user, user); err != nil {
		return fmt.Errorf("make cache of volume: %w", err)
	}
	return nil
}

// serve starts the process, and returns its answer.
func (m *Mounter) serve(ctx context.Context, program, state string, text []byte, device, lock *os.File) error {
	log, err := os.OpenFile(filepath.Join(state, logFile), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open log of volume: %w", err)
	}
	defer func() { _ = log.Close() }()
	out, in, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make pipe: %w", err)
	}
	defer func() { _ = out.Close() }()
	cmd := exec.Command(program) //nolint:noctx // it outlives this process
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(string(text)), in, log
	cmd.Env = []string{"GOMAXPROCS=2", "HOME=/"}
	cmd.ExtraFiles = []*os.File{device, lock}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	child, err := lifecycle.StartChild(cmd)
	_ = in.Close()
	if err != nil {
		return &volumetree.RemoteError{Reason: reasonMount, Message: err.Error()}
	}
	go child.Reap()
	if err := out.SetReadDeadline(time.Now().Add(startTimeout)); err != nil {
		return fmt.Errorf("wait for process of volume: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = out.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	line, err := bufio.NewReader(io.LimitReader(out, maxAnswer)).ReadBytes('\n')
	var a answer
	if err == nil {
		err = json.Unmarshal(line, &a)
	}
	if err != nil {
		err = errors.Join(err, child.Signal(syscall.SIGKILL))
		return &volumetree.RemoteError{Reason: reasonMount, Message: fmt.Sprintf("barchan-volumefs gave no answer: %v; see %s", err, log.Name())}
	}
	return a.err()
}

// targets returns what a volume's process connects to, as host:port.
func targets(at *volumetree.Remote) ([]string, error) {
	if n := at.NFS; n != nil {
		host := strings.ToLower(n.Server)
		list := []string{net.JoinHostPort(host, strconv.Itoa(cmp.Or(n.Port, nfsPort)))}
		if n.MountPort != 0 {
			list = append(list, net.JoinHostPort(host, strconv.Itoa(n.MountPort)))
		}
		return list, nil
	}
	u, err := url.Parse(at.Endpoint)
	if err != nil {
		return nil, &volumetree.RemoteError{Reason: reasonEndpoint, Message: "endpoint: " + err.Error()}
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return []string{net.JoinHostPort(strings.ToLower(u.Hostname()), port)}, nil
}

// denied returns the addresses that a backend may not have: unless the operator allows it, all that are not public, and this machine's own.
func (m *Mounter) denied(at *volumetree.Remote) (out []netip.Prefix, err error) {
	list, err := targets(at)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(list, func(t string) bool { return !slices.Contains(m.Endpoints, t) }) {
		return nil, nil
	}
	for _, r := range sandbox.NotPublic() {
		out = append(out, r.Prefix)
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("list own addresses: %w", err)
	}
	for _, a := range own {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			out = append(out, netip.PrefixFrom(p.Addr(), p.Addr().BitLen()))
		}
	}
	return out, nil
}

// holder returns the process that has the POSIX lock of a file, or 0.
func holder(path string) int {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return 0
	}
	defer func() { _ = f.Close() }()
	lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: unix.SEEK_SET}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &lock); err != nil || lock.Type == unix.F_UNLCK {
		return 0
	}
	return int(lock.Pid)
}

// mounted reports whether something of ours is mounted at a directory. It does not touch the directory, which may hang.
func mounted(dir string) (bool, error) {
	all, err := Mounts()
	return slices.Contains(all, dir), err
}

// Mounts returns where volumes are mounted.
func Mounts() (dirs []string, err error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		dash := slices.Index(fields, "-")
		if dash > 4 && dash+1 < len(fields) && fields[dash+1] == filesystem {
			dirs = append(dirs, unescape.Replace(fields[4]))
		}
	}
	return dirs, nil
}
