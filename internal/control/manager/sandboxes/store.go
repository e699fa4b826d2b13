// Package sandboxes finds, shows, changes, pauses, resumes and deletes the sandboxes of tenants. It creates
// none, talks to no node and starts no goroutine that outlives a call: it writes objects, one conditional write
// at a time, and waits for the controllers. It has no lock.
//
// Sandboxes of other tenants, unclaimed members and dead sandboxes give the same error as those that never
// existed. A returned call's change is visible to reads through the same cache, and in the routes before that.
package sandboxes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// UndoTimeout bounds the undo of a failed operation.
	UndoTimeout = 10 * time.Second
	// maxTries bounds the conditional writes of one change.
	maxTries = 12
)

// Objects reads and writes the API server; a controller-runtime client has it.
type Objects interface {
	Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error
	Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error
	Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error
	Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error
}

// Cache reads sandboxes from memory and returns copies; a sandbox that it lacks is an errs.ErrNotFound.
type Cache interface {
	SandboxByID(ctx context.Context, id sandbox.ID) (*agents.Sandbox, error)
	// CurrentSandbox reads the API server where the cache's watch has been cut off; it bounds how often.
	CurrentSandbox(ctx context.Context, namespace string, id sandbox.ID) (*agents.Sandbox, error)
	Sandboxes(ctx context.Context, namespace string) ([]*agents.Sandbox, error) // shared
	// WaitSandbox blocks until done returns true or an error. done gets nil once the sandbox is gone.
	WaitSandbox(ctx context.Context, key types.NamespacedName, done func(*agents.Sandbox) (bool, error)) (*agents.Sandbox, error)
}

// Routes gets every change before the caller; package route has it.
type Routes interface {
	Apply(s *agents.Sandbox) bool
	ApplyDelete(s *agents.Sandbox) bool
	// Name returns the object of a sandbox's route, pushed by another replica or seen in the watch.
	Name(id sandbox.ID) (types.NamespacedName, bool)
	// Ended returns why a sandbox of a namespace ended a short time ago; empty if unknown.
	Ended(namespace string, id sandbox.ID) string
}

// Agents reads from the agents of sandboxes; package agentclient has it.
type Agents interface {
	// Stats returns the present usage of a running sandbox.
	Stats(ctx context.Context, s *agents.Sandbox) (envd.Metrics, error)
	// StatsHistory returns the kept usage of a running sandbox since a time, oldest first, and last the present one.
	StatsHistory(ctx context.Context, s *agents.Sandbox, since time.Time) ([]envd.Metrics, error)
	// Logs returns the stored lines of a container, the first one if empty, since a time, oldest first.
	Logs(ctx context.Context, s *agents.Sandbox, container string, since time.Time) ([]envd.LogLine, error)
}

// Store has the sandboxes of all tenants. Its fields are required except where a comment gives a default. It is safe for
// concurrent use.
type Store struct {
	Objects   Objects
	Cache     Cache
	Routes    Routes
	Agents    Agents
	Templates *templates.Catalog
	Tokens    *sandbox.Tokens
	Quota     *quota.Quotas
	// Assumed has the sandboxes that the cache may lack.
	Assumed *assumecache.Sandboxes
	// Listing gets the events of Cache, which waits for it. Nil: each list reads all sandboxes of its namespace.
	Listing *Listing
	Log     *slog.Logger
	// Pods reports that sandboxes are Pods of a cluster: pods.go has what these cannot do.
	Pods bool
	// Gate refuses resumes from disk while the server is degraded. Nil: never.
	Gate *health.Gate
	// Observe records an operation's duration.
	Observe func(ctx context.Context, operation string, start time.Time, err error)
	// MaxTimeout bounds a time to live, MoveTimeout a pause or a resume, SettleTimeout the cache's lag.
	MaxTimeout, MoveTimeout, SettleTimeout time.Duration
	// DiskUsed returns how many bytes a sandbox has written. Nil, as in a replica: metrics have 0.
	DiskUsed func(ctx context.Context, ref sandbox.Ref) (int64, error)
	// TraceEgress returns the node's decision about a sandbox's traffic. Nil, as in a replica: there is none.
	TraceEgress func(ctx context.Context, id sandbox.ID, q EgressQuery) (EgressDecision, error)
}

// NotFound is the error for a sandbox that does not exist for a tenant.
func NotFound(id string) error { return hasEnded(id, "") }

// hasEnded is NotFound with the reason, if known.
func hasEnded(id, why string) error {
	if why != "" {
		why = ": it has ended: " + why
	}
	return apistatus.Refuse(errs.ErrNotFound, `Sandbox "%s" doesn't exist or you don't have access to it%s`, id, why)
}

// IsPaused refuses an operation that requires a running sandbox.
func IsPaused(id string) error {
	return apistatus.Refuse(errs.ErrConflict, "Sandbox %q is paused; resume it first: connect to it, or run: barchan resume %s", id, id)
}

