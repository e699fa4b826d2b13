package claim

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

// blueprint is a template with two containers, of which the first has a variable and a label.
func blueprint(env, volumes extensions.InjectionPolicy) *extensions.SandboxTemplate {
	t := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "t", UID: "t1"}}
	t.Spec.EnvVarsInjectionPolicy, t.Spec.VolumeClaimTemplatesPolicy = env, volumes
	t.Spec.PodTemplate.Spec.Containers = []corev1.Container{
		{Name: "main", Image: "x", Env: []corev1.EnvVar{{Name: "SET", Value: "t"}}}, {Name: "side", Image: "y"},
	}
	t.Spec.PodTemplate.ObjectMeta.Labels = map[string]string{"tier": "one"}
	t.Spec.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{volume("data")}
	return t
}

func volume(name string) agents.PersistentVolumeClaimTemplate {
	return agents.PersistentVolumeClaimTemplate{EmbeddedObjectMetadata: agents.EmbeddedObjectMetadata{Name: name}}
}

func newClaim(change func(*extensions.SandboxClaim)) *extensions.SandboxClaim {
	c := &extensions.SandboxClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "c", UID: "c1"}}
	if change != nil {
		change(c)
	}
	return c
}

func TestPlan(t *testing.T) {
	const allowed, overrides, disallowed = extensions.InjectionAllowed, extensions.InjectionOverrides, extensions.InjectionDisallowed
	env := func(name, value, container string) func(*extensions.SandboxClaim) {
		return func(c *extensions.SandboxClaim) {
			c.Spec.Env = []extensions.EnvVar{{Name: "FREE"}, {Name: name, Value: value, ContainerName: container}}
		}
	}
	vols := func(names ...string) func(*extensions.SandboxClaim) {
		return func(c *extensions.SandboxClaim) {
			for _, n := range names {
				c.Spec.VolumeClaimTemplates = append(c.Spec.VolumeClaimTemplates, volume(n))
			}
		}
	}
	note := func(labels, annotations map[string]string) func(*extensions.SandboxClaim) {
		return func(c *extensions.SandboxClaim) {
			c.Spec.AdditionalPodMetadata = agents.PodMetadata{Labels: labels, Annotations: annotations}
		}
	}
	for name, tt := range map[string]struct {
		policy extensions.InjectionPolicy
		late   bool
		give   func(*extensions.SandboxClaim)
		reason string // of the refusal; empty for none
		text   string // in its message, or in why the start is cold; empty for a warm one
	}{
		"nothing":              {disallowed, true, nil, "", ""},
		"env disallowed":       {disallowed, true, env("A", "", ""), extensions.ReasonEnvVarsRejected, "spec.env: "},
		"no policy":            {"", true, env("A", "", ""), extensions.ReasonEnvVarsRejected, "spec.env: "},
		"env allowed":          {allowed, true, env("A", "b", ""), "", ""},
		"env by name":          {allowed, true, env("A", "b", "main"), "", ""},
		"env of another":       {allowed, true, env("A", "b", "side"), "", "spec.env[1].containerName"},
		"env of none":          {allowed, true, env("A", "b", "none"), extensions.ReasonEnvVarsRejected, `spec.env[1].containerName: Unsupported value: "none": supported values: "main", "side"`},
		"env set":              {allowed, true, env("SET", "b", ""), extensions.ReasonEnvVarsRejected, "spec.env[1].name: "},
		"env set elsewhere":    {allowed, true, env("SET", "b", "side"), "", "spec.env[1].containerName"},
		"env overridden":       {overrides, true, env("SET", "b", ""), "", ""},
		"env malformed":        {overrides, true, env("A=", "b", ""), extensions.ReasonEnvVarsRejected, "spec.env[1].name: "},
		"env escape":           {allowed, true, env("A", "$$", ""), "", "spec.env[1].value"},
		"env reference":        {allowed, true, env("A", "$(SET)", ""), "", "spec.env[1].value"},
		"env without binder":   {allowed, false, env("A", "b", ""), "", "spec.env "},
		"volumes disallowed":   {disallowed, true, vols("more"), extensions.ReasonVolumeClaimsError, "spec.volumeClaimTemplates: "},
		"volumes allowed":      {allowed, true, vols("more"), "", "spec.volumeClaimTemplates "},
		"volume twice":         {allowed, true, vols("a", "a"), extensions.ReasonVolumeClaimsError, "spec.volumeClaimTemplates[1].metadata.name: Duplicate"},
		"volume set":           {allowed, true, vols("data"), extensions.ReasonVolumeClaimsError, "spec.volumeClaimTemplates[0].metadata.name: "},
		"volume overridden":    {overrides, true, vols("data"), "", "spec.volumeClaimTemplates "},
		"volume malformed":     {allowed, true, vols("A_b"), extensions.ReasonVolumeClaimsError, "spec.volumeClaimTemplates[0].metadata.name: "},
		"volume's long object": {allowed, true, func(c *extensions.SandboxClaim) { c.Name = strings.Repeat("c", 249); vols("a", "more")(c) }, extensions.ReasonVolumeClaimsError, "spec.volumeClaimTemplates[1].metadata.name: Invalid value: \"more\": its PersistentVolumeClaim more-c"},
		"volume's object":      {allowed, true, func(c *extensions.SandboxClaim) { c.Name = strings.Repeat("c", 248); vols("more")(c) }, "", "spec.volumeClaimTemplates "},
		"volume without name":  {allowed, true, vols(""), extensions.ReasonVolumeClaimsError, "spec.volumeClaimTemplates[0].metadata.name: "},
		"label":                {disallowed, true, note(map[string]string{"example.com/a": "b"}, nil), "", ""},
		"label as set":         {disallowed, true, note(map[string]string{"tier": "one"}, nil), "", ""},
		"label set":            {disallowed, true, note(map[string]string{"tier": "two"}, nil), extensions.ReasonInvalidMetadata, "labels[tier]: "},
		"label malformed":      {disallowed, true, note(map[string]string{"a b": ""}, nil), extensions.ReasonInvalidMetadata, "labels[a b]: "},
		"label value":          {disallowed, true, note(map[string]string{"a": "b c"}, nil), extensions.ReasonInvalidMetadata, "labels[a]: "},
		"label reserved":       {disallowed, true, note(map[string]string{"barchan.dev/warm-pool": ""}, nil), extensions.ReasonInvalidMetadata, "barchan.dev is reserved"},
		"label below reserved": {disallowed, true, note(map[string]string{"app.kubernetes.io/name": ""}, nil), extensions.ReasonInvalidMetadata, "kubernetes.io is reserved"},
		"label like reserved":  {disallowed, true, note(map[string]string{"notk8s.io/name": ""}, nil), "", ""},
		"annotation":           {disallowed, true, note(nil, map[string]string{"Example.com/A": "free text"}), "", ""},
		"annotation reserved":  {disallowed, true, note(nil, map[string]string{"K8s.io/a": ""}), extensions.ReasonInvalidMetadata, "annotations[K8s.io/a]: "},
		"annotation malformed": {disallowed, true, note(nil, map[string]string{"a/b/c": ""}), extensions.ReasonInvalidMetadata, "annotations[a/b/c]: "},
	} {
		t.Run(name, func(t *testing.T) {
			x, no := newPlan(newClaim(tt.give), &extensions.SandboxWarmPool{}, blueprint(tt.policy, tt.policy), "r", tt.late)
			switch {
			case no != nil:
				if no.reason != tt.reason || !strings.Contains(no.message, tt.text) {
					t.Errorf("refused: %v, want %s: %s", no, tt.reason, tt.text)
				}
			case tt.reason != "":
				t.Errorf("not refused, want %s", tt.reason)
			case (x.cold == "") != (tt.text == "") || !strings.HasPrefix(x.cold, tt.text):
				t.Errorf("cold because %q, want %q", x.cold, tt.text)
			}
		})
	}
}

