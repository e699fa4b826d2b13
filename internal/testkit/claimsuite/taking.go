package claimsuite

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func warm(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{binder: &agent{}})
	p := w.pool(w.template(envPolicy(extensions.InjectionAllowed)), 2)
	for _, change := range [][]func(*extensions.SandboxClaim){nil, {brings("COLOUR", "red")}} {
		before := len(w.writes.all())
		c, s := w.served(w.claim(string(rune('a'+before)), change...))
		if s.Labels[agents.LabelLaunchType] != agents.LaunchWarm || s.Labels[agents.LabelClaimUID] != string(c.UID) || pool.OriginOf(s) != p.UID || pool.MemberOf(s) != "" {
			t.Errorf("labels of a member that was taken: %v", s.Labels)
		}
		if !slices.Equal(c.Status.Sandbox.PodIPs, s.Status.PodIPs) || len(s.Status.PodIPs) == 0 || ready(c).Reason != agents.ReasonDependenciesReady {
			t.Errorf("status %+v of a claim for sandbox %+v", c.Status, s.Status)
		}
		if len(c.Finalizers) > 0 {
			t.Errorf("the claim has finalizers %v", c.Finalizers)
		}
		writes := w.writes.all()[before:]
		t.Logf("writes of a warm claim: %v", writes)
		if len(writes) > 2 {
			t.Errorf("a warm claim took the writes %v, want 2 at most", writes)
		}
	}
	if events := w.events.all(); len(events) > 0 {
		t.Errorf("warm claims recorded the events %v", events)
	}
}

func cold(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	p := w.pool(w.template(), 0)
	c, s := w.served(w.claim("cold"))
	if s.Name != c.Name || s.Labels[agents.LabelLaunchType] != agents.LaunchCold || s.Labels[agents.LabelClaimUID] != string(c.UID) || pool.OriginOf(s) != p.UID {
		t.Errorf("sandbox %s of a cold start has labels %v", s.Name, s.Labels)
	}
	eventually.True(t, "the controller has recorded the cold start", func() bool { return slices.Contains(w.events.all(), "Claimed") })
}

// waits has a hundred claims on a pool that is being filled: no claim starts cold while there
// is a member being created for each, and each claim is bound.
func waits(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	w.nodes.Holding(func(s *agents.Sandbox) bool { return pool.MemberOf(s) != "" })
	x := w.template()
	p := w.pool(x, 0)
	const many = 100
	for _, s := range w.grow(p, x, many) {
		w.settled(s, func(s *agents.Sandbox) bool { return s != nil })
	}
	var claims []*extensions.SandboxClaim
	for i := range many {
		claims = append(claims, w.claim("c"+string(rune('a'+i/26))+string(rune('a'+i%26))))
	}
	w.awaitClaim(claims[0], "waited", func(c *extensions.SandboxClaim) bool { return ready(c).Reason == extensions.ReasonSandboxCreatePending })
	w.nodes.Holding(nil)
	got := map[string]bool{}
	for _, c := range claims {
		_, s := w.served(c)
		if s.Labels[agents.LabelLaunchType] != agents.LaunchWarm || got[s.Name] {
			t.Errorf("claim %s got sandbox %s, launched %s", c.Name, s.Name, s.Labels[agents.LabelLaunchType])
		}
		got[s.Name] = true
	}
}

// upstreamMetrics: a claim is observed once, when it is ready.
func upstreamMetrics(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	want := func(what string, counts map[string]uint64) {
		t.Helper()
		eventually.True(t, what, func() bool { return maps.Equal(w.observedLatencies(), counts) })
	}
	w.pool(w.template(), 1)
	w.served(w.claim("warm"))
	want("the warm claim is observed", map[string]uint64{"warm blueprint": 1})

	w.nodes.Holding(func(*agents.Sandbox) bool { return true })
	c := w.refused(w.claim("cold"), extensions.ReasonSandboxCreatePending, "starts cold")
	want("the cold one is not, before it is ready", map[string]uint64{"warm blueprint": 1})
	w.nodes.Holding(nil)
	w.served(c)
	want("the cold one is observed", map[string]uint64{"warm blueprint": 1, "cold blueprint": 1})
}

