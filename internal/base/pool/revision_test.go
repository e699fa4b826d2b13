package pool_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"regexp"
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

var update = flag.Bool("update", false, "write the golden files")

func template() *extensions.SandboxTemplate {
	t := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "t", UID: "9b1f1c1e-0000-4000-8000-000000000001"}}
	t.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: "python:3.12"}}
	return t
}

func revision(t testing.TB, of *extensions.SandboxTemplate) string {
	t.Helper()
	before := of.DeepCopy()
	r, canonical, err := pool.Revision(of)
	if err != nil {
		t.Fatal(err)
	}
	if !json.Valid(canonical) || len(validation.IsValidLabelValue(r)) > 0 || len(r) != 52 {
		t.Fatalf("revision %q of %s", r, canonical)
	}
	if !reflect.DeepEqual(before, of) {
		t.Fatal("the template was changed")
	}
	return r
}

type change = func(*extensions.SandboxTemplate, *corev1.PodSpec, *corev1.Container)

func with(c change) *extensions.SandboxTemplate {
	t := template()
	c(t, &t.Spec.PodTemplate.Spec, &t.Spec.PodTemplate.Spec.Containers[0])
	return t
}

func quantity(s string) resource.Quantity { return resource.MustParse(s) }

func memory(s string) change {
	return func(_ *extensions.SandboxTemplate, _ *corev1.PodSpec, c *corev1.Container) {
		c.Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: quantity(s)}
	}
}

func cpu(s string) change {
	return func(_ *extensions.SandboxTemplate, _ *corev1.PodSpec, c *corev1.Container) {
		c.Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: quantity(s)}
	}
}

func env(pairs ...string) change {
	return func(_ *extensions.SandboxTemplate, _ *corev1.PodSpec, c *corev1.Container) {
		for i := 0; i < len(pairs); i += 2 {
			c.Env = append(c.Env, corev1.EnvVar{Name: pairs[i], Value: pairs[i+1]})
		}
	}
}

func barchan(b agents.BarchanSpec) change {
	return func(t *extensions.SandboxTemplate, _ *corev1.PodSpec, _ *corev1.Container) {
		t.Spec.Barchan = &extensions.TemplateBarchanSpec{Sandbox: &b}
	}
}

func spec(f func(*extensions.SandboxTemplateSpec)) change {
	return func(t *extensions.SandboxTemplate, _ *corev1.PodSpec, _ *corev1.Container) { f(&t.Spec) }
}

func pod(f func(*corev1.PodSpec)) change {
	return func(_ *extensions.SandboxTemplate, p *corev1.PodSpec, _ *corev1.Container) { f(p) }
}

func container(f func(*corev1.Container)) change {
	return func(_ *extensions.SandboxTemplate, _ *corev1.PodSpec, c *corev1.Container) { f(c) }
}

func claims(name, size string, labels map[string]string, mode *corev1.PersistentVolumeMode) change {
	return spec(func(s *extensions.SandboxTemplateSpec) {
		s.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{{
			EmbeddedObjectMetadata: agents.EmbeddedObjectMetadata{Name: name, Labels: labels, Annotations: labels},
			Spec: corev1.PersistentVolumeClaimSpec{VolumeMode: mode, Resources: corev1.VolumeResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceStorage: quantity(size)},
			}},
		}}
	})
}

func policy(p *extensions.TemplateNetworkPolicy, m extensions.NetworkPolicyManagement) change {
	return spec(func(s *extensions.SandboxTemplateSpec) { s.NetworkPolicy, s.NetworkPolicyManagement = p, m })
}

func none(*extensions.SandboxTemplate, *corev1.PodSpec, *corev1.Container) {}

