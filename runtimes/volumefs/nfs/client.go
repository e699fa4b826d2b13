package nfs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"
	"syscall"
	"time"

	nfs "github.com/willscott/go-nfs-client/nfs"
	rpctypes "github.com/willscott/go-nfs-client/nfs/rpc"

	"github.com/barchan-dev/barchan/runtimes/volumefs/backend"
)

const (
	// nfsTry bounds one attempt of a call; there are two within backend.OpTimeout.
	nfsTry = 7 * time.Second
	// maxDir bounds the entries of a directory; one reply has names of dirBytes, and replyDir with their attributes.
	maxDir   = 1 << 20
	dirBytes = 32 << 10
	replyDir = 128 << 10
	// Calls and constants of RFC 1813 that the library lacks.
	procFSStat  = 18
	guarded     = 1
	fileSync    = 2
	tryLater    = 10008
	laterPause  = 500 * time.Millisecond
	defaultSize = 32 << 10
)

// share is an export of an NFS server of version 3. All calls are made as one user.
type share struct {
	host, path          string
	port, mountPort     int
	denied              []netip.Prefix
	auth                rpctypes.Auth
	readSize, writeSize int

	mu   sync.Mutex
	conn *rpcConn
	root found
}

// openShare asks the server for the root of an export.
func openShare(ctx context.Context, cfg backend.Config) (*share, error) {
	s := &share{
		host: cfg.NFS.Server, path: cfg.NFS.Path, port: cfg.NFS.Port, mountPort: cfg.NFS.MountPort, denied: cfg.Denied,
	}
	user := rpctypes.NewAuthUnix("barchan", cfg.UID, cfg.GID)
	user.Gids = cfg.GID // the one further group, which would be root's
	s.auth = user.Auth()
	if s.port == 0 {
		s.port = nfsPort
	}
	ctx, cancel := context.WithTimeout(ctx, backend.OpTimeout)
	defer cancel()
	if err := s.mount(ctx); err != nil {
		return nil, err
	}
	info := nfs.FSInfo{}
	if err := s.do(ctx, nfs.NFSProc3FSInfo, &handleArg{s.rootHandle()}, &info); err != nil {
		return nil, fmt.Errorf("ask for the export's properties: %w", err)
	}
	s.readSize, s.writeSize = bounded(info.RTMax), bounded(info.WTMax)
	return s, nil
}

// mount asks for the handle of the export, again if the server no longer knows the last one.
func (s *share) mount(ctx context.Context) (err error) {
	port := s.mountPort
	if port == 0 {
		if port, err = portOf(ctx, s.host, s.denied, nfs.MountProg, nfs.MountVers); err != nil {
			return err
		}
	}
	root := found{}
	if root.handle, err = mountRoot(ctx, s.host, port, s.denied, s.auth, s.path); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	if root.attr, err = s.getattr(ctx, root.handle); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.root = root
	return nil
}

func (s *share) rootHandle() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.root.handle
}

// bounded is a size of transfers that is neither 0 nor more than a reply may have.
func bounded(n uint32) int {
	if n == 0 {
		return defaultSize
	}
	return int(min(n, maxTransfer))
}

// handleArg is the only argument of several calls.
type handleArg struct{ Handle []byte }

// connection returns the one that is open, or opens another.
func (s *share) connection(ctx context.Context) (*rpcConn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn != nil {
		select {
		case <-s.conn.done:
		default:
			return s.conn, nil
		}
	}
	conn, err := dialTo(ctx, s.host, s.port, s.denied)
	if err != nil {
		return nil, err
	}
	s.conn = newConn(conn)
	return s.conn, nil
}

// once makes a call. What was sent may have been done, also if it fails.
func (s *share) once(ctx context.Context, proc uint32, args any) (*bytes.Reader, error) {
	ctx, cancel := context.WithTimeout(ctx, nfsTry)
	defer cancel()
	c, err := s.connection(ctx)
	if err != nil {
		return nil, err
	}
	r, err := c.call(ctx, procedure{nfs.Nfs3Prog, nfs.Nfs3Vers, proc}, s.auth, args)
	if errors.Is(err, context.DeadlineExceeded) {
		_ = c.conn.Close() // the next attempt gets a connection of its own
	}
	return r, err
}

// do makes a call, twice if the first attempt has no reply, and decodes its result.
func (s *share) do(ctx context.Context, proc uint32, args, result any) error {
	r, err := s.ask(ctx, proc, args, true)
	if err != nil || result == nil {
		return err
	}
	return decode(r, result)
}

// change makes a call that cannot be repeated: one without a reply may have been done, so its caller gets EIO.
func (s *share) change(ctx context.Context, proc uint32, args, result any) error {
	r, err := s.ask(ctx, proc, args, false)
	if err != nil || result == nil {
		return err
	}
	return decode(r, result)
}

