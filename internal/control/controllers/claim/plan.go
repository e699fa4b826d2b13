package claim

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// plan is the desired sandbox of a claim, checked against one version of the template.
type plan struct {
	claim    *extensions.SandboxClaim
	pool     *extensions.SandboxWarmPool
	template *extensions.SandboxTemplate
	revision string
	// env is sent to the agent if the sandbox is already running.
	env map[string]string
	// cold is the reason for a cold start; empty if a running sandbox is possible.
	cold string
}

// refusal is an error that only a user can fix. It ends a pick.
type refusal struct {
	reason, message string
	// retry is the error of a request that may succeed later without a change of what the controller watches.
	retry error
}

func (r *refusal) Error() string { return r.reason + ": " + r.message }

func refuse(reason string, errs field.ErrorList) *refusal {
	return &refusal{reason: reason, message: errs.ToAggregate().Error()}
}

// newPlan validates a claim. late reports whether running sandboxes can take variables.
func newPlan(c *extensions.SandboxClaim, p *extensions.SandboxWarmPool, t *extensions.SandboxTemplate, revision string, late bool) (*plan, *refusal) {
	spec := field.NewPath("spec")
	if _, err := extensions.QueueTimeout(c); err != nil { // a cluster's API server does not check it
		return nil, refuse(extensions.ReasonInvalidMetadata, field.ErrorList{err})
	}
	if errs := checkMetadata(&c.Spec.AdditionalPodMetadata, &t.Spec.PodTemplate.ObjectMeta, spec.Child("additionalPodMetadata")); len(errs) > 0 {
		return nil, refuse(extensions.ReasonInvalidMetadata, errs)
	}
	if errs := checkEnv(c.Spec.Env, t, spec.Child("env")); len(errs) > 0 {
		return nil, refuse(extensions.ReasonEnvVarsRejected, errs)
	}
	if errs := checkVolumes(c.Spec.VolumeClaimTemplates, c.Name, t, spec.Child("volumeClaimTemplates")); len(errs) > 0 {
		return nil, refuse(extensions.ReasonVolumeClaimsError, errs)
	}
	x := &plan{claim: c, pool: p, template: t, revision: revision, env: map[string]string{}}
	for _, e := range c.Spec.Env {
		x.env[e.Name] = e.Value
	}
	x.cold = whyCold(c, t, late)
	return x, nil
}

// whyCold returns why a claim cannot get a running sandbox; empty if it can.
func whyCold(c *extensions.SandboxClaim, t *extensions.SandboxTemplate, late bool) string {
	if len(c.Spec.VolumeClaimTemplates) > 0 {
		return "spec.volumeClaimTemplates cannot be mounted into a running sandbox"
	}
	for i, e := range c.Spec.Env {
		switch {
		case !late:
			return "spec.env cannot be brought to a running sandbox here"
		case e.ContainerName != "" && e.ContainerName != t.Spec.PodTemplate.Spec.Containers[0].Name:
			return fmt.Sprintf("spec.env[%d].containerName: only the first container takes variables while it runs", i)
		case strings.Contains(e.Value, "$(") || strings.Contains(e.Value, "$$"): // "$$" stands for "$"
			return fmt.Sprintf("spec.env[%d].value: references are expanded only when a container starts", i)
		}
	}
	return ""
}

// owner is the claim as the owner of its sandbox.
func (x *plan) owner() *metav1.OwnerReference {
	return metav1.NewControllerRef(x.claim, extensions.GroupVersion.WithKind("SandboxClaim"))
}

// adopt returns a copy of a member with the claim as owner.
func (x *plan) adopt(member *agents.Sandbox) *agents.Sandbox {
	s := pool.Adopt(member, x.owner())
	x.apply(s)
	return s
}

