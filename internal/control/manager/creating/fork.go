package creating

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
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
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/snapshots"
)

// MaxForks bounds the forks of one request.
const MaxForks = 100

// forkTTL deletes a fork's checkpoint if the server ends before it has.
const forkTTL = 10 * time.Minute

// ForkRequest selects a running sandbox and the number of its forks.
type ForkRequest struct {
	Namespace, ID string
	// Key is the name of the API key, for the objects; empty: none.
	Key string
	// Count is from 1 to MaxForks.
	Count int
	// Timeout is the time to live of each, counted from the moment that it is ready.
	Timeout time.Duration
	// AllowSecrets lets the forks have the variables that the source was created with.
	AllowSecrets bool
	// Metadata and Env are added to the source's own; running programs do not get Env.
	Metadata, Env map[string]string
}

// Forked is one fork: a sandbox or an error.
type Forked struct {
	Sandbox sandboxes.Sandbox
	Err     error
}

// Fork copies a running sandbox, with its processes, memory and files. The source continues, and keeps its ID and
// its end. Each fork has its own identity and its own error; the returned error means that none was tried. If ctx
// ends, forks that are not ready are removed. The result has an entry for each, in order.
func (cr *Creator) Fork(ctx context.Context, req ForkRequest) ([]Forked, error) {
	var all []Forked
	err := cr.ForkEach(ctx, req, func(n int, one Forked) {
		if all == nil {
			all = make([]Forked, req.Count)
		}
		all[n] = one
	})
	return all, err
}

// ForkEach is Fork that calls each with a fork and its index once it is ready or has failed, in any order. The
// calls are serial and end before ForkEach returns; there is none before an error.
func (cr *Creator) ForkEach(ctx context.Context, req ForkRequest, each func(n int, one Forked)) (err error) {
	start := time.Now()
	defer func() { cr.Sandboxes.Observe(ctx, "fork", start, err) }()
	s, err := cr.forkable(ctx, &req)
	if err != nil {
		return err
	}
	if err := cr.Sandboxes.Quota.CheckAutoPause(ctx, req.Namespace, s.Spec.Barchan); err != nil {
		return err
	}
	forks := cr.newForks(ctx, &req, s, start)
	defer forks.release()
	if !slices.ContainsFunc(forks, func(f fork) bool { return f.err == nil }) {
		forks.start(ctx, cr, "", each)
		return nil
	}
	c := snapshots.NewCheckpoint(s, false, forkTTL)
	c.Labels[barchan.LabelPurpose] = barchan.PurposeFork
	c.Name = nameLike(s.Name + "-fork")
	defer cr.Snapshots.Drop(ctx, c)
	if _, err := cr.Snapshots.Capture(ctx, c); err != nil {
		return err
	}
	failpoint.Reach("fork/captured")
	forks.start(ctx, cr, c.Name, each)
	failpoint.Reach("fork/started")
	cr.Sandboxes.Log.InfoContext(ctx, "sandbox forked", telemetry.Sandbox, sandbox.IDOf(s.UID), telemetry.Namespace, s.Namespace,
		telemetry.Name, s.Name, "forks", req.Count, telemetry.Duration, time.Since(start))
	return nil
}

// forkable finds the source, and refuses one that cannot be forked.
func (cr *Creator) forkable(ctx context.Context, req *ForkRequest) (*agents.Sandbox, error) {
	if err := cr.Sandboxes.CheckCheckpoints(); err != nil {
		return nil, err
	}
	if req.Count < 1 || req.Count > MaxForks {
		return nil, apistatus.Refuse(errs.ErrInvalid, "count: must be from 1 to %d", MaxForks)
	}
	if err := errors.Join(cr.Sandboxes.CheckTimeout(req.Timeout), checkEnv(req.Env)); err != nil {
		return nil, err
	}
	if err := cr.Sandboxes.Gate.Err(); err != nil {
		return nil, err
	}
	s, err := cr.Sandboxes.FindLive(ctx, req.Namespace, req.ID)
	if err != nil {
		return nil, err
	}
	switch phase := sandbox.PhaseOf(s); {
	case s.Spec.OperatingMode == agents.ModeSuspended:
		return nil, sandboxes.IsPaused(req.ID)
	case phase != sandbox.Running:
		return nil, apistatus.Refuse(errs.ErrConflict, "Sandbox %q is %s; it can be forked while it runs", req.ID, phase)
	}
	if err := cr.checkVolumes(ctx, req.Namespace, &s.Spec.SandboxBlueprint); err != nil {
		return nil, err
	}
	return s, cr.mayShare(originOf(s), s.Spec.Barchan, req.AllowSecrets, "Sandbox \""+req.ID+"\"")
}

// originOf is what a fork inherits from its source.
func originOf(s *agents.Sandbox) *origin {
	return &origin{
		shutdown: s.Spec.ShutdownPolicy, secrets: pool.BoundEnv(s), own: pool.OwnEnv(s),
		template: s.Annotations[agents.AnnotationTemplateRef], templateName: s.Annotations[pool.AnnotationTemplateName], templateID: s.Annotations[pool.AnnotationTemplateID],
		templateNamespace: s.Annotations[pool.AnnotationTemplateNamespace], forkedFrom: string(sandbox.IDOf(s.UID)),
	}
}

// forks are those of one request, in order.
type forks []fork

type fork struct {
	create *createOp
	made   *agents.Sandbox
	err    error
}

// newForks reserves the quota of the forks; those without room have failed.
func (cr *Creator) newForks(ctx context.Context, req *ForkRequest, s *agents.Sandbox, start time.Time) forks {
	metadata := map[string]string{}
	if s.Spec.Barchan != nil {
		maps.Copy(metadata, s.Spec.Barchan.Metadata)
	}
	maps.Copy(metadata, req.Metadata)
	all := make(forks, req.Count)
	for i := range all {
		c := &createOp{cr: cr, start: start, Request: &Request{
			Namespace: req.Namespace, Key: req.Key, Timeout: req.Timeout, Env: req.Env, Metadata: metadata, Secure: s.Spec.AgentSecured(),
		}}
		policies := cmp.Or(s.Spec.Barchan.DeepCopy(), &agents.BarchanSpec{})
		c.startFrom(originOf(s), s.Spec.SandboxBlueprint.DeepCopy(), policies, cmp.Or(s.Annotations[agents.AnnotationTemplateRef], s.Name))
		all[i] = fork{create: c, err: c.claim.Reserve(ctx)}
	}
	return all
}

// start starts all forks that have room, at once, and calls each with every fork.
func (f forks) start(ctx context.Context, cr *Creator, checkpoint string, each func(n int, one Forked)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ended := make(chan int, len(f)) // a slow reader delays no fork
	for i := range f {
		if f[i].err != nil {
			ended <- i
			continue
		}
		f[i].create.origin.restore.CheckpointName = checkpoint
		wg.Go(func() {
			defer func() { ended <- i }()
			f[i].made, f[i].err = cr.startCold(ctx, f[i].create)
			if f[i].err == nil {
				cr.Sandboxes.Routes.Apply(f[i].made)
			}
		})
	}
	for range f {
		i := <-ended
		each(i, f[i].result(cr))
	}
}

// release returns the quota of the forks that failed.
func (f forks) release() {
	for i := range f {
		if f[i].made == nil {
			f[i].create.claim.Release()
		}
	}
}

func (f *fork) result(cr *Creator) Forked {
	if f.made == nil {
		return Forked{Err: f.err}
	}
	return Forked{Sandbox: cr.Sandboxes.View(f.made), Err: f.err}
}
