package cluster

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/version"
	discoveryfake "k8s.io/client-go/discovery/fake"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/yaml"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

var release = Release{Namespace: "sandboxes", Version: "v1.2.3"}

func images() Values { return Values{"image": "r.test/barchan:1", "agentImage": "r.test/agent:1"} }

func render(t *testing.T, values Values) []*unstructured.Unstructured {
	t.Helper()
	list, err := Render(release, Merge(images(), values))
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func find(list []*unstructured.Unstructured, kind, name string) *unstructured.Unstructured {
	i := slices.IndexFunc(list, func(u *unstructured.Unstructured) bool { return u.GetKind() == kind && u.GetName() == name })
	if i < 0 {
		return nil
	}
	return list[i]
}

func deployment(t *testing.T, list []*unstructured.Unstructured, name string) *appsv1.Deployment {
	t.Helper()
	u := find(list, kindDeployment, name)
	if u == nil {
		t.Fatalf("no Deployment %s", name)
	}
	d := &appsv1.Deployment{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(u.Object, d, true); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestRender(t *testing.T) {
	list := render(t, Values{
		"controller":  Values{"replicas": 3, "args": []any{"--log-level=debug"}, "nodeSelector": Values{"pool": "system"}},
		"sandbox":     Values{"runtimeClass": "gvisor", "imageVolumes": true},
		"tokenSecret": "mine", "imagePullSecrets": []any{Values{"name": "pull"}},
	})
	for i, u := range list {
		if (u.GetKind() == kindCRD) != (i < 9) {
			t.Errorf("object %d is a %s, want the nine definitions first", i, u.GetKind())
		}
		if ns := u.GetNamespace(); ns != "" && ns != "sandboxes" {
			t.Errorf("%s %s is in namespace %s", u.GetKind(), u.GetName(), ns)
		}
	}
	checkController(t, deployment(t, list, "barchan-controller"))
	for kind, name := range map[string]string{"Secret": TokenSecret, "Pod": "barchan-test"} { // another is named; it is a test of Helm's
		if find(list, kind, name) != nil {
			t.Errorf("it has the %s %s", kind, name)
		}
	}
}

func checkController(t *testing.T, d *appsv1.Deployment) {
	t.Helper()
	spec := d.Spec.Template.Spec
	args := spec.Containers[0].Args
	for _, want := range []string{"--runtime-class=gvisor", "--image-volumes", "--agent-image=r.test/agent:1", "--lease-namespace=sandboxes"} {
		if !slices.Contains(args, want) {
			t.Errorf("arguments %q lack %s", args, want)
		}
	}
	if *d.Spec.Replicas != 3 || args[len(args)-1] != "--log-level=debug" || d.Labels["app.kubernetes.io/version"] != "1.2.3" {
		t.Errorf("%d replicas, labels %v, arguments %q", *d.Spec.Replicas, d.Labels, args)
	}
	if spec.Containers[0].Image != "r.test/barchan:1" || spec.Volumes[1].Secret.SecretName != "mine" || spec.NodeSelector["pool"] != "system" || spec.ImagePullSecrets[0].Name != "pull" {
		t.Errorf("Pod %+v", spec)
	}
}

// TestRenderSwitches verifies what a value adds or leaves out.
func TestRenderSwitches(t *testing.T) {
	tests := map[string]struct {
		give       Values
		kind, name string
		want       bool
	}{
		"definitions":     {kind: kindCRD, name: "sandboxes.agents.x-k8s.io", want: true},
		"no definitions":  {give: Values{"crds": false}, kind: kindCRD, name: "sandboxes.agents.x-k8s.io"},
		"own secret":      {kind: "Secret", name: TokenSecret, want: true},
		"no autoscaling":  {kind: "HorizontalPodAutoscaler", name: "barchan-replica"},
		"autoscaling":     {give: Values{"replica": Values{"autoscaling": Values{"enabled": true}}}, kind: "HorizontalPodAutoscaler", name: "barchan-replica", want: true},
		"tenants":         {kind: "ValidatingAdmissionPolicy", name: "barchan-tenants", want: true},
		"no tenants":      {give: Values{"tenantLabel": false}, kind: "ValidatingAdmissionPolicy", name: "barchan-tenants"},
		"flow control":    {kind: "FlowSchema", name: "barchan", want: true},
		"no flow control": {give: Values{"flowControl": false}, kind: "PriorityLevelConfiguration", name: "barchan"},
		"peers":           {kind: "Service", name: "barchan-peers", want: true},
		"no peers":        {give: Values{"replica": Values{"peers": false}}, kind: "Service", name: "barchan-peers"},
		"no logs":         {kind: "ClusterRoleBinding", name: "barchan-logs"},
		"logs":            {give: Values{"replica": Values{"podLogs": true}}, kind: "ClusterRoleBinding", name: "barchan-logs", want: true},
		"no monitoring":   {kind: "Service", name: "barchan-metrics"},
		"alerts":          {give: Values{"prometheusRule": Values{"enabled": true}}, kind: "PrometheusRule", name: "barchan", want: true},
		"no alerts":       {kind: "PrometheusRule", name: "barchan"},
		"Grafana":         {give: Values{"grafanaDashboard": Values{"enabled": true}}, kind: "ConfigMap", name: "barchan-dashboard", want: true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := find(render(t, tt.give), tt.kind, tt.name) != nil; got != tt.want {
				t.Errorf("%s %s: %v, want %v", tt.kind, tt.name, got, tt.want)
			}
		})
	}
	for _, on := range []bool{true, false} {
		list := render(t, Values{"replica": Values{"peers": on}})
		c := deployment(t, list, "barchan-replica").Spec.Template.Spec.Containers[0]
		if got := slices.Contains(c.Args, "--peer-seeds=barchan-peers:7701"); got != on || len(c.Ports) == 5 != on || (c.Env[0].Name == "POD_IP") != on {
			t.Errorf("peers %v: arguments %q, ports %v, variables %v", on, c.Args, c.Ports, c.Env)
		}
		if c := deployment(t, list, "barchan-controller").Spec.Template.Spec.Containers[0]; len(c.Ports) != 2 {
			t.Errorf("ports %v of a controller", c.Ports)
		}
	}
	scaled := deployment(t, render(t, Values{"replica": Values{"autoscaling": Values{"enabled": true}}}), "barchan-replica")
	if scaled.Spec.Replicas != nil {
		t.Error("a number of replicas beside the autoscaler's")
	}
}

// TestRenderServiceMonitor: the ServiceMonitor selects the Service, and that selects the Pods of both roles and a port that they have.
func TestRenderServiceMonitor(t *testing.T) {
	list := render(t, Values{"serviceMonitor": Values{"enabled": true, "labels": Values{"release": "prometheus"}}})
	monitor, service := find(list, "ServiceMonitor", "barchan"), find(list, "Service", "barchan-metrics")
	if monitor == nil || service == nil || monitor.GetLabels()["release"] != "prometheus" {
		t.Fatalf("monitor %v, Service %v", monitor, service)
	}
	selected, _, err := unstructured.NestedStringMap(monitor.Object, "spec", "selector", "matchLabels")
	if err != nil || len(selected) == 0 {
		t.Fatalf("selector %v, %v", selected, err)
	}
	for _, u := range list {
		if got := u.GetKind() == "Service" && labels.SelectorFromSet(selected).Matches(labels.Set(u.GetLabels())); got != (u == service) {
			t.Errorf("the monitor selects %s %s: %v", u.GetKind(), u.GetName(), got)
		}
	}
	s := &corev1.Service{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(service.Object, s, true); err != nil {
		t.Fatal(err)
	}
	endpoints, _, err := unstructured.NestedSlice(monitor.Object, "spec", "endpoints")
	if err != nil || len(endpoints) != 1 || endpoints[0].(Values)["port"] != s.Spec.Ports[0].Name || !s.Spec.PublishNotReadyAddresses {
		t.Errorf("endpoints %v, %v; Service %+v", endpoints, err, s.Spec)
	}
	checkScraped(t, list, s)
}

// checkScraped has a Service select the Pods of both roles, and a port that they have.
func checkScraped(t *testing.T, list []*unstructured.Unstructured, s *corev1.Service) {
	t.Helper()
	for _, role := range []string{"barchan-controller", "barchan-replica"} {
		pod := deployment(t, list, role).Spec.Template
		if !labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(pod.Labels)) {
			t.Errorf("the Service does not select %s with %v", role, pod.Labels)
		}
		if !slices.ContainsFunc(pod.Spec.Containers[0].Ports, func(p corev1.ContainerPort) bool {
			return p.Name == s.Spec.Ports[0].TargetPort.StrVal && p.ContainerPort == s.Spec.Ports[0].Port
		}) {
			t.Errorf("%s has no port %+v", role, s.Spec.Ports[0])
		}
	}
}

// TestRenderControllerName: the value names the Deployment, and nothing else changes.
func TestRenderControllerName(t *testing.T) {
	const name = "agent-sandbox-controller"
	secret := Values{"tokenSecret": "mine"} // without, each rendering makes another
	usual, list := render(t, secret), render(t, Merge(secret, Values{"controller": Values{"name": name}}))
	want, got := deployment(t, usual, "barchan-controller"), deployment(t, list, name)
	if got.Name, want.Name = "", ""; !equality.Semantic.DeepEqual(got, want) {
		t.Errorf("the Deployment is %+v, want %+v", got, want)
	}
	for i, u := range usual {
		if u.GetKind() != kindDeployment && !equality.Semantic.DeepEqual(u, list[i]) {
			t.Errorf("%s %s changed", u.GetKind(), u.GetName())
		}
	}
	deployment(t, list, "barchan-replica")
}

// TestUpstreamController: ours is not taken for agent-sandbox's where it has its name.
func TestUpstreamController(t *testing.T) {
	list, err := Render(Release{Namespace: upstreamNamespace, Version: "v1"}, Merge(images(), Values{"controller": Values{"name": upstreamDeployment}}))
	if err != nil {
		t.Fatal(err)
	}
	ours := deployment(t, list, upstreamDeployment)
	theirs := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: upstreamNamespace, Name: upstreamDeployment}}
	for d, want := range map[*appsv1.Deployment]bool{ours: false, theirs: true} {
		d.Status.Replicas = 1
		c := &Cluster{kube: fake.NewClientset(d)}
		got, err := c.upstream(t.Context())
		if (err == nil) != want || !want && !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("upstream is %v, %v, want one: %v", got, err, want)
		}
		if check := c.checkUpstream(t.Context()); (check.State == adminclient.CheckOK) == want {
			t.Errorf("check %+v, upstream's runs: %v", check, want)
		}
	}
}

