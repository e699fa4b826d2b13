package oci

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// runsc's reads of pages, from gVisor's pkg/sentry/state/stateio/pagesfile.go. With other values in
// a build, reads are slower or take more processor time than necessary.
const (
	pagesName  = "pages.img"
	pageReads  = 128       // concurrent
	pageUnit   = 256 << 10 // maximum bytes of each
	pagesAhead = pageReads * pageUnit
)

const (
	// paceStep is the pause before the next read if there is no sign that the last one has
	// completed.
	paceStep = time.Millisecond
	// paceGrowth is the time that most sandboxes need to answer.
	paceGrowth = 300 * time.Millisecond
	// laterTimeout bounds the pause after a restore until pacing continues; then all reads are
	// allowed.
	laterTimeout = 5 * time.Second
	// maxPaced bounds the images that are paced, for the descriptors that each needs; others are
	// read unpaced.
	maxPaced = 8
	// spareFiles is the required number of free descriptors. Without one for an event the kernel
	// refuses the read, and the sandbox ends.
	spareFiles = 2 * maxPaced * pageReads
)

// minPacedSize is the size in bytes below which pacing takes longer than a wait for all pages. Only
// tests change it.
var minPacedSize int64 = 512 << 20

// pacing has a slot for each image that is being paced.
var pacing = make(chan struct{}, maxPaced)

// readPacer keeps the reads of an image's pages from using all processors while a restored sandbox
// starts. runsc reads pages with so many threads that the sandbox does not run before the last one
// is there. Each read first requests permission (fanotify's FAN_PRE_ACCESS, of Linux 6.14): pages
// that the sandbox waits for are allowed at once, the others a few at a time. If this process
// exits, the kernel allows all.
//
// Only readers that opened the pages through tree are affected: a mount of this one file without a
// place in the file system, which ends with its last descriptor. Other readers of the image are
// not.
type readPacer struct {
	dir    string // with links to the image's files
	tree   int
	events *os.File
	pages  readQueue
	since  time.Time // end of the restore; after it the limit doubles every paceGrowth
}

// restorePaced calls restore with the directory to restore an image from, and paces its reads as
// the options require.
func restorePaced(ctx context.Context, dir, image string, o RestoreOptions, restore func(image string) error) error {
	var p *readPacer
	if o.Background && o.Later != nil {
		p = newReadPacer(dir, image)
	}
	if p == nil {
		return restore(image)
	}
	during, over := context.WithCancel(context.WithoutCancel(ctx))
	var (
		running sync.WaitGroup
		read    bool
	)
	running.Go(func() { read = p.run(during) })
	err := restore(p.dir)
	over()
	running.Wait()
	p.opened()
	if err != nil || read {
		p.close()
		return err
	}
	p.since = time.Now()
	given := time.AfterFunc(laterTimeout, p.close)
	o.Later(func(ctx context.Context) {
		if given.Stop() {
			defer p.close()
			p.run(ctx)
		}
	})
	return nil
}

// newReadPacer creates the directory to restore an image from. It returns nil if there is nothing
// to pace, or the kernel cannot: then the caller uses the image itself.
func newReadPacer(dir, image string) *readPacer {
	info, err := os.Stat(filepath.Join(image, pagesName))
	if err != nil || info.Size() < minPacedSize || !hasSpareDescriptors() {
		return nil
	}
	select {
	case pacing <- struct{}{}:
	default:
		return nil
	}
	p := &readPacer{dir: dir, tree: -1, pages: readQueue{size: uint64(info.Size()), limit: maxConcurrentReads()}}
	if err := p.subscribe(image); err != nil {
		p.close()
		return nil
	}
	return p
}

