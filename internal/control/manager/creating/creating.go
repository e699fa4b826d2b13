// Package creating creates sandboxes for tenants: from a template, by a warm member or a cold start; from a
// snapshot; and as forks of a running sandbox. It owns a sandbox until it is ready, and removes it otherwise. The
// rules of quotas, members and templates are package claiming's. It has no lock, and no goroutine of it outlives a
// call.
package creating

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
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
	"github.com/barchan-dev/barchan/internal/control/manager/snapshots"
	"github.com/barchan-dev/barchan/internal/control/manager/volumes"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Cache reads what creates depend on; package cache has it.
type Cache interface {
	claiming.Reader
	// SandboxesByIdempotency finds those with this value of pool.AnnotationIdempotencyKey.
	SandboxesByIdempotency(ctx context.Context, namespace, hash string) ([]*agents.Sandbox, error)
	// PoolsOf lists the warm pools of a template in a namespace, or in all if that is empty.
	PoolsOf(ctx context.Context, namespace string, template types.NamespacedName) ([]extensions.SandboxWarmPool, error)
}

// Creator creates the sandboxes of all tenants. Its exported fields are required except Volumes and ForkSecrets. It is safe for
// concurrent use.
type Creator struct {
	Sandboxes *sandboxes.Store
	Snapshots *snapshots.Store
	// Volumes is nil where there are none; then no create may mount one.
	Volumes *volumes.Service
	Cache   Cache
	Picker  *picker.Picker
	Claims  *claiming.Claimer
	// StartTimeout bounds the wait for a new sandbox to be ready, BindTimeout that for a member's network.
	StartTimeout, BindTimeout time.Duration
	// ForkSecrets allows every start from memory with the variables of a SandboxClaim.
	ForkSecrets bool
	// Hasher hashes idempotency keys.
	Hasher idempotency.Hasher

	inFlight idempotency.Group
}

// Request is a tenant's create. The JSON of its fields is hashed and stored.
type Request struct {
	Namespace string
	// Key is the name of the API key, for the object; empty: none. It does not distinguish requests with an IdempotencyKey.
	Key string `json:"-"`
	// Template is a template's name, alias or ID; or a snapshot's ID or name that no template has.
	Template string
	// Timeout is the time to live, counted from the moment that the sandbox is ready.
	Timeout  time.Duration
	Env      map[string]string
	Metadata map[string]string
	// Secure makes the agent require its token.
	Secure bool
	// OnTimeout, Suspend: empty means the template's.
	OnTimeout agents.TimeoutAction
	Suspend   agents.SuspendMode
	// AutoResume lets traffic wake the sandbox.
	AutoResume bool
	// PublicTraffic: nil means the template's.
	PublicTraffic   *bool
	MaskRequestHost string
	// Network: nil means the template's.
	Network *agents.EgressPolicy
	// FilesOnly omits a snapshot's memory. AllowSecrets allows one with variables of its source's claim. Neither
	// applies to a template.
	FilesOnly    bool `json:",omitempty"`
	AllowSecrets bool `json:",omitempty"`
	// VolumeMounts are the tenant's volumes, each at its path. A sandbox with one is started for the request: members of pools
	// have none, and nothing can be mounted into a running one.
	VolumeMounts []volumes.Mount `json:",omitempty"`
	// IdempotencyKey makes it safe to repeat the request: from 1 to 255 printable ASCII
	// characters, the tenant's own choice. Empty: each request creates a sandbox.
	IdempotencyKey string
	// QueueTimeout is how long the request may wait for the namespace's quota, behind those that wait already; at most
	// MaxQueueTimeout. 0: it is refused at once. It does not distinguish requests with an IdempotencyKey.
	QueueTimeout time.Duration `json:"-"`
}

// MaxQueueTimeout is the longest QueueTimeout.
const MaxQueueTimeout = extensions.MaxQueueTimeout

// Create returns a sandbox once it is ready: a warm member of a pool, else one that it starts, or one from a
// snapshot. A sandbox that does not become ready is removed, and the error has the reason. A quota's refusal is an
// errs.ErrExhausted, the gate's an errs.ErrUnavailable.
//
// With an IdempotencyKey it returns the earlier sandbox of the same request, if that is not dead; the same key on
// another request is an [idempotency.ErrKeyReused]. It then continues even if ctx is done.
func (cr *Creator) Create(ctx context.Context, req Request) (_ sandboxes.Sandbox, err error) {
	start := time.Now()
	ctx, end := telemetry.StartSpan(ctx, "create sandbox")
	defer func() { end(err) }()
	defer func() { cr.Sandboxes.Observe(ctx, "create", start, err) }()
	if err := cr.check(&req); err != nil {
		return sandboxes.Sandbox{}, err
	}
	create := cr.createOnce
	if req.IdempotencyKey == "" {
		create = cr.create
	}
	s, err := create(ctx, &createOp{cr: cr, Request: &req, asked: start, start: start})
	if err != nil {
		return sandboxes.Sandbox{}, err
	}
	return cr.Sandboxes.View(s), nil
}