// TestCheckPodSecurity: an installation's namespace passes, and one as Helm makes it does not.
func TestCheckPodSecurity(t *testing.T) {
	helm := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: DefaultNamespace, Labels: map[string]string{"name": DefaultNamespace}}}
	ours := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: DefaultNamespace, Labels: Namespace(DefaultNamespace).GetLabels()}}
	tests := map[string]struct {
		give []runtime.Object
		want string
	}{
		"ours": {[]runtime.Object{ours}, adminclient.CheckOK}, "Helm's": {[]runtime.Object{helm}, adminclient.CheckWarning}, "none": {nil, adminclient.CheckOK},
	}
	for name, tt := range tests {
		c := &Cluster{kube: fake.NewClientset(tt.give...), cfg: Config{Namespace: DefaultNamespace}}
		got := c.checkPodSecurity(t.Context())
		remedy := "`kubectl label --overwrite namespace barchan-system pod-security.kubernetes.io/enforce=restricted`"
		if got.State != tt.want || (got.State == adminclient.CheckWarning) != (got.Remedy == remedy) {
			t.Errorf("%s: %+v, want %s", name, got, tt.want)
		}
	}
}

// TestCheckVersion: a cluster that is too old is refused by its version, whatever its distributor adds to that.
func TestCheckVersion(t *testing.T) {
	for give, want := range map[string]string{
		"v1.31.14-eks-1": "the cluster is Kubernetes v1.31.14-eks-1; Barchan needs 1.32 or later", "v1.32.0": "", "v1.33.5-gke.1080000": "", "v1.36.0+k3s1": "", "?": "version of the cluster",
	} {
		client := fake.NewClientset()
		client.Discovery().(*discoveryfake.FakeDiscovery).FakedServerVersion = &version.Info{GitVersion: give}
		c := &Cluster{kube: client}
		_, err := c.checkVersion()
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", give, err, want)
		}
		if got := c.checkKubernetes(); (got.State == adminclient.CheckOK) != (want == "") {
			t.Errorf("%s: %+v", give, got)
		}
	}
}