func TestRevisionIsTheSame(t *testing.T) {
	probe := func(p corev1.Probe) change {
		p.Exec = nil
		p.HTTPGet = &corev1.HTTPGetAction{Port: intstr.FromInt32(80), Path: p.HTTPGet.Path, Scheme: p.HTTPGet.Scheme}
		return container(func(c *corev1.Container) { c.ReadinessProbe = &p })
	}
	for name, pair := range map[string][2]change{
		"pod defaults": {none, pod(func(p *corev1.PodSpec) {
			p.DNSPolicy, p.SchedulerName, p.ServiceAccountName = corev1.DNSClusterFirst, corev1.DefaultSchedulerName, "default"
			p.TerminationGracePeriodSeconds, p.EnableServiceLinks = new(int64(30)), new(true)
			p.AutomountServiceAccountToken, p.ShareProcessNamespace, p.HostUsers = new(false), new(false), new(true)
			p.SetHostnameAsFQDN, p.RuntimeClassName = new(false), new("")
			p.SecurityContext, p.DNSConfig, p.Affinity = &corev1.PodSecurityContext{}, &corev1.PodDNSConfig{}, &corev1.Affinity{}
			p.PreemptionPolicy = new(corev1.PreemptLowerPriority)
		})},
		"container defaults": {none, container(func(c *corev1.Container) {
			c.ImagePullPolicy, c.TerminationMessagePath, c.TerminationMessagePolicy = corev1.PullIfNotPresent, "/dev/termination-log", corev1.TerminationMessageReadFile
			c.SecurityContext = &corev1.SecurityContext{Capabilities: &corev1.Capabilities{}, Privileged: new(false), ReadOnlyRootFilesystem: new(false), ProcMount: new(corev1.DefaultProcMount)}
		})},
		"empty lists": {none, func(t *extensions.SandboxTemplate, p *corev1.PodSpec, c *corev1.Container) {
			t.Spec.VolumeClaimTemplates = []agents.PersistentVolumeClaimTemplate{}
			p.Volumes, p.NodeSelector, p.Tolerations, p.InitContainers = []corev1.Volume{}, map[string]string{}, []corev1.Toleration{}, []corev1.Container{}
			c.Env, c.Args, c.Ports, c.Resources.Limits = []corev1.EnvVar{}, []string{}, []corev1.ContainerPort{}, corev1.ResourceList{}
			p.SecurityContext = &corev1.PodSecurityContext{SupplementalGroups: []int64{}}
		}},
		"no containers": {pod(func(p *corev1.PodSpec) { p.Containers = nil }), pod(func(p *corev1.PodSpec) { p.Containers = []corev1.Container{} })},
		"port":          {container(func(c *corev1.Container) { c.Ports = []corev1.ContainerPort{{ContainerPort: 80}} }), container(func(c *corev1.Container) { c.Ports = []corev1.ContainerPort{{ContainerPort: 80, Protocol: "TCP"}} })},
		"account":       {pod(func(p *corev1.PodSpec) { p.ServiceAccountName = "x" }), pod(func(p *corev1.PodSpec) { p.DeprecatedServiceAccount = "x" })},
		"probe": {
			probe(corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{}}}),
			probe(corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/", Scheme: "HTTP"}}, TimeoutSeconds: 1, PeriodSeconds: 10, SuccessThreshold: 1, FailureThreshold: 3}),
		},
		"binary units":   {memory("1Gi"), memory("1024Mi")},
		"bytes":          {memory("1Gi"), memory("1073741824")},
		"decimal units":  {cpu("0.5"), cpu("500m")},
		"exponent":       {memory("1e9"), memory("1G")},
		"claim labels":   {claims("d", "1Gi", nil, nil), claims("d", "1024Mi", map[string]string{"a": "b"}, new(corev1.PersistentVolumeFilesystem))},
		"managed":        {none, policy(nil, extensions.NetworkManaged)},
		"empty policies": {policy(&extensions.TemplateNetworkPolicy{}, ""), policy(&extensions.TemplateNetworkPolicy{Ingress: []networkingv1.NetworkPolicyIngressRule{}}, "")},
		"unmanaged, with a policy that is not applied": {policy(nil, extensions.NetworkUnmanaged), policy(&extensions.TemplateNetworkPolicy{}, extensions.NetworkUnmanaged)},
		"policy port": {
			policy(&extensions.TemplateNetworkPolicy{Egress: []networkingv1.NetworkPolicyEgressRule{{Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(1))}}}}}, ""),
			policy(&extensions.TemplateNetworkPolicy{Egress: []networkingv1.NetworkPolicyEgressRule{{Ports: []networkingv1.NetworkPolicyPort{{Port: new(intstr.FromInt32(1)), Protocol: new(corev1.ProtocolTCP)}}}}}, ""),
		},
		"internet":       {none, barchan(agents.BarchanSpec{Network: &agents.EgressPolicy{Internet: new(true), AllowOut: []string{}}})},
		"internet unset": {none, barchan(agents.BarchanSpec{Network: &agents.EgressPolicy{}})},
		"time to warm up": {
			barchan(agents.BarchanSpec{WarmUp: &agents.WarmUp{Command: []string{"a"}}}),
			barchan(agents.BarchanSpec{WarmUp: &agents.WarmUp{Command: []string{"a"}, TimeoutSeconds: 300}, Resume: agents.ResumeFiles, Fork: &agents.ForkPolicy{Secrets: agents.SecretsAllow}}),
		},
		"policies": {none, barchan(agents.BarchanSpec{
			Metadata: map[string]string{"a": "b"}, OnTimeout: agents.TimeoutPause, Suspend: agents.SuspendFiles,
			Wake: &agents.WakePolicy{OnTraffic: true}, Access: &agents.AccessPolicy{PublicTraffic: new(false), MaskRequestHost: "x"},
		})},
		"metadata": {none, func(t *extensions.SandboxTemplate, _ *corev1.PodSpec, _ *corev1.Container) {
			t.Name, t.Labels, t.Annotations, t.ResourceVersion, t.Generation = "other", map[string]string{"a": "b"}, map[string]string{"a": "b"}, "7", 3
			t.Spec.PodTemplate.ObjectMeta = agents.PodMetadata{Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"a": "b"}}
			t.Spec.EnvVarsInjectionPolicy, t.Spec.VolumeClaimTemplatesPolicy = extensions.InjectionAllowed, extensions.InjectionOverrides
			t.Spec.Barchan = &extensions.TemplateBarchanSpec{Aliases: []string{"a"}, Public: true}
		}},
	} {
		if a, b := revision(t, with(pair[0])), revision(t, with(pair[1])); a != b {
			_, x, _ := pool.Revision(with(pair[0]))
			_, y, _ := pool.Revision(with(pair[1]))
			t.Errorf("%s: differ:\n%s\n%s", name, x, y)
		}
	}
}

