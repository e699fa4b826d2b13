// Volumefs serves the files of one bucket's prefix, or of one export of an NFS server, by FUSE. The node starts one for each volume that is not a directory of
// its own: with the mounted /dev/fuse as descriptor 3, a lock file as 4, and its configuration, with the credentials, on
// standard input. It starts as root, makes its cache directory its root, and goes on as a user without rights.
//
// It answers one line of JSON, an [backend.Answer], on standard output: whether the bucket can be reached with these credentials.
// Then it serves until the mount is gone or SIGTERM, and uploads what was not yet. While it holds the POSIX lock on the lock
// file, it runs. It writes [backend.Answer] to the file status in its cache directory every few seconds: an old one means that it hangs.
package main

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/runtimes/volumefs/backend"
	"github.com/barchan-dev/barchan/runtimes/volumefs/bucket"
	"github.com/barchan-dev/barchan/runtimes/volumefs/nfs"
)

const (
	fuseDescriptor = 3
	lockDescriptor = 4
	// reportEvery is how often the status is written, and how often a bucket that cannot be reached is asked; checkEvery is how often one
	// is asked that can, as each list has its price. A call that fails has it asked too.
	reportEvery = 3 * time.Second
	checkEvery  = 30 * time.Second
	// drainTimeout bounds the uploads after the mount is gone.
	drainTimeout = 30 * time.Second
	// softMemory and hardMemory bound the process, in bytes.
	softMemory  = 192 << 20
	hardMemory  = 1 << 30
	descriptors = 4096
	maxConfig   = 64 << 10
	maxLog      = 1 << 20
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	cfg := backend.Config{}
	if err := json.NewDecoder(io.LimitReader(os.Stdin, maxConfig)).Decode(&cfg); err != nil {
		return fmt.Errorf("read configuration: %w", err)
	}
	if err := confine(&cfg); err != nil {
		return err
	}
	ctx := context.Background()
	cfg.Cache = "/"
	t, a := open(ctx, cfg)
	if a.Reason != "" {
		return answer(a)
	}
	server, err := serve(t, cfg)
	if err != nil {
		return err
	}
	if err := report(cfg.Cache, backend.Answer{}); err != nil {
		return err
	}
	if err := answer(backend.Answer{}); err != nil {
		return err
	}
	go watch(ctx, t, cfg.Cache)
	go func() {
		stop := make(chan os.Signal, 1)
		signal.Notify(stop, syscall.SIGTERM)
		<-stop
		t.Drain(drainTimeout)
		os.Exit(0)
	}()
	server.Wait()
	t.Drain(drainTimeout)
	return nil
}

// open returns the backend, or why it cannot be reached.
func open(ctx context.Context, cfg backend.Config) (backend.Backend, backend.Answer) {
	if cfg.NFS != nil {
		return nfs.Open(ctx, cfg)
	}
	return bucket.Open(ctx, cfg)
}

// confine takes the lock, and bounds what the process can use. The credentials stay out of core dumps and of other processes of the user.
func confine(cfg *backend.Config) error {
	lock := unix.Flock_t{Type: unix.F_WRLCK, Whence: unix.SEEK_SET}
	if err := unix.FcntlFlock(lockDescriptor, unix.F_SETLK, &lock); err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	debug.SetMemoryLimit(softMemory)
	limits := map[int]uint64{unix.RLIMIT_DATA: hardMemory, unix.RLIMIT_NOFILE: descriptors, unix.RLIMIT_CORE: 0}
	for kind, n := range limits {
		if err := unix.Setrlimit(kind, &unix.Rlimit{Cur: n, Max: n}); err != nil {
			return fmt.Errorf("set limits: %w", err)
		}
	}
	for _, fd := range []int{fuseDescriptor, lockDescriptor} {
		unix.CloseOnExec(fd)
	}
	return errors.Join(dropRights(cfg.Cache, cfg.User, cfg.NFS != nil), unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0))
}

