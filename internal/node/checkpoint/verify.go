package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
)

// verified caches which memory images were verified, as long as their files are unchanged: many sandboxes
// from one checkpoint verify it once.
type verified struct {
	mu     sync.Mutex
	checks map[types.UID]*verification // +checklocks:mu
}

type verification struct {
	state string        // of the files
	done  chan struct{} // closed at the end
	err   error         // set before done closes
}

// check verifies an image unless that was done; it waits for a concurrent verification.
func (v *verified) check(ctx context.Context, uid types.UID, dir string) error {
	for {
		state, err := stateOf(dir)
		if err != nil {
			return err
		}
		one, mine := v.start(uid, state)
		if mine {
			one.err = memimage.Verify(ctx, dir)
			if one.err != nil {
				v.remove(uid)
			}
			close(one.done)
			return one.err
		}
		select {
		case <-one.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if !errors.Is(one.err, context.Canceled) && !errors.Is(one.err, context.DeadlineExceeded) {
			return one.err
		} // the verifying caller was cancelled
	}
}

// add records that an image is verified, because the caller has just written it.
func (v *verified) add(uid types.UID, dir string) {
	if state, err := stateOf(dir); err == nil {
		if one, mine := v.start(uid, state); mine {
			close(one.done)
		}
	}
}

func (v *verified) start(uid types.UID, state string) (one *verification, mine bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if one := v.checks[uid]; one != nil && one.state == state {
		return one, false
	}
	one = &verification{state: state, done: make(chan struct{})}
	v.checks[uid] = one
	return one, true
}

func (v *verified) remove(uid types.UID) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.checks, uid)
}

// Verify reads and verifies the memory of a checkpoint, once for all sandboxes from it.
func (s *Store) Verify(ctx context.Context, uid types.UID) error {
	return s.verified.check(ctx, uid, s.MemoryDir(uid))
}

// MarkVerified records that the memory of a checkpoint is correct, because the caller has just
// written it.
func (s *Store) MarkVerified(uid types.UID) { s.verified.add(uid, s.MemoryDir(uid)) }

// stateOf changes with the files of an image.
func stateOf(dir string) (string, error) {
	img, err := memimage.Read(dir)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, f := range img.Files {
		info, err := os.Lstat(filepath.Join(dir, f.Name))
		if err != nil {
			return "", fmt.Errorf("read checkpoint: %w", err)
		}
		fmt.Fprintf(&b, "%s %d %d\n", f.Name, info.Size(), info.ModTime().UnixNano())
	}
	return b.String(), nil
}
