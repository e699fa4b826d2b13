package netdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// onOwnThread runs f on a thread that exits afterwards, because f leaves it in another network
// namespace. No other goroutine runs there.
func onOwnThread(f func() error) error {
	done := make(chan error, 1)
	go func() { // received from below
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() { // the first thread never exits: occupy it and use another
			done <- onOwnThread(f)
			runtime.UnlockOSThread()
			return
		}
		done <- f() // never unlocked: the thread exits with the goroutine
	}()
	return <-done
}

// newNamespace creates an unnamed network namespace, and a netlink handle inside it. It exists
// while one of both is open or a process runs in it.
func (n *Network) newNamespace() (handle *netlink.Handle, ns *os.File, err error) {
	err = onOwnThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := prepareIPv6("default", n.cfg.Subnet6.IsValid()); err != nil {
			return err
		}
		if ns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return fmt.Errorf("open: %w", err)
		}
		if handle, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return errors.Join(fmt.Errorf("open netlink inside: %w", err), ns.Close())
		}
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("create namespace: %w", err)
	}
	return handle, ns, nil
}

func inNamespace(ns *os.File, f func() error) error {
	return onOwnThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter namespace: %w", err)
		}
		return f()
	})
}

// bindNamespace gives a namespace a new name in the file system.
func bindNamespace(ns *os.File, path string) error {
	if err := placeholder(path); err != nil {
		return err
	}
	own := "/proc/thread-self/fd/" + strconv.Itoa(int(ns.Fd()))
	if err := unix.Mount(own, path, "", unix.MS_BIND, ""); err != nil {
		return errors.Join(fmt.Errorf("bind namespace to %s: %w", path, err), os.Remove(path))
	}
	return nil
}

// unbindNamespace removes a namespace's name. No name is success. Processes inside keep it alive;
// otherwise the kernel removes it later, with everything in it.
func unbindNamespace(path string) error {
	var failures []error
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		failures = append(failures, fmt.Errorf("unmount %s: %w", path, err))
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		failures = append(failures, fmt.Errorf("remove %s: %w", path, err))
	}
	return errors.Join(failures...)
}

// placeholder creates the empty file that a namespace is bound to.
func placeholder(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY|os.O_EXCL, 0o444)
	if errors.Is(err, os.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("create directory: %w", err)
		}
		f, err = os.OpenFile(path, os.O_CREATE|os.O_RDONLY|os.O_EXCL, 0o444)
	}
	if err != nil {
		return fmt.Errorf("create file: %w", err)
	}
	return f.Close()
}
