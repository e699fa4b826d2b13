package nfs

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"

	xdr "github.com/rasky/go-xdr/xdr2"
	nfs "github.com/willscott/go-nfs-client/nfs"
	rpctypes "github.com/willscott/go-nfs-client/nfs/rpc"

	"github.com/barchan-dev/barchan/runtimes/volumefs/backend"
)

const (
	// maxReply bounds one reply of the server, in bytes, and so what is read at once.
	maxReply = maxTransfer + 64<<10
	// maxTransfer bounds a read or write, in bytes.
	maxTransfer = 1 << 20
	// resvFirst and resvLast are the reserved ports that a server may require of its clients. Lower ones belong to well-known services.
	resvFirst, resvLast = 665, 1023
	portMapper          = 111
	nfsPort             = 2049
	lastFragment        = 1 << 31
)

// errGone means that the connection ended before the reply.
var errGone = errors.New("the connection to the server ended")

// dialTo connects to a server at an address that is not denied, from a reserved port if the process may have one.
func dialTo(ctx context.Context, host string, port int, denied []netip.Prefix) (net.Conn, error) {
	refused := func(_, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return err
		}
		ip := to.Addr().Unmap().WithZone("")
		if slices.ContainsFunc(denied, func(p netip.Prefix) bool { return p.Contains(ip) }) {
			return backend.ErrRefused
		}
		return nil
	}
	target := net.JoinHostPort(host, strconv.Itoa(port))
	for range 8 {
		from := &net.TCPAddr{Port: resvFirst + rand.IntN(resvLast-resvFirst+1)}
		d := &net.Dialer{Timeout: backend.ConnectTimeout, Control: refused, LocalAddr: from}
		conn, err := d.DialContext(ctx, "tcp", target)
		switch {
		case errors.Is(err, syscall.EADDRINUSE), errors.Is(err, syscall.EADDRNOTAVAIL):
			continue
		case errors.Is(err, os.ErrPermission):
			return (&net.Dialer{Timeout: backend.ConnectTimeout, Control: refused}).DialContext(ctx, "tcp", target)
		}
		return conn, err
	}
	return nil, fmt.Errorf("no reserved port is free: %w", syscall.EADDRINUSE)
}

// rpcConn is a connection on which several calls can wait for their replies.
type rpcConn struct {
	conn net.Conn
	// done is closed when nothing more is read.
	done chan struct{}
	// sending is held while a record is written. It is not mu: a server that waits for its replies to be read reads nothing.
	sending sync.Mutex

	mu      sync.Mutex
	xid     uint32
	waiting map[uint32]chan []byte
}

func newConn(conn net.Conn) *rpcConn {
	c := &rpcConn{conn: conn, done: make(chan struct{}), xid: rand.Uint32(), waiting: map[uint32]chan []byte{}}
	go c.receive()
	return c
}

func (c *rpcConn) receive() {
	defer close(c.done)
	defer c.conn.Close()
	in := bufio.NewReaderSize(c.conn, 64<<10)
	for {
		reply, err := readRecord(in)
		if err != nil || len(reply) < 4 {
			return
		}
		xid := binary.BigEndian.Uint32(reply)
		c.mu.Lock()
		to := c.waiting[xid]
		delete(c.waiting, xid)
		c.mu.Unlock()
		if to != nil { // else its caller has given up
			to <- reply[4:]
		}
	}
}

// readRecord reads one record, of any number of fragments.
func readRecord(in io.Reader) (record []byte, err error) {
	for {
		var mark uint32
		if err := binary.Read(in, binary.BigEndian, &mark); err != nil {
			return nil, err
		}
		size := int(mark &^ lastFragment)
		if len(record)+size > maxReply {
			return nil, fmt.Errorf("a reply of more than %d bytes", maxReply)
		}
		at := len(record)
		record = append(record, make([]byte, size)...)
		if _, err := io.ReadFull(in, record[at:]); err != nil {
			return nil, err
		}
		if mark&lastFragment != 0 {
			return record, nil
		}
	}
}

// header begins every call.
type header struct {
	XID, Type uint32
	rpctypes.Header
}

// procedure is one of a program.
type procedure struct{ program, version, number uint32 }

