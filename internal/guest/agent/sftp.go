package agent

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"

	"github.com/pkg/sftp"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
	"github.com/barchan-dev/barchan/internal/guest/agent/spawn"
)

// FlagSFTP has the agent's program serve SFTP on its standard input and output.
const FlagSFTP = "sftp"

// ServeSFTP is what the program does for FlagSFTP, as the user whose files it serves: the kernel checks each access, as it
// does for the user's own programs. It returns when the input ends. Relative paths begin in dir.
func ServeSFTP(in io.Reader, out io.WriteCloser, dir string) error {
	srv, err := sftp.NewServer(struct {
		io.Reader
		io.WriteCloser
	}{in, out}, sftp.WithServerWorkingDirectory(dir))
	if err != nil {
		return fmt.Errorf("start SFTP: %w", err)
	}
	if err := srv.Serve(); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("serve SFTP: %w", err)
	}
	return nil
}

// getSFTP upgrades the connection to one with an SFTP server that runs as the request's user.
func (a *Agent) getSFTP(w http.ResponseWriter, r *http.Request) error {
	acc, err := a.users.Of(r.Header)
	if err != nil {
		return reply.WithStatus(http.StatusUnauthorized, err)
	}
	if err := wantsTCP(w, r); err != nil {
		return err
	}
	inner, err := a.startSFTP(acc)
	if err != nil {
		return err
	}
	return becomeTCP(w, r, inner)
}

// startSFTP returns a connection to the standard input and output of an SFTP server, which ends when it is closed.
func (a *Agent) startSFTP(acc account.User) (net.Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make sockets: %w", err)
	}
	ours, its := os.NewFile(uintptr(fds[0]), "sftp"), os.NewFile(uintptr(fds[1]), "sftp")
	defer func() { _, _ = ours.Close(), its.Close() }() // the program and the connection have their own
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("open files of SFTP: %w", err)
	}
	defer func() { _ = null.Close() }()
	dir := acc.Home
	if st, err := os.Stat(dir); err != nil || !st.IsDir() {
		dir = "/"
	}
	_, _, err = a.reaper.Spawn(spawn.Command{
		Argv: []string{"/proc/self/exe", "-" + FlagSFTP, dir}, Env: map[string]string{"HOME": acc.Home}, Dir: "/",
		User: acc, Files: [3]*os.File{its, its, null},
	})
	if err != nil {
		return nil, fmt.Errorf("start SFTP: %w", err)
	}
	nc, err := net.FileConn(ours)
	if err != nil {
		return nil, fmt.Errorf("connect to SFTP: %w", err)
	}
	return nc, nil
}