func TestRevisionDiffers(t *testing.T) {
	changes := map[string]change{
		"none":             none,
		"image":            container(func(c *corev1.Container) { c.Image = "python:3.13" }),
		"name":             container(func(c *corev1.Container) { c.Name = "x" }),
		"command":          container(func(c *corev1.Container) { c.Command = []string{"a", "b"} }),
		"command's split":  container(func(c *corev1.Container) { c.Command = []string{"a b"} }),
		"args":             container(func(c *corev1.Container) { c.Args = []string{"a", "b"} }),
		"env a":            env("A", "1", "B", "2"),
		"env order":        env("B", "2", "A", "1"),
		"env values":       env("A", "2", "B", "1"),
		"memory":           memory("1Gi"),
		"more memory":      memory("2Gi"),
		"cpu":              cpu("1"),
		"always":           container(func(c *corev1.Container) { c.ImagePullPolicy = corev1.PullAlways }),
		"never":            container(func(c *corev1.Container) { c.ImagePullPolicy = corev1.PullNever }),
		"restart always":   pod(func(p *corev1.PodSpec) { p.RestartPolicy = corev1.RestartPolicyAlways }),
		"restart never":    pod(func(p *corev1.PodSpec) { p.RestartPolicy = corev1.RestartPolicyNever }),
		"gvisor":           pod(func(p *corev1.PodSpec) { p.RuntimeClassName = new("gvisor") }),
		"runc":             pod(func(p *corev1.PodSpec) { p.RuntimeClassName = new("runc") }),
		"token":            pod(func(p *corev1.PodSpec) { p.AutomountServiceAccountToken = new(true) }),
		"grace":            pod(func(p *corev1.PodSpec) { p.TerminationGracePeriodSeconds = new(int64(0)) }),
		"user":             pod(func(p *corev1.PodSpec) { p.SecurityContext = &corev1.PodSecurityContext{RunAsUser: new(int64(0))} }),
		"container's user": container(func(c *corev1.Container) { c.SecurityContext = &corev1.SecurityContext{RunAsUser: new(int64(0))} }),
		"no escalation": container(func(c *corev1.Container) {
			c.SecurityContext = &corev1.SecurityContext{AllowPrivilegeEscalation: new(false)}
		}),
		"root again": container(func(c *corev1.Container) { c.SecurityContext = &corev1.SecurityContext{RunAsNonRoot: new(false)} }),
		"scratch": pod(func(p *corev1.PodSpec) {
			p.Volumes = []corev1.Volume{{Name: "a", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		}),
		"memory scratch": pod(func(p *corev1.PodSpec) {
			p.Volumes = []corev1.Volume{{Name: "a", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: "Memory"}}}}
		}),
		"claim":        claims("d", "1Gi", nil, nil),
		"claim's name": claims("e", "1Gi", nil, nil),
		"claim's size": claims("d", "2Gi", nil, nil),
		"service":      spec(func(s *extensions.SandboxTemplateSpec) { s.Service = new(true) }),
		"no service":   spec(func(s *extensions.SandboxTemplateSpec) { s.Service = new(false) }),
		"unmanaged":    policy(nil, extensions.NetworkUnmanaged),
		"deny all":     policy(&extensions.TemplateNetworkPolicy{}, ""),
		"egress open":  policy(&extensions.TemplateNetworkPolicy{Egress: []networkingv1.NetworkPolicyEgressRule{{}}}, ""),
		"ingress open": policy(&extensions.TemplateNetworkPolicy{Ingress: []networkingv1.NetworkPolicyIngressRule{{}}}, ""),
		"no internet":  barchan(agents.BarchanSpec{Network: &agents.EgressPolicy{Internet: new(false)}}),
		"deny out":     barchan(agents.BarchanSpec{Network: &agents.EgressPolicy{DenyOut: []string{"1.1.1.1"}}}),
		"allow out":    barchan(agents.BarchanSpec{Network: &agents.EgressPolicy{AllowOut: []string{"1.1.1.1"}}}),
		"restore":      barchan(agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: "a"}}),
		"other origin": barchan(agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: "b"}}),
		"only files":   barchan(agents.BarchanSpec{Restore: &agents.RestoreSource{CheckpointName: "a", FilesOnly: true}}),
		"warm-up":      barchan(agents.BarchanSpec{WarmUp: &agents.WarmUp{Command: []string{"a", "b"}}}),
		"split":        barchan(agents.BarchanSpec{WarmUp: &agents.WarmUp{Command: []string{"a b"}}}),
		"long warm-up": barchan(agents.BarchanSpec{WarmUp: &agents.WarmUp{Command: []string{"a", "b"}, TimeoutSeconds: 301}}),
		"open agent":   barchan(agents.BarchanSpec{Access: &agents.AccessPolicy{OpenAgent: true}}),
	}
	of := map[string]string{}
	for name, c := range changes {
		r := revision(t, with(c))
		if other, taken := of[r]; taken {
			t.Errorf("%q and %q have one revision", name, other)
		}
		of[r] = name
	}
}

