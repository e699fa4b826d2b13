package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/barchan-dev/barchan/internal/edge/e2b"
	"github.com/barchan-dev/barchan/internal/edge/gateway/credentials"
	"github.com/barchan-dev/barchan/internal/edge/sshd"
)

// sshFront is the listener of SSH, which is bound before anything is ready. Connections wait until it is opened.
type sshFront struct {
	listener net.Listener
	key      *sshd.HostKey
	opened   chan *sshd.Server
}

func (d *Daemon) bindSSH(ctx context.Context) (*sshFront, error) {
	key, err := sshd.OpenHostKey(d.cfg.HostKeyFile())
	if err != nil {
		return nil, fmt.Errorf("sshHostKey: %w", err)
	}
	ln, err := listen(ctx, "sshAddr", d.cfg.SSHAddr)
	if err != nil {
		return nil, err
	}
	return &sshFront{listener: ln, key: key, opened: make(chan *sshd.Server, 1)}, nil
}

// access is what clients are told.
func (f *sshFront) access() *e2b.SSHAccess {
	port := netip.MustParseAddrPort(f.listener.Addr().String()).Port()
	return &e2b.SSHAccess{Port: int(port), HostKey: f.key.Public()}
}

// openSSH serves the connections, over the gateway.
func (d *Daemon) openSSH(keyNamespace credentials.KeyNamespace) error {
	srv, err := sshd.New(sshd.Config{
		Gateway: d.gateway, Routes: d.routes, Tokens: d.tokens, KeyNamespace: keyNamespace, SSHNamespaces: d.manager.Keys.SSHNamespaces,
		HostKey: d.ssh.key, Log: d.cfg.Log, Registerer: d.metrics, Idle: d.cfg.ClientIdle, StreamIdle: d.cfg.StreamIdle, Grace: drainTime,
	})
	if err != nil {
		return err
	}
	d.ssh.opened <- srv
	return nil
}

// run serves until ctx is done.
func (f *sshFront) run(ctx context.Context) error {
	select {
	case srv := <-f.opened:
		return srv.Serve(ctx, f.listener)
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), f.listener.Close())
	}
}