func TestPlanBringsOnce(t *testing.T) {
	c := newClaim(func(c *extensions.SandboxClaim) {
		c.Spec.Env = []extensions.EnvVar{{Name: "SET", Value: "1"}, {Name: "NEW", Value: "2"}, {Name: "NEW", Value: "3", ContainerName: "main"}, {Name: "NEW", Value: "4", ContainerName: "side"}}
		c.Spec.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{volume("more"), volume("data")}
	})
	template := blueprint(extensions.InjectionOverrides, extensions.InjectionOverrides)
	x, no := newPlan(c, &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{UID: "p1"}}, template, "r", true)
	if no != nil {
		t.Fatal(no)
	}
	s := x.fresh()
	x.apply(s)
	main, side := s.Spec.PodTemplate.Spec.Containers[0].Env, s.Spec.PodTemplate.Spec.Containers[1].Env
	if !slices.Equal(main, []corev1.EnvVar{{Name: "SET", Value: "1"}, {Name: "NEW", Value: "3"}}) || !slices.Equal(side, []corev1.EnvVar{{Name: "NEW", Value: "4"}}) {
		t.Errorf("env %v and %v", main, side)
	}
	if len(s.Spec.VolumeClaimTemplates) != 2 || len(template.Spec.VolumeClaimTemplates) != 1 || template.Spec.PodTemplate.Spec.Containers[0].Env[0].Value != "t" {
		t.Errorf("volumes %+v; the template was changed to %+v", s.Spec.VolumeClaimTemplates, template.Spec)
	}
	if !x.carried(s) || s.Annotations[pool.AnnotationBoundEnv] != "true" || pool.OriginOf(s) != "p1" || !owns(c, s) || s.Name != "c" {
		t.Errorf("a fresh sandbox: %+v", s.ObjectMeta)
	}
}