// rich is a template that sets most of what sandboxes can have.
func rich() *extensions.SandboxTemplate {
	t := with(env("A", "1", "B", "2"))
	p, c := &t.Spec.PodTemplate.Spec, &t.Spec.PodTemplate.Spec.Containers[0]
	memory("512Mi")(t, p, c)
	claims("data", "1Gi", nil, nil)(t, p, c)
	c.Command, c.Ports = []string{"server"}, []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}
	c.VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
	c.ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstr.FromString("http")}}}
	barchan(agents.BarchanSpec{Network: &agents.EgressPolicy{DenyOut: []string{"203.0.113.0/24"}}})(t, p, c)
	return t
}

// A change of the canonical form rolls every pool of every user at their next upgrade, and
// what claims find meanwhile are cold starts. If that is intended, raise form and run with
// -update. An upgrade of k8s.io/api may be the cause too: see whether its new field can be
// left out while it is unset.
func TestRevisionGolden(t *testing.T) {
	r, canonical, err := pool.Revision(rich())
	if err != nil {
		t.Fatal(err)
	}
	got := r + "\n" + string(canonical) + "\n"
	const file = "testdata/revision.golden"
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the canonical form has changed, which rolls every pool:\n%swas\n%s", got, want)
	}
}

// Every field of a Pod's and a container's specification counts, but for those named: also
// the fields that k8s.io/api brings next year.
func TestRevisionMissesNoField(t *testing.T) {
	same := map[string]bool{
		"DeprecatedServiceAccount": true, // set with ServiceAccountName, it is another name for nothing
	}
	base := func() *extensions.SandboxTemplate {
		return with(pod(func(p *corev1.PodSpec) { p.ServiceAccountName = "robot" }))
	}
	for name, root := range map[string]func(*extensions.SandboxTemplate) reflect.Value{
		"pod": func(t *extensions.SandboxTemplate) reflect.Value {
			return reflect.ValueOf(&t.Spec.PodTemplate.Spec).Elem()
		},
		"container": func(t *extensions.SandboxTemplate) reflect.Value {
			return reflect.ValueOf(&t.Spec.PodTemplate.Spec.Containers[0]).Elem()
		},
		"claim": func(t *extensions.SandboxTemplate) reflect.Value {
			t.Spec.VolumeClaimTemplates = make([]agents.PersistentVolumeClaimTemplate, 1)
			return reflect.ValueOf(&t.Spec.VolumeClaimTemplates[0].Spec).Elem()
		},
	} {
		for i := range root(base()).NumField() {
			missed, field := true, ""
			for _, yes := range []bool{true, false} { // one of both may be the default
				changed := base()
				v := root(changed)
				field = v.Type().Field(i).Name
				before := revision(t, changed)
				set(v.Field(i), yes, 0)
				missed = missed && revision(t, changed) == before
			}
			if missed != same[field] {
				t.Errorf("%s.%s: a change of it is missed, or named for nothing", name, field)
			}
		}
	}
}

