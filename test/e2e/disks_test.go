package e2e

import (
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const boundedManifest = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: NAME}
spec:
  podTemplate:
    spec:
      containers:
      - name: main
        image: barchan.local/base:latest
        resources: {limits: {ephemeral-storage: 64Mi}}
        volumeMounts: [{name: data, mountPath: /data}]
  volumeClaimTemplates:
  - metadata: {name: data}
    spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 32Mi}}}
`

// testDisks fills the disks of one sandbox; another, and the server, write on.
func testDisks(t *testing.T, s *server) {
	names := []string{"hog", "neighbour"}
	for _, name := range names {
		s.mustKubectl(strings.ReplaceAll(boundedManifest, "NAME", name), "apply", "-f", "-")
	}
	for _, name := range names {
		s.mustKubectl("", "wait", "--for=condition=Ready", "--timeout=120s", "sandbox/"+name)
	}
	sh := func(name, command string) string {
		t.Helper()
		return s.mustKubectl("", "exec", name, "--", "sh", "-c", command)
	}
	for _, dir := range []string{"/home/user", "/data"} {
		if out := sh("hog", "head -c 100000000 /dev/zero 2>&1 > "+dir+"/big; true"); !strings.Contains(out, "No space left on device") {
			t.Errorf("100 MB in %s: %q", dir, out)
		}
	}
	if out := sh("hog", "echo lives"); out != "lives\n" {
		t.Errorf("the hog: %q", out)
	}
	sh("neighbour", "head -c 40000000 /dev/zero > /home/user/big && head -c 20000000 /dev/zero > /data/big")
	s.mustKubectl("", "create", "configmap", "written", "--from-literal=a=b")
	s.mustKubectl("", "delete", "configmap", "written")
	if out := sh("hog", "df -m --output=size,avail / | tail -n 1"); len(strings.Fields(out)) != 2 || strings.Fields(out)[1] > "1" { // rounded up
		t.Errorf("df of a full one: %q", out)
	}
	eventually.True(t, "barchan show has limit and use", func() bool {
		out := s.data("show", "hog")
		_, uses, _ := strings.Cut(out, "Uses")
		return strings.Contains(out, "memory, 64.0 MiB disk") && strings.Contains(uses, "memory, 6") && strings.Contains(uses, "MiB disk")
	})
	// The disk of a claim is part of forks and pauses, and each fork's own.
	fork := strings.TrimSpace(s.data("fork", "neighbour"))
	if out := s.data("exec", fork, "--", "sh", "-c", "stat -c %s /data/big; echo fork > /data/own; head -c 100000000 /dev/zero 2>&1 > /data/more; true"); !strings.HasPrefix(out, "20000000\n") || !strings.Contains(out, "No space left") {
		t.Errorf("the claim of a fork: %q", out)
	}
	s.must("pause", "neighbour")
	s.must("resume", "neighbour")
	if out := sh("neighbour", "stat -c %s /data/*"); out != "20000000\n" {
		t.Errorf("the claim after a fork and a pause: %q", out)
	}
	s.must("rm", fork)
	for _, name := range names {
		s.mustKubectl("", "delete", "sandbox", name)
	}
}
