package sshd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"path"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/crypto/ssh"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/edge/gateway/traffic"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// servePort connects a channel to a port of the sandbox.
func (c *conn) servePort(ctx context.Context, offer ssh.NewChannel) {
	var m struct {
		Host       string
		Port       uint32
		Origin     string
		OriginPort uint32
	}
	switch err := ssh.Unmarshal(offer.ExtraData(), &m); {
	case err != nil || m.Port == 0 || m.Port > 1<<16-1:
		c.reject(offer, "port", ssh.ConnectionFailed, "a port from 1 to 65535 is needed")
	case m.Port == envd.Port:
		c.reject(offer, "port", ssh.Prohibited, "the agent's port is not forwarded")
	case !isSandbox(m.Host, c.login.id):
		c.reject(offer, "port", ssh.Prohibited, "only ports of the sandbox itself are forwarded: use localhost as the host")
	default:
		c.forward(ctx, offer, "port", fmt.Sprintf("port %d", m.Port), func(ctx context.Context, v *gateway.Visit) (net.Conn, error) {
			return v.Dial(ctx, uint16(m.Port))
		})
	}
}

// serveSocket connects a channel to a Unix socket of the sandbox.
func (c *conn) serveSocket(ctx context.Context, offer ssh.NewChannel) {
	var m struct {
		Path     string
		Reserved string
		Number   uint32
	}
	if ssh.Unmarshal(offer.ExtraData(), &m) != nil || !path.IsAbs(m.Path) || len(m.Path) > maxSocketPath {
		c.reject(offer, "socket", ssh.ConnectionFailed, "an absolute path of a socket is needed")
		return
	}
	c.forward(ctx, offer, "socket", m.Path, func(ctx context.Context, v *gateway.Visit) (net.Conn, error) {
		agent, err := v.Dial(ctx, envd.Port)
		if err != nil {
			return nil, err
		}
		return envd.ConnectSocket(ctx, agent, v.Token(), m.Path)
	})
}

// maxSocketPath is the kernel's.
const maxSocketPath = 107

// isSandbox reports whether a host of a client's request means the sandbox. Others are never resolved: the server would be a way
// into its own network.
func isSandbox(host string, id sandbox.ID) bool {
	host = strings.ToLower(strings.Trim(host, "[]"))
	if host == "localhost" || host == string(id) || strings.HasPrefix(host, string(id)+".") {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && (addr.Unmap().IsLoopback() || addr.IsUnspecified())
}

// forward connects a channel to what dial opens.
func (c *conn) forward(ctx context.Context, offer ssh.NewChannel, kind, where string, dial func(context.Context, *gateway.Visit) (net.Conn, error)) {
	v, ctx, cancel, err := c.visit(ctx)
	if err != nil {
		c.reject(offer, kind, ssh.ConnectionFailed, c.sentence(err))
		return
	}
	defer v.End()
	defer cancel(nil)
	dialing, stop := context.WithTimeout(ctx, connectTime)
	defer stop()
	nc, err := dial(dialing, v)
	if err != nil {
		text := c.sentence(err)
		if errors.Is(err, syscall.ECONNREFUSED) {
			text = "nothing listens on " + where
		}
		c.reject(offer, kind, ssh.ConnectionFailed, text)
		return
	}
	ch, reqs, err := offer.Accept()
	if err != nil {
		_ = nc.Close()
		return
	}
	go func() { // ends with the channel
		ssh.DiscardRequests(reqs)
		cancel(errGone)
	}()
	err = c.join(ctx, ch, nc)
	result := "ok"
	if err != nil {
		result = "failed"
	}
	c.s.metrics.channels.WithLabelValues(kind, result).Inc()
	_ = ch.Close() // it may be closed
}

// join carries bytes both ways until both directions have ended, one broke, or ctx is done. It closes nc, and ends what ch sends.
func (c *conn) join(ctx context.Context, ch ssh.Channel, nc net.Conn) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	shut := sync.OnceFunc(func() { _ = nc.Close() })
	defer shut()
	defer context.AfterFunc(ctx, shut)()
	idle := traffic.NewIdleTimer(c.s.cfg.StreamIdle, c.s.clock, func() { cancel(errIdle) })
	defer idle.Stop()
	go func() { // ends with the channel or the connection
		_, err := io.Copy(nc, idle.Reading(ch))
		if half, ok := nc.(interface{ CloseWrite() error }); err != nil || !ok || half.CloseWrite() != nil {
			shut()
		}
	}()
	_, err := io.Copy(ch, idle.Reading(nc))
	_ = ch.CloseWrite() // it may be closed
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}
