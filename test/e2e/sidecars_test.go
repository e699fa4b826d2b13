package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const sidecarsManifest = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: several}
spec:
  podTemplate:
    spec:
      containers:
      - name: main
        image: barchan.local/base:latest
        command: [sleep, infinity]
        volumeMounts: [{name: site, mountPath: /site}]
      - name: web
        image: barchan.local/base:latest
        command: [sh, -c, 'echo web of $(hostname) starts; exec python3 -m http.server 8080']
        workingDir: /site
        readinessProbe: {httpGet: {path: /up, port: 8080}, periodSeconds: 1}
        volumeMounts: [{name: site, mountPath: /site}]
      - name: fails
        image: barchan.local/base:latest
        command: [sh, -c, '[ -e /site/well ] || exit 3; exec sleep infinity']
        volumeMounts: [{name: site, mountPath: /site}]
      volumes:
      - {name: site, emptyDir: {medium: Memory}}
`

const severalPool = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: pair}
spec:
  envVarsInjectionPolicy: Overrides
  podTemplate:
    spec:
      containers:
      - {name: main, image: "barchan.local/base:latest", command: [sleep, infinity]}
      - {name: web, image: "barchan.local/base:latest", command: [sh, -c, 'cat /proc/sys/kernel/random/uuid > /tmp/nonce; echo web starts; cd /tmp; exec python3 -m http.server 8081']}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: pair}
spec: {replicas: 1, sandboxTemplateRef: {name: pair}}
`

// testPoolOfSeveral claims members of a pool whose template has two containers, by the API and by a SandboxClaim.
func testPoolOfSeveral(t *testing.T, s *server) {
	s.mustKubectl(severalPool, "apply", "-f", "-")
	ready := func() {
		t.Helper()
		s.mustKubectl("", "wait", "sandboxwarmpool/pair", "--for=jsonpath={.status.readyReplicas}=1", patience)
	}
	ready()
	member := s.mustKubectl("", "get", "sandboxes", "-o", `jsonpath={range .items[*]}{.metadata.uid} {end}`)
	id := s.create(s.localKey(), "pair")
	if got := s.exec(id, "curl -s --retry 60 --retry-delay 1 --retry-connrefused http://127.0.0.1:8081/nonce"); len(got) != 36 {
		t.Errorf("the program beside a claimed member answers %q", got)
	}
	if got := s.must("logs", id, "-c", "web"); !strings.Contains(got, "web starts") {
		t.Errorf("logs -c of a claimed member: %q", got)
	}
	if now := s.mustKubectl("", "get", "sandboxes", "-o", `jsonpath={range .items[*]}{.metadata.uid} {end}`); !strings.Contains(now, strings.TrimSpace(member)) {
		t.Errorf("the sandbox was not the pool's member: %q before, %q after", member, now)
	}
	ready()
	s.apply("apiVersion: extensions.agents.x-k8s.io/v1beta1\nkind: SandboxClaim\nmetadata: {name: pair}\nspec: {warmPoolRef: {name: pair}}\n")
	s.mustKubectl("", "wait", "sandboxclaim/pair", "--for=condition=Ready", patience)
	claimed := s.mustKubectl("", "get", "sandboxclaim", "pair", "-o", "jsonpath={.status.sandbox.name}")
	if got := s.mustKubectl("", "exec", claimed, "-c", "web", "--", "cat", "/tmp/nonce"); len(strings.TrimSpace(got)) != 36 {
		t.Errorf("exec -c in a claimed member: %q", got)
	}
	s.mustKubectl("", "delete", "sandboxwarmpool/pair", "sandboxclaim/pair", patience)
	s.must("kill", id)
	s.mustKubectl("", "delete", "sandboxtemplate/pair", patience)
}