func (cr *Creator) check(req *Request) error {
	if req.Template == "" {
		return apistatus.Refuse(errs.ErrInvalid, "templateID: must name a template")
	}
	if err := cr.Sandboxes.CheckTimeout(req.Timeout); err != nil {
		return err
	}
	if err := checkEnv(req.Env); err != nil {
		return err
	}
	if err := idempotency.CheckKey(req.IdempotencyKey); err != nil {
		return err
	}
	if req.QueueTimeout < 0 || req.QueueTimeout > MaxQueueTimeout {
		return apistatus.Refuse(errs.ErrInvalid, "Barchan-Queue-Timeout: want from 0 to %d seconds", int64(MaxQueueTimeout/time.Second))
	}
	if req.PublicTraffic != nil && !*req.PublicTraffic && !req.Secure {
		return apistatus.Refuse(errs.ErrInvalid, "network.allowPublicTraffic: false needs a secure sandbox; set secure to true")
	}
	if req.AutoResume && req.Suspend == agents.SuspendFiles {
		return apistatus.Refuse(errs.ErrInvalid, "autoResume: needs the memory to be kept; set autoPauseMemory to true")
	}
	if len(req.VolumeMounts) > 0 && cr.Volumes == nil {
		return apistatus.Refuse(errs.ErrInvalid, "volumeMounts: volumes are not available on a Kubernetes cluster; let the template mount a PersistentVolumeClaim")
	}
	return errors.Join(sandboxes.CheckNetwork(req.Network), volumes.CheckMounts(req.VolumeMounts))
}

func (cr *Creator) create(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	if err := cr.Sandboxes.Gate.Err(); err != nil {
		return nil, err
	}
	s, err := cr.obtain(ctx, c)
	if err != nil {
		return nil, err
	}
	cr.Sandboxes.Routes.Apply(s)
	failpoint.Reach("create/routed")
	cr.Sandboxes.Log.InfoContext(ctx, "sandbox created", telemetry.Sandbox, sandbox.IDOf(s.UID), telemetry.Namespace, s.Namespace,
		telemetry.Name, s.Name, telemetry.Template, c.Template, telemetry.Duration, time.Since(c.start))
	return s, nil
}

// obtain finds the template or the snapshot, and claims or starts a sandbox of it.
func (cr *Creator) obtain(ctx context.Context, c *createOp) (_ *agents.Sandbox, err error) {
	if len(c.VolumeMounts) > 0 {
		if c.mounts, err = cr.Volumes.Resolve(ctx, c.Namespace, c.VolumeMounts); err != nil {
			return nil, err
		}
	}
	t, err := cr.Sandboxes.Templates.Resolve(ctx, c.Namespace, c.Template)
	if err == nil {
		return cr.claim(ctx, c, client.ObjectKeyFromObject(t))
	}
	if !errors.Is(err, errs.ErrNotFound) {
		return nil, err
	}
	snap, err := cr.Snapshots.Find(ctx, c.Namespace, c.Template)
	if errors.Is(err, errs.ErrNotFound) {
		if t, err = cr.Sandboxes.Templates.ResolveUncached(ctx, c.Namespace, c.Template); err != nil {
			return nil, err
		}
		return cr.claim(ctx, c, client.ObjectKeyFromObject(t))
	}
	if err != nil {
		return nil, err
	}
	if err := cr.from(ctx, c, snap); err != nil {
		return nil, err
	}
	if err := cr.awaitQuota(ctx, c); err != nil {
		return nil, err
	}
	return cr.startCold(ctx, c)
}

// createOnce joins the create in progress of the same request, or starts it. It ignores the end of ctx, because
// other callers may wait for the result, and a repeated request gets the sandbox.
func (cr *Creator) createOnce(ctx context.Context, c *createOp) (_ *agents.Sandbox, err error) {
	rest := *c.Request
	rest.IdempotencyKey = ""
	if c.digest, err = cr.Hasher.Of(c.Namespace, c.IdempotencyKey, &rest); err != nil {
		return nil, err
	}
	return cr.inFlight.Do(ctx, c.Namespace, c.digest, func() (*agents.Sandbox, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.QueueTimeout+2*cr.StartTimeout)
		defer cancel()
		s, err := cr.createdBefore(ctx, c)
		if s != nil || err != nil {
			return s, err
		}
		return cr.create(ctx, c)
	})
}

