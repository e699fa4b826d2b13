package node

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
)

// spoil has one checkpoint with a row that cannot be read, one without a row, one without files, one
// half removed, and the directory of one that never was. The first is as it was.
func spoil(t *testing.T, n *Node, captures [5]sandbox.Capture) {
	t.Helper()
	unread, lost, incomplete, dropping := captures[1].Checkpoint, captures[2].Checkpoint, captures[3].Checkpoint, captures[4].Checkpoint
	clean(t, n)
	put := func(uid types.UID, value string) {
		must(t, n.db.Update(func(tx *bolt.Tx) error {
			if value == "" {
				return tx.Bucket(checkpoint.CheckpointsBucket).Delete([]byte(uid))
			}
			return tx.Bucket(checkpoint.CheckpointsBucket).Put([]byte(uid), []byte(value))
		}))
	}
	put(unread.UID, `{"stage":"flying","ref":{"UID":"`+string(unread.UID)+`"}}`)
	put(lost.UID, "")
	must(t, os.RemoveAll(n.checkpoints.Dir(incomplete.UID)))
	k := n.checkpoints.Of(dropping)
	c := *k.Row()
	must(t, n.checkpoints.Move(k, &c, checkpoint.Dropping))
	must(t, os.MkdirAll(n.checkpoints.Dir("unknown"), 0o700))
}

// findsOrphans fails unless a node that has only read the journal reports what does not fit together.
func findsOrphans(t *testing.T, m *machine, lost, incomplete sandbox.CheckpointRef) {
	t.Helper()
	n, err := New(m.cfg)
	must(t, err)
	must(t, n.checkpoints.Load(func([]byte, []byte, error) {}))
	orphans, incompleteRows, err := n.checkpoints.Orphans(t.Context())
	if err != nil || len(orphans) != 2 || len(orphans[lost.UID]) != 2 || len(orphans["unknown"]) != 1 || len(incompleteRows) != 1 || !strings.Contains(incompleteRows[0], incomplete.Name) {
		t.Errorf("got %v, %v, %v", orphans, incompleteRows, err)
	}
	must(t, n.Close())
}

// showsUnread fails unless a node answers rightly of what was spoilt.
func showsUnread(t *testing.T, n *Node, s *agents.Sandbox, captures [5]sandbox.Capture) {
	t.Helper()
	if unreadRows := n.checkpoints.Unread(); len(unreadRows) != 1 || unreadRows[captures[1].Checkpoint.UID] == nil {
		t.Errorf("unreadRows %v", unreadRows)
	}
	if _, err := n.Captured(t.Context(), captures[0].Checkpoint); err != nil {
		t.Error(err)
	}
	for _, ref := range []sandbox.CheckpointRef{captures[2].Checkpoint, captures[4].Checkpoint} {
		if _, err := n.Captured(t.Context(), ref); !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("%s: %v", ref.Name, err)
		}
	}
	must(t, n.cfg.Containerd.RemoveCommitted(t.Context(), checkpoint.Snapshot(captures[3].Checkpoint.UID, "")))
	for _, ask := range captures[2:4] {
		if _, err := n.Ensure(t.Context(), forkOf(s, ask)); !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("made of one that is gone, or of files that are: %v", err)
		}
	}
	if _, err := n.Capture(t.Context(), captures[1]); !errors.Is(err, errs.ErrUnavailable) || !strings.Contains(err.Error(), "flying") {
		t.Errorf("capture of what cannot be read: %v", err)
	}
}

// What is there without a row, or a row without what it names, is reported; the next start removes what has
// no row, finishes what was being removed, and keeps what it cannot read.
func TestStrayCheckpoints(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	s := object(class("runc"))
	ensure(t, n, s)
	var captures [5]sandbox.Capture
	for i := range captures {
		captures[i] = checkpointOf(s)
		capture1(t, n, captures[i])
	}
	spoil(t, n, captures)
	stop()
	whole, unread, lost, incomplete := captures[0].Checkpoint, captures[1].Checkpoint, captures[2].Checkpoint, captures[3].Checkpoint
	findsOrphans(t, m, lost, incomplete)
	n, _ = m.node()
	orphans, incompleteRows, err := n.checkpoints.Orphans(t.Context())
	if err != nil || len(orphans) != 0 || len(incompleteRows) != 1 {
		t.Errorf("after the start %v, %v, %v", orphans, incompleteRows, err)
	}
	left, err := n.Audit(t.Context())
	if err != nil || !slices.Equal(left, incompleteRows) {
		t.Errorf("audit has %v, %v", left, err)
	}
	showsUnread(t, n, s, captures)
	if _, err := os.Stat(n.checkpoints.Dir(unread.UID)); err != nil {
		t.Errorf("what cannot be read is not kept: %v", err)
	}
	for _, ref := range []sandbox.CheckpointRef{whole, unread, incomplete} {
		must(t, n.DropCheckpoint(t.Context(), ref))
	}
	noCheckpoint(t, n)
	if unreadRows := n.checkpoints.Unread(); len(unreadRows) != 0 {
		t.Errorf("unreadRows %v", unreadRows)
	}
	clean(t, n)
}

// A removal that fails is tried again by the watchdog.
func TestDropIsTriedAgain(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	s := object(class("runc"))
	ensure(t, n, s)
	ask := checkpointOf(s)
	capture1(t, n, ask)
	// A directory that something is mounted in cannot be removed.
	busy := filepath.Join(n.checkpoints.Dir(ask.Checkpoint.UID), "volumes")
	must(t, mountTmpfs(busy))
	if err := n.DropCheckpoint(t.Context(), ask.Checkpoint); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("drop of what is in use: %v", err)
	}
	if _, err := n.Ensure(t.Context(), forkOf(s, ask)); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("made of what is being removed: %v", err)
	}
	if _, err := n.Capture(t.Context(), ask); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("made again while it is being removed: %v", err)
	}
	must(t, unmountTmpfs(busy))
	n.Sweep(t.Context())
	noCheckpoint(t, n)
	clean(t, n)
}

func mountTmpfs(dir string) error { return unix.Mount("small", dir, "tmpfs", 0, "size=8m") }

func unmountTmpfs(dir string) error { return unix.Unmount(dir, unix.MNT_DETACH) }
