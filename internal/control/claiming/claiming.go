// Package claiming gives a claim its sandbox, in one sequence for API creates and SandboxClaims: it
// reserves the namespace's quota, reads the template from the API server, leases and writes a warm
// member or creates a sandbox for a cold start, and hands the agent what comes with the claim. What is
// claimed or created, and by which rules, is the [Owner]'s.
//
// It neither waits for a sandbox to start nor removes one: the caller does, and owns what a method
// has returned, with its quota. It starts no goroutine, and a Claim is one goroutine's, so it has no lock.
//
// The template is read again after every wait, before a write that depends on it: a claim never gets a
// sandbox of a revision that was not the template's at some moment after the claim began.
package claiming

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// BindTimeout bounds a request to one agent.
const BindTimeout = 5 * time.Second

// Creator writes new objects to the API server.
type Creator interface {
	Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error
}

// Reader reads what claims depend on; package cache has it.
type Reader interface {
	// CurrentTemplate returns a template, with its revision, by a read of the API server that began after
	// the call.
	CurrentTemplate(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, string, error)
	// Checkpoint reads the informer cache.
	Checkpoint(ctx context.Context, key types.NamespacedName) (*barchan.Checkpoint, error)
}

// Binder sends a request to the agent of a running sandbox.
type Binder interface {
	Bind(ctx context.Context, s *agents.Sandbox, req envd.InitRequest) error
	// Wake has the agent of a ready member run, so that it answers a Bind at once. It does not wait.
	Wake(ctx context.Context, member *agents.Sandbox)
}

// Config is what New needs.
type Config struct {
	// Creator, Reader, Picker and Quota are required.
	Creator Creator
	Reader  Reader
	Picker  *picker.Picker
	Quota   *quota.Quotas
	// Binder; nil reaches no agent.
	Binder Binder
	// Assumed gets the sandboxes that claims have written. Nil keeps none.
	Assumed *assumecache.Sandboxes
	// BindTimeout bounds a request to one agent. Default BindTimeout.
	BindTimeout time.Duration
}

// Claimer begins claims. It is safe for concurrent use.
type Claimer struct{ cfg Config }

// New returns a claimer.
func New(cfg Config) (*Claimer, error) {
	if cfg.Creator == nil || cfg.Reader == nil || cfg.Picker == nil || cfg.Quota == nil {
		return nil, fmt.Errorf("claiming: Creator, Reader, Picker and Quota are required: %w", errs.ErrInvalid)
	}
	cfg.BindTimeout = cmp.Or(cfg.BindTimeout, BindTimeout)
	return &Claimer{cfg}, nil
}

// Template is a template as it was last read, with its revision. The object is not changed.
type Template struct {
	*extensions.SandboxTemplate
	Revision string
}

// Owner is the API create or the SandboxClaim that a sandbox is for. Its methods are called by the
// methods of its Claim alone, and change no state of others.
type Owner interface {
	// Resolved takes the template as it is now, or the error of its read, and returns why the owner gets no
	// sandbox of it.
	Resolved(t Template, err error) error
	// Warm reports whether a member of a warm pool will do.
	Warm() bool
	// Adopt returns a member as the owner's, built on pool.Adopt.
	Adopt(member *agents.Sandbox, t Template) *agents.Sandbox
	// Binds reports whether the owner sends a request to the agent of the member that it has adopted last.
	Binds() bool
	// New returns the sandbox of a cold start.
	New(t Template) *agents.Sandbox
}

// Claim is one claim in progress.
type Claim struct {
	c         *Claimer
	namespace string
	key       types.NamespacedName
	owner     Owner

	template Template
	fresh    bool // no write and no wait came after the read of template
	fixed    bool // template is not in the API server
	wrote    bool
	hold     *quota.Reservation
	waits    pool.Waits
}

