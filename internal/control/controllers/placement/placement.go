package placement

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// ErrNotOwned means that an object of a sandbox's name is not the sandbox's. It is left as it is.
var ErrNotOwned = errors.New("is not owned by this sandbox")

// Config configures New. Client, Cache, Tokens, AgentImage and Namespace are required.
type Config struct {
	// Client writes to the API server, and reads from it.
	Client client.Client
	// Cache has the templates, Services, NetworkPolicies and PodDisruptionBudgets that the API server sent last.
	Cache client.Reader
	// Tokens are those of the agents.
	Tokens *sandbox.Tokens
	// AgentImage has the agent at /barchan-agent.
	AgentImage string
	// ImageVolumes mounts AgentImage as a volume (Kubernetes 1.33 and later, by feature gate before 1.35). Otherwise an init
	// container copies the agent.
	ImageVolumes bool
	// RuntimeClass is that of templates that name none. Empty: the cluster's default.
	RuntimeClass string
	// Namespace has the Pods of Barchan's roles, with the label app.kubernetes.io/part-of: barchan. Only they reach all sandboxes.
	Namespace string
	// Reachable are ranges that sandboxes may reach although they are not public.
	Reachable []netip.Prefix
	// ClusterDomain ends the names of Services. Default cluster.local.
	ClusterDomain string
}

// Placer writes the objects of sandboxes. Its methods are idempotent, and safe for concurrent use.
type Placer struct{ cfg Config }

// New checks the configuration; it sends nothing.
func New(cfg Config) (*Placer, error) {
	if cfg.Client == nil || cfg.Cache == nil || cfg.Tokens == nil || cfg.AgentImage == "" || cfg.Namespace == "" {
		return nil, fmt.Errorf("placement: Client, Cache, Tokens, AgentImage and Namespace are required: %w", errs.ErrInvalid)
	}
	if cfg.ClusterDomain == "" {
		cfg.ClusterDomain = "cluster.local"
	}
	return &Placer{cfg}, nil
}

// Place writes what a sandbox lacks that is to run or runs: its claims, its Service, its policies and then its Pod. owned has the
// sandbox's Pods, as the caller knows them; the result is those, or the one that Place has created. Kinds of error: errs.ErrInvalid
// names a field that the API server or this package refuses; ErrNotOwned, errs.ErrConflict with it, names an object in the way that
// the sandbox does not own.
func (p *Placer) Place(ctx context.Context, s *agents.Sandbox, owned []*corev1.Pod) ([]*corev1.Pod, error) {
	if err := errors.Join(p.placeClaims(ctx, s, owned), p.placeService(ctx, s)); err != nil || len(owned) > 0 {
		return owned, err
	}
	pod, err := p.Pod(s)
	if err != nil {
		return nil, err
	}
	marks, err := p.placePolicies(ctx, s)
	if err != nil {
		return nil, err
	}
	marks.set(&pod.ObjectMeta, s)
	if err := p.create(ctx, s, pod); err != nil {
		return nil, err
	}
	return []*corev1.Pod{pod}, nil
}

// PlaceSuspended writes what a suspended sandbox lacks beside its Pod: its Service, and with claims its claims. The errors are those
// of Place.
func (p *Placer) PlaceSuspended(ctx context.Context, s *agents.Sandbox, claims bool) error {
	err := p.placeService(ctx, s)
	if claims {
		err = errors.Join(p.placeClaims(ctx, s, nil), err)
	}
	return err
}

// Unplace deletes the Pods of a sandbox, each if it is still the one that the caller saw. Their grace period is that
// of their spec. Claims and Service stay.
func (p *Placer) Unplace(ctx context.Context, owned []*corev1.Pod) error {
	var failures []error
	for _, pod := range owned {
		if pod.DeletionTimestamp != nil {
			continue
		}
		failures = append(failures, p.delete(ctx, pod))
	}
	return errors.Join(failures...)
}

