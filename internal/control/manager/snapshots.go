package manager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/paging"
)

// SnapshotListRequest says which snapshots of a tenant to list. Its zero value but for Namespace is
// the first page of all.
type SnapshotListRequest struct {
	Namespace string
	// SandboxID keeps those of one source, which may be gone.
	SandboxID string
	// Name keeps those of one name, or, with a tag, the one.
	Name string
	// Limit is from 1 to MaxPage; 0 means MaxPage.
	Limit int
	// Cursor is what the page before returned.
	Cursor string
}

// Snapshots lists a page of what is ready, the newest first. next is empty on the last one.
func (m *Manager) Snapshots(ctx context.Context, req SnapshotListRequest) (page []Snapshot, next string, err error) {
	limit, after, err := paging.Parse(req.Limit, req.Cursor, paging.Direction(false))
	if err != nil {
		return nil, "", err
	}
	var id sandbox.ID
	if req.SandboxID != "" {
		if id, err = sandbox.ParseID(req.SandboxID); err != nil {
			return nil, "", apistatus.Refuse(errs.ErrInvalid, "sandboxID: %q is not the ID of a sandbox", req.SandboxID)
		}
	}
	wanted := func(*barchan.Checkpoint) bool { return true }
	if req.Name != "" {
		name, ours := splitID(req.Namespace, req.Name)
		wanted = func(c *barchan.Checkpoint) bool { return ours && name.matches(c) }
	}
	all, err := m.snapshots(ctx, req.Namespace)
	if err != nil {
		return nil, "", err
	}
	keep := []Snapshot{}
	for i := range all {
		c := &all[i]
		if c.Status.Phase != barchan.CheckpointReady || !wanted(c) {
			continue
		}
		if v := viewSnapshot(c); id == "" || v.SandboxID == id {
			keep = append(keep, v)
		}
	}
	page, next = paging.Cut(keep, limit, after, paging.Direction(false), func(v *Snapshot) paging.Cursor {
		return paging.Cursor{Key: v.CreatedAt.UnixNano(), ID: v.Object}
	})
	return page, next, nil
}

// matches reports whether a list of a name shows a snapshot.
func (n snapshotName) matches(c *barchan.Checkpoint) bool {
	has := nameOf(c)
	return has.name == n.name && (n.tag == "" || n.tag == has.tag)
}

// snapshots are the checkpoints of a namespace that people have made, whatever their phase. What is on
// its way out is gone.
func (m *Manager) snapshots(ctx context.Context, namespace string) ([]barchan.Checkpoint, error) {
	all, err := m.cache.Checkpoints(ctx, namespace)
	if err != nil {
		return nil, fmt.Errorf("list checkpoints: %w", err)
	}
	return slices.DeleteFunc(all, func(c barchan.Checkpoint) bool { return !public(&c) }), nil
}

func public(c *barchan.Checkpoint) bool {
	return c.DeletionTimestamp == nil && c.Labels[barchan.LabelPurpose] == ""
}

func noSnapshot(id string) error {
	return apistatus.Refuse(errs.ErrNotFound, "snapshot '%s' not found", id)
}

// snapshot finds what a tenant means: the one of a name and a tag, else the newest of the name, one that
// is ready before one that is not.
func (m *Manager) snapshot(ctx context.Context, namespace, asked string) (*barchan.Checkpoint, error) {
	name, ours := splitID(namespace, asked)
	if !ours {
		return nil, noSnapshot(asked)
	}
	all, err := m.snapshots(ctx, namespace)
	if err != nil {
		return nil, err
	}
	var best *barchan.Checkpoint
	for i := range all {
		c := &all[i]
		has := nameOf(c)
		switch {
		case has.name != name.name:
		case has.tag == name.tag:
			return c, nil
		case name.newest() && (best == nil || older(best, c)):
			best = c
		}
	}
	if best != nil {
		return best, nil
	}
	return m.unseen(ctx, namespace, asked, name)
}

// older reports whether b is to be preferred to a.
func older(a, b *barchan.Checkpoint) bool {
	readyA, readyB := a.Status.Phase == barchan.CheckpointReady, b.Status.Phase == barchan.CheckpointReady
	if readyA != readyB {
		return readyB
	}
	return cmp.Or(createdAt(a).Compare(createdAt(b)), cmp.Compare(nameOf(a).tag, nameOf(b).tag)) < 0
}

// unseen reads a snapshot that another replica may have made a moment ago. Only who names a tag has
// heard of one.
func (m *Manager) unseen(ctx context.Context, namespace, asked string, name snapshotName) (*barchan.Checkpoint, error) {
	if name.newest() || !nameForm.MatchString(name.name) || !tagForm.MatchString(name.tag) {
		return nil, noSnapshot(asked)
	}
	c := &barchan.Checkpoint{}
	err := m.objects.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name.object()}, c)
	if apierrors.IsNotFound(err) || (err == nil && (!public(c) || nameOf(c) != name)) {
		return nil, noSnapshot(asked)
	}
	if err != nil {
		return nil, apistatus.From("read snapshot "+asked, err)
	}
	return c, nil
}

// DeleteSnapshot deletes one snapshot. Its data go when nobody needs them any more. A bare name must
// mean a single one.
func (m *Manager) DeleteSnapshot(ctx context.Context, namespace, id string) error {
	c, err := m.snapshot(ctx, namespace, id)
	if err != nil {
		return err
	}
	if err := m.single(ctx, c, id); err != nil {
		return err
	}
	err = m.objects.Delete(ctx, c, client.Preconditions{UID: &c.UID})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return noSnapshot(id)
	}
	if err != nil {
		return apistatus.From("delete snapshot "+id, err)
	}
	failpoint.Reach("snapshot/deleted")
	m.settleCheckpoint(ctx, c)
	m.log.InfoContext(ctx, "snapshot deleted", telemetry.Namespace, c.Namespace, telemetry.Name, c.Name)
	return nil
}

// single refuses a name without a tag of which there are several.
func (m *Manager) single(ctx context.Context, c *barchan.Checkpoint, id string) error {
	name, _ := splitID(c.Namespace, id)
	if nameOf(c).tag == name.tag {
		return nil
	}
	all, err := m.snapshots(ctx, c.Namespace)
	if err != nil {
		return err
	}
	n := 0
	for i := range all {
		if nameOf(&all[i]).name == name.name {
			n++
		}
	}
	if n > 1 {
		return apistatus.Refuse(errs.ErrConflict, "there are %d snapshots of the name %q; say which by its tag, as in %q", n, name.name, c.SnapshotID())
	}
	return nil
}

// settleCheckpoint waits until the cache shows that a checkpoint is on its way out.
func (m *Manager) settleCheckpoint(ctx context.Context, c *barchan.Checkpoint) {
	ctx, cancel := context.WithTimeout(ctx, m.settleIn)
	defer cancel()
	_, err := m.cache.WaitCheckpoint(ctx, client.ObjectKeyFromObject(c), func(now *barchan.Checkpoint) (bool, error) {
		return now == nil || now.UID != c.UID || now.DeletionTimestamp != nil, nil
	})
	if err != nil && !errors.Is(err, context.Canceled) {
		m.log.WarnContext(ctx, "cache does not show a deletion yet", telemetry.Namespace, c.Namespace, telemetry.Name, c.Name, telemetry.Error, err)
	}
}