// Begin starts a claim of an owner in a namespace on the template of a key.
func (c *Claimer) Begin(namespace string, key types.NamespacedName, owner Owner) *Claim {
	return &Claim{c: c, namespace: namespace, key: key, owner: owner}
}

// BeginFrom starts a claim on a template that is made up, such as that of a checkpoint's source.
func (c *Claimer) BeginFrom(t *extensions.SandboxTemplate, namespace string, owner Owner) *Claim {
	return &Claim{c: c, namespace: namespace, owner: owner, template: Template{SandboxTemplate: t}, fixed: true}
}

// Template returns the template as it was last read.
func (x *Claim) Template() Template { return x.template }

// Wrote reports whether a member may have been written for the claim.
func (x *Claim) Wrote() bool { return x.wrote }

// Resolve reads the template as it is now. The first write after it reads it no more, unless it waits.
func (x *Claim) Resolve(ctx context.Context) error {
	if x.fixed {
		return nil
	}
	t, revision, err := x.c.cfg.Reader.CurrentTemplate(ctx, x.key)
	read := Template{t, revision}
	if err := x.owner.Resolved(read, err); err != nil {
		return err
	}
	if err != nil {
		return fmt.Errorf("read template %s: %w", x.key, err)
	}
	x.template, x.fresh = read, true
	return nil
}

// refresh resolves the template unless the last read is still unused.
func (x *Claim) refresh(ctx context.Context) error {
	if !x.fresh {
		if err := x.Resolve(ctx); err != nil {
			return err
		}
	}
	x.fresh = false
	return nil
}

// Reserve reserves what the sandbox will use, once for all tries of the claim. A refusal is an
// errs.ErrExhausted.
func (x *Claim) Reserve(ctx context.Context) (err error) {
	if x.hold != nil {
		return nil
	}
	x.hold, err = x.c.cfg.Quota.Hold(ctx, quota.Request{Namespace: x.namespace, Size: x.Size()})
	return err
}

// Await is Reserve, but waits for room, at most as long as patience, behind the requests of the namespace
// that wait already.
func (x *Claim) Await(ctx context.Context, patience time.Duration) (err error) {
	if x.hold != nil {
		return nil
	}
	began := time.Now()
	x.hold, err = x.c.cfg.Quota.Await(ctx, quota.Request{Namespace: x.namespace, Size: x.Size()}, patience)
	x.waits.Quota += time.Since(began)
	x.fresh = false
	return err
}

// Size returns what the sandbox will use, by the template as it was last read.
func (x *Claim) Size() quota.Size { return x.c.cfg.Quota.SizeOf(&x.template.Spec.PodTemplate.Spec) }

// Waited adds what the owner has waited for before; the claim's own waits are counted.
func (x *Claim) Waited(w pool.Waits) { x.waits = x.waits.Add(w) }

// Use gives the claim a reservation that its owner has got by a [quota.Waiter].
func (x *Claim) Use(hold *quota.Reservation) { x.hold = hold }

// Release returns the reserved quota: the claim has no sandbox, or has lost it.
func (x *Claim) Release() {
	x.hold.Release()
	x.hold = nil
}

// TakeWarm makes the next ready member of a pool the owner's, and returns it as it was written. It waits
// until ctx ends while a member that is being created is left for the claim.
//
// The error is a picker.ErrNone where a cold start is faster; an errs.ErrExhausted by the quota; an
// errs.ErrTimeout when ctx ended; or the owner's.
func (x *Claim) TakeWarm(ctx context.Context, warmPool types.UID) (*agents.Sandbox, error) {
	if err := x.refresh(ctx); err != nil {
		return nil, timely(ctx, err)
	}
	pick := x.c.cfg.Picker.Begin(warmPool, x.key)
	for {
		if !x.owner.Warm() {
			return nil, picker.ErrNone
		}
		if err := x.Reserve(ctx); err != nil {
			return nil, err
		}
		revision := x.template.Revision
		began := time.Now()
		lease, err := pick.Reserve(ctx, revision)
		if pick.Waited() {
			x.waits.Member += time.Since(began)
		}
		if pick.Waited() && (err == nil || errors.Is(err, picker.ErrNone)) {
			unread := x.Resolve(ctx)
			if unread != nil || x.template.Revision != revision || !x.owner.Warm() {
				lease.Release()
				if unread != nil {
					return nil, timely(ctx, unread)
				}
				continue
			}
		}
		if err != nil {
			return nil, err
		}
		s, err := x.commit(ctx, lease)
		if !errors.Is(err, picker.ErrLost) {
			return s, err
		}
	}
}

