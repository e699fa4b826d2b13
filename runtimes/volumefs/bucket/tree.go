package bucket

import (
	"context"
	"errors"
	"os"
	"path"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	rclone "github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/fs/config"
	"github.com/rclone/rclone/fs/fserrors"
	"github.com/rclone/rclone/vfs"
	"github.com/rclone/rclone/vfs/vfscommon"

	"github.com/barchan-dev/barchan/runtimes/volumefs/backend"
)

const (
	// writeBack is how long a closed file waits for its upload. The wait doubles with each failure.
	writeBack = time.Nanosecond
	// listFor is how long a list of a directory is taken as it was.
	listFor = 5 * time.Second
	// statfsSize is what df shows, in blocks of 4 KiB: an object store has no size.
	statfsSize = 1 << 40 >> 12
)

// tree has the files of a bucket.
type tree struct {
	*backend.Calls
	bucket   *bucket
	vfs      *vfs.VFS
	readOnly bool

	mu sync.Mutex
	// open has files that have a handle of the cache or are not uploaded, by inode number. They outlive the kernel's interest in their node.
	open map[uint64]*file
}

func newTree(ctx context.Context, b *bucket, cfg backend.Config) (*tree, error) {
	if err := config.SetCacheDir(cfg.Cache); err != nil {
		return nil, err
	}
	o := vfscommon.Opt
	o.CacheMode = vfscommon.CacheModeFull
	o.WriteBack = rclone.Duration(writeBack)
	o.HandleCaching = 0
	o.CacheMaxSize = rclone.SizeSuffix(cfg.CacheBytes)
	o.CachePollInterval = rclone.Duration(10 * time.Second)
	o.DirCacheTime, o.PollInterval = rclone.Duration(listFor), 0
	o.ChunkSize, o.ChunkSizeLimit = 4<<20, 64<<20
	o.ReadOnly, o.UID, o.GID, o.Umask = cfg.ReadOnly, cfg.UID, cfg.GID, 0
	t := &tree{Calls: backend.NewCalls(errno), bucket: b, vfs: vfs.New(ctx, b.Fs, &o), readOnly: cfg.ReadOnly, open: map[uint64]*file{}}
	if t.vfs.Opt.CacheMode != vfscommon.CacheModeFull {
		return nil, errors.New("open cache; it says why above")
	}
	go t.settle()
	return t, nil
}

// Check and Root implement [backend.Backend].
func (t *tree) Check(ctx context.Context) backend.Answer { return t.bucket.check(ctx) }

func (t *tree) Root() fs.InodeEmbedder { return &node{t: t, file: &file{t: t}} }

// errno is what a program sees of an error.
func errno(err error) syscall.Errno {
	if err == nil {
		return 0
	}
	_, cause := fserrors.Cause(err)
	switch cause {
	case vfs.OK:
		return 0
	case vfs.ENOENT, rclone.ErrorDirNotFound, rclone.ErrorObjectNotFound, os.ErrNotExist:
		return syscall.ENOENT
	case vfs.EEXIST, rclone.ErrorDirExists, os.ErrExist:
		return syscall.EEXIST
	case vfs.EPERM, rclone.ErrorPermissionDenied, os.ErrPermission:
		return syscall.EPERM
	case vfs.ENOTEMPTY:
		return syscall.ENOTEMPTY
	case vfs.EROFS:
		return syscall.EROFS
	case vfs.ENOSYS:
		return syscall.ENOSYS
	case vfs.EINVAL:
		return syscall.EINVAL
	}
	return backend.Errno(err)
}

// node is a file or directory. Its inode number is that of the cache's file, which keeps it when it is renamed.
type node struct {
	fs.Inode
	t    *tree
	file *file
}

var (
	_ fs.NodeLookuper  = (*node)(nil)
	_ fs.NodeGetattrer = (*node)(nil)
	_ fs.NodeSetattrer = (*node)(nil)
	_ fs.NodeReaddirer = (*node)(nil)
	_ fs.NodeMkdirer   = (*node)(nil)
	_ fs.NodeRmdirer   = (*node)(nil)
	_ fs.NodeUnlinker  = (*node)(nil)
	_ fs.NodeRenamer   = (*node)(nil)
	_ fs.NodeCreater   = (*node)(nil)
	_ fs.NodeOpener    = (*node)(nil)
	_ fs.NodeFsyncer   = (*node)(nil)
	_ fs.NodeStatfser  = (*node)(nil)
)

