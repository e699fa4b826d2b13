// Package snapshots creates, finds, lists and deletes the snapshots of tenants, and captures sandboxes for forks.
// It copies no data: it writes Checkpoint objects and waits for their controller. It has no lock and starts no
// goroutine.
package snapshots

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
)

// Snapshot is a Checkpoint as its tenant sees it.
type Snapshot struct {
	// ID is "<name>:<tag>"; Names has the same with the team before it.
	ID    string
	Names []string
	// Object is the Checkpoint's name.
	Namespace, Object string
	// SandboxID is the source, TemplateID and TemplateName that sandbox's template, empty for none.
	SandboxID                sandbox.ID
	TemplateID, TemplateName string
	Content                  barchan.CheckpointContent
	// Size is in bytes on disk, and includes MemorySize.
	Size, MemorySize int64
	// Secrets reports variables from the claim of its source.
	Secrets   bool
	CreatedAt time.Time
	// ExpiresAt is zero for one without a TTL.
	ExpiresAt time.Time
}

// Request selects a sandbox and what to keep of it.
type Request struct {
	Namespace string
	// ID of the sandbox.
	ID string
	// Name is a name, or "<name>:<tag>". Default name: the template's; default tag: a new one.
	Name string
	// FilesOnly leaves out the memory.
	FilesOnly bool
	// TTL after which it is deleted; 0: never. At least a second.
	TTL time.Duration
}

// Create captures a sandbox and returns when the snapshot is durable. A running sandbox continues, a paused one
// stays paused. If ctx ends before, the capture continues, and lists show its result.
func (st *Store) Create(ctx context.Context, req Request) (_ Snapshot, err error) {
	start := time.Now()
	defer func() { st.Sandboxes.Observe(ctx, "snapshot", start, err) }()
	if err := st.Sandboxes.CheckCheckpoints(); err != nil {
		return Snapshot{}, err
	}
	if req.TTL != 0 && req.TTL < time.Second {
		return Snapshot{}, apistatus.Refuse(errs.ErrInvalid, "ttl: must be 1 second or more, or left out to keep the snapshot until it is deleted")
	}
	name, err := parseName(req.Namespace, req.Name)
	if err != nil {
		return Snapshot{}, err
	}
	if err := st.Sandboxes.Gate.Err(); err != nil {
		return Snapshot{}, err
	}
	if err := st.checkName(ctx, req.Namespace, name); err != nil {
		return Snapshot{}, err
	}
	if err := st.Sandboxes.Quota.CheckStored(ctx, req.Namespace); err != nil {
		return Snapshot{}, err
	}
	s, err := st.Sandboxes.FindLive(ctx, req.Namespace, req.ID)
	if err != nil {
		return Snapshot{}, err
	}
	if sandbox.PhaseOf(s) != sandbox.Paused && !sandbox.Started(s) {
		return Snapshot{}, apistatus.Refuse(errs.ErrConflict, "Sandbox %q is still starting", sandbox.IDOf(s.UID))
	}
	c := NewCheckpoint(s, req.FilesOnly, req.TTL)
	name.orElse(s).label(c)
	release, err := st.Sandboxes.Quota.Add(ctx, c)
	if err != nil {
		return Snapshot{}, err
	}
	done, err := st.Capture(ctx, c)
	if err != nil {
		release()
		return Snapshot{}, err
	}
	v := view(done)
	st.Sandboxes.Log.InfoContext(ctx, "snapshot made", telemetry.Sandbox, v.SandboxID, telemetry.Namespace, v.Namespace,
		telemetry.Name, v.Object, telemetry.Duration, time.Since(start))
	return v, nil
}

// checkName refuses the name of a snapshot that is a template's.
func (st *Store) checkName(ctx context.Context, namespace string, name fullName) error {
	if name.name == "" || name.tag == "" || name.tag == barchan.DefaultTag {
		return nil
	}
	_, err := st.Sandboxes.Templates.Resolve(ctx, namespace, namespace+"/"+name.name+":"+name.tag)
	switch {
	case errors.Is(err, errs.ErrNotFound):
		return nil
	case err != nil:
		return err
	}
	return apistatus.Refuse(errs.ErrConflict, "name: the template %q has the tag %q; choose another tag, or none", name.name, name.tag)
}

// NewCheckpoint returns a checkpoint of a sandbox, without a name, to be written.
func NewCheckpoint(s *agents.Sandbox, filesOnly bool, ttl time.Duration) *barchan.Checkpoint {
	c := &barchan.Checkpoint{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:   s.Namespace,
			Labels:      map[string]string{barchan.LabelSandbox: string(sandbox.IDOf(s.UID)), agents.LabelCreatedBy: sandboxes.CreatedBy},
			Annotations: map[string]string{barchan.AnnotationCreatedAt: barchan.ExactNow()},
			Finalizers:  []string{barchan.NodeFinalizer},
		},
		Spec: barchan.CheckpointSpec{SandboxName: s.Name, KeepRunning: true},
	}
	if filesOnly {
		c.Spec.Content = barchan.ContentFiles
	}
	if ttl > 0 {
		c.Spec.TTLSeconds = new(int32(min(ttl/time.Second, 1<<31-1)))
	}
	barchan.SetCheckpointDefaults(c)
	return c
}

