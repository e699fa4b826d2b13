package manager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
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
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// warmTries is how many members a claim takes whose agents cannot be reached.
	warmTries = 2
	// bindTimeout bounds what one agent may take to hear of its claim, and the node to set its rules.
	bindTimeout = 5 * time.Second
	// maxOrphans is how many adopted members may wait for their removal.
	maxOrphans = 1024
)

// errUnbound says that a member was taken, could not be used, and is removed.
var errUnbound = errors.New("the member could not be made its claim's")

// createOp is one create on its way to a sandbox.
type createOp struct {
	m *Manager
	*CreateRequest
	start time.Time
	mark  requestDigest
	key   types.NamespacedName // of the template
	pools []extensions.SandboxWarmPool
	// origin is what the sandbox starts from, if not from a template.
	origin *origin
	// warm is the checkpoint of the template's warm-up that a cold start begins from; empty: none.
	warm string

	// mu guards what the picker may ask for at any time, even after it was done for us.
	mu      sync.Mutex
	blue    resolvedTemplate   // +checklocks:mu
	unused  bool               // nobody has asked for the revision in blue; +checklocks:mu
	wasOpen bool               // the member's agent asked for no token; +checklocks:mu
	hold    *quota.Reservation // +checklocks:mu
}

// resolvedTemplate is a template as it was last read, with its revision.
type resolvedTemplate struct {
	template *extensions.SandboxTemplate // not changed once it is here
	revision string
}

