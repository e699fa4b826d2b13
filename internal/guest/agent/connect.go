package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/agent/ports"
	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
	"github.com/barchan-dev/barchan/internal/guest/agent/spawn"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// FlagOwners has the agent's program print the owners of sockets that its user can see.
const FlagOwners = "owners"

const (
	// ownersTimeout bounds such a program.
	ownersTimeout = 5 * time.Second
	maxOwners     = 1 << 20 // bytes
)

// PrintOwners is what the program does for FlagOwners, whose value has inodes with commas between.
func PrintOwners(to io.Writer, inodes string) error {
	return json.NewEncoder(to).Encode(ports.Owners("/proc", strings.Split(inodes, ",")))
}

func (a *Agent) getPorts(w http.ResponseWriter, r *http.Request) error {
	list, err := ports.List("/proc", os.Getpid(), func(uid, gid uint32, inodes []string) (map[string]ports.Owner, error) {
		return a.ownersAs(r.Context(), uid, gid, inodes)
	})
	if err != nil {
		return err
	}
	return reply.JSON(w, list)
}

// ownersAs runs the agent's program as another user. The agent may act as any user, but without
// CAP_SYS_PTRACE cannot read the processes of others.
func (a *Agent) ownersAs(ctx context.Context, uid, gid uint32, inodes []string) (map[string]ports.Owner, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = null.Close() }()
	read, write, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = read.Close() }()
	pid, done, err := a.reaper.Spawn(spawn.Command{
		Argv: []string{"/proc/self/exe", "-" + FlagOwners, strings.Join(inodes, ",")}, Dir: "/",
		User: account.User{UID: uid, GID: gid}, Files: [3]*os.File{null, write, null},
	})
	_ = write.Close() // the program has its own
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, ownersTimeout)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = a.reaper.Signal(pid, syscall.SIGKILL) })()
	var owners map[string]ports.Owner
	err = json.NewDecoder(io.LimitReader(read, maxOwners)).Decode(&owners)
	<-done
	return owners, err
}

// getConnect upgrades the connection to one with a port of the sandbox's loopback, or with a Unix socket.
func (a *Agent) getConnect(w http.ResponseWriter, r *http.Request) error {
	path := r.URL.Query().Get(envd.QueryPath)
	port, err := strconv.ParseUint(r.URL.Query().Get(envd.QueryPort), 10, 16)
	if path != "" && !filepath.IsAbs(path) {
		return reply.Refuse(http.StatusBadRequest, "%s: want an absolute path", envd.QueryPath)
	}
	if path == "" && (err != nil || port == 0) {
		return reply.Refuse(http.StatusBadRequest, "%s: want a number from 1 to 65535", envd.QueryPort)
	}
	if err := wantsTCP(w, r); err != nil {
		return err
	}
	var inner net.Conn
	where := path
	if path != "" {
		inner, err = dialSocket(r.Context(), path)
	} else {
		where = fmt.Sprintf("port %d", port)
		inner, err = ports.Dial(r.Context(), uint16(port))
	}
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT) {
		return reply.Refuse(http.StatusBadGateway, "nothing listens on %s", where)
	}
	if err != nil {
		return err
	}
	return becomeTCP(w, r, inner)
}

// wantsTCP refuses a request that does not ask for an upgrade to a plain connection.
func wantsTCP(w http.ResponseWriter, r *http.Request) error {
	if r.ProtoMajor != 1 || !strings.EqualFold(r.Header.Get("Upgrade"), envd.UpgradeTCP) {
		w.Header().Set("Upgrade", envd.UpgradeTCP)
		return reply.Refuse(http.StatusUpgradeRequired, "want HTTP/1.1 and Upgrade: %s", envd.UpgradeTCP)
	}
	return nil
}

// becomeTCP upgrades the request's connection to one with inner, until both have ended or the agent stops. It closes inner.
func becomeTCP(w http.ResponseWriter, r *http.Request, inner net.Conn) error {
	outer, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return errors.Join(fmt.Errorf("hijack connection: %w", err), inner.Close())
	}
	_ = outer.SetDeadline(time.Time{}) // if that fails, so does what follows
	head := "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + envd.UpgradeTCP + "\r\n\r\n"
	if _, err := io.WriteString(outer, head); err != nil {
		_, _ = outer.Close(), inner.Close()
		return nil //nolint:nilerr // the client has gone
	}
	early, _ := buffered.Peek(buffered.Reader.Buffered())
	ports.Join(r.Context(), outer, strings.NewReader(string(early)), inner)
	return nil
}

// dialSocket connects to a Unix socket of the sandbox.
func dialSocket(ctx context.Context, path string) (net.Conn, error) {
	return (&net.Dialer{Timeout: socketTimeout}).DialContext(ctx, "unix", path)
}

// socketTimeout bounds the wait for a program that does not accept.
const socketTimeout = 5 * time.Second
