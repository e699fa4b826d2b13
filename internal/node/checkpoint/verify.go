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

// verified remembers which images of memory were read through and found whole, as long as their files
// are the same: a hundred sandboxes made from one checkpoint have it read once.
type verified struct {
	mu     sync.Mutex
	checks map[types.UID]*verification // +checklocks:mu
}

// verification is one reading of an image.
type verification struct {
	state string        // of the files
	done  chan struct{} // closed at the end
	err   error         // known then
}

// check reads an image through unless that was done, or somebody is at it, whom it waits for.
func (v *verified) check(ctx context.Context, uid types.UID, dir string) error {
	for {
		state, err := stateOf(dir)
		if err != nil {
			return err
		}
		look, mine := v.start(uid, state)
		if mine {
			look.err = memimage.Verify(ctx, dir)
			if look.err != nil {
				v.remove(uid)
			}
			close(look.done)
			return look.err
		}
		select {
		case <-look.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if !errors.Is(look.err, context.Canceled) && !errors.Is(look.err, context.DeadlineExceeded) {
			return look.err
		} // whoever was at it gave up
	}
}

// Trust notes that an image is whole, which whoever wrote it a moment ago knows.
func (v *verified) add(uid types.UID, dir string) {
	if state, err := stateOf(dir); err == nil {
		if look, mine := v.start(uid, state); mine {
			close(look.done)
		}
	}
}

func (v *verified) start(uid types.UID, state string) (look *verification, mine bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if look := v.checks[uid]; look != nil && look.state == state {
		return look, false
	}
	look = &verification{state: state, done: make(chan struct{})}
	v.checks[uid] = look
	return look, true
}

func (v *verified) remove(uid types.UID) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.checks, uid)
}

// Verify reads the memory of a checkpoint through, once for all that are made from it.
func (s *Store) Verify(ctx context.Context, uid types.UID) error {
	return s.verified.check(ctx, uid, s.MemoryDir(uid))
}

// Trust notes that the memory of a checkpoint is whole, because the caller has just written it.
func (s *Store) MarkVerified(uid types.UID) { s.verified.add(uid, s.MemoryDir(uid)) }

// stateOf changes with the files of an image, as far as the file system tells.
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
