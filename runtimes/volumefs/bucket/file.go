package bucket

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/rclone/rclone/fs/rc"
	"github.com/rclone/rclone/vfs"
	"github.com/rclone/rclone/vfs/vfscache/writeback"

	"github.com/barchan-dev/barchan/runtimes/volumefs/backend"
)

const (
	// quiet is how long after its last write a file is uploaded that is still open, and longest how long after its first.
	// gVisor keeps files open long after a sandbox's program has closed them, and does not pass the close on.
	quiet   = time.Second
	longest = 30 * time.Second
	// unused is how long a file's handle of the cache stays open without a call.
	unused = 5 * time.Second
	tick   = 250 * time.Millisecond
)

// file has one handle of the cache for all that have the file open; closing it is what uploads.
type file struct {
	t     *tree
	inode uint64

	mu sync.Mutex
	// path counts while the tree has the file open.
	path     string
	h        vfs.Handle
	writable bool
	gone     bool
	// dirty is the time of the first write that is not uploaded, written that of the last; zero: none.
	dirty, written, used time.Time
}

// ready returns the open handle. f.mu is held.
func (f *file) ready(path string, write bool) (vfs.Handle, error) {
	f.used = time.Now()
	switch {
	case f.gone:
		return nil, syscall.ESTALE
	case write && f.t.readOnly:
		return nil, syscall.EROFS
	case f.h != nil && (f.writable || !write):
		return f.h, nil
	case f.h != nil:
		if err := f.h.Close(); err != nil {
			return nil, err
		}
		f.h = nil
	}
	flags := os.O_RDONLY
	if write {
		flags = os.O_RDWR
	}
	if f.dirty.IsZero() {
		f.path = path
	}
	h, err := f.t.vfs.OpenFile(f.path, flags, os.ModePerm)
	if err != nil {
		return nil, err
	}
	f.set(h, write)
	return h, nil
}

func (f *file) set(h vfs.Handle, writable bool) {
	f.h, f.writable = h, writable
	f.t.mu.Lock()
	defer f.t.mu.Unlock()
	f.t.open[f.inode] = f
}

// adopt takes the handle of a file that was just made.
func (f *file) adopt(path string, h vfs.Handle) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.h != nil {
		_ = h.Close()
		return
	}
	f.gone, f.path, f.used = false, path, time.Now()
	f.set(h, true)
	f.changed()
}

func (f *file) changed() {
	f.written = time.Now()
	if f.dirty.IsZero() {
		f.dirty = f.written
	}
}

func (f *file) read(path string, to []byte, at int64) (int, error) {
	f.mu.Lock()
	h, err := f.ready(path, false)
	if err != nil {
		f.mu.Unlock()
		return 0, err
	}
	f.mu.Unlock()
	n, err := h.ReadAt(to, at)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	if errors.Is(err, vfs.ECLOSED) { // the handle was closed meanwhile
		f.mu.Lock()
		defer f.mu.Unlock()
		if h, err = f.ready(path, false); err == nil {
			if n, err = h.ReadAt(to, at); errors.Is(err, io.EOF) {
				err = nil
			}
		}
	}
	return n, err
}

func (f *file) write(path string, from []byte, at int64) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h, err := f.ready(path, true)
	if err != nil {
		return 0, err
	}
	f.changed()
	return h.WriteAt(from, at)
}

func (f *file) truncate(path string, size int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	h, err := f.ready(path, true)
	if err != nil {
		return err
	}
	f.changed()
	return h.Truncate(size)
}

// grown corrects the size of a file that is being written.
func (f *file) grown(a *fuse.Attr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.h == nil || f.dirty.IsZero() {
		return
	}
	if info, err := f.h.Stat(); err == nil {
		a.Size = uint64(max(0, info.Size()))
		a.Blocks = (a.Size + 511) / 512
	}
}

// flush uploads what is not uploaded, and waits for it.
func (f *file) flush() error {
	f.mu.Lock()
	if f.gone || f.isUpload() {
		f.mu.Unlock()
		return nil
	}
	var err error
	if !f.dirty.IsZero() {
		err = f.close()
	}
	name := f.path
	f.mu.Unlock()
	if err != nil {
		return err
	}
	return f.t.await(name)
}

// await waits for the upload of a file. One that failed once is an error; it is tried again without end.
func (t *tree) await(name string) error {
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		queue, err := t.queue()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(queue, func(q writeback.QueueInfo) bool { return q.Name == name })
		if i < 0 {
			return nil
		}
		if failed(queue[i]) && !queue[i].Uploading {
			return fmt.Errorf("upload of %q: %w", name, syscall.EIO)
		}
		time.Sleep(pause)
	}
}

// failed reports whether the last upload of a file that has ended failed. One that a change of the file canceled did not: only
// after a failure rclone waits for longer than at first.
func failed(q writeback.QueueInfo) bool { return q.Delay > writeBack.Seconds() }

