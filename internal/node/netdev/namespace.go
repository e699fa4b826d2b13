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

// onOwnThread runs f on a thread that ends with it, because f leaves the thread in another
// network namespace. No other goroutine ever runs there.
func onOwnThread(f func() error) error {
	done := make(chan error, 1)
	go func() { // received from below
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() { // the first thread never ends: sit on it and take another
			done <- onOwnThread(f)
			runtime.UnlockOSThread()
			return
		}
		done <- f() // never unlocked: the thread dies with the goroutine
	}()
	return <-done
}

// newNamespace makes a network namespace without a name, and a netlink handle inside it. It
// lives as long as one of both is open or something runs in it.
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
		return nil, nil, fmt.Errorf("make namespace: %w", err)
	}
	return handle, ns, nil
}

// inNamespace runs f in a namespace.
func inNamespace(ns *os.File, f func() error) error {
	return onOwnThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter namespace: %w", err)
		}
		return f()
	})
}

// bindNamespace gives a namespace a name in the file system. There must be none of the name.
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

// unbindNamespace takes a namespace's name away. None is success. What runs inside keeps it
// alive; otherwise the kernel removes it later, with all that is in it.
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

// placeholder makes the empty file that a namespace is bound to.
func placeholder(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY|os.O_EXCL, 0o444)
	if errors.Is(err, os.ErrNotExist) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("make directory: %w", err)
		}
		f, err = os.OpenFile(path, os.O_CREATE|os.O_RDONLY|os.O_EXCL, 0o444)
	}
	if err != nil {
		return fmt.Errorf("make file: %w", err)
	}
	return f.Close()
}
