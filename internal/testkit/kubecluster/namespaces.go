package kubecluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// namespaces are the PID, network and mount namespaces of one cluster. The program with PID 1 in
// them holds them: when it ends, the kernel kills all others, and with the last one the mounts, links
// and addresses disappear.
type namespaces struct {
	init  *program
	pid   int
	files map[int]*os.File // by the flag of setns
}

// newNamespaces starts the program with PID 1, which has to wait for its children.
func newNamespaces(init *exec.Cmd) (*namespaces, error) {
	init.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:   unix.CLONE_NEWPID | unix.CLONE_NEWNET,
		Unshareflags: unix.CLONE_NEWNS, // Go makes the mounts private with this flag, and not with the other
	}
	p, err := startProgram(init, nil)
	if err != nil {
		return nil, err
	}
	n := &namespaces{init: p, pid: p.cmd.Process.Pid, files: map[int]*os.File{}}
	for flag, name := range map[int]string{unix.CLONE_NEWPID: "pid", unix.CLONE_NEWNET: "net", unix.CLONE_NEWNS: "mnt"} {
		f, err := os.Open(n.path(name))
		if err != nil {
			return nil, errors.Join(err, n.end())
		}
		n.files[flag] = f
	}
	return n, nil
}

// path is the file of one of the namespaces.
func (n *namespaces) path(name string) string { return fmt.Sprintf("/proc/%d/ns/%s", n.pid, name) }

// end kills all programs in the namespaces.
func (n *namespaces) end() error {
	failures := []error{n.init.kill()}
	for _, f := range n.files {
		failures = append(failures, f.Close())
	}
	return errors.Join(failures...)
}

// enter brings the calling thread, which must be locked and end, into the namespaces. Only its children
// get PIDs there.
func (n *namespaces) enter() error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare the root directory: %w", err)
	}
	for flag, f := range n.files {
		if err := unix.Setns(int(f.Fd()), flag); err != nil {
			return fmt.Errorf("enter %s: %w", f.Name(), err)
		}
	}
	return nil
}

// do runs f on a thread in the namespaces.
func (n *namespaces) do(f func() error) error {
	result := make(chan error)
	onOwnThread(func() {
		err := n.enter()
		if err == nil {
			err = f()
		}
		result <- err
	})
	return <-result
}

// dial connects from within the network namespace. The address has no names, for no resolver is there.
func (n *namespaces) dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = n.inNetwork(func() (err error) {
		conn, err = (&net.Dialer{}).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// listen listens within the network namespace.
func (n *namespaces) listen(ctx context.Context, network, address string) (l net.Listener, err error) {
	err = n.inNetwork(func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(ctx, network, address)
		return err
	})
	return l, err
}

// inNetwork runs f on a thread in the network namespace; sockets that it makes stay there. The thread returns from the namespace
// rather than end, because the kernel would kill programs that it has started.
func (n *namespaces) inNetwork(f func() error) error {
	runtime.LockOSThread()
	own, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer func() { _ = own.Close() }()
	if err := unix.Setns(int(n.files[unix.CLONE_NEWNET].Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return err
	}
	err = f()
	if back := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); back != nil {
		panic(back) // goroutines would go on in the wrong namespace
	}
	runtime.UnlockOSThread()
	return err
}

// command prepares a program that runs in the network namespace, with the machine's files.
func (n *namespaces) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + n.path("net"), "--", name}, args...)...)
	cmd.SysProcAttr = withParent(nil)
	return cmd
}

// sysctls are the kernel settings that a kubelet requires. It finds them as it wants in files of the
// cluster's, and so changes none of the machine.
var sysctls = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

// mount gives the namespaces directories of their own where programs have fixed ones: below dir, which
// stays where it is. The programs in bin are mounted in dir too.
func (n *namespaces) mount(dir, bin string) error {
	for _, name := range []string{"bin", "lib", "log", "sysctl"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			return err
		}
	}
	return n.do(func() error {
		if err := mounted("", "/", "", unix.MS_REC|unix.MS_SHARED); err != nil { // Pods may ask for propagation
			return err
		}
		if err := mounted(bin, filepath.Join(dir, "bin"), "", unix.MS_BIND); err != nil {
			return err
		}
		tree, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
		if err != nil {
			return fmt.Errorf("open %s: %w", dir, err)
		}
		defer func() { _ = unix.Close(tree) }()
		for _, target := range []string{"/run", "/tmp"} {
			if err := mounted("tmpfs", target, "tmpfs", 0); err != nil {
				return err
			}
		}
		// The kernel shows the PIDs of the process that mounts, and not of the thread's children.
		if out, err := exec.Command("mount", "-t", "proc", "proc", "/proc").CombinedOutput(); err != nil { //nolint:noctx // it does not wait
			return fmt.Errorf("mount /proc: %w: %s", err, out)
		}
		if err := os.MkdirAll(dir, 0o755); err != nil { // hidden by now, perhaps
			return err
		}
		if err := unix.MoveMount(tree, "", unix.AT_FDCWD, dir, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
		for name, target := range map[string]string{"lib": "/var/lib", "log": "/var/log"} {
			if err := mounted(filepath.Join(dir, name), target, "", unix.MS_BIND); err != nil {
				return err
			}
		}
		return mountSysctls(filepath.Join(dir, "sysctl"))
	})
}

func mountSysctls(dir string) error {
	for name, value := range sysctls {
		file := filepath.Join(dir, filepath.Base(name))
		if err := os.WriteFile(file, []byte(value+"\n"), 0o600); err != nil {
			return err
		}
		if err := mounted(file, filepath.Join("/proc/sys", name), "", unix.MS_BIND); err != nil {
			return err
		}
	}
	return nil
}

func mounted(source, target, kind string, flags uintptr) error {
	if err := unix.Mount(source, target, kind, flags, ""); err != nil {
		return fmt.Errorf("mount %s: %w", target, err)
	}
	return nil
}

// relay accepts connections on the loopback device and forwards each to an address in the namespaces.
type relay struct {
	listener net.Listener
	dial     func(ctx context.Context) (net.Conn, error)
	ended    context.CancelFunc
	running  sync.WaitGroup
}

// startRelay listens at a host of the loopback device, on a free port.
func startRelay(ctx context.Context, host string, dial func(context.Context) (net.Conn, error)) (*relay, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, err
	}
	r := &relay{listener: l, dial: dial}
	ctx, r.ended = context.WithCancel(context.WithoutCancel(ctx))
	r.running.Go(func() { r.serve(ctx) })
	return r, nil
}

// close ends the listener and all connections.
func (r *relay) close() error {
	r.ended()
	err := r.listener.Close()
	r.running.Wait()
	return err
}

func (r *relay) serve(ctx context.Context) {
	for {
		client, err := r.listener.Accept()
		if err != nil {
			return
		}
		r.running.Go(func() { r.forward(ctx, client) })
	}
}

// forward copies both ways, and passes on the end of each.
func (r *relay) forward(ctx context.Context, client net.Conn) {
	defer func() { _ = client.Close() }()
	server, err := r.dial(ctx)
	if err != nil {
		return
	}
	defer func() { _ = server.Close() }()
	defer context.AfterFunc(ctx, func() { _ = errors.Join(client.Close(), server.Close()) })()
	var both sync.WaitGroup
	both.Go(func() { pipe(client, server) })
	both.Go(func() { pipe(server, client) })
	both.Wait()
}

func pipe(to, from net.Conn) {
	if _, err := io.Copy(to, from); err != nil {
		_ = errors.Join(to.Close(), from.Close())
		return
	}
	if half, ok := to.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
	}
}
