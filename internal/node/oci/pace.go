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

// What runsc reads pages with, by gVisor's pkg/sentry/state/stateio/pagesfile.go. If another build
// has other numbers, reading is slower than it could be, or less gentle.
const (
	pagesName  = "pages.img"
	pageReads  = 128       // at the same time
	pageUnit   = 256 << 10 // bytes of each, at most
	pagesAhead = pageReads * pageUnit
)

const (
	// paceStep is how long the next page waits if nothing tells that the last one was read.
	paceStep = time.Millisecond
	// paceGrowth is as long as most sandboxes need to answer.
	paceGrowth = 300 * time.Millisecond
	// laterTimeout is how long nobody may go on after a restore before all is let go.
	laterTimeout = 5 * time.Second
	// maxPaced bounds the images that are paced, for the descriptors that each of them takes;
	// those beyond are read as fast as they can be.
	maxPaced = 8
	// spareFiles is how many more descriptors we must be allowed to have. Without one for an event the
	// kernel refuses the read, and the sandbox ends.
	spareFiles = 2 * maxPaced * pageReads
)

// minPacedSize is the size in bytes below which to ask for pages one by one takes longer than to wait for all of
// them. Only tests change it.
var minPacedSize int64 = 512 << 20

// pacing has a place for each image that is being paced.
var pacing = make(chan struct{}, maxPaced)

// readPacer keeps the reading of an image's pages from taking all processors while what was restored from it
// starts. runsc reads them with so many threads that nothing else of the sandbox gets to run before the last
// page is there, and what somebody waits for is one of them. Each read asks us first (fanotify's
// FAN_PRE_ACCESS, of Linux 6.14): those that somebody waits for may go on at once, of the others a few at a time.
// If we end, the kernel lets all go on.
//
// Asked are only those who opened the pages through tree, a mount of this one file that has no place in the
// file system and ends with its last descriptor, so that other readers of the image are left alone.
type readPacer struct {
	dir    string // what runsc takes for the image's
	tree   int
	events *os.File
	pages  readQueue
	since  time.Time // when the restore was done, after which twice as much goes on with every paceGrowth
}

// paced calls restore with the directory to restore an image from, and has its pages read as the options say.
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

// newReadPacer makes the directory to restore an image from. It returns nil where there is nothing to be paced,
// or the kernel cannot: then the image itself is to be used.
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
		return fmt.Errorf("ask for events: %w", err)
	}
	p.events = os.NewFile(uintptr(group), "fanotify")
	if p.tree, err = unix.OpenTree(unix.AT_FDCWD, filepath.Join(image, pagesName), unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC); err != nil {
		return fmt.Errorf("mount pages: %w", err)
	}
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), p.tree)
	const what = unix.FAN_PRE_ACCESS | unix.FAN_CLOSE_NOWRITE
	if err := unix.FanotifyMark(group, unix.FAN_MARK_ADD|unix.FAN_MARK_MOUNT, what, unix.AT_FDCWD, path); err != nil {
		return fmt.Errorf("ask for events: %w", err)
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

// opened is to be called when runsc has opened the image, or has failed.
func (p *readPacer) opened() {
	if p.tree >= 0 {
		_ = unix.Close(p.tree)
		p.tree = -1
	}
	_ = os.RemoveAll(p.dir)
}

// close lets all that is not read yet be read. run must have returned.
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

// maxConcurrentReads is how many reads are under way while what was restored starts.
func maxConcurrentReads() int { return max(2, runtime.NumCPU()/2) }

// hasSpareDescriptors reports whether we may have many more descriptors. The size of the directory is their number
// since Linux 6.2.
func hasSpareDescriptors() bool {
	var most unix.Rlimit
	info, err := os.Stat("/proc/self/fd")
	return err == nil && info.Size() > 0 && unix.Getrlimit(unix.RLIMIT_NOFILE, &most) == nil && uint64(info.Size())+spareFiles <= most.Cur
}

// run answers until all is read, the reader has ended or ctx has. It may be called again after that.
func (p *readPacer) run(ctx context.Context) (read bool) {
	stop := context.AfterFunc(ctx, func() { _ = p.events.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, 16<<10)
	for ctx.Err() == nil {
		if !hasSpareDescriptors() {
			return true // as good as read: nobody is asked any more
		}
		deadline := time.Time{}
		if len(p.pages.waiting) > 0 {
			deadline = time.Now().Add(paceStep)
		}
		_ = p.events.SetReadDeadline(deadline)
		if ctx.Err() != nil { // before which its end has set one
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

// take notes events, and reports whether the pages were closed. Their form is that of fanotify(7).
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

// allow lets reads go on. It fails only for those who do not wait any more.
func (p *readPacer) allow(fds ...int32) {
	for _, fd := range fds {
		var answer [8]byte
		binary.NativeEndian.PutUint32(answer[:], uint32(fd))
		binary.NativeEndian.PutUint32(answer[4:], unix.FAN_ALLOW)
		_, _ = p.events.Write(answer[:])
		_ = unix.Close(int(fd))
	}
}

// pages decides which reads of pages go on. Those that nobody waits for come in the order of the file, a
// little shuffled, and as many as there can be wait here: that one more comes tells that one was done.
type readQueue struct {
	size    uint64  // of the file, in bytes
	limit   int     // how many may be under way
	waiting []int32 // in the order in which they came
	front   uint64  // the end of the farthest of them
}

// urgent reports whether a read is of pages that somebody waits for: it is short, or out of order.
func (p *readQueue) urgent(off, count uint64) bool {
	return count < pageUnit || off > p.front+pagesAhead
}

func (p *readQueue) push(fd int32, end uint64) {
	p.waiting = append(p.waiting, fd)
	p.front = max(p.front, end)
}

// next is what goes on now that more have come. After the last of the file no more come, and
// what is left is little.
func (p *readQueue) next() (gone []int32) {
	n := len(p.waiting) - (pageReads - p.limit)
	if p.front >= p.size {
		n = len(p.waiting)
	}
	return p.first(n)
}

// step is what goes on if nothing has come for a while.
func (p *readQueue) step() []int32 { return p.first(1) }

func (p *readQueue) first(n int) (gone []int32) {
	n = min(max(n, 0), len(p.waiting))
	gone, p.waiting = p.waiting[:n], p.waiting[n:]
	return gone
}