func (n *node) path() string { return n.Path(nil) }

func (n *node) child(ctx context.Context, info vfs.Node, out *fuse.EntryOut) *fs.Inode {
	attributes(info, &out.Attr)
	made := &node{t: n.t, file: n.t.file(info.Inode())}
	inode := n.NewInode(ctx, made, fs.StableAttr{Mode: out.Attr.Mode & syscall.S_IFMT, Ino: info.Inode()})
	if known, ok := inode.Operations().(*node); ok {
		known.file.grown(&out.Attr)
	}
	return inode
}

// attributes has the same owner and mode for all files: an object has neither.
func attributes(info vfs.Node, out *fuse.Attr) {
	o := info.VFS().Opt
	out.Owner = fuse.Owner{Uid: o.UID, Gid: o.GID}
	out.Ino, out.Nlink = info.Inode(), 1
	out.Mode = uint32(info.Mode().Perm()) | syscall.S_IFREG
	if info.IsDir() {
		out.Mode = uint32(info.Mode().Perm()) | syscall.S_IFDIR
	} else {
		out.Size = uint64(max(0, info.Size()))
		out.Blocks = (out.Size + 511) / 512
	}
	at := info.ModTime()
	out.SetTimes(&at, &at, &at)
}

func (n *node) Lookup(ctx context.Context, name string, out *fuse.EntryOut) (inode *fs.Inode, code syscall.Errno) {
	var info vfs.Node
	code = n.t.Call(ctx, backend.OpTimeout, func(context.Context) (err error) {
		info, err = n.t.vfs.Stat(path.Join(n.path(), name))
		return err
	})
	if code != 0 {
		return nil, code
	}
	return n.child(ctx, info, out), 0
}

func (n *node) Getattr(ctx context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	var info vfs.Node
	code := n.t.Call(ctx, backend.OpTimeout, func(context.Context) (err error) {
		info, err = n.t.vfs.Stat(n.path())
		return err
	})
	if code != 0 {
		return code
	}
	attributes(info, &out.Attr)
	n.file.grown(&out.Attr)
	return 0
}

// Setattr sets the size and the time. Owner and mode stay as they are without an error, so that programs that copy them work.
func (n *node) Setattr(ctx context.Context, h fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if n.t.readOnly {
		return syscall.EROFS
	}
	if size, ok := in.GetSize(); ok {
		if code := n.t.Call(ctx, backend.OpTimeout, func(context.Context) error { return n.file.truncate(n.path(), int64(size)) }); code != 0 {
			return code
		}
	}
	if at, ok := in.GetMTime(); ok && !n.IsDir() {
		if code := n.t.Call(ctx, backend.OpTimeout, func(context.Context) error { return n.t.vfs.Chtimes(n.path(), at, at) }); code != 0 {
			return code
		}
	}
	return n.Getattr(ctx, h, out)
}

func (n *node) Readdir(ctx context.Context) (fs.DirStream, syscall.Errno) {
	var entries []fuse.DirEntry
	code := n.t.Call(ctx, backend.OpTimeout, func(context.Context) error {
		list, err := n.t.vfs.ReadDir(n.path())
		for _, e := range list {
			if strings.HasPrefix(e.Name(), backend.UploadPrefix) {
				continue
			}
			entry := fuse.DirEntry{Name: e.Name(), Mode: syscall.S_IFREG}
			if e.IsDir() {
				entry.Mode = syscall.S_IFDIR
			}
			if of, ok := e.(vfs.Node); ok {
				entry.Ino = of.Inode()
			}
			entries = append(entries, entry)
		}
		return err
	})
	return fs.NewListDirStream(entries), code
}

func (n *node) Mkdir(ctx context.Context, name string, _ uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	at := path.Join(n.path(), name)
	var info vfs.Node
	code := n.t.Call(ctx, backend.OpTimeout, func(context.Context) (err error) {
		if _, err := n.t.vfs.Stat(at); err == nil {
			return vfs.EEXIST
		}
		if err = n.t.vfs.Mkdir(at, os.ModePerm); err == nil {
			info, err = n.t.vfs.Stat(at)
		}
		return err
	})
	if code != 0 {
		return nil, code
	}
	return n.child(ctx, info, out), 0
}

