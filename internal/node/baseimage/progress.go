package baseimage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// reportBytes is the number of bytes between two reports.
const reportBytes = 4 << 20

// reporter serializes reports of progress. fn is called under mu by design: this guarantees the order, and
// nothing else locks mu.
type reporter struct {
	mu   sync.Mutex
	fn   func(Progress) // +checklocks:mu
	last Progress       // +checklocks:mu
}

func (r *reporter) step(name string, percent int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last = Progress{Step: name, Percent: max(percent, r.last.Percent)}
	r.reportLocked()
}

func (r *reporter) bytes(n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.last.Bytes / reportBytes
	if r.last.Bytes += n; r.last.Bytes/reportBytes != before {
		r.reportLocked()
	}
}

// +checklocks:r.mu
func (r *reporter) reportLocked() {
	if r.fn != nil {
		r.fn(r.last)
	}
}

// count returns w, with reports of the bytes written to it.
func (r *reporter) count(w io.Writer) io.Writer { return counter{r, w} }

type counter struct {
	to *reporter
	w  io.Writer
}

func (c counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.to.bytes(int64(n))
	return n, err
}

// lockDir waits until no other process builds in dir, and returns the unlock function. The kernel unlocks
// after a crash. waiting is called once before a wait.
func lockDir(ctx context.Context, dir string, waiting func()) (func(), error) {
	file, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for first := true; ; first = false {
		// A blocking flock could not be cancelled, so retry.
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = file.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return nil, errors.Join(fmt.Errorf("flock: %w", err), file.Close())
		}
		if first {
			waiting()
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), file.Close())
		case <-tick.C:
		}
	}
}
