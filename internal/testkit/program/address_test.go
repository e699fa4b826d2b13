package program_test

import (
	"errors"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// The kernel gives the port to no other socket, even where it has no other left; a server can listen there, also a second time.
func TestAddress(t *testing.T) {
	addr := program.Address(t)
	want, err := net.ResolveTCPAddr("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr); !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatalf("a connection without a server: %v, %v", c, err)
		}
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	// A socket that may have this port alone.
	only := func(fd int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_LOCAL_PORT_RANGE, want.Port<<16|want.Port)
	}
	for what, use := range map[string]func(fd int) error{
		"listen": func(fd int) error { return unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}) },
		"dial": func(fd int) error {
			return unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: listening(t)})
		},
	} {
		t.Run(what, func(t *testing.T) {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = unix.Close(fd) }()
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
				t.Fatal(err)
			}
			if err := only(fd); errors.Is(err, unix.ENOPROTOOPT) {
				t.Skip("SKIPPED: the kernel cannot choose from one port")
			} else if err != nil {
				t.Fatal(err)
			}
			if err := use(fd); !errors.Is(err, unix.EADDRINUSE) && !errors.Is(err, unix.EADDRNOTAVAIL) {
				t.Errorf("it got the port: %v", err)
			}
		})
	}
}

// listening returns the port of a listener.
func listening(t *testing.T) int {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // it is
}
