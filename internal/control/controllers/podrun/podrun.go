package podrun

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/controllers"
	"github.com/barchan-dev/barchan/internal/control/controllers/placement"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

var _ controllers.Runner = (*Runner)(nil)

const (
	// startTimeout bounds the wait for an agent whose container has just started: the hook that starts it may still run.
	startTimeout = 3 * time.Second
	// requestTimeout bounds one request to an agent.
	requestTimeout = time.Second
)

// Cache has the state that the API server sent last.
type Cache interface {
	// Sandbox returns a sandbox by name, an errs.ErrNotFound if there is none.
	Sandbox(ctx context.Context, key types.NamespacedName) (*agents.Sandbox, error)
	// PodsOf returns the Pods that a sandbox controls.
	PodsOf(ctx context.Context, owner types.UID) ([]*corev1.Pod, error)
}

// Agents sends requests to the agents of sandboxes by the first of status.podIPs.
type Agents interface {
	Bind(ctx context.Context, s *agents.Sandbox, req envd.InitRequest) error
}

// Config configures New. All but Log and LastWarmClaim is required.
type Config struct {
	Log    *slog.Logger
	Cache  Cache
	Placer *placement.Placer
	Agents Agents
	Tokens *sandbox.Tokens
	// LastWarmClaim returns the time of the last claim, as in controllers.SandboxConfig.
	LastWarmClaim func() time.Time
}

// Runner runs sandboxes as Pods. It is safe for concurrent use.
type Runner struct {
	cfg Config
	// placed has Pods that this process has created and the cache may not show yet: another would be refused.
	placed *assumecache.Cache[corev1.Pod, *corev1.Pod]

	// reconcileAfter has a sandbox reconciled after a time; Changes sets it.
	reconcileAfter func(reconcile.Request, time.Duration)

	mu    sync.Mutex
	bound map[types.NamespacedName]binding // the last request that the agent of a sandbox accepted; +checklocks:mu
}

// binding identifies a request that an agent accepted: the run of its container, and a hash.
type binding struct {
	run         run
	fingerprint string
}

// run identifies a run of a container. Its start does not: objects have it in seconds, in which a Pod may be replaced.
type run struct {
	pod      types.UID
	restarts int32
}

// New returns a Runner.
func New(cfg Config) (*Runner, error) {
	if cfg.Cache == nil || cfg.Placer == nil || cfg.Agents == nil || cfg.Tokens == nil {
		return nil, fmt.Errorf("podrun: Cache, Placer, Agents and Tokens are required: %w", errs.ErrInvalid)
	}
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler)).With(telemetry.Component, "podrun")
	return newRunner(cfg), nil
}

func newRunner(cfg Config) *Runner {
	none := func(context.Context, types.NamespacedName) (*corev1.Pod, error) { return nil, errs.ErrNotFound } // see Runner.place
	return &Runner{
		cfg: cfg, placed: assumecache.New[corev1.Pod](none), bound: map[types.NamespacedName]binding{},
		reconcileAfter: func(reconcile.Request, time.Duration) {},
	}
}

// Ensure makes the Pod of a sandbox, and prepares its agent once the Pod runs. The returned state is pending until then. For a
// running sandbox it makes again what was deleted beside the Pod.
func (r *Runner) Ensure(ctx context.Context, s *agents.Sandbox) (sandbox.Observed, error) {
	pods, err := r.pods(ctx, s.UID)
	if err != nil {
		return sandbox.Observed{}, err
	}
	if b := s.Spec.Barchan; b != nil && b.Restore != nil {
		return r.observed(s, pods), refused("restore", "a Pod starts from its image only; "+sandbox.NoMemory)
	} else if b != nil && b.WarmUp != nil {
		return r.observed(s, pods), refused("warmUp", "a Pod does not run one; put it into the image or the entrypoint")
	}
	if pods, err = r.place(ctx, s, pods); err != nil {
		return r.observed(s, pods), err
	}
	seen := r.observed(s, pods) // the same as after the event of a new Pod, which then changes no status
	if seen.State != sandbox.ContainerPending || len(pods) != 1 || startOf(pods[0]).IsZero() || seen.Reason == agents.ReasonPodTerminating {
		return seen, nil
	}
	return r.prepare(ctx, s, pods)
}

