package controllers

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// awaitsOrigin reports whether a sandbox must wait for its checkpoint: it is not ready, or holds secrets
// that the sandbox may not read. The status then has the reason. A missing or failed checkpoint is an
// errs.ErrInvalid. A sandbox that has run no longer needs its checkpoint.
func (r *sandboxReconciler) awaitsOrigin(ctx context.Context, s *agents.Sandbox) (waits bool, err error) {
	if r.Origins == nil || s.Spec.Barchan == nil || s.Spec.Barchan.Restore == nil || sandbox.HasRun(s) || s.Spec.OperatingMode == agents.ModeSuspended {
		return false, nil
	}
	c, err := r.origin(ctx, types.NamespacedName{Namespace: s.Namespace, Name: s.Spec.Barchan.Restore.CheckpointName})
	switch {
	case err != nil:
		return false, err
	case c.Status.Phase != barchan.CheckpointReady:
		return true, r.writeStatus(ctx, s, waitingStatus(s, "waits for checkpoint "+c.Name))
	case !holdsSecrets(c):
		return false, nil
	case !r.ForkSecrets && !pool.AllowsSecrets(s):
		return true, r.refuseSecrets(ctx, s)
	}
	return false, r.markSecrets(ctx, s, c.Status.Source.OwnVariables)
}

// origin reads the checkpoint that a sandbox starts from. If the cache shows it as missing or failed, the API
// server decides, because such an error ends the sandbox.
func (r *sandboxReconciler) origin(ctx context.Context, key types.NamespacedName) (*barchan.Checkpoint, error) {
	c := &barchan.Checkpoint{}
	err := r.cache.Get(ctx, key, c)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("read checkpoint %s: %w", key, err)
	}
	if err != nil || c.Status.Phase == barchan.CheckpointFailed {
		c = &barchan.Checkpoint{}
		err = r.Client.Get(ctx, key, c)
	}
	switch {
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("%s: there is no checkpoint %q in namespace %s: %w", originField, key.Name, key.Namespace, errs.ErrInvalid)
	case err != nil:
		return nil, fmt.Errorf("read checkpoint %s: %w: %w", key, errs.ErrUnavailable, err)
	case c.Status.Phase == barchan.CheckpointFailed:
		return nil, fmt.Errorf("%s: checkpoint %q has failed: %s: %w", originField, key.Name, ReasonOf(c.Status.Conditions, barchan.ConditionReady), errs.ErrInvalid)
	}
	return c, nil
}

const originField = "spec.barchan.restore.checkpointName"

// holdsSecrets reports whether a checkpoint has variables of its source's claim that others may not read.
func holdsSecrets(c *barchan.Checkpoint) bool {
	return c.Status.Source != nil && c.Status.Source.Secrets
}

// refuseSecrets writes to the status why a sandbox is not started, and which setting allows it.
func (r *sandboxReconciler) refuseSecrets(ctx context.Context, s *agents.Sandbox) error {
	why := fmt.Sprintf("%s: checkpoint %q holds environment variables that its sandbox was created with, and this one would get them; "+
		"allow it by spec.barchan.fork.secrets: Allow of this sandbox, or for this one alone by its annotation %s: \"true\", or for all by the server's setting forkSecrets",
		originField, s.Spec.Barchan.Restore.CheckpointName, pool.AnnotationAllowSecrets)
	status := waitingStatus(s, why)
	setFailure(s, status, sandbox.ReasonSecrets, why, false)
	if _, recorded := sandbox.RefusedSecrets(s); !recorded {
		if r.Events != nil {
			r.Events.Eventf(s, nil, corev1.EventTypeWarning, sandbox.ReasonSecrets, "Run", "%s", why)
		}
		r.Log.InfoContext(ctx, "start from checkpoint with secrets refused", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name)
	}
	return r.writeStatus(ctx, s, status)
}

// markSecrets marks a sandbox as holding another claim's variables before it starts, so that sandboxes
// started from it are checked too. own is passed to pool.BindEnv.
func (r *sandboxReconciler) markSecrets(ctx context.Context, s *agents.Sandbox, own bool) error {
	if pool.BoundEnv(s) && (own || !pool.OwnEnv(s)) {
		return nil
	}
	pool.BindEnv(s, own)
	if err := r.Client.Update(ctx, s); err != nil {
		return fmt.Errorf("mark sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	return nil
}

// ready enqueues waiting sandboxes when their checkpoint is deleted, or changes its phase or its secrets.
func (r *sandboxReconciler) ready(from crcache.Cache) source.Source {
	enqueue := func(ctx context.Context, c *barchan.Checkpoint, q Queue) {
		waiting, err := r.Origins.RestoringFrom(ctx, client.ObjectKeyFromObject(c))
		if err != nil {
			r.Log.ErrorContext(ctx, "cannot list sandboxes of checkpoint", telemetry.Namespace, c.Namespace, telemetry.Name, c.Name, telemetry.Error, err)
		}
		for i := range waiting {
			if !sandbox.HasRun(&waiting[i]) {
				q.Add(RequestFor(&waiting[i]))
			}
		}
	}
	return Watch(from, &barchan.Checkpoint{}, func(ctx context.Context, old, now *barchan.Checkpoint, q Queue) {
		switch {
		case now == nil:
			enqueue(ctx, old, q)
		case old == nil && now.Status.Phase == barchan.CheckpointReady,
			old != nil && (old.Status.Phase != now.Status.Phase || holdsSecrets(old) != holdsSecrets(now)):
			enqueue(ctx, now, q)
		}
	})
}
