package toolchain

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/disk"
)

// checkKernelParts tests the kernel features that sandboxes need.
func checkKernelParts(ctx context.Context, dataDir string) []Check {
	const modules = "load it with `modprobe %s`, or use a kernel that has it"
	try := func(name, fix, detail string, attempt func() error) Check {
		if err := attempt(); err != nil {
			if errors.Is(err, unix.EPERM) {
				fix = "run it as root on the host, not in a container"
			}
			return bad(name, fix, "%v", err)
		}
		return good(name, "%s", detail)
	}
	link := func(kind string) func() error {
		return func() error { return inNamespaces(unix.CLONE_NEWNET, func() error { return addLink(kind) }) }
	}
	disks := good("disks of sandboxes", "bounded, by ext4 on loop devices")
	if _, err := disk.Check(); err != nil {
		disks = bad("disks of sandboxes", "install e2fsprogs, and `modprobe loop`; new sandboxes are bounded then", "not bounded: %v", err)
		disks.Optional = true
	}
	return []Check{
		disks,
		try("overlayfs", "use a data directory on ext4 or xfs, with a kernel that has overlay (`modprobe overlay`)",
			"works at "+existing(dataDir), func() error { return tryOverlay(existing(dataDir)) }),
		try("bridge", fmt.Sprintf(modules, "bridge"), "works", link("bridge")),
		try("veth", fmt.Sprintf(modules, "veth"), "works", link("veth")),
		try("nftables", fmt.Sprintf(modules, "nf_tables"), "answers", func() error {
			return inNamespaces(unix.CLONE_NEWNET, queryNftables)
		}),
		try("user namespaces", "sysctl -w user.max_user_namespaces=65536"+sysctlPersist, "work", func() error {
			return tryUserNamespace(ctx)
		}),
	}
}

// inNamespaces runs f on a thread in its own namespaces, which end with f.
func inNamespaces(flags int, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: Go then ends the thread
		if err := unix.Unshare(flags); err != nil {
			done <- fmt.Errorf("create namespace: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}

// tryOverlay mounts an overlay with its upper layer in dir, like snapshots.
func tryOverlay(dir string) (err error) {
	work, err := os.MkdirTemp(dir, ".barchan-check-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	at := func(name string) string { return filepath.Join(work, name) }
	for _, d := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(at(d), 0o700); err != nil {
			return err
		}
	}
	return inNamespaces(unix.CLONE_NEWNS, func() error {
		if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make mounts private: %w", err)
		}
		opts := "lowerdir=" + at("lower") + ",upperdir=" + at("upper") + ",workdir=" + at("work")
		if err := unix.Mount("overlay", at("merged"), "overlay", 0, opts); err != nil {
			return fmt.Errorf("mount overlay at %s: %w", dir, err)
		}
		return unix.Unmount(at("merged"), unix.MNT_DETACH)
	})
}

func tryUserNamespace(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, "/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("start a program in a user namespace: %w", err)
	}
	return nil
}

// addLink creates a link of a kind in the namespace of this thread. It is the only message that this package
// needs, so it is encoded by hand.
func addLink(kind string) error {
	info := attribute(unix.IFLA_LINKINFO, attribute(unix.IFLA_INFO_KIND, []byte(kind)))
	name := attribute(unix.IFLA_IFNAME, []byte("check0\x00"))
	body := append(make([]byte, unix.SizeofIfInfomsg), append(name, info...)...)
	err := request(unix.NETLINK_ROUTE, unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK, body)
	if err != nil {
		return fmt.Errorf("add a link of kind %s: %w", kind, err)
	}
	return nil
}

// queryNftables requests the rules' generation, which every nftables supports.
func queryNftables() error {
	const message = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN
	err := request(unix.NETLINK_NETFILTER, message, 0, []byte{unix.AF_UNSPEC, 0, 0, 0})
	if err != nil {
		return fmt.Errorf("query nftables: %w", err)
	}
	return nil
}

// request sends a netlink request, and returns the error in the kernel's response, if any.
func request(family int, kind, flags uint16, body []byte) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, family)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}); err != nil {
		return fmt.Errorf("set timeout: %w", err)
	}
	request := make([]byte, unix.SizeofNlMsghdr, unix.SizeofNlMsghdr+len(body))
	request = append(request, body...)
	binary.NativeEndian.PutUint32(request, uint32(len(request)))
	binary.NativeEndian.PutUint16(request[4:], kind)
	binary.NativeEndian.PutUint16(request[6:], flags|unix.NLM_F_REQUEST)
	if err := unix.Sendto(fd, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	answer := make([]byte, 8192)
	n, _, err := unix.Recvfrom(fd, answer, 0)
	if err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	if n < unix.SizeofNlMsghdr+4 {
		return fmt.Errorf("receive: %d bytes are not a response", n)
	}
	if binary.NativeEndian.Uint16(answer[4:]) == unix.NLMSG_ERROR {
		// Zero is the acknowledgement.
		if code := int32(binary.NativeEndian.Uint32(answer[unix.SizeofNlMsghdr:])); code != 0 {
			return syscall.Errno(-code)
		}
	}
	return nil
}

// attribute encodes one netlink attribute, padded to four bytes.
func attribute(kind uint16, data []byte) []byte {
	out := make([]byte, unix.SizeofRtAttr, unix.SizeofRtAttr+len(data)+unix.RTA_ALIGNTO)
	binary.NativeEndian.PutUint16(out, uint16(unix.SizeofRtAttr+len(data)))
	binary.NativeEndian.PutUint16(out[2:], kind)
	out = append(out, data...)
	for len(out)%unix.RTA_ALIGNTO != 0 {
		out = append(out, 0)
	}
	return out
}