// testSidecars has a sandbox of three containers, as kubectl shows a Pod.
func testSidecars(t *testing.T, s *server) {
	s.mustKubectl(sidecarsManifest, "apply", "-f", "-")
	shows := func(what ...string) {
		t.Helper()
		eventually.NoError(t, "kubectl shows "+strings.Join(what, " "), func() error {
			got, err := s.kubectl("", "get", "pod", "several", "--no-headers")
			for _, w := range what {
				if err == nil && !strings.Contains(got, w) {
					err = fmt.Errorf("it shows %q", got)
				}
			}
			return err
		})
	}
	shows("CrashLoopBackOff")
	if got := s.condition("several", "Ready"); !strings.HasPrefix(got, "False ContainersNotReady: container fails: its program ended with code 3") {
		t.Errorf("Ready is %q", got)
	}
	s.mustKubectl("", "exec", "several", "--", "sh", "-c", "touch /site/up /site/well")
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandbox/several", patience)
	shows("3/3", "Running")
	if got := s.mustKubectl("", "exec", "several", "-c", "main", "--", "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "http://127.0.0.1:8080/up"); got != "200" {
		t.Errorf("over loopback: %q", got)
	}
	if got := s.mustKubectl("", "exec", "several", "-c", "web", "--", "sh", "-c", "pwd; hostname"); got != "/site\nseveral\n" {
		t.Errorf("exec -c: %q", got)
	}
	if got := s.mustKubectl("input", "exec", "-i", "several", "-c", "web", "--", "cat"); got != "input" {
		t.Errorf("exec -i -c: %q", got)
	}
	if got := s.mustKubectl("", "logs", "several", "-c", "web"); !strings.Contains(got, "web of several starts\n") {
		t.Errorf("logs -c: %q", got)
	}
	statuses := func() string {
		t.Helper()
		return s.mustKubectl("", "get", "pod", "several", "-o", `jsonpath={range .status.containerStatuses[*]}{.name} {.ready} {.restartCount} {.lastState.terminated.exitCode} {end}`)
	}
	before := statuses()
	if !strings.HasPrefix(before, "main true 0  web true 0  fails true ") || !strings.HasSuffix(before, " 3 ") {
		t.Errorf("statuses: %q", before)
	}
	s.must("logs", "several", "-c", "web")
	if got := s.must("show", "several"); !strings.Contains(got, "web, Running, restarted 0 times") {
		t.Errorf("show: %s", got)
	}
	if out, err := s.kubectl("", "exec", "several", "-c", "none", "--", "true"); err == nil {
		t.Errorf("exec in a container that is not there: %s", out)
	}
	s.mustKubectl("", "patch", "sandbox", "several", "--type=merge", "-p", `{"spec":{"operatingMode":"Suspended"}}`)
	eventually.NoError(t, "its memory is on disk", func() error {
		if got := s.condition("several", "Suspended"); !strings.Contains(got, "on disk") {
			return fmt.Errorf("Suspended is %q", got)
		}
		return nil
	})
	s.mustKubectl("", "patch", "sandbox", "several", "--type=merge", "-p", `{"spec":{"operatingMode":"Running"}}`)
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandbox/several", patience)
	eventually.NoError(t, "no program has started again", func() error {
		if after := statuses(); after != before {
			return fmt.Errorf("statuses: %q, before %q", after, before)
		}
		return nil
	})
	s.mustKubectl("", "delete", "sandbox", "several", patience)
	testPoolOfSeveral(t, s)
	for field, manifest := range map[string]string{
		"containers[1]":         strings.Replace(sidecarsManifest, "    spec:\n      containers", "    spec:\n      runtimeClassName: runc\n      containers", 1),
		"shareProcessNamespace": strings.Replace(sidecarsManifest, "    spec:\n      containers", "    spec:\n      shareProcessNamespace: true\n      containers", 1),
	} {
		if out, err := s.kubectl(manifest, "apply", "-f", "-"); err == nil || !strings.Contains(out+err.Error(), field) {
			t.Errorf("%s: %v %s", field, err, out)
		}
	}
}