// annotations: a claim has them once its status names a sandbox. Their write fails where a user has changed the claim since the
// controller read it, so that no status follows from what the claim was.
func annotations(t *testing.T, cfg *Config) {
	began := time.Now()
	hooks := onStatus(func(_ context.Context, _ client.Client, c *extensions.SandboxClaim) error {
		if c.Status.Sandbox.Name == "" {
			return nil
		}
		first, err := time.Parse(time.RFC3339Nano, c.Annotations[agents.AnnotationFirstObserved])
		if err != nil || first.Before(began) || first.After(time.Now()) || c.Annotations[agents.AnnotationSandboxName] != c.Status.Sandbox.Name {
			t.Errorf("status %+v is written with the annotations %v: %v", c.Status, c.Annotations, err)
		}
		if c.Name == "changed" {
			t.Errorf("the changed claim was served: %+v", c.Status)
		}
		return nil
	})
	var change, fail sync.Once
	hooks.Patch = func(ctx context.Context, to client.WithWatch, obj client.Object, patch client.Patch, opts ...client.PatchOption) (err error) {
		if obj.GetName() == "changed" {
			change.Do(func() {
				other := &extensions.SandboxClaim{}
				must(t, to.Get(ctx, client.ObjectKeyFromObject(obj), other))
				other.Spec.Env = []extensions.EnvVar{{Name: "LATE", Value: "1"}}
				must(t, to.Update(ctx, other))
			})
		}
		if obj.GetName() == "failed" {
			fail.Do(func() { err = apierrors.NewInternalError(errors.New("the write fails")) })
		}
		if err != nil {
			return err
		}
		return to.Patch(ctx, obj, patch, opts...)
	}
	w := start(t, cfg, options{hooks: hooks, annotate: true})
	early := w.refused(w.claim("early"), extensions.ReasonWarmPoolNotFound, poolName)
	of := w.template()
	w.grow(w.pool(of, 0), of, 3) // the early claim takes one as soon as it is there
	w.served(early)
	w.refused(w.claim("changed"), extensions.ReasonEnvVarsRejected, "spec.env")
	w.served(w.claim("failed"))
	w.served(w.claim("warm"))
	w.served(w.claim("cold"))
}

// observedLatencies returns how many claims of which launch and template agent-sandbox's metric has.
func (w *fixture) observedLatencies() map[string]uint64 {
	families, err := w.upstream.Gather()
	must(w.t, err)
	counts := map[string]uint64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			counts[m.GetLabel()[0].GetValue()+" "+m.GetLabel()[1].GetValue()] += m.GetHistogram().GetSampleCount()
		}
	}
	return counts
}

func poolAndTemplateToCome(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	c := w.claim("early")
	w.refused(c, extensions.ReasonWarmPoolNotFound, "spec.warmPoolRef.name")
	p := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: poolName}}
	p.Spec.SandboxTemplateRef.Name = templateName
	must(t, w.api.Create(t.Context(), p))
	w.refused(c, extensions.ReasonTemplateNotFound, templateName)
	w.template()
	w.served(c)
}

func envPolicy(p extensions.InjectionPolicy) func(*extensions.SandboxTemplate) {
	return func(x *extensions.SandboxTemplate) {
		x.Spec.EnvVarsInjectionPolicy = p
		c := &x.Spec.PodTemplate.Spec.Containers
		(*c)[0].Env = []corev1.EnvVar{{Name: "SHAPE", Value: "round"}}
	}
}

func brings(name, value string) func(*extensions.SandboxClaim) {
	return func(c *extensions.SandboxClaim) {
		c.Spec.Env = append(c.Spec.Env, extensions.EnvVar{Name: name, Value: value})
	}
}

func valueOf(s *agents.Sandbox, container int, name string) (value string) {
	for _, v := range s.Spec.PodTemplate.Spec.Containers[container].Env {
		if v.Name == name {
			value += v.Value
		}
	}
	return value
}