// queue returns what waits for its upload.
func (t *tree) queue() ([]writeback.QueueInfo, error) {
	out, err := rc.Calls.Get("vfs/queue").Fn(context.Background(), rc.Params{})
	if err != nil {
		return nil, err
	}
	queue, _ := out["queue"].([]writeback.QueueInfo)
	return queue, nil
}

func (f *file) isUpload() bool {
	return strings.HasPrefix(path.Base(f.path), backend.UploadPrefix)
}

func (f *file) name() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.path
}

// moved follows a rename of the file, or of a directory above it.
func (f *file) moved(from, to string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if rest, ok := strings.CutPrefix(f.path, from); ok && (rest == "" || rest[0] == '/') {
		f.path = to + rest
	}
}

// close closes the handle, which queues the file for its upload. f.mu is held.
func (f *file) close() error {
	if f.h == nil {
		return nil
	}
	err := f.h.Close()
	f.h, f.dirty = nil, time.Time{}
	f.t.mu.Lock()
	defer f.t.mu.Unlock()
	delete(f.t.open, f.inode)
	return err
}

// removed forgets a file that was removed, or replaced.
func (f *file) removed() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gone = true
	if f.h != nil {
		_ = f.h.Close() // the cache no longer has the file: nothing is uploaded
		f.h = nil
	}
	f.dirty = time.Time{}
	f.t.mu.Lock()
	defer f.t.mu.Unlock()
	delete(f.t.open, f.inode)
}

// due reports whether the file is to be closed.
func (f *file) due(now time.Time) bool {
	if !f.mu.TryLock() { // in use
		return false
	}
	defer f.mu.Unlock()
	switch {
	case f.dirty.IsZero():
		return now.Sub(f.used) > unused
	}
	return !f.isUpload() && (now.Sub(f.written) > quiet || now.Sub(f.dirty) > longest)
}

// file returns the state of a file.
func (t *tree) file(inode uint64) *file {
	t.mu.Lock()
	defer t.mu.Unlock()
	if f := t.open[inode]; f != nil {
		return f
	}
	return &file{t: t, inode: inode}
}

func (t *tree) files() (list []*file) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, f := range t.open {
		list = append(list, f)
	}
	return list
}

// Waiting counts the files that are not uploaded, and those of them whose upload has failed.
func (t *tree) Waiting() (all, failures int) {
	for _, f := range t.files() {
		f.mu.Lock()
		if !f.dirty.IsZero() {
			all++
		}
		f.mu.Unlock()
	}
	queue, _ := t.queue()
	for _, q := range queue {
		all++
		if failed(q) {
			failures++
		}
	}
	return all, failures
}

// settle closes files that are due.
func (t *tree) settle() {
	slots := make(chan struct{}, 8)
	for now := range time.Tick(tick) {
		for _, f := range t.files() {
			if !f.due(now) {
				continue
			}
			select {
			case slots <- struct{}{}:
			default:
				continue
			}
			go func() {
				defer func() { <-slots }()
				f.mu.Lock()
				defer f.mu.Unlock()
				if err := f.close(); err != nil {
					fmt.Fprintln(os.Stderr, "upload:", backend.Shorten(err))
				}
			}()
		}
	}
}

// Drain uploads all that is not uploaded, as far as that works in time. The rest is uploaded by the next process with this cache.
func (t *tree) Drain(limit time.Duration) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for _, f := range t.files() {
			_ = f.flush()
		}
		for all, _ := t.Waiting(); all > 0; all, _ = t.Waiting() {
			time.Sleep(tick)
		}
	}()
	select {
	case <-done:
	case <-time.After(limit):
	}
}

// handle is one open of a file.
type handle struct{ n *node }

var (
	_ fs.FileReader  = (*handle)(nil)
	_ fs.FileWriter  = (*handle)(nil)
	_ fs.FileFlusher = (*handle)(nil)
)

func (h *handle) Read(ctx context.Context, to []byte, at int64) (fuse.ReadResult, syscall.Errno) {
	read := 0
	buffer := make([]byte, len(to)) // a call that timed out writes on
	code := h.n.t.Call(ctx, backend.OpTimeout, func(context.Context) (err error) {
		read, err = h.n.file.read(h.n.path(), buffer, at)
		return err
	})
	if code != 0 {
		return nil, code
	}
	return fuse.ReadResultData(buffer[:read]), 0
}

func (h *handle) Write(ctx context.Context, from []byte, at int64) (uint32, syscall.Errno) {
	written := 0
	from = append([]byte(nil), from...)
	code := h.n.t.Call(ctx, backend.OpTimeout, func(context.Context) (err error) {
		written, err = h.n.file.write(h.n.path(), from, at)
		return err
	})
	if code != 0 {
		return 0, code
	}
	return uint32(written), 0
}

// Flush is a close by a process of this kernel: the file is uploaded when it returns.
func (h *handle) Flush(ctx context.Context) syscall.Errno {
	return h.n.t.Call(ctx, backend.UploadTimeout, func(context.Context) error { return h.n.file.flush() })
}
