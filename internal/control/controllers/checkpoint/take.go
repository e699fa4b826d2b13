package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// verdict is the decision for the current state of a source.
type verdict int

const (
	capture verdict = iota
	suspendFirst
	wait   // until it changes
	refuse // final
)

// take captures a source. Each write before the capture is required for crash recovery.
func (r *reconciler) take(ctx context.Context, c *barchan.Checkpoint) error {
	if c.Status.Phase == barchan.CheckpointWriting { // by an earlier attempt, possibly of an earlier process
		got, err := r.Runner.Captured(ctx, refOf(c))
		if err == nil {
			return r.finish(ctx, c, got)
		}
		if !errors.Is(err, errs.ErrNotFound) {
			return fmt.Errorf("query its data on the node: %w", err)
		}
	}
	s := &agents.Sandbox{}
	err := r.Client.Get(ctx, types.NamespacedName{Namespace: c.Namespace, Name: c.Spec.SandboxName}, s)
	if apierrors.IsNotFound(err) {
		return r.fail(ctx, c, fmt.Sprintf("spec.sandboxName: there is no sandbox %q in namespace %s", c.Spec.SandboxName, c.Namespace))
	}
	if err != nil {
		return fmt.Errorf("read sandbox %s: %w", c.Spec.SandboxName, err)
	}
	if r.elsewhere(s.Status.NodeName) {
		return nil
	}
	todo, why := judge(c, s)
	if todo == refuse {
		return r.fail(ctx, c, why)
	}
	if err := r.hold(ctx, c, sandbox.IDOf(s.UID)); err != nil {
		return err
	}
	if todo == suspendFirst {
		if err := r.suspend(ctx, c, s); err != nil {
			return err
		}
	}
	if todo != capture {
		return r.wait(ctx, c, why)
	}
	if err := r.intend(ctx, c, s); err != nil {
		return err
	}
	return r.capture(ctx, c, s)
}

// judge decides whether a sandbox can be captured, with the reason if not.
func judge(c *barchan.Checkpoint, s *agents.Sandbox) (todo verdict, why string) {
	if why = never(c, s); why != "" {
		return refuse, why
	}
	phase, started := sandbox.PhaseOf(s), sandbox.Started(s)
	active := phase == sandbox.Starting || phase == sandbox.Running
	switch {
	case phase == sandbox.Pending, active && !started:
		return wait, fmt.Sprintf("waits for sandbox %s to start", s.Name)
	case phase == sandbox.Resuming:
		return wait, fmt.Sprintf("waits for sandbox %s to run again", s.Name)
	case phase == sandbox.Pausing:
		why, _ = sandbox.SuspendFailure(s)
		return wait, because(fmt.Sprintf("waits for sandbox %s to sleep", s.Name), why)
	case active && !c.Spec.KeepRunning:
		return suspendFirst, fmt.Sprintf("waits for sandbox %s to sleep", s.Name)
	}
	return capture, ""
}

// never returns why a sandbox can never be captured; empty if it can.
func never(c *barchan.Checkpoint, s *agents.Sandbox) string {
	const field = "spec.sandboxName: "
	known := c.Status.Source
	deletes := s.Spec.Barchan != nil && s.Spec.Barchan.Suspend == agents.SuspendDelete
	switch {
	case known != nil && known.UID != "" && known.UID != s.UID:
		return fmt.Sprintf("%ssandbox %s is gone before it was captured; another one has its name", field, s.Name)
	case sandbox.DeadForGood(s):
		return fmt.Sprintf("%ssandbox %s has ended", field, s.Name)
	case pool.MemberOf(s) != "" && !pool.IsInternal(s):
		return fmt.Sprintf("%ssandbox %s is a spare member of a warm pool, which may get an owner any time; claim it first", field, s.Name)
	case deletes && sandbox.Suspended(s):
		return fmt.Sprintf("%ssandbox %s is paused, and its spec.barchan.suspend, Delete, kept nothing to take a checkpoint of; resume it first", field, s.Name)
	case deletes && !c.Spec.KeepRunning:
		return "spec.keepRunning: must be true, for the sandbox's spec.barchan.suspend is Delete, which would leave nothing to take a checkpoint of"
	}
	return ""
}

func because(what, why string) string {
	if why == "" {
		return what
	}
	return what + ": " + why
}

