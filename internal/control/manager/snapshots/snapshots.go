package snapshots

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/paging"
)

// Cache reads checkpoints from memory.
type Cache interface {
	Checkpoints(ctx context.Context, namespace string) ([]barchan.Checkpoint, error)
	// WaitCheckpoint blocks until done returns true or an error. done gets nil once the checkpoint is gone.
	WaitCheckpoint(ctx context.Context, key types.NamespacedName, done func(*barchan.Checkpoint) (bool, error)) (*barchan.Checkpoint, error)
}

// Store has the snapshots of all tenants. Its fields are required. It is safe for concurrent use.
type Store struct {
	Sandboxes *sandboxes.Store
	Cache     Cache
	// CaptureTimeout bounds the wait for a snapshot to be durable.
	CaptureTimeout time.Duration
}

// ListRequest selects snapshots of a tenant. Its zero value but for Namespace is the first page of all.
type ListRequest struct {
	Namespace string
	// SandboxID selects one source, which may be gone.
	SandboxID string
	// Name selects one name, or, with a tag, one snapshot.
	Name string
	// Limit is from 1 to paging.MaxPage; 0 means paging.DefaultPage.
	Limit int
	// Cursor is the previous page's next.
	Cursor string
}

// List returns a page of ready snapshots, newest first. next is empty on the last one.
func (st *Store) List(ctx context.Context, req ListRequest) (page []Snapshot, next string, err error) {
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
	all, err := st.snapshots(ctx, req.Namespace)
	if err != nil {
		return nil, "", err
	}
	keep := []Snapshot{}
	for i := range all {
		c := &all[i]
		if c.Status.Phase != barchan.CheckpointReady || !wanted(c) {
			continue
		}
		if v := view(c); id == "" || v.SandboxID == id {
			keep = append(keep, v)
		}
	}
	page, next = paging.Cut(keep, limit, after, paging.Direction(false), func(v *Snapshot) paging.Cursor {
		return paging.Cursor{Key: v.CreatedAt.UnixNano(), ID: v.Object}
	})
	return page, next, nil
}

// matches reports whether a list of a name shows a snapshot.
func (n fullName) matches(c *barchan.Checkpoint) bool {
	has := nameOf(c)
	return has.name == n.name && (n.tag == "" || n.tag == has.tag)
}

// snapshots returns the checkpoints of a namespace that tenants made, in any phase but deletion.
func (st *Store) snapshots(ctx context.Context, namespace string) ([]barchan.Checkpoint, error) {
	all, err := st.Cache.Checkpoints(ctx, namespace)
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

// Find returns the snapshot of a name and a tag, else the newest of the name, ready ones first.
func (st *Store) Find(ctx context.Context, namespace, requested string) (*barchan.Checkpoint, error) {
	name, ours := splitID(namespace, requested)
	if !ours {
		return nil, noSnapshot(requested)
	}
	all, err := st.named(ctx, namespace, name.name)
	if err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(all, func(c barchan.Checkpoint) bool { return nameOf(&c).tag == name.tag }); i >= 0 {
		return &all[i], nil
	}
	if name.newest() && len(all) > 0 {
		return new(slices.MaxFunc(all, compare)), nil
	}
	return st.unseen(ctx, namespace, requested, name)
}

// named returns the snapshots of a name.
func (st *Store) named(ctx context.Context, namespace, name string) ([]barchan.Checkpoint, error) {
	all, err := st.snapshots(ctx, namespace)
	return slices.DeleteFunc(all, func(c barchan.Checkpoint) bool { return nameOf(&c).name != name }), err
}

// compare orders ready snapshots after others, then by age.
func compare(a, b barchan.Checkpoint) int {
	readyA, readyB := a.Status.Phase == barchan.CheckpointReady, b.Status.Phase == barchan.CheckpointReady
	switch {
	case readyA == readyB:
		return cmp.Or(barchan.CreatedAt(&a).Compare(barchan.CreatedAt(&b)), cmp.Compare(nameOf(&a).tag, nameOf(&b).tag))
	case readyA:
		return 1
	}
	return -1
}

// unseen reads a snapshot that another replica may have just made, and of which the client knows the tag.
func (st *Store) unseen(ctx context.Context, namespace, requested string, name fullName) (*barchan.Checkpoint, error) {
	if name.newest() || !nameForm.MatchString(name.name) || !tagForm.MatchString(name.tag) {
		return nil, noSnapshot(requested)
	}
	c := &barchan.Checkpoint{}
	err := st.Sandboxes.Objects.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name.object()}, c)
	if apierrors.IsNotFound(err) || (err == nil && (!public(c) || nameOf(c) != name)) {
		return nil, noSnapshot(requested)
	}
	if err != nil {
		return nil, apistatus.From("read snapshot "+requested, err)
	}
	return c, nil
}

// Delete deletes one snapshot. Its data stay while other objects use them. A bare name must match only one.
func (st *Store) Delete(ctx context.Context, namespace, id string) error {
	c, err := st.Find(ctx, namespace, id)
	if err != nil {
		return err
	}
	if err := st.single(ctx, c, id); err != nil {
		return err
	}
	err = st.Sandboxes.Objects.Delete(ctx, c, client.Preconditions{UID: &c.UID})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return noSnapshot(id)
	}
	if err != nil {
		return apistatus.From("delete snapshot "+id, err)
	}
	failpoint.Reach("snapshot/deleted")
	st.settle(ctx, c)
	st.Sandboxes.Log.InfoContext(ctx, "snapshot deleted", telemetry.Namespace, c.Namespace, telemetry.Name, c.Name)
	return nil
}

// single refuses a name without a tag that several snapshots have.
func (st *Store) single(ctx context.Context, c *barchan.Checkpoint, id string) error {
	name, _ := splitID(c.Namespace, id)
	if nameOf(c).tag == name.tag {
		return nil
	}
	all, err := st.named(ctx, c.Namespace, name.name)
	if err == nil && len(all) > 1 {
		err = apistatus.Refuse(errs.ErrConflict, "there are %d snapshots of the name %q; name one by its tag, as in %q", len(all), name.name, c.SnapshotID())
	}
	return err
}

// settle waits until the cache shows a deletion.
func (st *Store) settle(ctx context.Context, c *barchan.Checkpoint) {
	ctx, cancel := context.WithTimeout(ctx, st.Sandboxes.SettleTimeout)
	defer cancel()
	_, err := st.Cache.WaitCheckpoint(ctx, client.ObjectKeyFromObject(c), func(now *barchan.Checkpoint) (bool, error) {
		return now == nil || now.UID != c.UID || now.DeletionTimestamp != nil, nil
	})
	if err != nil && !errors.Is(err, context.Canceled) {
		st.Sandboxes.Log.WarnContext(ctx, "cache does not show a deletion yet", telemetry.Namespace, c.Namespace, telemetry.Name, c.Name, telemetry.Error, err)
	}
}
