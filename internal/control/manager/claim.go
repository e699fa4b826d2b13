package manager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/claiming"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// warmTries is how many members a create takes whose agents cannot be reached.
const warmTries = 2

// errUnbound reports that a member was taken, could not be used, and is removed.
var errUnbound = errors.New("the member could not be made its claim's")

// createOp is one create in progress; it is its claim's owner.
type createOp struct {
	m *Manager
	*CreateRequest
	start  time.Time
	digest requestDigest
	claim  *claiming.Claim
	pools  []extensions.SandboxWarmPool
	// origin is the checkpoint that the sandbox starts from; nil for a template's.
	origin *origin
	// try numbers the names of a cold start.
	try int
	// wasOpen reports that the agent of the member required no token before the claim.
	wasOpen bool
}

// take makes or takes a sandbox of a template, and returns it when it is ready.
func (m *Manager) take(ctx context.Context, c *createOp, template types.NamespacedName) (*agents.Sandbox, error) {
	c.claim = m.claims.Begin(c.Namespace, template, c)
	if err := c.claim.Resolve(ctx); err != nil {
		return nil, err
	}
	if err := c.findPools(ctx, template); err != nil {
		return nil, err
	}
	for try := 0; len(c.pools) > 0 && try < warmTries; try++ {
		s, err := m.takeWarm(ctx, c)
		if err == nil {
			return s, nil
		}
		if errors.Is(err, picker.ErrNone) {
			break
		}
		if !errors.Is(err, errUnbound) {
			return nil, err
		}
	}
	return m.takeCold(ctx, c)
}

// findPools finds the template's pools, the one with most ready members first.
func (c *createOp) findPools(ctx context.Context, template types.NamespacedName) error {
	pools, err := c.m.cache.PoolsOf(ctx, c.Namespace, template)
	if err != nil {
		return fmt.Errorf("look up the pools of template %s: %w", template, err)
	}
	c.pools = slices.DeleteFunc(pools, func(p extensions.SandboxWarmPool) bool {
		return p.DeletionTimestamp != nil
	})
	if p := c.m.cfg.Picker; p != nil && len(c.pools) > 1 {
		revision := c.claim.Template().Revision
		slices.SortStableFunc(c.pools, func(a, b extensions.SandboxWarmPool) int {
			return cmp.Compare(p.Ready(b.UID, revision), p.Ready(a.UID, revision))
		})
	}
	return nil
}

// Resolved implements [claiming.Owner].
func (c *createOp) Resolved(t claiming.Template, err error) error {
	if errors.Is(err, errs.ErrNotFound) || (err == nil && !usable(t.SandboxTemplate, c.Namespace)) {
		return noTemplate(c.Template)
	}
	return nil
}

// Warm implements [claiming.Owner].
func (c *createOp) Warm() bool { return c.origin == nil }

// Adopt implements [claiming.Owner].
func (c *createOp) Adopt(member *agents.Sandbox, t claiming.Template) *agents.Sandbox {
	c.wasOpen = !member.Spec.AgentSecured()
	s := pool.Adopt(member, nil)
	pool.Refresh(s, t.SandboxTemplate)
	c.own(s, deadline(c.Timeout))
	return s
}

// New implements [claiming.Owner].
func (c *createOp) New(t claiming.Template) *agents.Sandbox {
	s := pool.NewSandbox(t.SandboxTemplate, t.Revision, c.Namespace)
	s.Name = nameLike(t.Name)
	if c.digest != (requestDigest{}) {
		s.Name = c.digest.name(c.try)
		s.Annotations[AnnotationIdempotencyPending] = "true"
	}
	if c.origin != nil {
		c.origin.apply(s)
	}
	if len(c.pools) > 0 {
		s.Labels[pool.LabelOrigin] = string(c.pools[0].UID)
	}
	c.own(s, c.m.firstDeadline(c.Timeout))
	return s
}