// take decides where a sandbox comes from, and returns it when it is ready. All claims of the API
// go through it.
func (m *Manager) take(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	if err := c.look(ctx); err != nil {
		return nil, err
	}
	for try := 0; m.cfg.Picker != nil && len(c.pools) > 0 && try < warmTries; try++ {
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

// look reads the template as it is now, and finds its pools, the fullest first.
func (c *createOp) look(ctx context.Context) error {
	if err := c.read(ctx); err != nil {
		return err
	}
	pools, err := c.m.cache.PoolsOf(ctx, c.Namespace, c.key)
	if err != nil {
		return fmt.Errorf("look up the pools of template %s: %w", c.key, err)
	}
	c.pools = slices.DeleteFunc(pools, func(p extensions.SandboxWarmPool) bool {
		return p.DeletionTimestamp != nil
	})
	if p := c.m.cfg.Picker; p != nil && len(c.pools) > 1 {
		revision := c.asRead().revision
		slices.SortStableFunc(c.pools, func(a, b extensions.SandboxWarmPool) int {
			return cmp.Compare(p.Ready(b.UID, revision), p.Ready(a.UID, revision))
		})
	}
	return nil
}

// read takes note of the template as it is now.
func (c *createOp) read(ctx context.Context) error {
	t, revision, err := c.m.cache.CurrentTemplate(ctx, c.key)
	if errors.Is(err, errs.ErrNotFound) || (err == nil && !usable(t, c.Namespace)) {
		return noTemplate(c.Template)
	}
	if err != nil {
		return fmt.Errorf("read template %s: %w", c.key, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.blue, c.unused = resolvedTemplate{t, revision}, true
	return nil
}

func (c *createOp) asRead() resolvedTemplate {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.blue
}

// current is the revision that may be handed out. The first to ask gets what the claim began with.
func (c *createOp) current(ctx context.Context) (string, error) {
	c.mu.Lock()
	unused := c.unused
	c.mu.Unlock()
	if !unused {
		if err := c.read(ctx); err != nil {
			return "", err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unused = false
	return c.blue.revision, nil
}

// adopt is a member as the claim's own.
func (c *createOp) adopt(member *agents.Sandbox) *agents.Sandbox {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hold.For(member.Name)
	c.wasOpen = !member.Spec.AgentSecured()
	s := pool.Adopt(member, nil)
	pool.Refresh(s, c.blue.template)
	c.own(s, deadline(c.Timeout))
	return s
}

// reserve asks for what a sandbox uses.
func (m *Manager) reserve(ctx context.Context, namespace string, pod *corev1.PodSpec, paused bool) (*quota.Reservation, error) {
	if m.cfg.Quota == nil {
		return nil, nil //nolint:nilnil // a nil reservation is one of nothing
	}
	return m.cfg.Quota.Hold(ctx, quota.Request{Namespace: namespace, Size: m.cfg.Quota.SizeOf(pod), Paused: paused})
}

// vacated tells the quota what it will hear from the cache in a moment: newer is nil if s is gone.
func (m *Manager) vacated(s, newer *agents.Sandbox) {
	if m.cfg.Quota != nil {
		m.cfg.Quota.Observe(s, newer)
	}
}

// holds makes sure that the claim has what its sandbox will use.
func (c *createOp) holds(ctx context.Context) error {
	if c.holding() != nil {
		return nil
	}
	hold, err := c.m.reserve(ctx, c.Namespace, &c.asRead().template.Spec.PodTemplate.Spec, false)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hold = hold
	return err
}

func (c *createOp) holding() *quota.Reservation {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hold
}

// letGo gives back what the claim has reserved: it has no sandbox, or has lost it.
func (c *createOp) letGo() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hold.Release()
	c.hold = nil
}

// takeWarm adopts a member and tells its agent. Its kinds of failure are picker.ErrNone, errUnbound
// and what ends the claim.
func (m *Manager) takeWarm(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	if err := c.holds(ctx); err != nil {
		return nil, err
	}
	s, err := m.pick(ctx, c)
	if errors.Is(err, picker.ErrNone) {
		return nil, err
	}
	m.observe(opClaim, c.start, err)
	if err != nil {
		c.letGo()
		return nil, err
	}
	m.ahead.note(ctx, m, s)
	if c.Network != nil { // before it hears anything: nothing may leave by a way that is about to be shut
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
	c.letGo()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("claim sandbox %s: %w: %w", sandbox.IDOf(s.UID), errs.ErrTimeout, ctx.Err())
	}
	m.log.WarnContext(ctx, "warm sandbox cannot be made its claim's; taking another", telemetry.Sandbox, sandbox.IDOf(s.UID),
		telemetry.Namespace, s.Namespace, telemetry.Name, s.Name, telemetry.Error, err)
	return nil, fmt.Errorf("%w: %w", errUnbound, err)
}

// pick adopts a member of the first pool that has one. A wait that is too long is a picker.ErrNone.
func (m *Manager) pick(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	bounded, cancel := context.WithTimeout(ctx, m.cfg.StartTimeout/2)
	defer cancel()
	for i := range c.pools {
		s, err := m.cfg.Picker.Pick(bounded, picker.Request{Pool: c.pools[i].UID, Current: c.current, Adopt: c.adopt})
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

// bind tells the agent of an adopted member what it cannot know, if there is anything.
func (m *Manager) bind(ctx context.Context, c *createOp, s *agents.Sandbox) error {
	c.mu.Lock()
	wasOpen := c.wasOpen
	c.mu.Unlock()
	req := envd.InitRequest{EnvVars: c.Env}
	switch {
	case !c.Secure && !wasOpen:
		req.Open = true
	case c.Secure && wasOpen:
		req.AccessToken = m.cfg.Tokens.Agent(sandbox.IDOf(s.UID))
	case len(c.Env) == 0:
		return nil
	}
	return m.tellAgent(ctx, s, req)
}

func (m *Manager) tellAgent(ctx context.Context, s *agents.Sandbox, req envd.InitRequest) error {
	ctx, cancel := context.WithTimeout(ctx, m.bindIn)
	defer cancel()
	return m.cfg.Binder.Bind(ctx, s, req)
}

// takeCold starts a sandbox of the template as it is now.
func (m *Manager) takeCold(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	if !c.fresh() {
		if err := c.read(ctx); err != nil {
			return nil, err
		}
	}
	if err := c.holds(ctx); err != nil {
		return nil, err
	}
	if err := c.warmUp(ctx); err != nil {
		c.letGo()
		return nil, err
	}
	made, joined, err := m.make(ctx, c)
	m.observe(opClaim, c.start, err)
	if err != nil {
		c.letGo()
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
		c.letGo()
		return nil, err
	}
	return ready, nil
}

// warmUp finds what spares the sandbox the template's warm-up, if anything does.
func (c *createOp) warmUp(ctx context.Context) error {
	now := c.asRead()
	if c.origin != nil || !pool.KeepsWarmMemory(now.template) {
		return nil
	}
	all, err := c.m.cache.Checkpoints(ctx, c.Namespace)
	if err != nil {
		return fmt.Errorf("look up the warm-up of template %s: %w", c.key, err)
	}
	c.warm = pool.WarmCheckpoint(now.template, now.revision, all)
	return nil
}

// fresh reports whether the template is as the claim found it when it began, without a wait since.
func (c *createOp) fresh() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.unused
}

// Orphaned takes a member that was adopted for a caller who had gone: it is removed by [Manager.Run]. It
// does not block. What belongs to another than this API is left alone.
func (m *Manager) Orphaned(s *agents.Sandbox) {
	if s.Labels[agents.LabelCreatedBy] != CreatedBy || s.Labels[agents.LabelClaimUID] != "" {
		return
	}
	select {
	case m.orphans <- s.DeepCopy():
	default: // its timeout, which stands in it, will end it
	}
}

// Run removes orphans until ctx is done. Nothing else of a manager needs it.
func (m *Manager) Run(ctx context.Context) error {
	defer m.ahead.waitForAll(ctx)
	for {
		select {
		case s := <-m.orphans:
			m.discard(ctx, s)
		case <-ctx.Done():
			return nil
		}
	}
}
