package firewall

import (
	"fmt"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
)

// socketBuffer bounds a transaction and the kernel's answers to it, in bytes. The usual bound is
// too low for the greatest policies that are let in. It is no memory until it is needed.
const socketBuffer = 16 << 20

// roomy gives a connection buffers for great transactions.
func roomy(conn *netlink.Conn) error {
	if err := conn.SetWriteBuffer(socketBuffer); err != nil {
		return err
	}
	return conn.SetReadBuffer(socketBuffer)
}

// connect returns a connection without a transaction. It is the last one again if that one's
// transaction succeeded: closing a connection waits until the kernel has freed what was deleted,
// about 10 ms each time. A transaction on it ends with [Rules.commit], or the next call opens a new
// one.
//
// +checklocks:r.mu
func (r *Rules) connect() (*nftables.Conn, error) {
	if r.conn != nil && r.settled {
		r.settled = false
		return r.conn, nil
	}
	r.disconnect()
	conn, err := nftables.New(nftables.AsLasting(), nftables.WithSockOptions(roomy))
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	r.conn = conn
	return conn, nil
}

// commit executes the pending changes of a connection in one transaction.
//
// +checklocks:r.mu
func (r *Rules) commit(conn *nftables.Conn) error {
	err := conn.Flush()
	r.settled = err == nil && conn == r.conn
	if err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// +checklocks:r.mu
func (r *Rules) disconnect() {
	if r.conn != nil {
		_ = r.conn.CloseLasting()
	}
	r.conn, r.settled = nil, false
}

// Close closes the connection; the rules stay.
func (r *Rules) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.disconnect()
	r.flows.Close()
}
