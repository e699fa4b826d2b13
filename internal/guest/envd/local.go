package envd

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"syscall"
	"time"
)

// Routes about the ports of a sandbox, our addition to the protocol.
const (
	PathPorts = "/ports"
	// PathConnect leads to a port on the sandbox's own loopback, which is unreachable from outside:
	// after 101, the connection is one to that port. It takes the query parameter QueryPort; or QueryPath, for
	// a Unix socket, whatever its mode.
	PathConnect = "/internal/connect"
	// PathSFTP leads, after 101, to an SFTP server that runs as the request's user.
	PathSFTP  = "/internal/sftp"
	QueryPort = "port"
	// UpgradeTCP is the protocol that a connection of PathConnect changes to.
	UpgradeTCP = "tcp"
)

// ListeningPort is a TCP port that a program in a sandbox listens on.
type ListeningPort struct {
	Port uint16 `json:"port"`
	// Address that it is bound to; 0.0.0.0 and :: mean all.
	Address string `json:"address"`
	// PID is 0 where the program is not known.
	PID     int    `json:"pid,omitempty"`
	Process string `json:"process,omitempty"`
}

// Ports reads what listens in the sandbox, by port and address, without the agent itself.
func (c *Client) Ports(ctx context.Context) ([]ListeningPort, error) {
	ports := list[ListeningPort]{max: maxPorts}
	err := c.call(ctx, http.MethodGet, PathPorts, nil, &ports)
	return ports.items, err
}

// ConnectLocal makes of a connection to an agent one to a port of its sandbox's loopback. The error
// is a syscall.ECONNREFUSED if nothing listens there. The connection is closed if it fails.
func ConnectLocal(ctx context.Context, agent net.Conn, token string, port uint16) (net.Conn, error) {
	number := strconv.Itoa(int(port))
	nc, err := upgrade(ctx, agent, PathConnect+"?"+QueryPort+"="+number, token, "")
	return nc, describe("connect to port "+number+" through the agent", err)
}

// ConnectSocket is ConnectLocal for a Unix socket of the sandbox, by an absolute path.
func ConnectSocket(ctx context.Context, agent net.Conn, token, path string) (net.Conn, error) {
	nc, err := upgrade(ctx, agent, PathConnect+"?"+url.Values{QueryPath: {path}}.Encode(), token, "")
	return nc, describe("connect to "+path+" through the agent", err)
}

// ConnectSFTP makes of a connection to an agent one to an SFTP server that runs as a user of the sandbox; empty: the
// default one. An agent older than this route answers 404, an [Error]. The connection is closed if it fails.
func ConnectSFTP(ctx context.Context, agent net.Conn, token, user string) (net.Conn, error) {
	nc, err := upgrade(ctx, agent, PathSFTP, token, user)
	return nc, describe("start SFTP", err)
}

func describe(action string, err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", action, err)
	}
	return nil
}

// upgrade has the agent lead a connection elsewhere; it is closed if that fails.
func upgrade(ctx context.Context, agent net.Conn, pathAndQuery, token, user string) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = agent.SetDeadline(time.Unix(1, 0)) })
	nc, err := sendUpgrade(ctx, agent, pathAndQuery, token, user)
	if !stop() {
		err = errors.Join(err, context.Cause(ctx))
	}
	if err != nil {
		_ = agent.Close()
		return nil, err
	}
	return nc, nil
}

func sendUpgrade(ctx context.Context, agent net.Conn, pathAndQuery, token, user string) (net.Conn, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+agent.RemoteAddr().String()+pathAndQuery, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", UpgradeTCP)
	if token != "" {
		req.Header.Set(HeaderAccessToken, token)
	}
	if user != "" {
		req.SetBasicAuth(user, "")
	}
	if err := req.Write(agent); err != nil {
		return nil, err
	}
	head := &io.LimitedReader{R: agent, N: MaxResponseHeader}
	br := bufio.NewReaderSize(head, 1<<10)
	res, err := http.ReadResponse(br, req)
	if err != nil {
		return nil, err
	}
	switch res.StatusCode {
	case http.StatusSwitchingProtocols:
	case http.StatusBadGateway:
		return nil, syscall.ECONNREFUSED
	default:
		defer func() { _ = res.Body.Close() }()
		return nil, readError(res)
	}
	if br.Buffered() == 0 {
		return agent, nil
	}
	head.N = math.MaxInt64
	return &ahead{Conn: agent, read: br}, nil
}

// ahead is a connection of which more than the head was read.
type ahead struct {
	net.Conn
	read io.Reader
}

// Read gives what was read ahead first.
func (a *ahead) Read(b []byte) (int, error) { return a.read.Read(b) }

// CloseWrite ends one direction.
func (a *ahead) CloseWrite() error {
	if half, ok := a.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return a.Close()
}