func TestJudge(t *testing.T) {
	plain, _ := newPlan(newClaim(nil), &extensions.SandboxWarmPool{}, blueprint("", ""), "r", true)
	volumes, _ := newPlan(newClaim(func(c *extensions.SandboxClaim) {
		c.Spec.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{volume("more")}
	}), &extensions.SandboxWarmPool{}, blueprint("", extensions.InjectionAllowed), "r", true)
	brings, _ := newPlan(newClaim(func(c *extensions.SandboxClaim) { c.Spec.Env = []extensions.EnvVar{{Name: "A", Value: "b"}} }),
		&extensions.SandboxWarmPool{}, blueprint(extensions.InjectionAllowed, ""), "r", true)
	is := func(kind string) func(*agents.Sandbox) {
		return func(s *agents.Sandbox) {
			meta.SetStatusCondition(&s.Status.Conditions, metav1.Condition{Type: kind, Status: metav1.ConditionTrue, Reason: "x"})
		}
	}
	warm := func(s *agents.Sandbox) { s.Labels[agents.LabelLaunchType] = agents.LaunchWarm }
	stale := func(s *agents.Sandbox) { s.Labels[agents.LabelTemplateHash] = "q" }
	other := func(s *agents.Sandbox) { s.Annotations[agents.AnnotationTemplateRef] = "other" }
	leaves := func(s *agents.Sandbox) { s.DeletionTimestamp = new(metav1.Now()) }
	fails := func(s *agents.Sandbox) {
		meta.SetStatusCondition(&s.Status.Conditions, metav1.Condition{Type: agents.ConditionReady, Status: metav1.ConditionFalse, Reason: agents.ReasonPodFailed})
	}
	run, end := is(agents.ConditionReady), is(agents.ConditionFinished)
	for title, tt := range map[string]struct {
		plan *plan
		give []func(*agents.Sandbox)
		want verdict
	}{
		"warm, ready":             {plain, []func(*agents.Sandbox){warm, run}, name},
		"warm, not ready now":     {plain, []func(*agents.Sandbox){warm}, name},
		"warm, ended":             {plain, []func(*agents.Sandbox){warm, end}, drop},
		"warm, stale":             {plain, []func(*agents.Sandbox){warm, run, stale}, drop},
		"warm, going":             {plain, []func(*agents.Sandbox){warm, run, leaves}, leave},
		"warm, stale and going":   {plain, []func(*agents.Sandbox){warm, stale, leaves}, leave},
		"warm, but volumes":       {volumes, []func(*agents.Sandbox){warm, run}, drop},
		"warm, lacks variables":   {brings, []func(*agents.Sandbox){warm, run}, drop},
		"warm, has variables":     {brings, []func(*agents.Sandbox){warm, run, brings.apply}, name},
		"cold, starting":          {plain, nil, await},
		"cold, ready":             {plain, []func(*agents.Sandbox){run}, name},
		"cold, entrypoint failed": {plain, []func(*agents.Sandbox){fails}, name},
		"cold, ended":             {plain, []func(*agents.Sandbox){end}, name},
		"cold, stale":             {plain, []func(*agents.Sandbox){run, stale}, drop},
		"cold, starting, stale":   {plain, []func(*agents.Sandbox){stale}, drop},
		"cold, ended, stale":      {plain, []func(*agents.Sandbox){end, stale}, drop},
		"cold, with volumes":      {volumes, []func(*agents.Sandbox){run}, name},
		"warm, other template":    {plain, []func(*agents.Sandbox){warm, run, other}, drop},
		"cold, other template":    {plain, []func(*agents.Sandbox){end, other}, drop},
		"of unknown revision":     {plain, []func(*agents.Sandbox){run, func(s *agents.Sandbox) { s.Labels[agents.LabelTemplateHash] = "" }}, drop},
		"cold, lacking variables": {brings, nil, drop},
	} {
		t.Run(title, func(t *testing.T) {
			s := pool.NewSandbox(blueprint("", ""), "r", "n")
			for _, f := range tt.give {
				f(s)
			}
			if got := tt.plan.judge(s); got != tt.want {
				t.Errorf("judge = %d, want %d", got, tt.want)
			}
		})
	}
}

