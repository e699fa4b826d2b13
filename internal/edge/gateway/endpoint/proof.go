package endpoint

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// errUnproved is the cause of a dial's error if the Verifier has refused the address.
var errUnproved = errors.New("not proved to be the sandbox")

// Verifier verifies which sandbox is at an address; identity.Verifier implements it.
type Verifier interface {
	// Verify returns nil once the other end of an HTTP/1.1 connection has proved that it is the agent of a sandbox.
	// It bounds the time and the bytes that the other end takes. The connection then carries requests as before.
	Verify(ctx context.Context, agent net.Conn, id sandbox.ID) error
}

// proved returns a connection that was just opened once its address is proved to be the sandbox's, and closes it
// otherwise. agent is true if it leads to the agent in HTTP/1.1, and so can carry the proof itself.
func (e *Endpoint) proved(ctx context.Context, nc net.Conn, agent bool) (net.Conn, error) {
	if e.cfg.Verifier == nil {
		return nc, nil
	}
	var err error
	if agent {
		if err = e.cfg.Verifier.Verify(ctx, nc, e.id); err != nil && ctx.Err() == nil {
			e.cfg.Dials.WithLabelValues("unproved").Inc()
		}
	} else {
		err = e.proveAddress(ctx)
	}
	if err == nil {
		return nc, nil
	}
	_ = nc.Close()
	return nil, &net.OpError{Op: "dial", Net: "tcp", Addr: nc.RemoteAddr(), Err: fmt.Errorf("%w: %v", errUnproved, err)} //nolint:errorlint // a refused port of the agent must not look like one of the service
}

// proveAddress has the agent prove itself over an idle connection of the fast path, or over a new one, which it leaves there.
func (e *Endpoint) proveAddress(ctx context.Context) error {
	if c := e.fast.Get(envd.Port); c != nil {
		if e.cfg.Verifier.Verify(ctx, c, e.id) == nil {
			e.fast.Put(envd.Port, c)
			return nil
		}
		_ = c.Close() // it may have broken meanwhile
	}
	c, err := e.open(ctx, e.At(envd.Port), false)
	if err == nil {
		e.fast.Put(envd.Port, c)
	}
	return err
}