// TestRenderMemoryLimit: GOMEMLIMIT is nine tenths of the memory limit, where there is one in Mi or Gi.
func TestRenderMemoryLimit(t *testing.T) {
	for limit, want := range map[string]string{"500Mi": "450MiB", "2Gi": "1843MiB", "1.5Gi": "", "": ""} {
		limits := Values{"memory": limit}
		if limit == "" {
			limits = Values{"memory": nil}
		}
		d := deployment(t, render(t, Values{"replica": Values{"resources": Values{"limits": limits}}}), "barchan-replica")
		got := ""
		for _, v := range d.Spec.Template.Spec.Containers[0].Env {
			if v.Name == "GOMEMLIMIT" {
				got = v.Value
			}
		}
		if got != want {
			t.Errorf("limit %q: GOMEMLIMIT %q, want %q", limit, got, want)
		}
	}
}

func TestRenderRefuses(t *testing.T) {
	tests := map[string]struct {
		give Values
		want string
	}{
		"no image":     {Values{"agentImage": "a"}, "set image to"},
		"no agent":     {Values{"image": "a"}, "set agentImage to"},
		"misspelt":     {Merge(images(), Values{"images": "a"}), "value images"},
		"misspelt in":  {Merge(images(), Values{"replica": Values{"autoscaling": Values{"enable": true}}}), "value replica.autoscaling.enable"},
		"not a map":    {Merge(images(), Values{"replica": 3}), "value replica"},
		"not a number": {Merge(images(), Values{"replica": Values{"replicas": "many: {"}}), "templates/replica.yaml"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, err := Render(release, tt.give); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want an ErrInvalid with %q", err, tt.want)
			}
		})
	}
}