// reserve reserves what a paused sandbox will use when it is resumed.
func (m *Manager) reserve(ctx context.Context, namespace string, pod *corev1.PodSpec) (*quota.Reservation, error) {
	if m.cfg.Quota == nil {
		return nil, nil //nolint:nilnil // a nil reservation is one of nothing
	}
	return m.cfg.Quota.Hold(ctx, quota.Request{Namespace: namespace, Size: m.cfg.Quota.SizeOf(pod), Paused: true})
}

// vacated gives the quota a change before its event: newer is nil if s is gone.
func (m *Manager) vacated(s, newer *agents.Sandbox) {
	if m.cfg.Quota != nil {
		m.cfg.Quota.Observe(s, newer)
	}
}

// takeWarm takes a member and binds its agent. Its errors are a picker.ErrNone, errUnbound, and those that
// end the create.
func (m *Manager) takeWarm(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	s, err := m.pick(ctx, c)
	if errors.Is(err, picker.ErrNone) {
		return nil, err
	}
	m.observe(opClaim, c.start, err)
	if err != nil {
		c.claim.Release()
		return nil, err
	}
	if c.Network != nil { // before the agent gets a request: no packet may leave by a way that is about to be shut
		err = m.awaitNetwork(ctx, s, m.bindIn)
	}
	if err == nil {
		err = m.bind(ctx, c, s)
	}
	if err == nil {
		failpoint.Reach("claim/bound")
		err = ctx.Err()
	}
	if err == nil {
		return s, nil
	}
	m.discard(ctx, s)
	c.claim.Release()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("claim sandbox %s: %w: %w", sandbox.IDOf(s.UID), errs.ErrTimeout, ctx.Err())
	}
	m.log.WarnContext(ctx, "warm sandbox not bound; taking another", telemetry.Sandbox, sandbox.IDOf(s.UID),
		telemetry.Namespace, s.Namespace, telemetry.Name, s.Name, telemetry.Error, err)
	return nil, fmt.Errorf("%w: %w", errUnbound, err)
}

// pick takes a member of the first pool that has one. A wait that is too long is a picker.ErrNone.
func (m *Manager) pick(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	bounded, cancel := context.WithTimeout(ctx, m.cfg.StartTimeout/2)
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

// bind hands the agent of a taken member what came with the create, if there is anything.
func (m *Manager) bind(ctx context.Context, c *createOp, s *agents.Sandbox) error {
	req := envd.InitRequest{EnvVars: c.Env}
	switch {
	case !c.Secure && !c.wasOpen:
		req.Open = true
	case c.Secure && c.wasOpen:
		req.AccessToken = m.cfg.Tokens.Agent(sandbox.IDOf(s.UID))
	case len(c.Env) == 0:
		return nil
	}
	return m.claims.Bind(ctx, s, req)
}

// takeCold starts a sandbox of the template as it is now.
func (m *Manager) takeCold(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	made, joined, err := m.make(ctx, c)
	m.observe(opClaim, c.start, err)
	if err != nil {
		c.claim.Release()
		return nil, err
	}
	if joined {
		return made, nil
	}
	ready, err := m.awaitStart(ctx, made)
	if err == nil {
		ready, err = m.setShutdownTime(ctx, ready, c.Timeout)
		failpoint.Reach("create/timed")
	}
	if err != nil {
		m.discard(ctx, made)
		c.claim.Release()
		return nil, err
	}
	return ready, nil
}

// Run removes the picker's orphans until ctx is done. Nothing else of a manager needs it.
func (m *Manager) Run(ctx context.Context) error {
	var orphans <-chan *agents.Sandbox
	if m.cfg.Picker != nil {
		orphans = m.cfg.Picker.Orphans()
	}
	for {
		select {
		case s := <-orphans:
			m.removeOrphan(ctx, s)
		case <-ctx.Done():
			return nil
		}
	}
}

// removeOrphan removes a member that was taken for a create of this API. A SandboxClaim finds its own.
func (m *Manager) removeOrphan(ctx context.Context, s *agents.Sandbox) {
	if s.Labels[agents.LabelCreatedBy] == CreatedBy && s.Labels[agents.LabelClaimUID] == "" {
		m.discard(ctx, s)
	}
}
