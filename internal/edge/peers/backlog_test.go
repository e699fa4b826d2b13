package peers

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// fullBacklog listens without ever accepting, and fills the queue of connections, so that the
// kernel drops what else comes.
func fullBacklog(t *testing.T, addr string) netip.AddrPort {
	t.Helper()
	ip := netip.MustParseAddr(addr).As4()
	open := func() int {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
		return fd
	}
	l := open()
	if err := errors.Join(unix.Bind(l, &unix.SockaddrInet4{Addr: ip}), unix.Listen(l, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(l)
	if err != nil {
		t.Fatal(err)
	}
	at, _ := name.(*unix.SockaddrInet4)
	for range 4 { // one is queued; the rest are dropped, as ours will be
		_ = unix.Connect(open(), at)
	}
	return netip.AddrPortFrom(netip.AddrFrom4(at.Addr), uint16(at.Port))
}