// Release deletes the Service of a sandbox that has ended and whose object stays.
func (p *Placer) Release(ctx context.Context, s *agents.Sandbox) error {
	if s.Status.Service == "" && !wantsService(s) {
		return nil
	}
	service := &corev1.Service{}
	if err := p.cfg.Client.Get(ctx, client.ObjectKeyFromObject(s), service); err != nil {
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("read Service %s/%s: %w", s.Namespace, s.Name, err)
	}
	if !metav1.IsControlledBy(service, s) {
		return nil
	}
	return p.delete(ctx, service)
}

// create writes an object unless the sandbox has it.
func (p *Placer) create(ctx context.Context, s *agents.Sandbox, o client.Object) error {
	err := p.cfg.Client.Create(ctx, o)
	if apierrors.IsAlreadyExists(err) {
		return p.checkOwned(ctx, s, o)
	}
	return createError(err, o)
}

// lasting are parts of the texts with which admission refuses an object until somebody changes another one; the API server gives no
// codes. Other refusals pass: of a quota that is used up while Pods end, or in a new namespace, whose ServiceAccount is still to come.
var lasting = []string{
	"violates PodSecurity", "RuntimeClass ", "PriorityClass ", "failed quota: ", // a quota that wants limits
	" per Container", " per Pod", // of a LimitRange
	" denied request: ", " denied the request: ", // a ValidatingAdmissionPolicy, a webhook
}

// createError gives an error of a create its kind.
func createError(err error, o client.Object) error {
	switch {
	case err == nil:
		return nil
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
		return fmt.Errorf("%w: %w", err, errs.ErrInvalid)
	case apierrors.IsForbidden(err): // a quota, or an admission policy, which may change
		refused := errs.Public(fmt.Errorf("%w: %w", err, errs.ErrExhausted), err.Error())
		if slices.ContainsFunc(lasting, func(text string) bool { return strings.Contains(err.Error(), text) }) {
			refused = sandbox.PodRefused(refused)
		}
		return refused
	}
	return fmt.Errorf("create %s %s/%s: %w", kindOf(o), o.GetNamespace(), o.GetName(), err)
}

// CheckPod returns ErrNotOwned if a Pod of the sandbox's name is not the sandbox's. It reads the API server.
func (p *Placer) CheckPod(ctx context.Context, s *agents.Sandbox) error {
	err := p.checkOwned(ctx, s, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: sandbox.PodName(s)}})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// checkOwned returns ErrNotOwned if the sandbox does not own an object.
func (p *Placer) checkOwned(ctx context.Context, s *agents.Sandbox, o client.Object) error {
	if err := p.cfg.Client.Get(ctx, client.ObjectKeyFromObject(o), o); err != nil {
		return fmt.Errorf("read %T %s/%s: %w", o, s.Namespace, o.GetName(), err)
	}
	if !metav1.IsControlledBy(o, s) {
		return notOwned(o)
	}
	return nil
}

func notOwned(o client.Object) error {
	kind := kindOf(o)
	return errs.Public(fmt.Errorf("%s %s/%s %w: %w", kind, o.GetNamespace(), o.GetName(), ErrNotOwned, errs.ErrConflict),
		fmt.Sprintf("%s %s exists and %s; delete or rename it", kind, o.GetName(), ErrNotOwned))
}

func kindOf(o client.Object) string {
	switch o.(type) {
	case *corev1.Pod:
		return "Pod"
	case *corev1.Service:
		return "Service"
	case *networkingv1.NetworkPolicy:
		return "NetworkPolicy"
	case *policyv1.PodDisruptionBudget:
		return "PodDisruptionBudget"
	default:
		return "PersistentVolumeClaim"
	}
}

// delete deletes an object if it is still the one that was read.
func (p *Placer) delete(ctx context.Context, o client.Object) error {
	uid := o.GetUID()
	err := p.cfg.Client.Delete(ctx, o, client.Preconditions{UID: &uid})
	if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return fmt.Errorf("delete %s %s/%s: %w", kindOf(o), o.GetNamespace(), o.GetName(), err)
}