// createdBefore returns the earlier sandbox of the same request once it is ready; nil without one.
func (cr *Creator) createdBefore(ctx context.Context, c *createOp) (*agents.Sandbox, error) {
	found, err := cr.Cache.SandboxesByIdempotency(ctx, c.Namespace, c.digest.Key)
	if err != nil {
		return nil, fmt.Errorf("look up the idempotency key: %w", err)
	}
	found = cr.Sandboxes.Assumed.Merge(found, func(s *agents.Sandbox) bool {
		return s.Namespace == c.Namespace && s.Annotations[pool.AnnotationIdempotencyKey] == c.digest.Key
	})
	for _, before := range found {
		if s, err := cr.reuse(ctx, c, client.ObjectKeyFromObject(before)); s != nil || err != nil {
			return s, err
		}
	}
	return nil, nil //nolint:nilnil // there is none
}

// reuse returns the sandbox of a name, ready, if it was created for the same request; else nil.
//
// If its create may have returned, it is the owner's, even if the template has changed: that is the promise of the key.
// So for a member after its adoption, whose agent may not have its variables yet, and may get them twice; and for
// a cold start after the last write of its create. An interrupted create is completed if its sandbox fits the present
// template; else the sandbox is removed, and the result is nil.
func (cr *Creator) reuse(ctx context.Context, c *createOp, key types.NamespacedName) (*agents.Sandbox, error) {
	s := &agents.Sandbox{}
	err := cr.Sandboxes.Objects.Get(ctx, key, s)
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // gone meanwhile
	}
	if err != nil {
		return nil, apistatus.From("read sandbox "+key.String(), err)
	}
	if made, err := c.digest.Made(s); err != nil || !made {
		return nil, err
	}
	if s.Annotations[pool.AnnotationPending] != "" {
		if s, err = cr.complete(ctx, c, s); s == nil || err != nil {
			return nil, err
		}
	} else if s.Labels[agents.LabelLaunchType] == agents.LaunchWarm && sandbox.PhaseOf(s) == sandbox.Running && (len(c.Env) > 0 || !c.Secure) {
		if err := cr.Claims.Bind(ctx, s, envd.InitRequest{EnvVars: c.Env, Open: !c.Secure}); err != nil {
			return nil, err
		}
	}
	cr.Sandboxes.Routes.Apply(s)
	return s, nil
}

// complete completes an interrupted create, or removes its sandbox and returns nil.
func (cr *Creator) complete(ctx context.Context, c *createOp, s *agents.Sandbox) (*agents.Sandbox, error) {
	if fits, err := cr.fits(ctx, c, s); err != nil {
		return nil, err
	} else if fits {
		return cr.finish(ctx, s, c.Timeout)
	}
	if err := cr.Sandboxes.Remove(ctx, s); !errors.Is(err, errs.ErrNotFound) {
		return nil, err
	}
	return nil, nil //nolint:nilnil // there is none any more
}

// fits reports whether a sandbox is of the template as it is now. A snapshot does not change.
func (cr *Creator) fits(ctx context.Context, c *createOp, s *agents.Sandbox) (bool, error) {
	t, err := cr.Sandboxes.Templates.Resolve(ctx, c.Namespace, c.Template)
	if errors.Is(err, errs.ErrNotFound) {
		return pool.RevisionOf(s) == "", nil
	}
	if err != nil {
		return false, err
	}
	key := client.ObjectKeyFromObject(t)
	_, revision, err := cr.Cache.CurrentTemplate(ctx, key)
	if err != nil {
		return false, fmt.Errorf("read template %s: %w", c.Template, err)
	}
	return pool.Fits(s, key, revision), nil
}

// RemoveOrphans removes members that were written for creates whose callers had left, until ctx is done.
func (cr *Creator) RemoveOrphans(ctx context.Context, orphans <-chan *agents.Sandbox) {
	for {
		select {
		case s := <-orphans:
			// A SandboxClaim finds its own.
			if s.Labels[agents.LabelCreatedBy] == sandboxes.CreatedBy && s.Labels[agents.LabelClaimUID] == "" {
				cr.Sandboxes.Discard(ctx, s)
			}
		case <-ctx.Done():
			return
		}
	}
}
