package cli

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/apiserver"
	"github.com/barchan-dev/barchan/internal/telemetry"
)

const objects = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: py}
spec:
  podTemplate:
    spec:
      containers:
      - name: main
        image: barchan.local/base:latest
        resources: {limits: {cpu: 500m, memory: 256Mi}}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: py-pool}
spec:
  replicas: 2
  sandboxTemplateRef: {name: py}
`

// TestObjects drives the commands that go over the Kubernetes API against the
// real API server on its real etcd.
func TestObjects(t *testing.T) {
	api, err := apiserver.New(apiserver.Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	if err := api.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Stop)
	s := newServer(t, nil)
	s.status.Addresses.Kubeconfig = api.AdminKubeconfig()
	t.Run("apply", s.testApply)
	t.Run("pool", s.testPool)
	t.Run("key", s.testKey)
}

func (s *server) testApply(t *testing.T) {
	file := filepath.Join(t.TempDir(), "objects.yaml")
	if err := os.WriteFile(file, []byte(objects), 0o600); err != nil {
		t.Fatal(err)
	}
	s.run("", "apply", "-f", file, "--dry-run").want(t, 0, "sandboxtemplate/py created (dry run)\n", "")
	s.run("", "apply", "-f", file).want(t, 0, "sandboxtemplate/py created\nsandboxwarmpool/py-pool created\n", "")
	s.run(objects, "apply", "-f", "-").want(t, 0, "sandboxtemplate/py unchanged\nsandboxwarmpool/py-pool unchanged\n", "")
	s.run(strings.ReplaceAll(objects, "256Mi", "128Mi"), "apply", "-f", "-").want(t, 0, "sandboxtemplate/py configured\n", "")
	s.run(strings.ReplaceAll(objects, "image:", "imaeg:"), "apply", "-f", "-").want(t, 1, "sandboxwarmpool/py-pool unchanged\n", "imaeg")
	s.run("{apiVersion: v9, kind: Nothing, metadata: {name: a}}", "apply", "-f", "-").
		want(t, 1, "", "barchan: nothing/a: the server has no Nothing of v9\n")
	s.run("", "template", "ls").want(t, 0, "default     py     barchan.local/base:latest   gvisor    500m   128Mi", "")
	s.run("", "template", "ls", "-A", "--json").want(t, 0, `"name": "py"`, "")
	s.run("", "template", "show", "py").want(t, 0, "image: barchan.local/base:latest\n", "")
	s.run("", "template", "show", "py", "--json").want(t, 0, `"kind": "SandboxTemplate"`, "")
	s.run("", "template", "show", "nope").want(t, 1, "", `"nope" not found`)
	// What show prints, apply takes.
	s.run(s.run("", "template", "show", "py").stdout, "apply", "--force-conflicts", "-f", "-").
		want(t, 0, "sandboxtemplate/py ", "")
}

func (s *server) testPool(t *testing.T) {
	s.run("", "pool", "ls").want(t, 0, "default     py-pool   py         0       2         OnReplenish   ", "")
	s.run("", "pool", "scale", "py-pool", "5").want(t, 0, "py-pool scaled to 5\n", "")
	s.run("", "pool", "show", "py-pool").want(t, 0, "replicas: 5\n", "")
	s.run("", "pool", "scale", "nope", "5").want(t, 1, "", `"nope" not found`)
	s.run("", "pool", "ls", "-n", "elsewhere", "--json").want(t, 0, "[]\n", "")
}

func (s *server) testKey(t *testing.T) {
	made := s.run("", "key", "create", "ci", "-n", "team-a", "--description", "for CI", "--expires", "48h")
	made.want(t, 0, "e2b_", "key ci of namespace team-a; it is not shown again:\n")
	text := strings.TrimSpace(made.stdout)
	if len(text) != 44 {
		t.Errorf("key %q", text)
	}
	list := s.run("", "key", "ls", "-n", "team-a")
	list.want(t, 0, "team-a      ci     "+text[:10]+"…   47h", "")
	list.want(t, 0, "for CI\n", "")
	var kept []struct {
		Spec struct{ SHA256, Prefix string }
	}
	out := s.run("", "key", "ls", "-A", "--json").stdout
	if err := json.Unmarshal([]byte(out), &kept); err != nil || len(kept) != 1 {
		t.Fatalf("%s: %v", out, err)
	}
	sum := sha256.Sum256([]byte(text))
	if kept[0].Spec.SHA256 != hex.EncodeToString(sum[:]) || strings.Contains(out, text) {
		t.Errorf("kept %s", out)
	}
	s.run("", "key", "create", "ci", "-n", "team-a").want(t, 1, "", `"ci" already exists`)
	s.run("", "key", "create", "Bad_Name").want(t, 1, "", "Bad_Name")
	s.run("", "key", "create", "--json").want(t, 0, `"namespace": "default"`, "")
	s.run("", "key", "rm", "-n", "team-a", "none", "ci").want(t, 1, "ci\n", `"none" not found`)
	if out := s.run("", "key", "ls", "-n", "team-a", "--json").stdout; out != "[]\n" {
		t.Errorf("left: %s", out)
	}
}