// set gives a value, and all that it consists of, a content: yes in booleans, and elsewhere
// values that are no defaults.
func set(v reflect.Value, yes bool, depth int) {
	switch x := v.Addr().Interface().(type) {
	case *resource.Quantity:
		*x = quantity("7")
		return
	case *intstr.IntOrString:
		*x = intstr.FromInt32(7)
		return
	}
	if depth > 6 {
		return
	}
	switch v.Kind() { //nolint:exhaustive // Kubernetes' types are of these
	case reflect.String:
		v.SetString("odd")
	case reflect.Bool:
		v.SetBool(yes)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(7)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		set(v.Elem(), yes, depth+1)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		set(v.Index(0), yes, depth+1)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		k, e := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		set(k, yes, depth+1)
		set(e, yes, depth+1)
		v.SetMapIndex(k, e)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				set(v.Field(i), yes, depth+1)
			}
		}
	default:
	}
}

// dimension is one thing that a template decides. Each meaning has several spellings.
type dimension [][]change

func dimensions() []dimension {
	image := func(s string) change { return container(func(c *corev1.Container) { c.Image = s }) }
	pull := func(p corev1.PullPolicy) change {
		return container(func(c *corev1.Container) { c.ImagePullPolicy = p })
	}
	restart := func(p corev1.RestartPolicy) change { return pod(func(s *corev1.PodSpec) { s.RestartPolicy = p }) }
	grace := func(n *int64) change { return pod(func(s *corev1.PodSpec) { s.TerminationGracePeriodSeconds = n }) }
	service := func(b *bool) change { return spec(func(s *extensions.SandboxTemplateSpec) { s.Service = b }) }
	reach := func(e *agents.EgressPolicy) change { return barchan(agents.BarchanSpec{Network: e}) }
	return []dimension{
		{{image("a"), image("a")}, {image("b")}, {image("ab")}, {image("")}},
		{{pull(""), pull(corev1.PullIfNotPresent)}, {pull(corev1.PullAlways)}, {pull(corev1.PullNever)}},
		{{restart("")}, {restart("Always")}, {restart("OnFailure")}, {restart("Never")}},
		{{grace(nil), grace(new(int64(30)))}, {grace(new(int64(0)))}, {grace(new(int64(31)))}},
		{{none}, {memory("1Gi"), memory("1024Mi"), memory("1073741824")}, {memory("1G"), memory("1000M"), memory("1e9")}},
		{{none, env()}, {env("A", "1")}, {env("A", "1", "B", "2")}, {env("B", "2", "A", "1")}, {env("A", "1,B=2")}},
		{{service(nil)}, {service(new(true))}, {service(new(false))}},
		{
			{policy(nil, ""), policy(nil, extensions.NetworkManaged)},
			{policy(&extensions.TemplateNetworkPolicy{}, "")},
			{policy(nil, extensions.NetworkUnmanaged), policy(&extensions.TemplateNetworkPolicy{}, extensions.NetworkUnmanaged)},
		},
		{{none, reach(nil), reach(&agents.EgressPolicy{Internet: new(true)})}, {reach(&agents.EgressPolicy{Internet: new(false)})}, {reach(&agents.EgressPolicy{AllowOut: []string{"a"}})}, {reach(&agents.EgressPolicy{DenyOut: []string{"a"}})}},
		{{none}, {claims("a", "1Gi", nil, nil), claims("a", "1024Mi", map[string]string{"x": "y"}, nil)}, {claims("b", "1Gi", nil, nil)}},
	}
}