func (n *node) Rmdir(ctx context.Context, name string) syscall.Errno { return n.remove(ctx, name) }

func (n *node) Unlink(ctx context.Context, name string) syscall.Errno { return n.remove(ctx, name) }

func (n *node) remove(ctx context.Context, name string) syscall.Errno {
	return n.t.Call(ctx, backend.OpTimeout, func(context.Context) error {
		err := n.t.vfs.Remove(path.Join(n.path(), name))
		if known := n.known(name); known != nil && err == nil {
			known.file.removed()
		}
		return err
	})
}

// known returns a file that the kernel knows.
func (n *node) known(name string) *node {
	if c := n.GetChild(name); c != nil {
		if known, ok := c.Operations().(*node); ok {
			return known
		}
	}
	return nil
}

func (n *node) Rename(ctx context.Context, name string, parent fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	const noReplace = 1
	if flags&^noReplace != 0 {
		return syscall.EINVAL
	}
	to, ok := parent.EmbeddedInode().Operations().(*node)
	if !ok {
		return syscall.EXDEV
	}
	return n.t.Call(ctx, backend.UploadTimeout, func(context.Context) error {
		target := path.Join(to.path(), newName)
		there, err := n.t.vfs.Stat(target)
		if err == nil && flags&noReplace != 0 {
			return syscall.EEXIST
		}
		if err == nil && there.IsDir() {
			if list, err := n.t.vfs.ReadDir(target); err != nil || len(list) > 0 {
				return errors.Join(err, syscall.ENOTEMPTY)
			}
			if err := n.t.vfs.Remove(target); err != nil {
				return err
			}
		} else if known := to.known(newName); err == nil && known != nil {
			known.file.removed()
		}
		source := path.Join(n.path(), name)
		if err := n.t.vfs.Rename(source, target); err != nil {
			return err
		}
		for _, f := range n.t.files() {
			f.moved(source, target)
		}
		return nil
	})
}

func (n *node) Create(ctx context.Context, name string, flags uint32, _ uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	if n.t.readOnly {
		return nil, nil, 0, syscall.EROFS
	}
	at := path.Join(n.path(), name)
	var info vfs.Node
	var h vfs.Handle
	code := n.t.Call(ctx, backend.OpTimeout, func(context.Context) (err error) {
		if h, err = n.t.vfs.OpenFile(at, os.O_RDWR|os.O_CREATE|int(flags)&(os.O_EXCL|os.O_TRUNC), os.ModePerm); err == nil {
			info, err = n.t.vfs.Stat(at)
		}
		return err
	})
	if code != 0 {
		return nil, nil, 0, code
	}
	inode := n.child(ctx, info, out)
	made, ok := inode.Operations().(*node)
	if !ok {
		return nil, nil, 0, syscall.EIO
	}
	made.file.adopt(at, h)
	return inode, &handle{made}, 0, 0
}

func (n *node) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if flags&syscall.O_TRUNC != 0 {
		if code := n.t.Call(ctx, backend.OpTimeout, func(context.Context) error { return n.file.truncate(n.path(), 0) }); code != 0 {
			return nil, 0, code
		}
	}
	return &handle{n}, 0, 0
}

// Fsync of a directory uploads the files that are in it.
func (n *node) Fsync(ctx context.Context, h fs.FileHandle, _ uint32) syscall.Errno {
	if !n.IsDir() {
		return n.t.Call(ctx, backend.UploadTimeout, func(context.Context) error { return n.file.flush() })
	}
	return n.t.Call(ctx, backend.UploadTimeout, func(context.Context) (err error) {
		for _, f := range n.t.files() {
			if dir, _ := path.Split(f.name()); strings.Trim(dir, "/") == n.path() {
				err = errors.Join(err, f.flush())
			}
		}
		return err
	})
}

func (n *node) Statfs(_ context.Context, out *fuse.StatfsOut) syscall.Errno {
	out.Bsize, out.Frsize, out.NameLen = 4096, 4096, 255
	out.Blocks, out.Bfree, out.Bavail, out.Files, out.Ffree = statfsSize, statfsSize, statfsSize, statfsSize, statfsSize
	return 0
}