// suspend suspends a source, conditional on the version read, if the checkpoint still waits for it: the cache
// may be stale and the source resumed since the capture.
func (r *reconciler) suspend(ctx context.Context, c *barchan.Checkpoint, s *agents.Sandbox) error {
	now := &barchan.Checkpoint{}
	if err := r.Client.Get(ctx, client.ObjectKeyFromObject(c), now); err != nil {
		return fmt.Errorf("read it: %w", err)
	}
	if now.UID != c.UID || now.ResourceVersion != c.ResourceVersion {
		return apierrors.NewConflict(schema.GroupResource{Group: barchan.GroupVersion.Group, Resource: "checkpoints"}, c.Name, errChanged)
	}
	s.Spec.OperatingMode = agents.ModeSuspended
	if err := r.Client.Update(ctx, s); err != nil {
		return fmt.Errorf("suspend sandbox %s: %w", s.Name, err)
	}
	failpoint.Reach("checkpointobject/suspended")
	return nil
}

var errChanged = errors.New("it differs from the cache")

// intend writes the source to the status before the capture.
func (r *reconciler) intend(ctx context.Context, c *barchan.Checkpoint, s *agents.Sandbox) error {
	source, err := sourceOf(s)
	if err != nil {
		return err
	}
	status := c.Status.DeepCopy()
	status.Phase, status.Source = barchan.CheckpointWriting, source
	notReady(c, status, barchan.ReasonWaiting, "its data are being written")
	if err := r.write(ctx, c, status); err != nil {
		return err
	}
	failpoint.Reach("checkpointobject/intended")
	return nil
}

// capture calls the node and writes the outcome.
func (r *reconciler) capture(ctx context.Context, c *barchan.Checkpoint, s *agents.Sandbox) error {
	began := time.Now()
	got, err := r.Runner.Capture(ctx, sandbox.Capture{
		Checkpoint: refOf(c), Source: sandbox.Ref{Namespace: s.Namespace, Name: s.Name, UID: s.UID}, FilesOnly: c.Spec.Content == barchan.ContentFiles,
	})
	switch {
	case err == nil:
		failpoint.Reach("checkpointobject/captured")
		r.Log.InfoContext(ctx, "checkpoint taken", telemetry.Namespace, c.Namespace, telemetry.Name, c.Name, telemetry.Sandbox, sandbox.IDOf(s.UID),
			telemetry.Duration, time.Since(began), "paused", got.Paused)
		return r.finish(ctx, c, got)
	case ctx.Err() != nil: // shutdown: the next process continues
		return err
	case errors.Is(err, errs.ErrInvalid), errors.Is(err, errs.ErrNotFound), errors.Is(err, errs.ErrForbidden):
		return r.fail(ctx, c, errs.Text(err))
	default:
		return errors.Join(err, r.retry(ctx, c, errs.Text(err)))
	}
}

// sourceOf returns the parts of a sandbox that the status keeps.
func sourceOf(s *agents.Sandbox) (*barchan.CheckpointSource, error) {
	blueprint, err := json.Marshal(s.Spec.SandboxBlueprint)
	if err != nil {
		return nil, fmt.Errorf("encode template of sandbox %s: %w", s.Name, err)
	}
	policies := agents.BarchanSpec{}
	if s.Spec.Barchan != nil {
		policies = *s.Spec.Barchan.DeepCopy()
	}
	// Its own origin and resume mode do not apply to other sandboxes.
	policies.Metadata, policies.Restore, policies.Resume = nil, nil, ""
	kept, err := json.Marshal(policies)
	if err != nil {
		return nil, fmt.Errorf("encode policies of sandbox %s: %w", s.Name, err)
	}
	source := &barchan.CheckpointSource{
		ID: string(sandbox.IDOf(s.UID)), UID: s.UID, Node: s.Status.NodeName,
		TemplateName: s.Annotations[agents.AnnotationTemplateRef], TemplateID: s.Annotations[pool.AnnotationTemplateID],
		TemplateNamespace: s.Annotations[pool.AnnotationTemplateNamespace],
		Blueprint:         runtime.RawExtension{Raw: blueprint}, Policies: runtime.RawExtension{Raw: kept},
	}
	pool.NoteSecrets(source, s)
	return source, nil
}