// FindLive returns the tenant's sandbox as the API server has it now. A cache may lag behind another replica's
// write, so a refusal or a no-op is decided on this read.
func (st *Store) FindLive(ctx context.Context, namespace, id string) (*agents.Sandbox, error) {
	s, err := st.find(ctx, namespace, id)
	if err != nil {
		return nil, err
	}
	if s, err = st.live(ctx, s); errors.Is(err, errs.ErrNotFound) {
		return nil, NotFound(id)
	}
	return s, err
}

// live reads a sandbox from the API server. A sandbox that has ended since is an errs.ErrNotFound.
func (st *Store) live(ctx context.Context, s *agents.Sandbox) (*agents.Sandbox, error) {
	now, key := &agents.Sandbox{}, client.ObjectKeyFromObject(s)
	if err := st.Objects.Get(ctx, key, now); err != nil {
		return nil, apistatus.From("read sandbox "+key.String(), err)
	}
	if now.UID != s.UID || sandbox.DeadForGood(now) {
		return nil, fmt.Errorf("read sandbox %s: it is gone: %w", key, errs.ErrNotFound)
	}
	return now, nil
}

// find returns the tenant's sandbox if it is not dead.
func (st *Store) find(ctx context.Context, namespace, id string) (*agents.Sandbox, error) {
	s, err := st.findAny(ctx, namespace, id)
	if err == nil && sandbox.DeadForGood(s) {
		return nil, hasEnded(id, sandbox.EndOf(s))
	}
	return s, err
}

// findAny returns the tenant's sandbox, dead or alive. Where the watch has been cut off, the API server has been read before there
// is none, unless it is known to have ended.
func (st *Store) findAny(ctx context.Context, namespace, id string) (*agents.Sandbox, error) {
	parsed, err := sandbox.ParseID(id)
	if err != nil {
		return nil, NotFound(id)
	}
	s, err := st.owned(ctx, parsed)
	why := ""
	if errors.Is(err, errs.ErrNotFound) {
		if why = st.Routes.Ended(namespace, parsed); why == "" {
			s, err = st.Cache.CurrentSandbox(ctx, namespace, parsed)
		}
	}
	if errors.Is(err, errs.ErrNotFound) || (err == nil && (s.Namespace != namespace || pool.MemberOf(s) != "")) {
		return nil, hasEnded(id, why)
	}
	return s, err
}

// owned returns a sandbox with an owner, dead or alive, of any tenant; else an errs.ErrNotFound.
func (st *Store) owned(ctx context.Context, id sandbox.ID) (*agents.Sandbox, error) {
	s, err := st.Cache.SandboxByID(ctx, id)
	switch {
	case err == nil:
		s = st.Assumed.Latest(s)
	case errors.Is(err, errs.ErrNotFound):
		if a := st.Assumed.Find(func(s *agents.Sandbox) bool { return sandbox.IDOf(s.UID) == id }); a != nil {
			s, err = a, nil
		}
	}
	if errors.Is(err, errs.ErrNotFound) {
		s, err = st.findByHint(ctx, id)
	} else if err == nil && pool.MemberOf(s) != "" { // another replica may have claimed it
		s, err = st.read(ctx, client.ObjectKeyFromObject(s), id)
	}
	if err == nil && pool.MemberOf(s) != "" {
		err = errs.ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("look up sandbox %s: %w", id, err)
	}
	return s, nil
}

// findByHint reads a sandbox that another replica created and pushed before the watch showed it.
// Without a route it does not read the API server. None is an errs.ErrNotFound.
func (st *Store) findByHint(ctx context.Context, id sandbox.ID) (*agents.Sandbox, error) {
	known, ok := st.Routes.Name(id)
	if !ok {
		return nil, errs.ErrNotFound
	}
	return st.read(ctx, known, id)
}

// read reads a sandbox from the API server. Another of its name is an errs.ErrNotFound.
func (st *Store) read(ctx context.Context, key types.NamespacedName, id sandbox.ID) (*agents.Sandbox, error) {
	s := &agents.Sandbox{}
	if err := st.Objects.Get(ctx, key, s); err != nil {
		return nil, apistatus.From("read sandbox "+key.String(), err)
	}
	if sandbox.IDOf(s.UID) != id {
		return nil, errs.ErrNotFound
	}
	return s, nil
}

// change applies mutate to the tenant's sandbox and writes it, again on a newer version after a conflict. It
// returns the object as written, or as read if mutate reports no change.
func (st *Store) change(ctx context.Context, namespace, id string, mutate func(*agents.Sandbox) (bool, error)) (*agents.Sandbox, error) {
	s, err := st.find(ctx, namespace, id)
	if err != nil {
		return nil, err
	}
	s, err = st.Change(ctx, s, mutate)
	if errors.Is(err, errs.ErrNotFound) {
		return nil, NotFound(id)
	}
	return s, err
}

