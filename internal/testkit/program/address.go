package program

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

// Address returns a TCP address of loopback that is the test's until it ends: no socket gets its port by chance, and a
// connection is refused. A server that sets SO_REUSEADDR before it binds, as servers in Go do, can listen at it, one at a time.
func Address(t testing.TB) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	// The socket never listens, so it does not prevent a listener that sets SO_REUSEADDR too. The kernel chooses no port that one has.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", at.(*unix.SockaddrInet4).Port) //nolint:forcetypeassert // of the family above
}