func env(t *testing.T, cfg *Config) {
	a := &agent{}
	w := start(t, cfg, options{binder: a})
	x := w.template(envPolicy(extensions.InjectionDisallowed), func(x *extensions.SandboxTemplate) {
		c := &x.Spec.PodTemplate.Spec.Containers
		*c = append(*c, corev1.Container{Name: "side", Image: "second"})
	})
	w.pool(x, 4)
	plain := w.claim("plain", brings("COLOUR", "red"))
	other := w.claim("other", brings("COLOUR", "red"), brings("SHAPE", "square"))
	w.refused(plain, extensions.ReasonEnvVarsRejected, "spec.env: ")

	update(w, x, func(x *extensions.SandboxTemplate) { x.Spec.EnvVarsInjectionPolicy = extensions.InjectionAllowed })
	_, s := w.served(plain)
	if s.Labels[agents.LabelLaunchType] != agents.LaunchWarm || valueOf(s, 0, "COLOUR") != "red" || a.environment(s.Name)["COLOUR"] != "red" {
		t.Errorf("launch %s, object has %q, agent received %v", s.Labels[agents.LabelLaunchType], valueOf(s, 0, "COLOUR"), a.environment(s.Name))
	}
	w.refused(other, extensions.ReasonEnvVarsRejected, "spec.env[1].name: ")
	w.refused(w.claim("nowhere", brings("A", "b"), func(c *extensions.SandboxClaim) { c.Spec.Env[0].ContainerName = "none" }),
		extensions.ReasonEnvVarsRejected, "spec.env[0].containerName: ")

	update(w, x, func(x *extensions.SandboxTemplate) { x.Spec.EnvVarsInjectionPolicy = extensions.InjectionOverrides })
	_, s = w.served(other)
	if valueOf(s, 0, "SHAPE") != "square" || a.environment(s.Name)["SHAPE"] != "square" {
		t.Errorf("an override is %q in the object; agent received %v", valueOf(s, 0, "SHAPE"), a.environment(s.Name))
	}
	_, s = w.served(w.claim("side", brings("A", "b"), func(c *extensions.SandboxClaim) { c.Spec.Env[0].ContainerName = "side" }))
	if s.Labels[agents.LabelLaunchType] != agents.LaunchCold || valueOf(s, 1, "A") != "b" || valueOf(s, 0, "A") != "" || a.environment(s.Name) != nil {
		t.Errorf("variables for the second container: launch %s, %+v", s.Labels[agents.LabelLaunchType], s.Spec.PodTemplate.Spec.Containers)
	}
}

func envNotTaken(t *testing.T, cfg *Config) {
	a := &agent{fail: 1}
	w := start(t, cfg, options{binder: a})
	w.pool(w.template(envPolicy(extensions.InjectionAllowed)), 2)
	c, s := w.served(w.claim("c", brings("COLOUR", "red")))
	a.mu.Lock()
	tried := len(a.bound)
	a.mu.Unlock()
	if tried != 2 || a.environment(s.Name)["COLOUR"] != "red" {
		t.Errorf("%d agents received it, the one of sandbox %s: %v", tried, s.Name, a.environment(s.Name))
	}
	if all := w.owned(c); len(all) != 1 {
		t.Errorf("the claim owns %d sandboxes", len(all))
	}
}

// The claim's status is written in a second try: the agent of its sandbox gets the variables in the first
// one alone.
func envBoundOnce(t *testing.T, cfg *Config) {
	a := &agent{}
	var once sync.Once
	w := start(t, cfg, options{binder: a, hooks: onStatus(func(_ context.Context, _ client.Client, c *extensions.SandboxClaim) (err error) {
		if c.Status.Sandbox.Name != "" {
			once.Do(func() { err = errors.New("the API server is away") })
		}
		return err
	})})
	w.pool(w.template(envPolicy(extensions.InjectionAllowed)), 1)
	_, s := w.served(w.claim("c", brings("COLOUR", "red")))
	a.mu.Lock()
	defer a.mu.Unlock()
	if n := a.calls[s.Name]; n != 1 {
		t.Errorf("the agent got %d requests, want 1", n)
	}
}

func envNeverTaken(t *testing.T, cfg *Config) {
	a := &agent{fail: 1 << 30}
	w := start(t, cfg, options{binder: a})
	w.pool(w.template(envPolicy(extensions.InjectionAllowed)), 3)
	c := w.refused(w.claim("c", brings("COLOUR", "red")), extensions.ReasonClaimReconcilerFailed, "connection refused")
	if c.Status.Sandbox.Name != "" {
		t.Errorf("a sandbox that did not take the variables is named: %+v", c.Status)
	}
}

func metadata(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	w.pool(w.template(func(x *extensions.SandboxTemplate) {
		x.Spec.PodTemplate.ObjectMeta.Labels = map[string]string{"tier": "one"}
	}), 2)
	label := func(key, value string) func(*extensions.SandboxClaim) {
		return func(c *extensions.SandboxClaim) {
			c.Spec.AdditionalPodMetadata.Labels = map[string]string{key: value}
			c.Spec.AdditionalPodMetadata.Annotations = map[string]string{"note": "free text, with blanks"}
		}
	}
	for name, give := range map[string]struct{ key, value, message string }{
		"reserved":  {"agents.x-k8s.io/claim-uid", "x", "spec.additionalPodMetadata.labels[agents.x-k8s.io/claim-uid]: "},
		"malformed": {"a", "no blanks", "spec.additionalPodMetadata.labels[a]: "},
		"set":       {"tier", "two", "spec.additionalPodMetadata.labels[tier]: "},
	} {
		w.refused(w.claim(name, label(give.key, give.value)), extensions.ReasonInvalidMetadata, give.message)
	}
	_, s := w.served(w.claim("fine", label("example.com/team", "blue")))
	got := s.Spec.PodTemplate.ObjectMeta
	if s.Labels[agents.LabelLaunchType] != agents.LaunchWarm || got.Labels["example.com/team"] != "blue" || got.Labels["tier"] != "one" || got.Annotations["note"] == "" {
		t.Errorf("launch %s, metadata %+v", s.Labels[agents.LabelLaunchType], got)
	}
}

