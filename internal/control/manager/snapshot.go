package manager

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
)

// Snapshot is what was kept of a sandbox, for others to start from. Behind it is a Checkpoint.
type Snapshot struct {
	// ID is "<name>:<tag>", by which it is asked for; Names has the same with the team before it.
	ID    string
	Names []string
	// Object is the Checkpoint's name.
	Namespace, Object string
	// SandboxID is the source, TemplateID and TemplateName what that was made of, empty for none.
	SandboxID                sandbox.ID
	TemplateID, TemplateName string
	Content                  barchan.CheckpointContent
	// Size is in bytes on disk, and MemorySize that part of it which is memory.
	Size, MemorySize int64
	// Secrets says that it holds what the claim of its source brought.
	Secrets   bool
	CreatedAt time.Time
	// ExpiresAt is zero for one that is kept until it is deleted.
	ExpiresAt time.Time
}

// SnapshotRequest says what to keep of which sandbox.
type SnapshotRequest struct {
	Namespace string
	// ID of the sandbox.
	ID string
	// Name is a name, or "<name>:<tag>". Default name: the template's; default tag: one that is new.
	Name string
	// FilesOnly leaves out the memory.
	FilesOnly bool
	// TTL after which it is deleted; 0: never. At least a second.
	TTL time.Duration
}

// Snapshot keeps a sandbox as it is now, and returns when that is durable. One that runs goes on
// afterwards, one that is paused sleeps on. If ctx ends before, the work goes on, and what comes of
// it is listed.
func (m *Manager) Snapshot(ctx context.Context, req SnapshotRequest) (_ Snapshot, err error) {
	start := time.Now()
	defer func() { m.observe(opSnapshot, start, err) }()
	if req.TTL != 0 && req.TTL < time.Second {
		return Snapshot{}, apistatus.Refuse(errs.ErrInvalid, "ttl: must be 1 second or more, or left out to keep the snapshot until it is deleted")
	}
	name, err := parseName(req.Namespace, req.Name)
	if err != nil {
		return Snapshot{}, err
	}
	if err := m.cfg.Gate.Err(); err != nil {
		return Snapshot{}, err
	}
	s, err := m.findLive(ctx, req.Namespace, req.ID)
	if err != nil {
		return Snapshot{}, err
	}
	if err := hasBegun(s); err != nil {
		return Snapshot{}, err
	}
	c := newCheckpoint(s, req.FilesOnly, req.TTL)
	name.orElse(s).label(c)
	done, err := m.capture(ctx, c)
	if err != nil {
		return Snapshot{}, err
	}
	v := viewSnapshot(done)
	m.log.InfoContext(ctx, "snapshot made", telemetry.Sandbox, v.SandboxID, telemetry.Namespace, v.Namespace,
		telemetry.Name, v.Object, telemetry.Duration, time.Since(start))
	return v, nil
}

// hasBegun refuses a sandbox that has nothing to keep yet.
func hasBegun(s *agents.Sandbox) error {
	if sandbox.PhaseOf(s) != sandbox.Paused && !sandbox.Started(s) {
		return apistatus.Refuse(errs.ErrConflict, "Sandbox %q is still starting", sandbox.IDOf(s.UID))
	}
	return nil
}

// newCheckpoint is one of a sandbox that is not written yet, and has no name.
func newCheckpoint(s *agents.Sandbox, filesOnly bool, ttl time.Duration) *barchan.Checkpoint {
	c := &barchan.Checkpoint{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:   s.Namespace,
			Labels:      map[string]string{barchan.LabelSandbox: string(sandbox.IDOf(s.UID)), agents.LabelCreatedBy: CreatedBy},
			Annotations: map[string]string{barchan.AnnotationCreatedAt: exactly()},
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

// capture writes a checkpoint and returns it once it is durable. One that fails is removed.
func (m *Manager) capture(ctx context.Context, c *barchan.Checkpoint) (*barchan.Checkpoint, error) {
	err := m.objects.Create(ctx, c)
	if apierrors.IsAlreadyExists(err) {
		return nil, errs.Public(apistatus.From("create checkpoint", err), fmt.Sprintf("name: a snapshot %q exists already; choose another name or tag, or none", called(c)))
	}
	if err != nil {
		return nil, apistatus.From("create checkpoint", err)
	}
	failpoint.Reach("snapshot/written")
	done, err := m.awaitCapture(ctx, c, m.cfg.CaptureTimeout)
	if errors.Is(err, errCapture) {
		m.dropCheckpoint(ctx, c)
	}
	return done, err
}

// errCapture says that there is no checkpoint, and that there will be none.
var errCapture = errors.New("the checkpoint failed")

// awaitCapture waits until a checkpoint is ready, or cannot become so.
func (m *Manager) awaitCapture(ctx context.Context, c *barchan.Checkpoint, limit time.Duration) (*barchan.Checkpoint, error) {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	waitingFor := ""
	done, err := m.cache.WaitCheckpoint(bounded, client.ObjectKeyFromObject(c), func(now *barchan.Checkpoint) (bool, error) {
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

// called is the ID of a snapshot, or the name of a checkpoint that no API shows as one.
func called(c *barchan.Checkpoint) string { return cmp.Or(c.SnapshotID(), c.Name) }

// waitReason is what the controller of a checkpoint says about one that is not ready.
func waitReason(c *barchan.Checkpoint) string {
	ready := meta.FindStatusCondition(c.Status.Conditions, barchan.ConditionReady)
	if ready == nil || ready.Status == metav1.ConditionTrue || ready.Message == "" {
		return ""
	}
	return ": " + ready.Message
}

// dropCheckpoint deletes a checkpoint that nobody is to have, even if the caller has gone away.
func (m *Manager) dropCheckpoint(ctx context.Context, c *barchan.Checkpoint) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	err := m.objects.Delete(ctx, c, client.Preconditions{UID: &c.UID})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		m.log.WarnContext(ctx, "checkpoint that nobody needs could not be deleted", telemetry.Namespace, c.Namespace, telemetry.Name, c.Name, telemetry.Error, err)
	}
}

func viewSnapshot(c *barchan.Checkpoint) Snapshot {
	v := Snapshot{
		ID: c.SnapshotID(), Names: []string{c.Namespace + "/" + c.SnapshotID()},
		Namespace: c.Namespace, Object: c.Name, SandboxID: sandbox.ID(c.Labels[barchan.LabelSandbox]),
		Content: c.Status.Content, CreatedAt: createdAt(c),
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