// fresh returns a new sandbox of the claim, not yet written.
func (x *plan) fresh() *agents.Sandbox {
	s := pool.NewSandbox(x.template, x.revision, x.claim.Namespace)
	s.Name = x.claim.Name
	s.Labels[pool.LabelOrigin] = string(x.pool.UID)
	s.Labels[agents.LabelClaimUID] = string(x.claim.UID)
	s.Annotations[pool.AnnotationClaimedAt] = barchan.ExactNow()
	s.OwnerReferences = []metav1.OwnerReference{*x.owner()}
	for _, v := range x.claim.Spec.VolumeClaimTemplates {
		at := slices.IndexFunc(s.Spec.VolumeClaimTemplates, func(o agents.PersistentVolumeClaimTemplate) bool { return o.Name == v.Name })
		if at >= 0 {
			s.Spec.VolumeClaimTemplates[at] = *v.DeepCopy()
			continue
		}
		s.Spec.VolumeClaimTemplates = append(s.Spec.VolumeClaimTemplates, *v.DeepCopy())
	}
	x.apply(s)
	return s
}

// apply sets the claim's variables and metadata on a sandbox. It is idempotent.
func (x *plan) apply(s *agents.Sandbox) {
	for _, e := range x.claim.Spec.Env {
		if at := containerOf(&s.Spec.PodTemplate.Spec, e.ContainerName); at >= 0 {
			setEnv(&s.Spec.PodTemplate.Spec.Containers[at], e)
		}
	}
	if len(x.claim.Spec.Env) > 0 {
		pool.BindEnv(s, false)
	}
	set, more := &s.Spec.PodTemplate.ObjectMeta, &x.claim.Spec.AdditionalPodMetadata
	set.Labels = merged(set.Labels, more.Labels)
	set.Annotations = merged(set.Annotations, more.Annotations)
}

func setEnv(c *corev1.Container, e extensions.EnvVar) {
	v := corev1.EnvVar{Name: e.Name, Value: e.Value}
	c.Env = slices.Clone(c.Env)
	at := slices.IndexFunc(c.Env, func(o corev1.EnvVar) bool { return o.Name == e.Name })
	if at < 0 {
		c.Env = append(c.Env, v)
		return
	}
	c.Env[at] = v
}

func merged(base, more map[string]string) map[string]string {
	if len(more) == 0 {
		return base
	}
	all := maps.Clone(base)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, more)
	return all
}

// containerOf returns the index of a container by name, the first for an empty name, or -1.
func containerOf(spec *corev1.PodSpec, name string) int {
	if name == "" && len(spec.Containers) > 0 {
		return 0
	}
	return slices.IndexFunc(spec.Containers, func(c corev1.Container) bool { return c.Name == name })
}

// starts returns the message for a starting sandbox, with the reason for its cold start.
func (x *plan) starts(s *agents.Sandbox) string {
	why := cmp.Or(x.cold, fmt.Sprintf("no member of warm pool %s was ready", x.pool.Name))
	text := fmt.Sprintf("sandbox %s starts cold: %s", s.Name, why)
	if ready := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionReady); ready != nil && ready.Message != "" {
		text += "; " + ready.Message
	}
	return text
}

// verdict is the decision on an owned sandbox that is not assigned.
type verdict int

const (
	leave verdict = iota // it is terminating
	name                 // assign it to the claim
	await                // it is starting, and fits so far
	drop                 // delete it
)

// judge decides on a sandbox that was taken or started for the claim.
func (x *plan) judge(s *agents.Sandbox) verdict {
	cold := s.Labels[agents.LabelLaunchType] == agents.LaunchCold
	template := client.ObjectKeyFromObject(x.template)
	fits := pool.Fits(s, template, x.revision)
	switch {
	case s.DeletionTimestamp != nil:
		return leave
	case !x.carried(s), x.cold != "" && !cold:
		return drop
	case fits && (!cold || sandbox.PhaseOf(s) == sandbox.Running):
		return name
	case fits:
		return await
	case cold && pool.RevisionFor(s, template) == x.revision:
		return name // it exited; another one would exit too
	default:
		return drop
	}
}

// carried reports whether a sandbox's object has everything that the claim adds.
func (x *plan) carried(s *agents.Sandbox) bool {
	with := s.DeepCopy()
	x.apply(with)
	return apiequality.Semantic.DeepEqual(s.Spec.PodTemplate, with.Spec.PodTemplate)
}
