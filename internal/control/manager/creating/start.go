package creating

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/claiming"
	"github.com/barchan-dev/barchan/internal/control/manager/idempotency"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/manager/volumes"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// warmTries bounds the members of one create whose agents cannot be reached.
const warmTries = 2

// errUnbound reports a claimed member that could not be used and was removed.
var errUnbound = errors.New("the member could not be made its claim's")

// createOp is one create in progress; it is its claim's owner.
type createOp struct {
	cr *Creator
	*Request
	// asked is when the request came, start when its create began; they differ by the wait for the quota.
	asked, start time.Time

	digest idempotency.Digest
	claim  *claiming.Claim
	pools  []extensions.SandboxWarmPool
	// mounts are the resolved VolumeMounts.
	mounts []sandbox.VolumeMount
	// origin is the checkpoint that the sandbox starts from; nil for a template's.
	origin *origin
	// try numbers the names of a cold start.
	try int
	// wasOpen reports that the agent of the member required no token before the claim.
	wasOpen bool
}

// claim claims a member or starts a sandbox of a template, and returns it when it is ready.
func (cr *Creator) claim(ctx context.Context, c *createOp, template types.NamespacedName) (*agents.Sandbox, error) {
	c.claim = cr.Claims.Begin(c.Namespace, template, c)
	if err := c.claim.Resolve(ctx); err != nil {
		return nil, err
	}
	if err := c.findPools(ctx, template); err != nil {
		return nil, err
	}
	if err := cr.awaitQuota(ctx, c); err != nil {
		return nil, err
	}
	for try := 0; len(c.pools) > 0 && try < warmTries; try++ {
		s, err := cr.claimWarm(ctx, c)
		if err == nil {
			return s, nil
		}
		if errors.Is(err, picker.ErrNone) {
			break
		}
		if !errors.Is(err, errUnbound) {
			return nil, err
		}
		if err := cr.awaitQuota(ctx, c); err != nil {
			return nil, err
		}
	}
	return cr.startCold(ctx, c)
}

// awaitQuota refuses a sandbox whose pauses a cluster or the namespace's quota would, and waits for the rest of the quota if the request may. The
// time of the create counts from then on.
func (cr *Creator) awaitQuota(ctx context.Context, c *createOp) error {
	var policies *agents.BarchanSpec
	if b := c.claim.Template().Spec.Barchan; b != nil {
		policies = b.Sandbox
	}
	policies = c.barchanSpec(policies)
	if policies.OnTimeout == agents.TimeoutPause {
		if err := cr.Sandboxes.CheckPause(policies, "autoPause", "autoPauseMemory"); err != nil {
			return err
		}
	}
	if err := cr.Sandboxes.Quota.CheckAutoPause(ctx, c.Namespace, policies); err != nil {
		return err
	}
	if c.QueueTimeout <= 0 {
		return nil
	}
	if err := c.claim.Await(ctx, c.QueueTimeout-time.Since(c.asked)); err != nil {
		return err
	}
	c.start = time.Now()
	err := cr.Sandboxes.Gate.Err() // it was asked before the wait
	if err != nil {
		c.claim.Release()
	}
	return err
}

// findPools finds the template's pools, those with most ready members first.
func (c *createOp) findPools(ctx context.Context, template types.NamespacedName) error {
	pools, err := c.cr.Cache.PoolsOf(ctx, c.Namespace, template)
	if err != nil {
		return fmt.Errorf("look up the pools of template %s: %w", template, err)
	}
	c.pools = slices.DeleteFunc(pools, func(p extensions.SandboxWarmPool) bool { return p.DeletionTimestamp != nil })
	revision := c.claim.Template().Revision
	slices.SortStableFunc(c.pools, func(a, b extensions.SandboxWarmPool) int {
		return cmp.Compare(c.cr.Picker.Ready(b.UID, template, revision), c.cr.Picker.Ready(a.UID, template, revision))
	})
	return nil
}

// Resolved implements [claiming.Owner].
func (c *createOp) Resolved(t claiming.Template, err error) error {
	if errors.Is(err, errs.ErrNotFound) || (err == nil && !templates.Usable(t.SandboxTemplate, c.Namespace)) {
		return templates.NotFound(c.Template)
	}
	if err != nil {
		return nil //nolint:nilerr // the caller has the error
	}
	var restore *agents.RestoreSource
	if b := t.Spec.Barchan; b != nil && b.Sandbox != nil {
		if err := c.checkAccess(b.Sandbox); err != nil {
			return err
		}
		restore = b.Sandbox.Restore
	}
	if len(c.mounts) == 0 {
		return nil
	}
	return c.checkMountable(&t.Spec.SandboxBlueprint, restore)
}