func volumes(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	x := w.template()
	w.pool(x, 1)
	c := w.claim("c", func(c *extensions.SandboxClaim) {
		c.Spec.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{{EmbeddedObjectMetadata: agents.EmbeddedObjectMetadata{Name: "data"}}}
	})
	w.refused(c, extensions.ReasonVolumeClaimsError, "spec.volumeClaimTemplates: ")
	w.nodes.Holding(func(*agents.Sandbox) bool { return true })
	update(w, x, func(x *extensions.SandboxTemplate) { x.Spec.VolumeClaimTemplatesPolicy = extensions.InjectionAllowed })
	w.refused(c, extensions.ReasonSandboxCreatePending, "spec.volumeClaimTemplates cannot be mounted into a running sandbox")
	w.nodes.Holding(nil)
	for name, names := range map[string][]string{"unnamed": {""}, "twice": {"a", "a"}, "malformed": {"A_b"}} { // the server takes them
		c := w.claim(name, func(c *extensions.SandboxClaim) {
			for _, n := range names {
				c.Spec.VolumeClaimTemplates = append(c.Spec.VolumeClaimTemplates, agents.PersistentVolumeClaimTemplate{EmbeddedObjectMetadata: agents.EmbeddedObjectMetadata{Name: n}})
			}
		})
		w.refused(c, extensions.ReasonVolumeClaimsError, fmt.Sprintf("spec.volumeClaimTemplates[%d].metadata.name: ", len(names)-1))
	}
	_, s := w.served(c)
	if s.Labels[agents.LabelLaunchType] != agents.LaunchCold || len(s.Spec.VolumeClaimTemplates) != 1 {
		t.Errorf("launch %s, volumes %+v", s.Labels[agents.LabelLaunchType], s.Spec.VolumeClaimTemplates)
	}
}

func nameTaken(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{})
	x := w.template()
	w.pool(x, 0)
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "mine"}}
	s.Spec.SandboxBlueprint = *x.Spec.SandboxBlueprint.DeepCopy()
	must(t, w.api.Create(t.Context(), s))
	c := w.claim("mine")
	w.refused(c, extensions.ReasonAdoptionConflict, "metadata.name: ")
	must(t, w.api.Delete(t.Context(), s))
	w.served(c)
}

func overQuota(t *testing.T, cfg *Config) {
	w := start(t, cfg, options{limits: quota.Limits{Sandboxes: quota.AtMost(1)}})
	w.pool(w.template(), 2)
	_, first := w.served(w.claim("first"))
	second := w.claim("second")
	c := w.refused(second, "QuotaExceeded", "at most 1 sandboxes")
	if strings.Contains(ready(c).Message, "exhausted") {
		t.Errorf("message %q", ready(c).Message)
	}
	must(t, w.api.Delete(t.Context(), first, client.Preconditions{UID: &first.UID}))
	w.served(second)
}

// forbidden has the API server forbid the writes of sandboxes for a while, as it does before it knows all rights. No event announces the end.
func forbidden(t *testing.T, cfg *Config) {
	var over atomic.Bool
	refusal := func(obj client.Object) error {
		if _, is := obj.(*agents.Sandbox); !is || over.Load() {
			return nil
		}
		return apierrors.NewForbidden(schema.GroupResource{Group: agents.GroupVersion.Group, Resource: "sandboxes"}, obj.GetName(), errors.New("no rights yet"))
	}
	w := start(t, cfg, options{hooks: interceptor.Funcs{
		Update: func(ctx context.Context, to client.WithWatch, obj client.Object, opts ...client.UpdateOption) error {
			if err := refusal(obj); err != nil {
				return err
			}
			return to.Update(ctx, obj, opts...)
		},
		Create: func(ctx context.Context, to client.WithWatch, obj client.Object, opts ...client.CreateOption) error {
			if err := refusal(obj); err != nil {
				return err
			}
			return to.Create(ctx, obj, opts...)
		},
	}})
	w.pool(w.template(), 1)
	warm := w.refused(w.claim("warm"), extensions.ReasonClaimReconcilerFailed, "no rights yet")
	over.Store(true)
	w.served(warm)
	over.Store(false)
	cold := w.refused(w.claim("cold"), extensions.ReasonClaimReconcilerFailed, "no rights yet")
	over.Store(true)
	w.served(cold)
}
