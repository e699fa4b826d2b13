package agent_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/pkg/sftp"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// dial opens a connection to the agent.
func (a *testAgent) dial() net.Conn {
	a.t.Helper()
	nc, err := net.Dial("tcp", strings.TrimPrefix(a.base, "http://")) //nolint:noctx // on the loopback
	noError(a.t, err)
	return nc
}

// TestSFTP writes, reads, renames and stats through the agent's SFTP server, which ends with its connection.
func TestSFTP(t *testing.T) {
	a := start(t, envd.Config{AccessToken: "secret"})
	nc, err := envd.ConnectSFTP(t.Context(), a.dial(), "secret", "root")
	noError(t, err)
	c, err := sftp.NewClientPipe(nc, nc.(io.WriteCloser))
	noError(t, err)
	path, content := filepath.Join(t.TempDir(), "file"), bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	f, err := c.Create(path)
	noError(t, err)
	_, err = f.ReadFrom(bytes.NewReader(content))
	noError(t, errors.Join(err, f.Close()))
	_, err = c.Stat(path + ".none")
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("stat of a missing file: %v", err)
	}
	noError(t, errors.Join(c.Chmod(path, 0o640), c.Rename(path, path+"2")))
	st, err := os.Stat(path + "2")
	noError(t, err)
	if got, err := os.ReadFile(path + "2"); err != nil || !bytes.Equal(got, content) || st.Mode().Perm() != 0o640 {
		t.Errorf("%d bytes, mode %v, %v", len(got), st.Mode(), err)
	}
	if dir, err := c.Getwd(); err != nil || dir != "/root" {
		t.Errorf("working directory %q, %v; want the home", dir, err)
	}
	noError(t, c.Close())
	eventually.True(t, "the server's end", func() bool { return !a.runsSFTP() })
	if _, err := envd.ConnectSFTP(t.Context(), a.dial(), "guessed", "root"); status(err) != http.StatusUnauthorized {
		t.Errorf("with another token: %v", err)
	}
	if _, err := envd.ConnectSFTP(t.Context(), a.dial(), "secret", "nobody-such"); status(err) != http.StatusUnauthorized {
		t.Errorf("as an unknown user: %v", err)
	}
}

// runsSFTP reports whether a child of the agent serves SFTP.
func (a *testAgent) runsSFTP() bool {
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		stat, _ := os.ReadFile(file)
		line, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "cmdline"))
		fields := strings.Fields(string(stat[max(0, bytes.LastIndexByte(stat, ')')):]))
		if len(fields) > 2 && fields[2] == strconv.Itoa(a.cmd.Process.Pid) && bytes.Contains(line, []byte("-sftp\x00")) {
			return true
		}
	}
	return false
}

func status(err error) int {
	if refused, ok := errors.AsType[*envd.Error](err); ok {
		return refused.Status
	}
	return 0
}

// TestConnectSocket reaches a Unix socket by its path.
func TestConnectSocket(t *testing.T) {
	a := start(t, envd.Config{AccessToken: "secret"})
	path := filepath.Join(t.TempDir(), "socket")
	listenSocket(t, path)
	nc, err := envd.ConnectSocket(t.Context(), a.dial(), "secret", path)
	noError(t, err)
	_, err = io.WriteString(nc, "hello")
	noError(t, errors.Join(err, nc.(interface{ CloseWrite() error }).CloseWrite()))
	if b, err := io.ReadAll(nc); err != nil || string(b) != "hello" {
		t.Errorf("got %q, %v", b, err)
	}
	if _, err := envd.ConnectSocket(t.Context(), a.dial(), "secret", path+"2"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a path without a socket: %v", err)
	}
	if _, err := envd.ConnectSocket(t.Context(), a.dial(), "secret", "@abstract"); status(err) != http.StatusBadRequest {
		t.Errorf("a relative path: %v", err)
	}
}

// listenSocket echoes what it gets.
func listenSocket(t *testing.T, path string) {
	t.Helper()
	l, err := net.Listen("unix", path) //nolint:noctx // on this machine
	noError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		_, _ = io.Copy(nc, nc)
		_ = nc.Close()
	}()
}
