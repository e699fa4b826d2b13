package manager

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

// MaxForks is the most that one request may make.
const MaxForks = 100

// forkTTL deletes a fork's checkpoint if the server ends before it has done so.
const forkTTL = 10 * time.Minute

// ForkRequest says how often to multiply which sandbox.
type ForkRequest struct {
	// ID of the sandbox, which must run.
	Namespace, ID string
	// Count is from 1 to MaxForks.
	Count int
	// Timeout is the time to live of each, counted from the moment that it is ready.
	Timeout time.Duration
	// AllowSecrets lets the forks have the variables that the source was created with.
	AllowSecrets bool
	// Metadata and Env are added to the source's own; programs that run already know nothing of Env.
	Metadata, Env map[string]string
}

// Forked is one fork: a sandbox, or why there is none.
type Forked struct {
	Sandbox Sandbox
	Err     error
}

// Fork multiplies a running sandbox, with its processes, memory and files. The source goes on, and keeps
// its ID and its end. Each fork has an identity of its own and fails by itself; an error says that none
// was tried. If ctx ends, those that are not ready are removed. The result has an entry for each, in order.
func (m *Manager) Fork(ctx context.Context, req ForkRequest) ([]Forked, error) {
	var all []Forked
	err := m.ForkEach(ctx, req, func(n int, one Forked) {
		if all == nil {
			all = make([]Forked, req.Count)
		}
		all[n] = one
	})
	return all, err
}

// ForkEach is Fork that tells of each fork, by its place, as soon as it is ready or has failed, in
// whatever order. It is told of one at a time, before ForkEach returns, and of none before an error.
func (m *Manager) ForkEach(ctx context.Context, req ForkRequest, tell func(n int, one Forked)) (err error) {
	start := time.Now()
	defer func() { m.observe(opFork, start, err) }()
	s, err := m.forkable(ctx, &req)
	if err != nil {
		return err
	}
	forks := m.newForks(ctx, &req, s, start)
	defer forks.release()
	if !forks.any() {
		forks.start(ctx, m, "", tell)
		return nil
	}
	c := newCheckpoint(s, false, forkTTL)
	c.Labels[barchan.LabelPurpose] = barchan.PurposeFork
	c.Name = nameLike(s.Name + "-fork")
	defer m.dropCheckpoint(ctx, c)
	if _, err := m.capture(ctx, c); err != nil {
		return err
	}
	failpoint.Reach("fork/captured")
	forks.start(ctx, m, c.Name, tell)
	failpoint.Reach("fork/started")
	m.log.InfoContext(ctx, "sandbox forked", telemetry.Sandbox, sandbox.IDOf(s.UID), telemetry.Namespace, s.Namespace,
		telemetry.Name, s.Name, "forks", req.Count, telemetry.Duration, time.Since(start))
	return nil
}

// forkable finds the source, and refuses what can never become a fork.
func (m *Manager) forkable(ctx context.Context, req *ForkRequest) (*agents.Sandbox, error) {
	if req.Count < 1 || req.Count > MaxForks {
		return nil, apistatus.Refuse(errs.ErrInvalid, "count: must be from 1 to %d", MaxForks)
	}
	if err := errors.Join(m.checkTimeout(req.Timeout), checkEnv(req.Env)); err != nil {
		return nil, err
	}
	if err := m.cfg.Gate.Err(); err != nil {
		return nil, err
	}
	s, err := m.findLive(ctx, req.Namespace, req.ID)
	if err != nil {
		return nil, err
	}
	switch phase := sandbox.PhaseOf(s); {
	case s.Spec.OperatingMode == agents.ModeSuspended:
		return nil, isPaused(req.ID)
	case phase != sandbox.Running:
		return nil, apistatus.Refuse(errs.ErrConflict, "Sandbox %q is %s; it can be forked while it runs", req.ID, phase)
	}
	return s, m.mayShare(originOf(s), s.Spec.Barchan, req.AllowSecrets, "Sandbox \""+req.ID+"\"")
}

// originOf is what a fork takes over from its source.
func originOf(s *agents.Sandbox) *origin {
	return &origin{
		shutdown: s.Spec.ShutdownPolicy, secrets: pool.BoundEnv(s), own: pool.OwnEnv(s),
		template: s.Annotations[agents.AnnotationTemplateRef], templateName: s.Annotations[pool.AnnotationTemplateName], templateID: s.Annotations[pool.AnnotationTemplateID],
		templateNamespace: s.Annotations[pool.AnnotationTemplateNamespace],
	}
}

// forks are those of one request, in order.
type forks []fork

type fork struct {
	create *createOp
	made   *agents.Sandbox
	err    error
}

// newForks reserves what the forks will use; those for which there is no room have failed.
func (m *Manager) newForks(ctx context.Context, req *ForkRequest, s *agents.Sandbox, start time.Time) forks {
	metadata := map[string]string{}
	if s.Spec.Barchan != nil {
		maps.Copy(metadata, s.Spec.Barchan.Metadata)
	}
	maps.Copy(metadata, req.Metadata)
	all := make(forks, req.Count)
	for i := range all {
		c := &createOp{m: m, start: start, CreateRequest: &CreateRequest{
			Namespace: req.Namespace, Timeout: req.Timeout, Env: req.Env, Metadata: metadata, Secure: s.Spec.AgentSecured(),
		}}
		policies := s.Spec.Barchan.DeepCopy()
		if policies == nil {
			policies = &agents.BarchanSpec{}
		}
		c.startFrom(originOf(s), s.Spec.SandboxBlueprint.DeepCopy(), policies, cmp.Or(s.Annotations[agents.AnnotationTemplateRef], s.Name))
		all[i] = fork{create: c, err: c.claim.Reserve(ctx)}
	}
	return all
}

func (f forks) any() bool {
	for i := range f {
		if f[i].err == nil {
			return true
		}
	}
	return false
}

// start makes all that have room, at once, tells of each when it is ready or has failed, and returns
// when all have been told of.
func (f forks) start(ctx context.Context, m *Manager, checkpoint string, tell func(n int, one Forked)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	var refused []int
	ended := make(chan int, len(f)) // who listens slowly holds up no fork
	for i := range f {
		if f[i].err != nil {
			refused = append(refused, i)
			continue
		}
		f[i].create.origin.restore.CheckpointName = checkpoint
		wg.Go(func() {
			defer func() { ended <- i }()
			f[i].made, f[i].err = m.takeCold(ctx, f[i].create)
			if f[i].err == nil {
				m.cfg.Routes.Apply(f[i].made)
			}
		})
	}
	for _, i := range refused {
		tell(i, f[i].result(m))
	}
	for range len(f) - len(refused) {
		i := <-ended
		tell(i, f[i].result(m))
	}
}

// release gives back the room of those that have not come to be.
func (f forks) release() {
	for i := range f {
		if f[i].made == nil {
			f[i].create.claim.Release()
		}
	}
}

func (f *fork) result(m *Manager) Forked {
	if f.made == nil {
		return Forked{Err: f.err}
	}
	return Forked{Sandbox: m.view(f.made), Err: f.err}
}
