// Package nfs has the files of an export of an NFS server of version 3, without the kernel's client.
package nfs

import (
	"context"
	"errors"
	"hash/fnv"
	"net"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	nfs "github.com/willscott/go-nfs-client/nfs"

	"github.com/barchan-dev/barchan/runtimes/volumefs/backend"
)

// shareTree has the files of an export. It keeps nothing: what a call has written is on the server.
type shareTree struct {
	*backend.Calls
	share    *share
	readOnly bool
	uid, gid uint32
}

// Open returns the files of an export, or why it cannot be reached.
func Open(ctx context.Context, cfg backend.Config) (backend.Backend, backend.Answer) {
	s, err := openShare(ctx, cfg)
	if err != nil {
		return nil, shareAnswer(err)
	}
	return &shareTree{Calls: backend.NewCalls(backend.Errno), share: s, readOnly: cfg.ReadOnly, uid: cfg.UID, gid: cfg.GID}, backend.Answer{}
}

// Root, Check, Waiting and Drain implement [backend.Backend].
func (t *shareTree) Root() fs.InodeEmbedder { return &shareNode{t: t, handle: t.share.rootHandle()} }

func (t *shareTree) Waiting() (all, failures int) { return 0, 0 }

func (t *shareTree) Drain(time.Duration) {}

// Check asks for the root. A server that was set up anew knows its export by another handle.
func (t *shareTree) Check(ctx context.Context) backend.Answer {
	ctx, cancel := context.WithTimeout(ctx, backend.CheckTimeout)
	defer cancel()
	_, err := t.share.getattr(ctx, t.share.rootHandle())
	if errors.Is(err, syscall.ESTALE) {
		err = t.share.mount(ctx)
	}
	return shareAnswer(err)
}

func shareAnswer(err error) backend.Answer {
	var network *net.OpError
	var name *net.DNSError
	switch {
	case err == nil:
		return backend.Answer{}
	case errors.Is(err, backend.ErrRefused):
		return backend.Answer{Reason: backend.ReasonRefused, Message: backend.ErrRefused.Error()}
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return backend.Answer{Reason: backend.ReasonDenied, Message: "the server refuses this machine the export; see its list of exports"}
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ENOTDIR):
		return backend.Answer{Reason: backend.ReasonExport, Message: "the server has no such export"}
	case errors.Is(err, context.DeadlineExceeded):
		return backend.Answer{Reason: backend.ReasonUnreachable, Message: "the server does not answer in time"}
	case errors.Is(err, errGone), errors.As(err, &network), errors.As(err, &name):
		return backend.Answer{Reason: backend.ReasonUnreachable, Message: "no connection to the server"}
	}
	return backend.Answer{Reason: backend.ReasonBackend, Message: backend.Shorten(err)}
}

// shareNode is a file or directory, whose inode number is the server's.
type shareNode struct {
	fs.Inode
	t *shareTree

	mu     sync.Mutex
	handle []byte
}

var (
	_ fs.NodeLookuper   = (*shareNode)(nil)
	_ fs.NodeGetattrer  = (*shareNode)(nil)
	_ fs.NodeSetattrer  = (*shareNode)(nil)
	_ fs.NodeReaddirer  = (*shareNode)(nil)
	_ fs.NodeReadlinker = (*shareNode)(nil)
	_ fs.NodeSymlinker  = (*shareNode)(nil)
	_ fs.NodeMkdirer    = (*shareNode)(nil)
	_ fs.NodeRmdirer    = (*shareNode)(nil)
	_ fs.NodeUnlinker   = (*shareNode)(nil)
	_ fs.NodeRenamer    = (*shareNode)(nil)
	_ fs.NodeCreater    = (*shareNode)(nil)
	_ fs.NodeOpener     = (*shareNode)(nil)
	_ fs.NodeReader     = (*shareNode)(nil)
	_ fs.NodeWriter     = (*shareNode)(nil)
	_ fs.NodeFsyncer    = (*shareNode)(nil)
	_ fs.NodeStatfser   = (*shareNode)(nil)
)

func (n *shareNode) current() []byte {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.handle
}

func (n *shareNode) set(handle []byte) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.handle = handle
}

// do makes calls with the node's handle, once more with a new one if the server no longer knows it.
func (n *shareNode) do(ctx context.Context, work func(ctx context.Context, handle []byte) error) syscall.Errno {
	// Interrupts do not end a call: the server may have done it.
	return n.t.Call(context.WithoutCancel(ctx), backend.OpTimeout, func(ctx context.Context) error {
		err := work(ctx, n.current())
		if !errors.Is(err, syscall.ESTALE) || n.renew(ctx) != nil {
			return err
		}
		return work(ctx, n.current())
	})
}