// place writes what a sandbox lacks, and returns its Pods after that.
func (r *Runner) place(ctx context.Context, s *agents.Sandbox, owned []*corev1.Pod) ([]*corev1.Pod, error) {
	pods, err := r.cfg.Placer.Place(ctx, s, owned)
	if err != nil || len(owned) > 0 {
		return pods, err
	}
	r.placed.Assume(ctx, pods[0])
	shown, err := r.cfg.Cache.PodsOf(ctx, s.UID)
	for _, pod := range shown { // its event was faster than the response
		r.placed.Observe(nil, pod)
	}
	return pods, err
}

// Bind sends the agent of a running sandbox what a claim has added to its object. A container that starts again has
// forgotten that; Ensure sends it again.
func (r *Runner) Bind(ctx context.Context, s *agents.Sandbox) error {
	pods, err := r.pods(ctx, s.UID)
	if err != nil || len(pods) != 1 || !hasAgent(pods[0]) || r.initialized(s, runOf(pods[0])) {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return r.send(ctx, s, runOf(pods[0]))
}

// SetEgress applies the sandbox's policies to its Pod. It refuses what no NetworkPolicy can express. That a claimed sandbox may not be
// evicted waits for a pause between claims.
func (r *Runner) SetEgress(ctx context.Context, s *agents.Sandbox) error {
	pods, err := r.pods(ctx, s.UID)
	if err != nil {
		return err
	}
	wait := controllers.ClaimDelay(r.cfg.LastWarmClaim, barchan.ExactTime(s, pool.AnnotationClaimedAt))
	waits, err := r.cfg.Placer.Restrict(ctx, s, pods, wait > 0)
	if waits {
		r.reconcileAfter(reconcile.Request{NamespacedName: client.ObjectKeyFromObject(s)}, wait)
	}
	return err
}

// Suspend deletes the Pod of a sandbox that keeps its volumes only. Without a Pod it makes what the sandbox has beside that: one that
// is suspended from the start has never had it.
func (r *Runner) Suspend(ctx context.Context, ref sandbox.Ref, mode agents.SuspendMode) (sandbox.Observed, error) {
	s, pods, err := r.read(ctx, ref)
	if err != nil {
		return sandbox.Observed{}, err
	}
	if len(pods) == 0 {
		return r.placeSuspended(ctx, s)
	}
	if s.Spec.Barchan != nil && mode != agents.SuspendDelete {
		return r.observed(s, pods), refused("suspend", fmt.Sprintf("%s; set it to %s, which keeps volumes", sandbox.NoMemory, agents.SuspendDelete))
	}
	if err := r.cfg.Placer.Unplace(ctx, pods); err != nil {
		return r.observed(s, pods), err
	}
	return r.state(ctx, s, pods)
}

// placeSuspended makes what a sandbox without a Pod lacks. A sandbox that has run has its claims, and one that is suspended too. So it is
// not called suspended before it has them.
func (r *Runner) placeSuspended(ctx context.Context, s *agents.Sandbox) (sandbox.Observed, error) {
	err := r.cfg.Placer.PlaceSuspended(ctx, s, !sandbox.Suspended(s) && !sandbox.HasRun(s))
	if err == nil {
		return r.state(ctx, s, nil)
	}
	seen := r.observed(s, nil)
	if !sandbox.Suspended(s) {
		seen.State, seen.Reason, seen.Message = sandbox.ContainerPending, sandbox.ReasonSuspendFailed, errs.Text(err)
	}
	return seen, err
}

// Resume is not called: a suspended sandbox has no container that could be resumed, so it is started again.
func (r *Runner) Resume(ctx context.Context, ref sandbox.Ref, _ bool) (sandbox.Observed, error) {
	s, _, err := r.read(ctx, ref)
	if err != nil {
		return sandbox.Observed{}, err
	}
	return r.Ensure(ctx, s)
}

// Remove deletes the Pod and the Service of a sandbox whose object stays. It returns nil once the Pod is gone.
func (r *Runner) Remove(ctx context.Context, ref sandbox.Ref) error {
	pods, err := r.pods(ctx, ref.UID)
	if err != nil {
		return err
	}
	if err := r.cfg.Placer.Unplace(ctx, pods); err != nil {
		return err
	}
	key := types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}
	s, err := r.cfg.Cache.Sandbox(ctx, key)
	if err == nil && s.UID == ref.UID {
		err = r.cfg.Placer.Release(ctx, s)
	}
	if err != nil && !errors.Is(err, errs.ErrNotFound) {
		return err
	}
	r.forget(key)
	return nil
}