func (p *readPacer) subscribe(image string) error {
	group, err := unix.FanotifyInit(unix.FAN_CLASS_PRE_CONTENT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, unix.O_RDONLY|unix.O_CLOEXEC)
	if err != nil {
		return fmt.Errorf("subscribe to events: %w", err)
	}
	p.events = os.NewFile(uintptr(group), "fanotify")
	if p.tree, err = unix.OpenTree(unix.AT_FDCWD, filepath.Join(image, pagesName), unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC); err != nil {
		return fmt.Errorf("mount pages: %w", err)
	}
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.tree)
	const what = unix.FAN_PRE_ACCESS | unix.FAN_CLOSE_NOWRITE
	if err := unix.FanotifyMark(group, unix.FAN_MARK_ADD|unix.FAN_MARK_MOUNT, what, unix.AT_FDCWD, path); err != nil {
		return fmt.Errorf("subscribe to events: %w", err)
	}
	if err := errors.Join(os.RemoveAll(p.dir), os.Mkdir(p.dir, 0o700)); err != nil {
		return err
	}
	entries, err := os.ReadDir(image)
	if err != nil {
		return err
	}
	for _, e := range entries {
		to := filepath.Join(image, e.Name())
		if e.Name() == pagesName {
			to = path
		}
		if err := os.Symlink(to, filepath.Join(p.dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// opened must be called when runsc has opened the image, or has failed.
func (p *readPacer) opened() {
	if p.tree >= 0 {
		_ = unix.Close(p.tree)
		p.tree = -1
	}
	_ = os.RemoveAll(p.dir)
}

// close allows all remaining reads. run must have returned.
func (p *readPacer) close() {
	p.opened()
	if p.events != nil {
		_ = p.events.Close()
	}
	for _, fd := range p.pages.first(len(p.pages.waiting)) {
		_ = unix.Close(int(fd))
	}
	<-pacing
}

// maxConcurrentReads is the number of concurrent reads while a restored sandbox starts.
func maxConcurrentReads() int { return max(2, runtime.NumCPU()/2) }

// hasSpareDescriptors reports whether the process may open many more files. Since Linux 6.2 the
// size of the directory is their number.
func hasSpareDescriptors() bool {
	var most unix.Rlimit
	info, err := os.Stat("/proc/self/fd")
	return err == nil && info.Size() > 0 && unix.Getrlimit(unix.RLIMIT_NOFILE, &most) == nil && uint64(info.Size())+spareFiles <= most.Cur
}

// run answers events until all is read, or the reader or ctx has ended. It may be called again
// after that.
func (p *readPacer) run(ctx context.Context) (read bool) {
	stop := context.AfterFunc(ctx, func() { _ = p.events.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, 16<<10)
	for ctx.Err() == nil {
		if !hasSpareDescriptors() {
			return true // closed: reads need no permission
		}
		deadline := time.Time{}
		if len(p.pages.waiting) > 0 {
			deadline = time.Now().Add(paceStep)
		}
		_ = p.events.SetReadDeadline(deadline)
		if ctx.Err() != nil { // ctx's end sets the deadline
			break
		}
		n, err := p.events.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			p.allow(p.pages.step()...)
			continue
		} else if err != nil {
			return true
		}
		if !p.since.IsZero() {
			p.pages.limit = min(pageReads, maxConcurrentReads()<<min(6, time.Since(p.since)/paceGrowth))
		}
		ended := p.take(buf[:n])
		p.allow(p.pages.next()...)
		if ended {
			return true
		}
	}
	return false
}

// take queues events, and reports whether the pages were closed. The format is that of fanotify(7).
func (p *readPacer) take(events []byte) (ended bool) {
	const metadata, ranged = 24, 48
	e := binary.NativeEndian
	for len(events) >= metadata {
		size := min(len(events), int(e.Uint32(events)))
		event, mask, fd := events[:size], e.Uint64(events[8:]), int32(e.Uint32(events[16:]))
		events = events[size:]
		switch {
		case mask&unix.FAN_PRE_ACCESS == 0:
			ended = ended || mask&unix.FAN_CLOSE_NOWRITE != 0
			if fd >= 0 {
				_ = unix.Close(int(fd))
			}
		case size < ranged || p.pages.urgent(e.Uint64(event[32:]), e.Uint64(event[40:])):
			p.allow(fd)
		default:
			p.pages.push(fd, e.Uint64(event[32:])+e.Uint64(event[40:]))
		}
	}
	return ended
}

// allow permits reads. It fails only for readers that no longer wait.
func (p *readPacer) allow(fds ...int32) {
	for _, fd := range fds {
		var answer [8]byte
		binary.NativeEndian.PutUint32(answer[:], uint32(fd))
		binary.NativeEndian.PutUint32(answer[4:], unix.FAN_ALLOW)
		_, _ = p.events.Write(answer[:])
		_ = unix.Close(int(fd))
	}
}

// readQueue orders the reads of pages. Prefetches come in file order, slightly shuffled, and all
// workers' reads wait here: one more shows that one has completed.
type readQueue struct {
	size    uint64  // of the file, in bytes
	limit   int     // maximum concurrent reads
	waiting []int32 // in order of arrival
	front   uint64  // the end of the farthest
}

// urgent reports whether the sandbox waits for the pages of a read: it is short, or out of order.
func (p *readQueue) urgent(off, count uint64) bool {
	return count < pageUnit || off > p.front+pagesAhead
}

func (p *readQueue) push(fd int32, end uint64) {
	p.waiting = append(p.waiting, fd)
	p.front = max(p.front, end)
}

// next returns the reads to allow now that more have arrived. After the last one of the file no more
// arrive, and little remains.
func (p *readQueue) next() (allowed []int32) {
	n := len(p.waiting) - (pageReads - p.limit)
	if p.front >= p.size {
		n = len(p.waiting)
	}
	return p.first(n)
}

// step returns the read to allow after a pause without events.
func (p *readQueue) step() []int32 { return p.first(1) }

func (p *readQueue) first(n int) (allowed []int32) {
	n = min(max(n, 0), len(p.waiting))
	allowed, p.waiting = p.waiting[:n], p.waiting[n:]
	return allowed
}