// draw makes a template up. Two have the same meaning if and only if their names are equal.
func draw(r *rand.Rand) (t *extensions.SandboxTemplate, meaning string) {
	t = template()
	for _, d := range dimensions() {
		m := r.IntN(len(d))
		c := d[m][r.IntN(len(d[m]))]
		c(t, &t.Spec.PodTemplate.Spec, &t.Spec.PodTemplate.Spec.Containers[0])
		meaning += fmt.Sprint(m, " ")
	}
	return t, meaning
}

func TestRevisionOfRandomTemplates(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	byMeaning, byRevision := map[string]string{}, map[string]string{}
	for range 20_000 {
		drawn, meaning := draw(r)
		got := revision(t, drawn)
		if was, ok := byMeaning[meaning]; ok && was != got {
			t.Fatalf("one meaning %s, two revisions", meaning)
		}
		if was, ok := byRevision[got]; ok && was != meaning {
			t.Fatalf("one revision, two meanings: %s and %s", was, meaning)
		}
		byMeaning[meaning], byRevision[got] = got, meaning
	}
}

var longExponent = regexp.MustCompile(`[eE][+-]?\d{5,}`)

// What is stored and read again is of the same revision.
func FuzzRevisionSurvivesStorage(f *testing.F) {
	for _, t := range []*extensions.SandboxTemplate{template(), rich()} {
		text, err := json.Marshal(t)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte(`{"spec":{"podTemplate":{"spec":{"containers":[{"resources":{"limits":{"cpu":"0.1","memory":1e3}},"env":[]}],"volumes":[{"name":"a","emptyDir":{"sizeLimit":"1.5Gi"}}]}}}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		var first, second extensions.SandboxTemplate
		if longExponent.Match(text) {
			t.Skip("the library of quantities takes minutes to read them")
		}
		if json.Unmarshal(text, &first) != nil {
			return
		}
		before := revision(t, &first)
		stored, err := json.Marshal(&first)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(stored, &second); err != nil {
			t.Fatal(err)
		}
		if after := revision(t, &second); after != before {
			t.Fatalf("%s\nbecame\n%s", text, stored)
		}
	})
}