// renew finds the node's file by its name again. Another file of the name is none: programs have opened this one.
func (n *shareNode) renew(ctx context.Context) error {
	if n.IsRoot() {
		if err := n.t.share.mount(ctx); err != nil {
			return err
		}
		n.set(n.t.share.rootHandle())
		return nil
	}
	name, parent := n.Parent()
	if parent == nil {
		return syscall.ESTALE
	}
	dir, ok := parent.Operations().(*shareNode)
	if !ok {
		return syscall.ESTALE
	}
	f, err := n.t.share.lookup(ctx, dir.current(), name)
	if errors.Is(err, syscall.ESTALE) {
		if err := dir.renew(ctx); err != nil {
			return err
		}
		f, err = n.t.share.lookup(ctx, dir.current(), name)
	}
	if err != nil {
		return err
	}
	if f.attr.Fileid != n.StableAttr().Ino {
		return syscall.ESTALE
	}
	n.set(f.handle)
	return nil
}

func (n *shareNode) child(ctx context.Context, f found, out *fuse.EntryOut) *fs.Inode {
	n.t.attributes(&f.attr, &out.Attr)
	made := &shareNode{t: n.t, handle: f.handle}
	return n.NewInode(ctx, made, fs.StableAttr{Mode: out.Attr.Mode & syscall.S_IFMT, Ino: f.attr.Fileid, Gen: generation(&f)})
}

// generation tells files of one number apart: of two file systems in one export, and those that have had the number one after the other.
func generation(f *found) uint64 {
	h := fnv.New64a()
	h.Write(f.handle) // does not fail
	return h.Sum64() ^ f.attr.FSID
}

var fileTypes = map[uint32]uint32{
	nfs.NF3Reg: syscall.S_IFREG, nfs.NF3Dir: syscall.S_IFDIR, nfs.NF3Lnk: syscall.S_IFLNK,
	nfs.NF3Blk: syscall.S_IFBLK, nfs.NF3Chr: syscall.S_IFCHR, nfs.NF3FIFO: syscall.S_IFIFO, nfs.NF3Sock: syscall.S_IFSOCK,
}

// attributes are the server's but for the owner: the server decides by its own what the one user may do.
func (t *shareTree) attributes(a *nfs.Fattr, out *fuse.Attr) {
	out.Owner = fuse.Owner{Uid: t.uid, Gid: t.gid}
	out.Ino, out.Nlink, out.Size, out.Blocks = a.Fileid, a.Nlink, a.Filesize, (a.Used+511)/512
	out.Mode = a.FileMode&0o7777 | fileTypes[a.Type]
	at, changed, status := timeOf(a.Atime), timeOf(a.Mtime), timeOf(a.Ctime)
	out.SetTimes(&at, &changed, &status)
}

func timeOf(t nfs.NFS3Time) time.Time { return time.Unix(int64(t.Seconds), int64(t.Nseconds)) }

func (n *shareNode) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return n.entry(ctx, out, func(ctx context.Context, dir []byte) (found, error) { return n.t.share.lookup(ctx, dir, name) })
}

// entry has a call return a file of the directory.
func (n *shareNode) entry(ctx context.Context, out *fuse.EntryOut, get func(ctx context.Context, dir []byte) (found, error)) (*fs.Inode, syscall.Errno) {
	var f found
	code := n.do(ctx, func(ctx context.Context, dir []byte) (err error) {
		f, err = get(ctx, dir)
		return err
	})
	if code != 0 {
		return nil, code
	}
	return n.child(ctx, f, out), 0
}

func (n *shareNode) Getattr(ctx context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	var attr nfs.Fattr
	code := n.do(ctx, func(ctx context.Context, handle []byte) (err error) {
		attr, err = n.t.share.getattr(ctx, handle)
		return err
	})
	if code == 0 {
		n.t.attributes(&attr, &out.Attr)
	}
	return code
}

// Setattr leaves the owner as it is without an error: gVisor gives each new file to the user of its sandbox.
func (n *shareNode) Setattr(ctx context.Context, h fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	attr, some := nfs.Sattr3{}, false
	if size, ok := in.GetSize(); ok {
		attr.Size, some = nfs.SetSize{SetIt: true, Size: size}, true
	}
	if mode, ok := in.GetMode(); ok {
		attr.Mode, some = nfs.SetMode{SetIt: true, Mode: mode & 0o7777}, true
	}
	for to, at := range map[*nfs.SetTime]func() (time.Time, bool){&attr.Atime: in.GetATime, &attr.Mtime: in.GetMTime} {
		if when, ok := at(); ok {
			to.SetIt, some = nfs.SetToClientTime, true
			to.Time = nfs.NFS3Time{Seconds: uint32(when.Unix()), Nseconds: uint32(when.Nanosecond())}
		}
	}
	if some {
		if n.t.readOnly {
			return syscall.EROFS
		}
		code := n.do(ctx, func(ctx context.Context, handle []byte) error { return n.t.share.setattr(ctx, handle, attr) })
		if code != 0 {
			return code
		}
	}
	return n.Getattr(ctx, h, out)
}