// call sends a call and waits for its reply, whose result is what follows.
func (c *rpcConn) call(ctx context.Context, p procedure, auth rpctypes.Auth, args any) (*bytes.Reader, error) {
	reply := make(chan []byte, 1)
	c.mu.Lock()
	c.xid++
	xid := c.xid
	c.waiting[xid] = reply
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.waiting, xid)
	}()
	h := header{XID: xid, Header: rpctypes.Header{Rpcvers: 2, Prog: p.program, Vers: p.version, Proc: p.number, Cred: auth, Verf: rpctypes.AuthNull}}
	out := bytes.NewBuffer(make([]byte, 4, 256))
	if _, err := xdr.Marshal(out, &h); err != nil {
		return nil, err
	}
	if args != nil {
		if _, err := xdr.Marshal(out, args); err != nil {
			return nil, err
		}
	}
	text := out.Bytes()
	binary.BigEndian.PutUint32(text, uint32(len(text)-4)|lastFragment)
	if err := c.send(ctx, text); err != nil {
		return nil, errors.Join(errGone, err)
	}
	select {
	case text := <-reply:
		return accepted(text)
	case <-c.done:
		return nil, errGone
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// send writes a whole record, or ends the connection: half a one cannot be followed by another.
func (c *rpcConn) send(ctx context.Context, record []byte) error {
	c.sending.Lock()
	defer c.sending.Unlock()
	if deadline, ok := ctx.Deadline(); ok {
		if err := c.conn.SetWriteDeadline(deadline); err != nil {
			return err
		}
	}
	_, err := c.conn.Write(record)
	if err != nil {
		_ = c.conn.Close()
	}
	return err
}

// accepted returns the result of a reply that has one.
func accepted(reply []byte) (*bytes.Reader, error) {
	r := bytes.NewReader(reply)
	var h struct {
		Type, Denied uint32
	}
	if err := decode(r, &h); err != nil {
		return nil, err
	}
	if h.Type != 1 {
		return nil, errors.New("no reply")
	}
	if h.Denied != 0 {
		return nil, fmt.Errorf("the server refuses the call's credentials: %w", syscall.EACCES)
	}
	var v struct {
		Verf   rpctypes.Auth
		Status uint32
	}
	if err := decode(r, &v); err != nil {
		return nil, err
	}
	if v.Status != 0 {
		return nil, fmt.Errorf("the server does not accept the call: RPC status %d: %w", v.Status, syscall.EOPNOTSUPP)
	}
	return r, nil
}

// decode reads a value, none of whose parts can be larger than a reply.
func decode(r io.Reader, to any) error {
	if _, err := xdr.UnmarshalLimited(r, to, maxReply); err != nil {
		return fmt.Errorf("a reply that cannot be read: %w", err)
	}
	return nil
}

// portOf asks the server's port mapper.
func portOf(ctx context.Context, host string, denied []netip.Prefix, program, version uint32) (int, error) {
	conn, err := dialTo(ctx, host, portMapper, denied)
	if err != nil {
		return 0, fmt.Errorf("port mapper: %w", err)
	}
	c := newConn(conn)
	defer conn.Close()
	r, err := c.call(ctx, procedure{rpctypes.PmapProg, rpctypes.PmapVers, rpctypes.PmapProcGetPort}, rpctypes.AuthNull,
		&rpctypes.Mapping{Prog: program, Vers: version, Prot: rpctypes.IPProtoTCP})
	if err != nil {
		return 0, fmt.Errorf("port mapper: %w", err)
	}
	var port uint32
	if err := decode(r, &port); err != nil {
		return 0, err
	}
	if port == 0 || port > 65535 {
		return 0, fmt.Errorf("the server has no version %d of RPC program %d: %w", version, program, syscall.EPROTONOSUPPORT)
	}
	return int(port), nil
}

// mountRoot asks for the file handle of an export.
func mountRoot(ctx context.Context, host string, port int, denied []netip.Prefix, auth rpctypes.Auth, path string) ([]byte, error) {
	conn, err := dialTo(ctx, host, port, denied)
	if err != nil {
		return nil, err
	}
	c := newConn(conn)
	defer conn.Close()
	r, err := c.call(ctx, procedure{nfs.MountProg, nfs.MountVers, nfs.MountProc3MNT}, auth, &struct{ Path string }{path})
	if err != nil {
		return nil, err
	}
	var status uint32
	if err := decode(r, &status); err != nil {
		return nil, err
	}
	if status != nfs.MNT3Ok { // whose numbers are those of files
		return nil, statusError(status)
	}
	var handle []byte
	err = decode(r, &handle)
	return handle, err
}