// checkMountable refuses volumes for a sandbox that starts from memory, whose kernel has no mounts but those that it had.
func (c *createOp) checkMountable(b *agents.SandboxBlueprint, restore *agents.RestoreSource) error {
	if len(c.mounts) > 0 && restore != nil && !restore.FilesOnly {
		return apistatus.Refuse(errs.ErrInvalid, "volumeMounts: %q starts from memory, with what it had mounted when that was taken; use a template without a start command, or a snapshot with memory: false", c.Template)
	}
	return volumes.Conflict(&b.PodTemplate.Spec, c.mounts)
}

// Warm implements [claiming.Owner].
func (c *createOp) Warm() bool { return c.origin == nil && len(c.mounts) == 0 }

// claimWarm claims a member and binds its agent. Its errors are a picker.ErrNone, errUnbound, and those that
// end the create.
func (cr *Creator) claimWarm(ctx context.Context, c *createOp) (_ *agents.Sandbox, err error) {
	ctx, end := telemetry.StartSpan(ctx, "claim member")
	defer func() { end(err) }()
	s, err := cr.pick(ctx, c)
	if errors.Is(err, picker.ErrNone) {
		return nil, err
	}
	cr.Sandboxes.Observe(ctx, "claim", c.start, err)
	if err != nil {
		c.claim.Release()
		return nil, err
	}
	if c.Network != nil { // before the first request to the agent, so that no packet bypasses the policy
		err = cr.Sandboxes.AwaitNetwork(ctx, s, cr.BindTimeout)
	}
	if err == nil {
		err = cr.bind(ctx, c, s)
	}
	if err == nil {
		failpoint.Reach("claim/bound")
		err = ctx.Err()
	}
	if err == nil {
		return s, nil
	}
	cr.Sandboxes.Discard(ctx, s)
	c.claim.Release()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("claim sandbox %s: %w: %w", sandbox.IDOf(s.UID), errs.ErrTimeout, ctx.Err())
	}
	cr.Sandboxes.Log.WarnContext(ctx, "warm sandbox not bound; retrying", telemetry.Sandbox, sandbox.IDOf(s.UID),
		telemetry.Namespace, s.Namespace, telemetry.Name, s.Name, telemetry.Error, err)
	return nil, fmt.Errorf("%w: %w", errUnbound, err)
}

// pick claims a member of the first pool that has one. A wait that is too long is a picker.ErrNone.
func (cr *Creator) pick(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	bounded, cancel := context.WithTimeout(ctx, cr.StartTimeout/2)
	defer cancel()
	for i := range c.pools {
		s, err := c.claim.TakeWarm(bounded, c.pools[i].UID)
		switch {
		case err == nil:
			return s, nil
		case bounded.Err() != nil && ctx.Err() == nil:
			return nil, fmt.Errorf("%w: %w", picker.ErrNone, err)
		case !errors.Is(err, picker.ErrNone):
			return nil, fmt.Errorf("claim a member of pool %s/%s: %w", c.pools[i].Namespace, c.pools[i].Name, err)
		}
	}
	return nil, picker.ErrNone
}

// bind sends the create's variables and token to the agent of a claimed member, if there are any.
func (cr *Creator) bind(ctx context.Context, c *createOp, s *agents.Sandbox) error {
	if !c.Binds() {
		return nil
	}
	req := envd.InitRequest{EnvVars: c.Env}
	switch {
	case !c.Secure && !c.wasOpen:
		req.Open = true
	case c.Secure && c.wasOpen:
		req.AccessToken = cr.Sandboxes.Tokens.Agent(sandbox.IDOf(s.UID))
	}
	return cr.Claims.Bind(ctx, s, req)
}

// startCold starts a sandbox of the template as it is now, or of the checkpoint.
func (cr *Creator) startCold(ctx context.Context, c *createOp) (_ *agents.Sandbox, err error) {
	ctx, end := telemetry.StartSpan(ctx, "cold start")
	defer func() { end(err) }()
	made, complete, err := cr.write(ctx, c)
	cr.Sandboxes.Observe(ctx, "claim", c.start, err)
	if err == nil && !complete {
		made, err = cr.finish(ctx, made, c.Timeout)
	}
	if err != nil {
		c.claim.Release()
		return nil, err
	}
	return made, nil
}

// write writes a new sandbox. complete reports that an earlier create of the same request has made it.
func (cr *Creator) write(ctx context.Context, c *createOp) (s *agents.Sandbox, complete bool, err error) {
	const tries = 4
	for c.try = 1; ; c.try++ {
		s, err := c.claim.Create(ctx, true)
		if err == nil {
			failpoint.Reach("create/written")
			return s, false, nil
		}
		if s == nil {
			return nil, false, err
		}
		if apierrors.IsNotFound(err) {
			return nil, false, errs.Public(apistatus.From("create sandbox", err), fmt.Sprintf("the team's namespace %q does not exist", c.Namespace))
		}
		if !apierrors.IsAlreadyExists(err) || c.try == tries {
			return nil, false, apistatus.From("create sandbox", err)
		}
		if c.digest == (idempotency.Digest{}) {
			continue
		}
		if other, err := cr.reuse(ctx, c, client.ObjectKeyFromObject(s)); other != nil || err != nil {
			return other, true, err
		}
	}
}