// Change applies mutate to an object that may be old. A result on an old object counts only if it is written, on
// condition that it is the newest; no change, or a refusal, is decided on a live read.
func (st *Store) Change(ctx context.Context, s *agents.Sandbox, mutate func(*agents.Sandbox) (bool, error)) (*agents.Sandbox, error) {
	for try, live := 1, false; ; live = true {
		changed, err := mutate(s)
		if live && (err != nil || !changed) {
			st.settleAt(ctx, s) // the decision may rest on more than the cache shows
			return s, err
		}
		if err == nil && changed {
			telemetry.Stamp(ctx, s)
			err := st.Objects.Update(ctx, s)
			if err == nil {
				st.Routes.Apply(s)
				st.settleAt(ctx, s)
				return s, nil
			}
			if !apierrors.IsConflict(err) || try == maxTries {
				return nil, apistatus.From("update sandbox "+client.ObjectKeyFromObject(s).String(), err)
			}
			try++
		}
		if s, err = st.live(ctx, s); err != nil {
			return nil, err
		}
	}
}

// Remove deletes exactly this sandbox, not a later one of its name.
func (st *Store) Remove(ctx context.Context, s *agents.Sandbox) error {
	err := st.Objects.Delete(ctx, s, client.Preconditions{UID: &s.UID})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		st.Routes.ApplyDelete(s)
		return fmt.Errorf("delete sandbox: %w: %w", errs.ErrNotFound, err)
	}
	if err != nil {
		return apistatus.From("delete sandbox", err)
	}
	failpoint.Reach("delete/written")
	st.Assumed.Forget(s.UID)
	gone := s.DeepCopy() // as the watch will show it, so that the next request is told why
	if gone.DeletionTimestamp == nil {
		gone.DeletionTimestamp = new(metav1.Now())
	}
	st.Routes.ApplyDelete(gone)
	st.settle(ctx, s, func(now *agents.Sandbox) bool { return now.DeletionTimestamp != nil })
	st.Quota.Observe(s, nil)
	return nil
}

// Discard removes the sandbox of a failed create, even if the caller has left.
func (st *Store) Discard(ctx context.Context, made *agents.Sandbox) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), UndoTimeout)
	defer cancel()
	if err := st.Remove(ctx, made); err != nil && !errors.Is(err, errs.ErrNotFound) {
		st.Log.WarnContext(ctx, "failed sandbox not removed; its timeout will",
			telemetry.Sandbox, sandbox.IDOf(made.UID), telemetry.Namespace, made.Namespace, telemetry.Name, made.Name, telemetry.Error, err)
	}
}

// settleAt waits until the cache shows the version of s or a newer one.
func (st *Store) settleAt(ctx context.Context, s *agents.Sandbox) {
	version := s.ResourceVersion
	st.settle(ctx, s, func(now *agents.Sandbox) bool { return !behind(now, version) })
}

// behind reports whether an object is older than a version.
func behind(s *agents.Sandbox, version string) bool {
	order, err := resourceversion.CompareResourceVersion(s.ResourceVersion, version)
	return err == nil && order < 0
}

// settle waits until the cache shows a write, so that the caller's next read does too. A lagging cache is no
// error, because the write is done.
func (st *Store) settle(ctx context.Context, s *agents.Sandbox, shown func(*agents.Sandbox) bool) {
	ctx, cancel := context.WithTimeout(ctx, st.SettleTimeout)
	defer cancel()
	uid := s.UID
	_, err := st.Cache.WaitSandbox(ctx, client.ObjectKeyFromObject(s), func(now *agents.Sandbox) (bool, error) {
		return now == nil || now.UID != uid || shown(now), nil
	})
	if err != nil {
		st.Log.WarnContext(ctx, "cache does not show a write yet", telemetry.Sandbox, sandbox.IDOf(uid), telemetry.Error, err)
	}
}

// await waits until a sandbox that is not older than s is as arrived requires. After limit the error is late's.
func (st *Store) await(ctx context.Context, s *agents.Sandbox, id string, limit time.Duration, arrived func(*agents.Sandbox) (bool, error), late func() error) error {
	bounded, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	uid, version := s.UID, s.ResourceVersion
	_, err := st.Cache.WaitSandbox(bounded, client.ObjectKeyFromObject(s), func(now *agents.Sandbox) (bool, error) {
		if now == nil || now.UID != uid || sandbox.DeadForGood(now) {
			return false, NotFound(id)
		}
		if behind(now, version) {
			return false, nil
		}
		return arrived(now)
	})
	if errors.Is(err, errs.ErrTimeout) && ctx.Err() == nil {
		return late()
	}
	if err != nil {
		return fmt.Errorf("wait for sandbox %s: %w", id, err)
	}
	return nil
}