// timely adds the kind of a timeout to an error that the end of ctx has caused.
func timely(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return fmt.Errorf("claim a sandbox: %w: %w", errs.ErrTimeout, err)
}

func (x *Claim) commit(ctx context.Context, lease *picker.Lease) (*agents.Sandbox, error) {
	member := lease.Sandbox()
	if member == nil {
		lease.Release()
		return nil, picker.ErrLost
	}
	x.hold.For(member.Name)
	want := x.owner.Adopt(member, x.template)
	x.waits.Mark(want)
	telemetry.Stamp(ctx, want)
	x.wrote, x.fresh = true, false
	if x.c.cfg.Binder != nil && x.owner.Binds() {
		x.c.cfg.Binder.Wake(ctx, member)
	}
	s, err := lease.Commit(ctx, want)
	if err == nil {
		x.assume(ctx, s)
	}
	return s, err
}

// Create writes the owner's sandbox for a cold start, of the template as it is now, and returns it. With
// warmUp it starts from the checkpoint of the template's warm-up, if there is one.
//
// An error of the write is the API server's own.
func (x *Claim) Create(ctx context.Context, warmUp bool) (*agents.Sandbox, error) {
	if err := x.refresh(ctx); err != nil {
		return nil, err
	}
	if err := x.Reserve(ctx); err != nil {
		return nil, err
	}
	s := x.owner.New(x.template)
	if warmUp && x.owner.Warm() {
		if err := x.startWarm(ctx, s); err != nil {
			return nil, err
		}
	}
	x.hold.For(s.Name)
	x.waits.Mark(s)
	telemetry.Stamp(ctx, s)
	x.wrote = true
	if err := x.c.cfg.Creator.Create(ctx, s); err != nil {
		return s, err
	}
	x.assume(ctx, s)
	return s, nil
}

// startWarm has a sandbox that is not written yet start from the checkpoint of its template's warm-up.
func (x *Claim) startWarm(ctx context.Context, s *agents.Sandbox) error {
	if !pool.KeepsWarmMemory(x.template.SandboxTemplate) {
		return nil
	}
	key := client.ObjectKey{Namespace: x.namespace, Name: pool.WarmName(x.template.Name, x.template.Revision)}
	c, err := x.c.cfg.Reader.Checkpoint(ctx, key)
	if errors.Is(err, errs.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find the warm-up checkpoint of template %s: %w", x.key, err)
	}
	pool.StartWarm(s, pool.WarmCheckpoint(x.template.SandboxTemplate, x.template.Revision, []barchan.Checkpoint{*c}))
	return nil
}

func (x *Claim) assume(ctx context.Context, s *agents.Sandbox) {
	if x.c.cfg.Assumed != nil {
		x.c.cfg.Assumed.Assume(ctx, s)
	}
}

// Bind hands the agent of a claimed sandbox what comes with its claim. A repeated request is harmless.
func (c *Claimer) Bind(ctx context.Context, s *agents.Sandbox, req envd.InitRequest) error {
	if c.cfg.Binder == nil {
		return fmt.Errorf("bind sandbox %s: agents cannot be reached here: %w", s.Name, errs.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(ctx, c.cfg.BindTimeout)
	defer cancel()
	return c.cfg.Binder.Bind(ctx, s, req)
}