// ask returns the result of a call that the server has carried out.
func (s *share) ask(ctx context.Context, proc uint32, args any, repeat bool) (*bytes.Reader, error) {
	for {
		r, err := s.once(ctx, proc, args)
		if repeat && ctx.Err() == nil && (errors.Is(err, errGone) || errors.Is(err, context.DeadlineExceeded)) {
			r, err = s.once(ctx, proc, args)
		}
		if err != nil {
			return nil, err
		}
		var status uint32
		switch err := decode(r, &status); {
		case err != nil:
			return nil, err
		case status == nfs.NFS3Ok:
			return r, nil
		case status != tryLater:
			return nil, statusError(status)
		}
		select {
		case <-time.After(laterPause):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// numbers has the errors of statuses whose numbers are not Linux's.
var numbers = map[uint32]syscall.Errno{
	nfs.NFS3ErrNameTooLong: syscall.ENAMETOOLONG, nfs.NFS3ErrNotEmpty: syscall.ENOTEMPTY, nfs.NFS3ErrDQuot: syscall.EDQUOT,
	nfs.NFS3ErrStale: syscall.ESTALE, nfs.NFS3ErrRemote: syscall.EREMOTE, nfs.NFS3ErrBadHandle: syscall.ESTALE,
	nfs.NFS3ErrNotSupp: syscall.EOPNOTSUPP, nfs.NFS3ErrBadType: syscall.EINVAL,
}

// sameAsLinux is the last status that has Linux's number.
const sameAsLinux = nfs.NFS3ErrROFS + 1

func statusError(status uint32) error {
	if number, ok := numbers[status]; ok {
		return number
	}
	if status <= sameAsLinux {
		return syscall.Errno(status)
	}
	return fmt.Errorf("NFS status %d: %w", status, syscall.EIO)
}

func (s *share) getattr(ctx context.Context, handle []byte) (nfs.Fattr, error) {
	var out nfs.Fattr
	err := s.do(ctx, nfs.NFSProc3GetAttr, &handleArg{handle}, &out)
	return out, err
}

// found is a file that a call has named.
type found struct {
	handle []byte
	attr   nfs.Fattr
}

func (s *share) lookup(ctx context.Context, dir []byte, name string) (f found, err error) {
	var out struct {
		Handle []byte
		Attr   nfs.PostOpAttr
	}
	if err := s.do(ctx, nfs.NFSProc3Lookup, &nfs.Diropargs3{FH: dir, Filename: name}, &out); err != nil {
		return f, err
	}
	return s.whole(ctx, out.Handle, out.Attr)
}

// whole asks for the attributes that a reply has left out.
func (s *share) whole(ctx context.Context, handle []byte, attr nfs.PostOpAttr) (f found, err error) {
	f = found{handle, attr.Attr}
	if !attr.IsSet {
		f.attr, err = s.getattr(ctx, handle)
	}
	return f, err
}

// made is the result of the calls that make a file.
type made struct {
	Handle nfs.PostOpFH3
	Attr   nfs.PostOpAttr
}

func (s *share) take(ctx context.Context, dir []byte, name string, m *made) (found, error) {
	if !m.Handle.IsSet {
		return s.lookup(ctx, dir, name)
	}
	return s.whole(ctx, m.Handle.FH, m.Attr)
}

// create makes a regular file; with only, no other file may have the name.
func (s *share) create(ctx context.Context, dir []byte, name string, mode uint32, only bool) (found, error) {
	args := struct {
		Where nfs.Diropargs3
		How   uint32
		Attr  nfs.Sattr3
	}{Where: nfs.Diropargs3{FH: dir, Filename: name}, Attr: withMode(mode)}
	if only {
		args.How = guarded
	}
	m := made{}
	if err := s.change(ctx, nfs.NFSProc3Create, &args, &m); err != nil {
		return found{}, err
	}
	return s.take(ctx, dir, name, &m)
}

func withMode(mode uint32) nfs.Sattr3 {
	return nfs.Sattr3{Mode: nfs.SetMode{SetIt: true, Mode: mode & 0o7777}}
}

func (s *share) mkdir(ctx context.Context, dir []byte, name string, mode uint32) (found, error) {
	args := struct {
		Where nfs.Diropargs3
		Attr  nfs.Sattr3
	}{nfs.Diropargs3{FH: dir, Filename: name}, withMode(mode)}
	m := made{}
	if err := s.change(ctx, nfs.NFSProc3Mkdir, &args, &m); err != nil {
		return found{}, err
	}
	return s.take(ctx, dir, name, &m)
}

func (s *share) symlink(ctx context.Context, dir []byte, name, target string) (found, error) {
	args := struct {
		Where  nfs.Diropargs3
		Attr   nfs.Sattr3
		Target string
	}{nfs.Diropargs3{FH: dir, Filename: name}, withMode(0o777), target}
	m := made{}
	if err := s.change(ctx, nfs.NFSProc3Symlink, &args, &m); err != nil {
		return found{}, err
	}
	return s.take(ctx, dir, name, &m)
}

func (s *share) readlink(ctx context.Context, handle []byte) (string, error) {
	var out struct {
		Attr   nfs.PostOpAttr
		Target string
	}
	err := s.do(ctx, nfs.NFSProc3Readlink, &handleArg{handle}, &out)
	return out.Target, err
}

func (s *share) remove(ctx context.Context, dir []byte, name string, isDir bool) error {
	proc := uint32(nfs.NFSProc3Remove)
	if isDir {
		proc = nfs.NFSProc3RmDir
	}
	return s.change(ctx, proc, &nfs.Diropargs3{FH: dir, Filename: name}, nil)
}

func (s *share) rename(ctx context.Context, dir []byte, name string, to []byte, newName string) error {
	return s.change(ctx, nfs.NFSProc3Rename, &struct{ From, To nfs.Diropargs3 }{
		nfs.Diropargs3{FH: dir, Filename: name}, nfs.Diropargs3{FH: to, Filename: newName},
	}, nil)
}

func (s *share) setattr(ctx context.Context, handle []byte, attr nfs.Sattr3) error {
	return s.do(ctx, nfs.NFSProc3SetAttr, &struct {
		Handle []byte
		Attr   nfs.Sattr3
		Guard  uint32
	}{handle, attr, 0}, nil)
}

func (s *share) read(ctx context.Context, handle, to []byte, at int64) (n int, err error) {
	for n < len(to) {
		var out struct {
			Attr  nfs.PostOpAttr
			Count uint32
			EOF   bool
			Data  []byte
		}
		err := s.do(ctx, nfs.NFSProc3Read, &struct {
			Handle []byte
			Offset uint64
			Count  uint32
		}{handle, uint64(at) + uint64(n), uint32(min(len(to)-n, s.readSize))}, &out)
		if err != nil {
			return n, err
		}
		n += copy(to[n:], out.Data)
		if out.EOF || len(out.Data) == 0 {
			return n, nil
		}
	}
	return n, nil
}

// write returns when the server has the bytes on its disk, as it answers a write that is stable.
func (s *share) write(ctx context.Context, handle, from []byte, at int64) (n int, err error) {
	for n < len(from) {
		part := from[n:min(len(from), n+s.writeSize)]
		var out struct {
			Wcc   nfs.WccData
			Count uint32
		}
		err := s.do(ctx, nfs.NFSProc3Write, &struct {
			Handle []byte
			Offset uint64
			Count  uint32
			How    uint32
			Data   []byte
		}{handle, uint64(at) + uint64(n), uint32(len(part)), fileSync, part}, &out)
		if err != nil {
			return n, err
		}
		if out.Count == 0 || int(out.Count) > len(part) {
			return n, fmt.Errorf("the server has written %d of %d bytes: %w", out.Count, len(part), syscall.EIO)
		}
		n += int(out.Count)
	}
	return n, nil
}

// space is what is free, in bytes and files.
type space struct {
	Attr                         nfs.PostOpAttr
	Total, Free, Available       uint64
	Files, FreeFiles, AvailFiles uint64
	Unchanged                    uint32
}

func (s *share) statfs(ctx context.Context) (out space, err error) {
	err = s.do(ctx, procFSStat, &handleArg{s.rootHandle()}, &out)
	return out, err
}

// list reads a directory.
func (s *share) list(ctx context.Context, dir []byte) (all []nfs.EntryPlus, err error) {
	args := struct {
		Dir           []byte
		Cookie        uint64
		Verifier      uint64
		Names, Answer uint32
	}{dir, 0, 0, dirBytes, replyDir}
	for {
		r, err := s.ask(ctx, nfs.NFSProc3ReadDirPlus, &args, true)
		if err != nil {
			return nil, err
		}
		page, verifier, end, err := readPage(r)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if end || len(page) == 0 {
			return all, nil
		}
		if len(all) > maxDir {
			return nil, fmt.Errorf("a directory of more than %d entries: %w", maxDir, syscall.EOVERFLOW)
		}
		args.Cookie, args.Verifier = page[len(page)-1].Cookie, verifier
	}
}

func readPage(r io.Reader) (page []nfs.EntryPlus, verifier uint64, end bool, err error) {
	var head struct {
		Attr     nfs.PostOpAttr
		Verifier uint64
	}
	if err := decode(r, &head); err != nil {
		return nil, 0, false, err
	}
	for {
		var follows bool
		if err := decode(r, &follows); err != nil {
			return nil, 0, false, err
		}
		if !follows {
			break
		}
		var e nfs.EntryPlus
		if err := decode(r, &e); err != nil {
			return nil, 0, false, err
		}
		page = append(page, e)
	}
	err = decode(r, &end)
	return page, head.Verifier, end, err
}