func TestEndOf(t *testing.T) {
	now := time.Now().Truncate(time.Second)
	shutdown := func(in time.Duration) *extensions.ClaimLifecycle {
		return &extensions.ClaimLifecycle{ShutdownTime: new(metav1.NewTime(now.Add(in)))}
	}
	both := shutdown(time.Hour)
	both.TTLSecondsAfterFinished = new(int32(60))
	only := &extensions.ClaimLifecycle{TTLSecondsAfterFinished: new(int32(0))}
	for name, tt := range map[string]struct {
		lifecycle *extensions.ClaimLifecycle
		finished  bool // now
		reason    string
		want      time.Time // zero for never
	}{
		"none":             {},
		"shutdown":         {lifecycle: shutdown(time.Minute), want: now.Add(time.Minute)},
		"passed":           {lifecycle: shutdown(-time.Minute), want: now.Add(-time.Minute)},
		"expired":          {lifecycle: shutdown(-time.Minute), reason: extensions.ReasonClaimExpired},
		"ttl, running":     {lifecycle: only},
		"ttl, finished":    {lifecycle: only, finished: true, want: now},
		"both, running":    {lifecycle: both, want: now.Add(time.Hour)},
		"both, finished":   {lifecycle: both, finished: true, want: now.Add(time.Minute)},
		"finished, no ttl": {lifecycle: shutdown(time.Hour), finished: true, want: now.Add(time.Hour)},
	} {
		t.Run(name, func(t *testing.T) {
			c := newClaim(func(c *extensions.SandboxClaim) { c.Spec.Lifecycle = tt.lifecycle })
			if tt.finished {
				meta.SetStatusCondition(&c.Status.Conditions, metav1.Condition{Type: agents.ConditionFinished, Status: metav1.ConditionTrue, LastTransitionTime: metav1.NewTime(now)})
			}
			if tt.reason != "" {
				c.Status = *waiting(c, tt.reason, "")
			}
			at, why, ends := endOf(c)
			if ends == tt.want.IsZero() || (ends && (!at.Equal(tt.want) || why == "")) {
				t.Errorf("endOf = %v, %q, %v; want %v", at, why, ends, tt.want)
			}
		})
	}
}

func TestMirrored(t *testing.T) {
	c := newClaim(func(c *extensions.SandboxClaim) { c.Generation = 7 })
	s := pool.NewSandbox(blueprint("", ""), "r", "n")
	s.Name, s.Status.PodIPs = "s", []string{"10.0.0.1"}
	check := func(title string, status metav1.ConditionStatus, reason string) {
		t.Helper()
		got := mirrored(c, s)
		ready := readyOf(got)
		if ready.Status != status || ready.Reason != reason || ready.ObservedGeneration != 7 || got.Sandbox.Name != "s" || !slices.Equal(got.Sandbox.PodIPs, s.Status.PodIPs) {
			t.Errorf("%s: %+v", title, got)
		}
	}
	check("nothing known", metav1.ConditionFalse, extensions.ReasonSandboxNotReady)
	meta.SetStatusCondition(&s.Status.Conditions, metav1.Condition{Type: agents.ConditionReady, Status: metav1.ConditionTrue, Reason: agents.ReasonDependenciesReady})
	check("ready", metav1.ConditionTrue, agents.ReasonDependenciesReady)
	s.DeletionTimestamp = new(metav1.Now())
	check("being deleted", metav1.ConditionFalse, extensions.ReasonSandboxNotReady)
}

func TestSlotsAreFair(t *testing.T) {
	req := func(name string) reconcile.Request {
		return reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}
	}
	var called []string
	slots := newPoolSlots(2)
	slots.start(func(r reconcile.Request) { called = append(called, r.Name) })
	for name, want := range map[string]bool{"a": true, "b": true} {
		if slots.acquire(req(name), "p") != want {
			t.Errorf("take %s is not %v", name, want)
		}
	}
	for _, name := range []string{"c", "d", "c"} {
		if slots.acquire(req(name), "p") {
			t.Errorf("%s got a third slot", name)
		}
	}
	if !slots.acquire(req("x"), "other") || !slots.acquire(req("a"), "p") {
		t.Error("another pool, or a holder of a slot, has to wait")
	}
	slots.release(req("unknown"))
	slots.release(req("a"))
	if slots.acquire(req("a"), "p") {
		t.Error("a former holder got a slot before a waiting request")
	}
	if !slots.acquire(req("c"), "p") {
		t.Error("a called request got no slot")
	}
	slots.release(req("b"))
	slots.release(req("c")) // without having waited
	slots.release(req("d"))
	slots.release(req("a"))
	slots.release(req("x"))
	if !slices.Equal(called, []string{"c", "d", "a"}) {
		t.Errorf("called %v", called)
	}
	slots.mu.Lock()
	defer slots.mu.Unlock()
	if len(slots.held)+len(slots.used)+len(slots.parked) > 0 {
		t.Errorf("left behind: %v %v %v", slots.held, slots.used, slots.parked)
	}
}