func (n *shareNode) Readdir(ctx context.Context) (fs.DirStream, syscall.Errno) {
	var entries []fuse.DirEntry
	code := n.do(ctx, func(ctx context.Context, handle []byte) error {
		list, err := n.t.share.list(ctx, handle)
		entries = entries[:0]
		for i := range list {
			e := &list[i]
			if e.FileName == "." || e.FileName == ".." || strings.Contains(e.FileName, "/") || strings.HasPrefix(e.FileName, backend.UploadPrefix) {
				continue
			}
			entries = append(entries, fuse.DirEntry{Name: e.FileName, Ino: e.FileId, Mode: fileTypes[e.Attr.Attr.Type]})
		}
		return err
	})
	return fs.NewListDirStream(entries), code
}

func (n *shareNode) Readlink(ctx context.Context) ([]byte, syscall.Errno) {
	target := ""
	code := n.do(ctx, func(ctx context.Context, handle []byte) (err error) {
		target, err = n.t.share.readlink(ctx, handle)
		return err
	})
	return []byte(target), code
}

func (n *shareNode) Symlink(ctx context.Context, target, name string, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return n.entry(ctx, out, func(ctx context.Context, dir []byte) (found, error) { return n.t.share.symlink(ctx, dir, name, target) })
}

func (n *shareNode) Mkdir(ctx context.Context, name string, mode uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return n.entry(ctx, out, func(ctx context.Context, dir []byte) (found, error) { return n.t.share.mkdir(ctx, dir, name, mode) })
}

func (n *shareNode) Rmdir(ctx context.Context, name string) syscall.Errno {
	return n.do(ctx, func(ctx context.Context, dir []byte) error { return n.t.share.remove(ctx, dir, name, true) })
}

func (n *shareNode) Unlink(ctx context.Context, name string) syscall.Errno {
	return n.do(ctx, func(ctx context.Context, dir []byte) error { return n.t.share.remove(ctx, dir, name, false) })
}

func (n *shareNode) Rename(ctx context.Context, name string, parent fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	const noReplace = 1
	to, ok := parent.EmbeddedInode().Operations().(*shareNode)
	switch {
	case flags&^noReplace != 0:
		return syscall.EINVAL
	case !ok:
		return syscall.EXDEV
	}
	return n.do(ctx, func(ctx context.Context, dir []byte) error {
		if flags&noReplace != 0 { // NFS has no such call: another client can be in between
			if _, err := n.t.share.lookup(ctx, to.current(), newName); !errors.Is(err, syscall.ENOENT) {
				return errors.Join(err, syscall.EEXIST)
			}
		}
		return n.t.share.rename(ctx, dir, name, to.current(), newName)
	})
}

func (n *shareNode) Create(ctx context.Context, name string, flags uint32, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	inode, code := n.entry(ctx, out, func(ctx context.Context, dir []byte) (f found, err error) {
		f, err = n.t.share.create(ctx, dir, name, mode, flags&syscall.O_EXCL != 0)
		if err == nil && flags&syscall.O_TRUNC != 0 && f.attr.Filesize > 0 {
			f.attr.Filesize, err = 0, n.t.share.setattr(ctx, f.handle, nfs.Sattr3{Size: nfs.SetSize{SetIt: true}})
		}
		return f, err
	})
	return inode, nil, 0, code
}

func (n *shareNode) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if flags&syscall.O_TRUNC == 0 {
		return nil, 0, 0
	}
	return nil, 0, n.do(ctx, func(ctx context.Context, handle []byte) error {
		return n.t.share.setattr(ctx, handle, nfs.Sattr3{Size: nfs.SetSize{SetIt: true}})
	})
}

func (n *shareNode) Read(ctx context.Context, _ fs.FileHandle, to []byte, at int64) (fuse.ReadResult, syscall.Errno) {
	buffer, read := make([]byte, len(to)), 0 // a call that timed out writes on
	code := n.do(ctx, func(ctx context.Context, handle []byte) (err error) {
		read, err = n.t.share.read(ctx, handle, buffer, at)
		return err
	})
	if code != 0 {
		return nil, code
	}
	return fuse.ReadResultData(buffer[:read]), 0
}

// Write returns when the server has the bytes on its disk, so that nothing is due at a close.
func (n *shareNode) Write(ctx context.Context, _ fs.FileHandle, from []byte, at int64) (uint32, syscall.Errno) {
	from, written := append([]byte(nil), from...), 0
	code := n.do(ctx, func(ctx context.Context, handle []byte) (err error) {
		written, err = n.t.share.write(ctx, handle, from, at)
		return err
	})
	if code != 0 {
		return 0, code
	}
	return uint32(written), 0
}

func (n *shareNode) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno { return 0 }

func (n *shareNode) Statfs(ctx context.Context, out *fuse.StatfsOut) syscall.Errno {
	var s space
	code := n.do(ctx, func(ctx context.Context, _ []byte) (err error) {
		s, err = n.t.share.statfs(ctx)
		return err
	})
	const block = 4096
	out.Bsize, out.Frsize, out.NameLen = block, block, 255
	out.Blocks, out.Bfree, out.Bavail, out.Files, out.Ffree = s.Total/block, s.Free/block, s.Available/block, s.Files, s.FreeFiles
	return code
}