// ObjectDeleted forgets a sandbox; Kubernetes collects what its object owned.
func (r *Runner) ObjectDeleted(namespace, name string) {
	r.forget(types.NamespacedName{Namespace: namespace, Name: name})
}

// Observe returns the state of a sandbox's Pod.
func (r *Runner) Observe(ctx context.Context, ref sandbox.Ref) (sandbox.Observed, error) {
	s, pods, err := r.read(ctx, ref)
	if err != nil {
		return sandbox.Observed{}, err
	}
	return r.state(ctx, s, pods)
}

// state is observed, but before a sandbox is called suspended for the first time it looks for a Pod of its name that it
// does not own.
func (r *Runner) state(ctx context.Context, s *agents.Sandbox, pods []*corev1.Pod) (sandbox.Observed, error) {
	seen := r.observed(s, pods)
	if seen.State != sandbox.ContainerAbsent || s.Spec.OperatingMode != agents.ModeSuspended || sandbox.Suspended(s) {
		return seen, nil
	}
	err := r.cfg.Placer.CheckPod(ctx, s)
	if errors.Is(err, placement.ErrNotOwned) {
		seen.State, seen.Reason = sandbox.ContainerPending, agents.ReasonPodNotOwned
		seen.Message = "Refused to delete pod because it is not owned by this sandbox"
		return seen, nil
	}
	return seen, err
}

// Changes reconciles the sandbox that controls a Pod or a Service whenever that changes, and the sandboxes of a policy when a client
// changes or deletes it. The Runner needs these events too.
func (r *Runner) Changes(from crcache.Cache) []source.Source {
	return []source.Source{
		source.Func(func(_ context.Context, q controllers.Queue) error {
			r.reconcileAfter = q.AddAfter
			return nil
		}),
		controllers.Watch(from, &corev1.Pod{}, func(_ context.Context, old, now *corev1.Pod, q controllers.Queue) {
			r.placed.Observe(old, now)
			addOwner(q, cmp.Or(now, old))
		}),
		controllers.Watch(from, &corev1.Service{}, func(_ context.Context, old, now *corev1.Service, q controllers.Queue) {
			addOwner(q, cmp.Or(now, old))
		}),
		controllers.Watch(from, &networkingv1.NetworkPolicy{}, func(ctx context.Context, old, now *networkingv1.NetworkPolicy, q controllers.Queue) {
			if old != nil && (now == nil || now.Generation != old.Generation) {
				addSelected(ctx, from, q, old.Namespace, &old.Spec.PodSelector)
			}
		}),
		controllers.Watch(from, &policyv1.PodDisruptionBudget{}, func(ctx context.Context, old, now *policyv1.PodDisruptionBudget, q controllers.Queue) {
			if old != nil && (now == nil || now.Generation != old.Generation) {
				addSelected(ctx, from, q, old.Namespace, old.Spec.Selector)
			}
		}),
	}
}

func addOwner(q controllers.Queue, owned client.Object) {
	if owner := metav1.GetControllerOf(owned); owner != nil {
		q.Add(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: owned.GetNamespace(), Name: owner.Name}})
	}
}

// addSelected adds the sandboxes whose Pods a policy selected.
func addSelected(ctx context.Context, from client.Reader, q controllers.Queue, namespace string, selector *metav1.LabelSelector) {
	selected, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return // not as the API server has it
	}
	var pods corev1.PodList
	if err := from.List(ctx, &pods, client.InNamespace(namespace), client.MatchingLabelsSelector{Selector: selected}); err != nil {
		return // the cache has stopped
	}
	for i := range pods.Items {
		addOwner(q, &pods.Items[i])
	}
}