func TestMerge(t *testing.T) {
	base := Values{"a": Values{"b": 1, "c": 2}, "d": 3}
	got := Merge(base, Values{"a": Values{"c": 4}, "e": 5})
	text, err := yaml.Marshal(got)
	if err != nil || string(text) != "a:\n  b: 1\n  c: 4\nd: 3\ne: 5\n" {
		t.Errorf("%s, %v", text, err)
	}
	if inner := base["a"].(Values); inner["c"] != 2 {
		t.Error("it changed what it was given")
	}
}

func TestSemantic(t *testing.T) {
	for give, want := range map[string]string{
		"": "0.0.0", "v1.2.3": "1.2.3", "1.2.3-4-gabc-dirty": "1.2.3-4-gabc-dirty", "ce71da9": "0.0.0-ce71da9", "(devel)": "0.0.0-devel",
	} {
		if got := semantic(give); got != want {
			t.Errorf("%q: %q, want %q", give, got, want)
		}
	}
}

func TestWriteChart(t *testing.T) {
	var archives [2][]byte
	for i := range archives {
		file, err := WriteChart("v1.2.3", t.TempDir())
		if err != nil || filepath.Base(file) != "barchan-1.2.3.tgz" {
			t.Fatalf("%s, %v", file, err)
		}
		if archives[i], err = os.ReadFile(file); err != nil {
			t.Fatal(err)
		}
	}
	if string(archives[0]) != string(archives[1]) {
		t.Error("two archives of one version differ")
	}
	if _, err := WriteChart("v1.2.3", filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("written into a directory that is not there")
	}
}

func TestUnion(t *testing.T) {
	a, b, c := reference{Kind: "A"}, reference{Kind: "B"}, reference{Kind: "C"}
	if got := union([]reference{a, b}, []reference{b, c}); !slices.Equal(got, []reference{b, c, a}) {
		t.Errorf("%v", got)
	}
}
