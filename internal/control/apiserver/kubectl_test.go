package apiserver_test

import (
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
)

const sandboxYAML = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: one, labels: {tier: gold}}
spec:
  podTemplate:
    spec:
      containers: [{name: main, image: "base:1"}]
`

const poolYAML = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: pool}
spec: {replicas: 2, sandboxTemplateRef: {name: base}}
`

// expect fails the test unless text holds every one of want.
func expect(t *testing.T, text string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(text, w) {
			t.Errorf("%q is not in\n%s", w, text)
		}
	}
}

func TestKubectlReads(t *testing.T) {
	s := start(t)
	k := newKubectl(t, s)
	k.ok(sandboxYAML+"---"+poolYAML, "apply", "-f", "-")

	expect(t, k.ok("", "get", "sandboxes"), "NAME", "READY", "REASON", "AGE", "one")
	expect(t, k.ok("", "get", "swp"), "NAME", "READY", "DESIRED", "AGE", "pool")
	expect(t, k.ok("", "get", "ns"), "default", "barchan-system", "Active")
	expect(t, k.ok("", "get", "sandbox/one", "-o", "jsonpath={.spec.operatingMode}"), "Running")
	expect(t, k.ok("", "get", "sandbox", "-A", "-l", "tier=gold", "-o", "name"), "sandbox.agents.x-k8s.io/one")
	if out := k.ok("", "get", "sandbox", "-l", "tier!=gold", "-o", "name"); out != "" {
		t.Errorf("a label selector let %q pass", out)
	}
	expect(t, k.ok("", "get", "sandbox", "--field-selector", "spec.operatingMode=Running", "-o", "name"), "one")
	if out := k.ok("", "get", "sandbox", "--field-selector", "spec.operatingMode=Suspended", "-o", "name"); out != "" {
		t.Errorf("a field selector let %q pass", out)
	}
	k.fails("", []string{`"spec.color" is not a known field selector of sandboxes`}, "get", "sandbox", "--field-selector", "spec.color=red")
	k.fails("", []string{`sandboxes.agents.x-k8s.io "none" not found`}, "get", "sandbox", "none")
	expect(t, k.ok("", "describe", "sandbox", "one"), "Name:", "one", "Operating Mode:", "Running")

	expect(t, k.ok("", "api-resources"), "sandboxes", "sandboxwarmpools", "swp", "checkpoints", "apikeys", "events.k8s.io/v1")
	expect(t, k.ok("", "api-versions"), "agents.x-k8s.io/v1beta1", "barchan.dev/v1alpha1", "coordination.k8s.io/v1")
	expect(t, k.ok("", "explain", "sandbox.spec.barchan.network"), "EgressPolicy", "denyOut", "allowOut")
	expect(t, k.ok("", "explain", "swp.spec.replicas"), "<integer>")
	expect(t, k.ok("", "version"), "Server Version: v1.")
	expect(t, k.ok("", "get", "--raw", "/readyz"), "ok")
	expect(t, k.ok("", "get", "--raw", "/openapi/v2"), "io.x-k8s.agents.v1beta1.Sandbox")
}

func TestKubectlWrites(t *testing.T) {
	s := start(t)
	k := newKubectl(t, s)
	expect(t, k.ok(sandboxYAML, "apply", "-f", "-"), "created")
	expect(t, k.ok(sandboxYAML, "apply", "-f", "-"), "unchanged")
	expect(t, k.ok(strings.Replace(sandboxYAML, "base:1", "base:2", 1), "apply", "-f", "-"), "configured")
	expect(t, k.ok("", "get", "sandbox", "one", "-o", "jsonpath={.metadata.generation}:{.spec.podTemplate.spec.containers[0].image}"), "2:base:2")

	server := strings.Replace(sandboxYAML, "{name: one", "{name: two", 1)
	k.ok(server, "apply", "--server-side", "--field-manager=a", "-f", "-")
	k.ok(server, "apply", "--server-side", "--field-manager=a", "-f", "-")
	conflicting := strings.Replace(server, "base:1", "base:3", 1)
	k.fails(conflicting, []string{"conflict", `"a"`, `.spec.podTemplate.spec.containers[name="main"].image`},
		"apply", "--server-side", "--field-manager=b", "-f", "-")
	k.ok(conflicting, "apply", "--server-side", "--field-manager=b", "--force-conflicts", "-f", "-")

	for kind, patch := range map[string]string{
		"merge":     `{"spec":{"operatingMode":"Suspended"}}`,
		"json":      `[{"op":"replace","path":"/spec/operatingMode","value":"Running"}]`,
		"strategic": `{"spec":{"podTemplate":{"spec":{"containers":[{"name":"side","image":"x"}]}}}}`,
	} {
		expect(t, k.ok("", "patch", "sandbox", "one", "--type", kind, "-p", patch), "patched")
	}
	expect(t, k.ok("", "get", "sandbox", "one", "-o", "jsonpath={.spec.podTemplate.spec.containers[*].name}"), "side main")

	k.ok("", "label", "sandbox", "one", "x=y")
	k.ok("", "annotate", "sandbox", "one", "x=y")
	k.ok(poolYAML, "create", "-f", "-")
	expect(t, k.ok("", "scale", "swp/pool", "--replicas=7"), "scaled")
	expect(t, k.ok("", "get", "swp", "pool", "-o", "jsonpath={.spec.replicas}"), "7")
	k.fails("", []string{"spec.replicas", "must be from 0 to 1000"}, "patch", "swp", "pool", "--subresource=scale", "--type=merge", "-p", `{"spec":{"replicas":-1}}`)

	k.ok("", "create", "namespace", "tenant")
	k.ok("", "create", "secret", "generic", "s", "--from-literal=a=b", "-n", "tenant")
	k.ok("", "create", "configmap", "c", "--from-literal=a=b", "-n", "tenant")
	expect(t, k.ok("", "get", "secret", "s", "-n", "tenant"), "Opaque")
	k.ok("", "delete", "namespace", "tenant")
	k.fails("", []string{"not found"}, "get", "namespace", "tenant")
	k.fails("", []string{`namespaces "tenant" not found`}, "create", "configmap", "c", "-n", "tenant")
}

