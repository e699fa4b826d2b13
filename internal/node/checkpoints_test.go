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
func spoil(t *testing.T, n *Node, asks [5]sandbox.Capture) {
	t.Helper()
	unread, lost, incomplete, dropping := asks[1].Checkpoint, asks[2].Checkpoint, asks[3].Checkpoint, asks[4].Checkpoint
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
	must(t, os.MkdirAll(n.checkpoints.Dir("nobody"), 0o700))
}

// tellsStray fails unless a node that has only read the books tells what does not fit together.
func tellsStray(t *testing.T, m *machine, lost, incomplete sandbox.CheckpointRef) {
	t.Helper()
	n, err := New(m.cfg)
	must(t, err)
	must(t, n.checkpoints.Load(func([]byte, []byte, error) {}))
	orphans, told, err := n.checkpoints.Orphans(t.Context())
	if err != nil || len(orphans) != 2 || len(orphans[lost.UID]) != 2 || len(orphans["nobody"]) != 1 || len(told) != 1 || !strings.Contains(told[0], incomplete.Name) {
		t.Errorf("told %v, %v, %v", orphans, told, err)
	}
	must(t, n.Close())
}

// speaksOf fails unless a node answers rightly of what was spoilt.
func speaksOf(t *testing.T, n *Node, s *agents.Sandbox, asks [5]sandbox.Capture) {
	t.Helper()
	if remarks := n.checkpoints.Unread(); len(remarks) != 1 || remarks[asks[1].Checkpoint.UID] == nil {
		t.Errorf("remarks %v", remarks)
	}
	if _, err := n.Captured(t.Context(), asks[0].Checkpoint); err != nil {
		t.Error(err)
	}
	for _, ref := range []sandbox.CheckpointRef{asks[2].Checkpoint, asks[4].Checkpoint} {
		if _, err := n.Captured(t.Context(), ref); !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("%s: %v", ref.Name, err)
		}
	}
	must(t, n.cfg.Containerd.RemoveCommitted(t.Context(), checkpoint.Snapshot(asks[3].Checkpoint.UID)))
	for _, ask := range asks[2:4] {
		if _, err := n.Ensure(t.Context(), forkOf(s, ask)); !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("made of one that is gone, or of files that are: %v", err)
		}
	}
	if _, err := n.Capture(t.Context(), asks[1]); !errors.Is(err, errs.ErrUnavailable) || !strings.Contains(err.Error(), "flying") {
		t.Errorf("capture of what cannot be read: %v", err)
	}
}

// What is there without a row, or a row without what it names, is told; the next start removes what has
// no row, finishes what was being removed, and keeps what it cannot read.
func TestStrayCheckpoints(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, stop := m.node()
	s := object(class("runc"))
	ensure(t, n, s)
	var asks [5]sandbox.Capture
	for i := range asks {
		asks[i] = checkpointOf(s)
		capture1(t, n, asks[i])
	}
	spoil(t, n, asks)
	stop()
	whole, unread, lost, incomplete := asks[0].Checkpoint, asks[1].Checkpoint, asks[2].Checkpoint, asks[3].Checkpoint
	tellsStray(t, m, lost, incomplete)
	n, _ = m.node()
	orphans, told, err := n.checkpoints.Orphans(t.Context())
	if err != nil || len(orphans) != 0 || len(told) != 1 {
		t.Errorf("after the start %v, %v, %v", orphans, told, err)
	}
	left, err := n.Audit(t.Context())
	if err != nil || !slices.Equal(left, told) {
		t.Errorf("audit tells %v, %v", left, err)
	}
	speaksOf(t, n, s, asks)
	if _, err := os.Stat(n.checkpoints.Dir(unread.UID)); err != nil {
		t.Errorf("what cannot be read is not kept: %v", err)
	}
	for _, ref := range []sandbox.CheckpointRef{whole, unread, incomplete} {
		must(t, n.DropCheckpoint(t.Context(), ref))
	}
	noCheckpoint(t, n)
	if remarks := n.checkpoints.Unread(); len(remarks) != 0 {
		t.Errorf("remarks %v", remarks)
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
