// Package nfs runs an NFS server for tests, which exports a directory as /export.
package nfs

import (
	"net"
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// Export is the path of the directory; the server refuses Denied.
const (
	Export = "/export"
	Denied = "/denied"
)

// Server is a running NFS server.
type Server struct {
	program.Server
	// Address is its host and port, Dir what it exports.
	Address, Dir string
}

// Start starts a server. It ends with the test.
func Start(t testing.TB) *Server {
	t.Helper()
	s := &Server{Address: program.Address(t), Dir: t.TempDir()}
	if err := os.Chmod(s.Dir, 0o777); err != nil { //nolint:gosec // exported
		t.Fatal(err)
	}
	s.Restart(t)
	t.Cleanup(func() { s.Stop(t) })
	return s
}

// Port is the one at which it serves files and mounts.
func (s *Server) Port(t testing.TB) int {
	t.Helper()
	_, text, err := net.SplitHostPort(s.Address)
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// Restart starts a server that was stopped. It knows no handle of the one before.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	cmd := exec.Command(program.Find(t, "nfs-server", "scripts/tool.sh nfs-server"), s.Address, s.Dir) //nolint:gosec,noctx // ended by Stop
	s.Start(t, cmd, func() error {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.Address)
		if err != nil {
			return err
		}
		return conn.Close()
	})
}
