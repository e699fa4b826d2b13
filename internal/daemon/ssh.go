package daemon

import (
	"context"
	"fmt"

	"github.com/barchan-dev/barchan/internal/daemon/front"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/gateway/credentials"
	"github.com/barchan-dev/barchan/internal/edge/sshd"
)

func (d *Daemon) bindSSH(ctx context.Context) (err error) {
	if d.hostKey, err = sshd.OpenHostKey(d.cfg.HostKeyFile()); err != nil {
		return fmt.Errorf("sshHostKey: %w", err)
	}
	d.ssh, err = front.BindSSH(ctx, "sshAddr", d.cfg.SSHAddr)
	return err
}

// sshAccess is how clients reach the listener.
func (d *Daemon) sshAccess() *api.SSHAccess {
	return &api.SSHAccess{Port: int(d.ssh.Addr().Port()), HostKey: d.hostKey.Public()}
}

// openSSH serves the connections, over the gateway.
func (d *Daemon) openSSH(keyNamespace credentials.KeyNamespace) error {
	srv, err := sshd.New(sshd.Config{
		Gateway: d.gateway, Routes: d.routes, Tokens: d.tokens, KeyNamespace: keyNamespace, SSHNamespaces: d.manager.Keys.SSHNamespaces,
		HostKey: d.hostKey, Log: d.cfg.Log, Audit: d.audit, Registerer: d.metrics, Idle: d.cfg.ClientIdle, StreamIdle: d.cfg.StreamIdle, Grace: drainTime,
	})
	if err != nil {
		return err
	}
	d.ssh.Open(srv)
	return nil
}