// Capture writes a checkpoint and returns it once it is durable. It removes a failed one.
func (st *Store) Capture(ctx context.Context, c *barchan.Checkpoint) (*barchan.Checkpoint, error) {
	err := st.Sandboxes.Objects.Create(ctx, c)
	if apierrors.IsAlreadyExists(err) {
		return nil, errs.Public(apistatus.From("create checkpoint", err), fmt.Sprintf("name: a snapshot %q exists already; choose another name or tag, or none", called(c)))
	}
	if err != nil {
		return nil, apistatus.From("create checkpoint", err)
	}
	failpoint.Reach("snapshot/written")
	done, err := st.Await(ctx, c, st.CaptureTimeout)
	if errors.Is(err, errCapture) {
		st.Drop(ctx, c)
	}
	return done, err
}

// errCapture reports a permanent failure.
var errCapture = errors.New("the checkpoint failed")

// Await waits until a checkpoint is ready or has failed.
func (st *Store) Await(ctx context.Context, c *barchan.Checkpoint, limit time.Duration) (*barchan.Checkpoint, error) {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	waitingFor := ""
	done, err := st.Cache.WaitCheckpoint(bounded, client.ObjectKeyFromObject(c), func(now *barchan.Checkpoint) (bool, error) {
		if now == nil || now.UID != c.UID || now.DeletionTimestamp != nil {
			return false, apistatus.Refuse(errs.ErrConflict, "snapshot %q was deleted before it was ready", called(c))
		}
		if now.Status.Phase == barchan.CheckpointFailed {
			return false, errs.Public(fmt.Errorf("%w: %w", errCapture, errs.ErrConflict), "the sandbox cannot be captured"+waitReason(now))
		}
		waitingFor = waitReason(now)
		return now.Status.Phase == barchan.CheckpointReady, nil
	})
	if errors.Is(err, errs.ErrTimeout) && ctx.Err() == nil {
		return nil, errs.Public(err, fmt.Sprintf("snapshot %q was not ready within %s%s; it is listed when it is", called(c), limit, waitingFor))
	}
	if err != nil {
		return nil, fmt.Errorf("wait for checkpoint %s/%s: %w", c.Namespace, c.Name, err)
	}
	return done, nil
}

// called is the ID of a snapshot, or the name of a checkpoint that is none.
func called(c *barchan.Checkpoint) string { return cmp.Or(c.SnapshotID(), c.Name) }

// waitReason is the controller's message on a checkpoint that is not ready.
func waitReason(c *barchan.Checkpoint) string {
	ready := meta.FindStatusCondition(c.Status.Conditions, barchan.ConditionReady)
	if ready == nil || ready.Status == metav1.ConditionTrue || ready.Message == "" {
		return ""
	}
	return ": " + ready.Message
}

// Drop deletes a checkpoint that has no user, even if the caller has left.
func (st *Store) Drop(ctx context.Context, c *barchan.Checkpoint) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), sandboxes.UndoTimeout)
	defer cancel()
	err := st.Sandboxes.Objects.Delete(ctx, c, client.Preconditions{UID: &c.UID})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		st.Sandboxes.Log.WarnContext(ctx, "unused checkpoint not deleted", telemetry.Namespace, c.Namespace, telemetry.Name, c.Name, telemetry.Error, err)
	}
}

func view(c *barchan.Checkpoint) Snapshot {
	v := Snapshot{
		ID: c.SnapshotID(), Names: []string{c.Namespace + "/" + c.SnapshotID()},
		Namespace: c.Namespace, Object: c.Name, SandboxID: sandbox.ID(c.Labels[barchan.LabelSandbox]),
		Content: c.Status.Content, CreatedAt: barchan.CreatedAt(c),
	}
	if c.Status.Size != nil {
		v.Size = c.Status.Size.Value()
	}
	if c.Status.MemorySize != nil {
		v.MemorySize = c.Status.MemorySize.Value()
	}
	if ttl := c.Spec.TTLSeconds; ttl != nil && c.Status.CompletedAt != nil {
		v.ExpiresAt = c.Status.CompletedAt.Add(time.Duration(*ttl) * time.Second).UTC()
	}
	if from := c.Status.Source; from != nil {
		v.SandboxID, v.TemplateID, v.TemplateName, v.Secrets = sandbox.ID(from.ID), from.TemplateID, from.TemplateName, from.Secrets
	}
	return v
}