func TestKubectlRefusals(t *testing.T) {
	s := start(t)
	k := newKubectl(t, s)
	for name, tc := range map[string]struct {
		old, with string
		want      []string
	}{
		"typo in a field":        {"podTemplate:", "podTemplatee:", []string{`unknown field "spec.podTemplatee"`}},
		"typo deep in a pod":     {"image:", "imagee:", []string{`unknown field`, `containers[0].imagee`}},
		"typo in our own part":   {"spec:\n  pod", "spec:\n  barchan: {onTimeot: Pause}\n  pod", []string{`unknown field "spec.barchan.onTimeot"`}},
		"bad word":               {"spec:\n  pod", "spec:\n  operatingMode: Dozing\n  pod", []string{"spec.operatingMode", `"Dozing"`, `"Running", "Suspended"`}},
		"no containers":          {`[{name: main, image: "base:1"}]`, "[]", []string{"spec.podTemplate.spec.containers", "Required value"}},
		"a container's bad name": {"name: main", "name: Main", []string{"spec.podTemplate.spec.containers[0].name"}},
		"bad name":               {"name: one", "name: One_1", []string{"metadata.name", "RFC 1123"}},
		"bad label":              {"tier: gold", `tier: "a b"`, []string{"metadata.labels"}},
		"wrong type":             {`"base:1"`, "[]", []string{"image"}},
	} {
		t.Run(name, func(t *testing.T) {
			yaml := strings.Replace(sandboxYAML, tc.old, tc.with, 1)
			if yaml == sandboxYAML {
				t.Fatal("the case changes nothing")
			}
			k := k
			k.t = t
			k.fails(yaml, tc.want, "create", "-f", "-", "--validate=strict")
		})
	}
	k.fails(strings.Replace(sandboxYAML, "Sandbox", "Sandcastle", 1), []string{"no matches for kind"}, "create", "-f", "-")
	k.fails(strings.Replace(sandboxYAML, "podTemplate:", "podTemplatee:", 1), []string{"podTemplatee"}, "apply", "-f", "-")
	k.fails(strings.Replace(sandboxYAML, "podTemplate:", "podTemplatee:", 1), []string{"podTemplatee"}, "apply", "--server-side", "-f", "-")
	if out := k.ok("", "get", "sandboxes", "-o", "name"); out != "" {
		t.Errorf("refused input left %s", out)
	}
}

func TestKubectlWaitsAndDeletes(t *testing.T) {
	s := start(t)
	k := newKubectl(t, s)
	c := clientAs(t, s, apiserver.UserController)
	k.ok(sandboxYAML, "apply", "-f", "-")
	k.fails("", []string{"timed out"}, "wait", "--for=condition=Ready", "sandbox/one", "--timeout=100ms")
	k.ok("", "patch", "sandbox", "one", "--type=merge", "-p", `{"metadata":{"finalizers":["barchan.dev/hold"]}}`)

	waited := make(chan string, 1)
	go func() {
		out, err := k.try("", "wait", "--for=condition=Ready", "sandbox/one", "--timeout=60s")
		if err != nil {
			out += err.Error()
		}
		waited <- out
	}()
	var sb agents.Sandbox
	if err := c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "one"}, &sb); err != nil {
		t.Fatal(err)
	}
	sb.Status.Conditions = []metav1.Condition{{
		Type: agents.ConditionReady, Status: metav1.ConditionTrue, Reason: agents.ReasonDependenciesReady, LastTransitionTime: metav1.NewTime(time.Now()),
	}}
	if err := c.Status().Update(t.Context(), &sb); err != nil {
		t.Fatal(err)
	}
	expect(t, <-waited, "condition met")
	expect(t, k.ok("", "get", "sandbox", "one"), "True", "DependenciesReady")

	k.ok("", "delete", "sandbox", "one", "--wait=false")
	expect(t, k.ok("", "get", "sandbox", "one", "-o", "jsonpath={.metadata.deletionTimestamp}"), "20")
	k.ok("", "patch", "sandbox", "one", "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
	k.fails("", []string{"not found"}, "get", "sandbox", "one")
}

func TestKubectlWatches(t *testing.T) {
	s := start(t)
	c := clientAs(t, s, apiserver.UserAdmin)
	list := &unstructured.UnstructuredList{}
	list.SetGroupVersionKind(agents.GroupVersion.WithKind("SandboxList"))
	w, err := c.Watch(t.Context(), list, client.InNamespace("default"))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	k := newKubectl(t, s)
	k.ok(sandboxYAML, "apply", "-f", "-")
	k.ok("", "delete", "sandbox", "one")
	var seen []string
	for e := range w.ResultChan() {
		if seen = append(seen, string(e.Type)); e.Type == "DELETED" {
			break
		}
	}
	expect(t, strings.Join(seen, " "), "ADDED", "DELETED")
}