// finish waits until a new sandbox is ready and sets its end. It removes a sandbox that fails.
func (cr *Creator) finish(ctx context.Context, made *agents.Sandbox, timeout time.Duration) (*agents.Sandbox, error) {
	ready, err := cr.awaitStart(ctx, made)
	if err == nil {
		ready, err = cr.setShutdownTime(ctx, ready, timeout)
		failpoint.Reach("create/timed")
	}
	if err != nil {
		cr.Sandboxes.Discard(ctx, made)
		return nil, err
	}
	return ready, nil
}

// awaitStart waits until a new sandbox is ready or has failed.
func (cr *Creator) awaitStart(ctx context.Context, made *agents.Sandbox) (*agents.Sandbox, error) {
	bounded, cancel := context.WithTimeout(ctx, cr.StartTimeout)
	defer cancel()
	id, waitingFor := sandbox.IDOf(made.UID), ""
	ready, err := cr.Sandboxes.Cache.WaitSandbox(bounded, client.ObjectKeyFromObject(made), func(s *agents.Sandbox) (bool, error) {
		if s == nil || s.UID != made.UID {
			return false, killed(id)
		}
		if reason, message, failed := sandbox.Failure(s); failed {
			return false, apistatus.Refuse(errs.ErrInvalid, "the sandbox cannot start: %s: %s", reason, message)
		}
		if sandbox.DeadForGood(s) {
			return false, killed(id)
		}
		if err := heldUp(s); err != nil {
			return false, err
		}
		condition := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady)
		if err := cr.Sandboxes.Gate.Err(); err != nil && sandbox.PhaseOf(s) != sandbox.Running && failing(condition) {
			return false, err // the node would retry until the gate opens
		}
		waitingFor = waitReason(condition)
		return sandbox.PhaseOf(s) == sandbox.Running, nil
	})
	if refused := cr.Sandboxes.Gate.Err(); refused != nil && errors.Is(err, errs.ErrTimeout) && ctx.Err() == nil {
		return nil, fmt.Errorf("wait for the start of sandbox %s: %w", id, refused)
	}
	if errors.Is(err, errs.ErrTimeout) && ctx.Err() == nil {
		return nil, errs.Public(err, fmt.Sprintf("the sandbox was not ready within %s%s", cr.StartTimeout, waitingFor))
	}
	if err != nil {
		return nil, fmt.Errorf("wait for the start of sandbox %s: %w", id, err)
	}
	return ready, nil
}

// heldUp returns why a sandbox starts only after a change by an operator or a tenant, for which no create waits.
func heldUp(s *agents.Sandbox) error {
	if message, lacks := sandbox.LacksImage(s); lacks {
		return apistatus.Refuse(errs.ErrUnavailable, "the sandbox cannot start: %s", message)
	}
	if message, lacks := sandbox.LacksObject(s); lacks {
		return apistatus.Refuse(errs.ErrUnavailable, "the sandbox cannot start: %s", message)
	}
	if message, refused := sandbox.RefusedSecrets(s); refused {
		return apistatus.Refuse(errs.ErrForbidden, "the sandbox cannot start: %s", message)
	}
	return nil
}

func killed(id sandbox.ID) error {
	return apistatus.Refuse(errs.ErrConflict, "Sandbox %q was killed while it was starting", id)
}

// failing reports whether the last try to start a sandbox failed.
func failing(ready *metav1.Condition) bool {
	return ready != nil && ready.Reason == agents.ReasonReconcilerError
}

// waitReason is the controller's message on a sandbox that is not ready.
func waitReason(ready *metav1.Condition) string {
	if ready == nil || ready.Status == metav1.ConditionTrue || ready.Message == "" {
		return ""
	}
	return ": " + ready.Reason + ": " + ready.Message
}

// setShutdownTime sets the end of a ready sandbox, unless it is right to the second, and records that its create is
// complete.
func (cr *Creator) setShutdownTime(ctx context.Context, ready *agents.Sandbox, timeout time.Duration) (*agents.Sandbox, error) {
	end := sandboxes.Deadline(timeout)
	set, err := cr.Sandboxes.Change(ctx, ready, func(s *agents.Sandbox) (changed bool, err error) {
		_, changed = s.Annotations[pool.AnnotationPending]
		delete(s.Annotations, pool.AnnotationPending)
		was := s.Spec.ShutdownTime
		if s.Spec.OperatingMode != agents.ModeSuspended && (was == nil || end.Sub(was.Time).Abs() > time.Second) {
			s.Spec.ShutdownTime, changed = end, true
		}
		return changed, nil
	})
	if errors.Is(err, errs.ErrNotFound) {
		return nil, killed(sandbox.IDOf(ready.UID))
	}
	return set, err
}
