package front

import (
	"context"
	"errors"
	"net"
	"net/netip"

	"github.com/barchan-dev/barchan/internal/edge/sshd"
)

// SSH is the listener of SSH. Connections wait until it is opened.
type SSH struct {
	listener net.Listener
	opened   chan *sshd.Server
}

// BindSSH takes an address; key is its setting.
func BindSSH(ctx context.Context, key, addr string) (*SSH, error) {
	ln, err := listen(ctx, key, addr)
	if err != nil {
		return nil, err
	}
	return &SSH{listener: ln, opened: make(chan *sshd.Server, 1)}, nil
}

// Addr is the address that was taken.
func (f *SSH) Addr() netip.AddrPort { return addrOf(f.listener) }

// Open has a server serve the connections. It is called once.
func (f *SSH) Open(srv *sshd.Server) { f.opened <- srv }

// Run serves until ctx is done.
func (f *SSH) Run(ctx context.Context) error {
	select {
	case srv := <-f.opened:
		return srv.Serve(ctx, f.listener)
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), f.listener.Close())
	}
}

func addrOf(ln net.Listener) netip.AddrPort { return netip.MustParseAddrPort(ln.Addr().String()) }