// dropRights makes the cache directory the root, with copies of what names and certificates need. The right to reserved ports can stay.
func dropRights(dir string, user int, ports bool) error {
	if os.Geteuid() != 0 {
		return nil
	}
	if _, err := x509.SystemCertPool(); err != nil { // kept from here on
		return fmt.Errorf("read certificates: %w", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "etc"), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	for _, name := range []string{"/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf"} {
		if text, err := os.ReadFile(name); err == nil {
			if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
				return err
			}
		}
	}
	if err := unix.Chroot(dir); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if ports {
		if err := keepRights(); err != nil {
			return err
		}
	}
	if err := errors.Join(syscall.Setgroups(nil), syscall.Setresgid(user, user, user), syscall.Setresuid(user, user, user)); err != nil {
		return fmt.Errorf("give up rights: %w", err)
	}
	if ports {
		if err := onlyPorts(); err != nil {
			return err
		}
	}
	return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
}

// keepRights has a change of the user leave the permitted capabilities, of all threads.
func keepRights() error {
	if _, _, code := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_KEEPCAPS, 1, 0, 0, 0, 0); code != 0 {
		return fmt.Errorf("keep the right to reserved ports: %w", code)
	}
	return nil
}

// onlyPorts keeps the right to reserved ports, which servers of NFS require by default, and no other.
func onlyPorts() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{{Effective: 1 << unix.CAP_NET_BIND_SERVICE, Permitted: 1 << unix.CAP_NET_BIND_SERVICE}}
	_, _, code := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data[0])), 0)
	if code != 0 {
		return fmt.Errorf("give up rights: %w", code)
	}
	return nil
}

func answer(a backend.Answer) error {
	text, err := json.Marshal(a)
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(append(text, '\n'))
	_ = os.Stdout.Close()
	return err
}

// report writes the file status, as a whole.
func report(dir string, a backend.Answer) error {
	text, err := json.Marshal(a)
	if err != nil {
		return err
	}
	temp := filepath.Join(dir, ".status")
	if err := os.WriteFile(temp, text, 0o600); err != nil {
		return err
	}
	return os.Rename(temp, filepath.Join(dir, "status"))
}

// watch reports every few seconds whether the backend can be reached.
func watch(ctx context.Context, t backend.Backend, dir string) {
	var state backend.Answer
	h := t.Health()
	for last := time.Now(); ; {
		time.Sleep(reportEvery)
		trimLog()
		if h.Trouble.Swap(false) || state.Reason != "" || time.Since(last) > checkEvery {
			state, last = t.Check(ctx), time.Now()
			h.Down.Store(state.Reason != "")
		}
		a, failed := state, 0
		if a.Waiting, failed = t.Waiting(); a.Reason == "" && failed > 0 {
			a.Reason, a.Message = backend.ReasonUpload, fmt.Sprintf("%d files could not be uploaded, and are tried again", failed)
		}
		if err := report(dir, a); err != nil {
			fmt.Fprintln(os.Stderr, "report status:", err)
		}
	}
}

// trimLog empties the file that standard error goes to.
func trimLog() {
	var st unix.Stat_t
	if err := unix.Fstat(2, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size > maxLog {
		_ = unix.Ftruncate(2, 0)
	}
}

// serve answers the kernel.
func serve(t backend.Backend, cfg backend.Config) (*fuse.Server, error) {
	second := time.Second
	options := &fs.Options{
		EntryTimeout: &second, AttrTimeout: &second, UID: cfg.UID, GID: cfg.GID,
		MountOptions: fuse.MountOptions{DisableXAttrs: true, MaxWrite: 1 << 20, FsName: "volume", Name: "barchan", DisableSplice: true, DisableReadDirPlus: true},
	}
	server, err := fuse.NewServer(fs.NewNodeFS(t.Root(), options), fmt.Sprintf("/dev/fd/%d", fuseDescriptor), &options.MountOptions)
	if err != nil {
		return nil, fmt.Errorf("serve FUSE: %w", err)
	}
	go server.Serve()
	return server, nil
}
