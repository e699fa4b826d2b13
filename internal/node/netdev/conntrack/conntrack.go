// Package conntrack deletes entries of the kernel's table of connections. A connection's next packet is then filtered like
// the first of a new one.
package conntrack

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// tries bounds the retries of a list that changes while the kernel writes it.
const tries = 50

// Table is the kernel's table. The zero value is ready; it is not safe for concurrent use.
type Table struct{ handle *netlink.Handle }

// Delete deletes the entries that match, of a family. A kernel that cannot list connections is an error.
func (t *Table) Delete(family netlink.InetFamily, filter netlink.CustomConntrackFilter) error {
	if t.handle == nil {
		handle, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
		if err != nil {
			return fmt.Errorf("open netlink: %w", err)
		}
		t.handle = handle
	}
	var err error = netlink.ErrDumpInterrupted
	for try := 0; try < tries && errors.Is(err, netlink.ErrDumpInterrupted); try++ {
		_, err = t.handle.ConntrackDeleteFilters(netlink.ConntrackTable, family, filter)
	}
	if err != nil {
		return fmt.Errorf("cut connections: %w", err)
	}
	return nil
}

// Close closes the connection to the kernel.
func (t *Table) Close() {
	if t.handle != nil {
		t.handle.Close()
	}
	t.handle = nil
}
