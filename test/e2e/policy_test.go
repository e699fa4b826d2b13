package e2e

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// policyManifests are written as for upstream; only the image is ours.
const policyManifests = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: kept}
spec:
  podTemplate:
    spec:
      containers:
      - {name: main, image: ` + baseImage + `, resources: {limits: {cpu: 500m, memory: 256Mi}}}
  networkPolicy:
    ingress:
    - from: [{podSelector: {matchLabels: {app: sandbox-router}}}]
    egress:
    - to: [{namespaceSelector: {}, podSelector: {matchLabels: {k8s-app: kube-dns}}}]
      ports: [{protocol: UDP, port: 53}]
    - to: [{ipBlock: {cidr: 8.0.0.0/8, except: [8.1.0.0/16]}}]
      ports: [{port: 443}]
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: kept}
spec: {replicas: 1, sandboxTemplateRef: {name: kept}}
`

// testNetworkPolicy takes the way of a template's networkPolicy to sandboxes that are warm, cold
// or have a policy of their own.
func testNetworkPolicy(t *testing.T, s *server) {
	out := s.mustKubectl(policyManifests, "apply", "-f", "-")
	for _, want := range []string{"spec.networkPolicy.ingress: has no effect", "spec.networkPolicy.egress[0].to[0]: allows nothing but DNS"} {
		if !strings.Contains(out, want) {
			t.Errorf("apply does not warn %q:\n%s", want, out)
		}
	}
	bad := strings.Replace(policyManifests, "port: 443", "port: https", 1)
	if out, err := s.kubectl(bad, "apply", "-f", "-"); err == nil || !strings.Contains(out, "spec.networkPolicy.egress[1].ports[0].port") {
		t.Errorf("a port's name = %v\n%s", err, out)
	}
	trace := func(id, dest, port, want string) {
		t.Helper()
		if out := s.must("net", "trace", id, dest, "--port", port); !strings.Contains(out, want) {
			t.Errorf("trace of %s, port %s: %q, want %q", dest, port, out, want)
		}
	}
	kept := func(id string) {
		t.Helper()
		trace(id, "8.8.8.8", "443", "allowed: networkPolicy.egress[1].to[0] 8.0.0.0/8, tcp 443")
		trace(id, "8.8.8.8", "80", "refused: networkPolicy.egress allows nothing else")
		trace(id, "8.1.0.1", "443", "refused: networkPolicy.egress allows nothing else")
		const connect = `import socket; print(socket.socket().connect_ex(("1.1.1.1", 443)) == 111)`
		if out := s.data("exec", id, "--", "python3", "-c", connect); out != "True\n" {
			t.Errorf("a connection that no rule allows: %q", out)
		}
	}
	s.mustKubectl("", "wait", "--for=jsonpath={.status.readyReplicas}=1", "sandboxwarmpool/kept", patience)
	warm, _ := s.keep("kept", "true")
	if labels := s.sandbox(warm).Labels; labels[agents.LabelLaunchType] != agents.LaunchWarm {
		t.Errorf("not warm: %v", labels)
	}
	kept(warm)
	s.mustKubectl("", "delete", "sandboxwarmpool/kept")
	cold, _ := s.keep("kept", "true")
	kept(cold)

	status, body := s.call(s.localKey(), http.MethodPost, "/sandboxes", map[string]any{
		"templateID": "kept", "timeout": 600, "secure": true, "network": map[string]any{"denyOut": []string{"8.8.8.8"}},
	})
	var made struct{ SandboxID string }
	if err := json.Unmarshal([]byte(body), &made); status != http.StatusCreated || err != nil {
		t.Fatalf("create = %d %s", status, body)
	}
	trace(made.SandboxID, "8.8.8.8", "443", "refused: denyOut[0] 8.8.8.8")
	trace(made.SandboxID, "8.8.4.4", "443", "allowed: networkPolicy.egress[1]")
	trace(made.SandboxID, "9.9.9.9", "443", "refused: networkPolicy.egress")
	if status, body := s.call(s.localKey(), http.MethodPut, "/sandboxes/"+made.SandboxID+"/network", map[string]any{"allowOut": []string{"0.0.0.0/0"}}); status != http.StatusNoContent {
		t.Errorf("update = %d %s", status, body)
	}
	trace(made.SandboxID, "9.9.9.9", "443", "refused: networkPolicy.egress")
	s.must("kill", made.SandboxID)
}
