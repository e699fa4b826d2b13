package cli

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/resources"
	"github.com/barchan-dev/barchan/internal/testkit/embedded"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
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
	api := embedded.Listen(t, "127.0.0.1:0")
	s := newServer(t, nil)
	s.status.Addresses.Kubeconfig = api.AdminKubeconfig()
	t.Run("apply", s.testApply)
	t.Run("history", s.testHistory)
	t.Run("pool", s.testPool)
	t.Run("key", s.testKey)
	t.Run("namespace of a key", s.testKeysNamespace)
	t.Run("variant", s.testVariant)
	t.Run("checkpoint", s.testCheckpoint)
}

const checkpointObjects = `
apiVersion: barchan.dev/v1alpha1
kind: Checkpoint
metadata: {name: mine-v1, labels: {barchan.dev/snapshot: mine, barchan.dev/snapshot-tag: v1}}
spec: {sandboxName: worker, keepRunning: true, ttlSeconds: 3600}
---
apiVersion: barchan.dev/v1alpha1
kind: Checkpoint
metadata: {name: passing, labels: {barchan.dev/purpose: fork}}
spec: {sandboxName: worker, keepRunning: true}
`

func (s *server) testCheckpoint(t *testing.T) {
	s.run("", "checkpoint", "ls", "--json").want(t, 0, "[]\n", "")
	s.run(checkpointObjects, "apply", "-f", "-").want(t, 0, "checkpoint/mine-v1 created\n", "")
	s.setCheckpoint(t, "mine-v1", barchan.CheckpointStatus{
		Phase: barchan.CheckpointReady, Content: barchan.ContentMemoryAndFiles, Size: resource.NewQuantity(3<<20, resource.BinarySI),
		MemorySize: resource.NewQuantity(2<<20, resource.BinarySI), Runtime: "gvisor", RuntimeBuild: "release-1 sha256:ab", CPUFeatures: []string{"avx", "sse"},
		CompletedAt: new(metav1.Now()), Source: &barchan.CheckpointSource{ID: id1, TemplateName: "py", TemplateNamespace: "default", Secrets: true},
	})
	s.setCheckpoint(t, "passing", barchan.CheckpointStatus{Phase: barchan.CheckpointFailed, Conditions: []metav1.Condition{{
		Type: barchan.ConditionReady, Status: metav1.ConditionFalse, Reason: barchan.ReasonFailed, Message: "the disk is full", LastTransitionTime: metav1.Now(),
	}}})
	s.run("", "checkpoint", "ls").want(t, 0, "default     mine:v1   mine-v1   worker    py         Ready    MemoryAndFiles   3.0 MiB   -         ", "")
	s.run("", "quota", "set", "default", "--stored", "1Gi").want(t, 0, "", "")
	s.run("", "quota", "show", "default").want(t, 0, "stored            1Gi               3.0 MiB", "")
	s.run("", "quota", "show", "default").want(t, 0, "snapshots         10000 (default)   2 ", "")
	s.run("", "quota", "show", "default").want(t, 0, "volumes           any (default)     - ", "")
	s.run("", "quota", "show", "default", "--kubeconfig", s.status.Addresses.Kubeconfig).want(t, 0, "snapshots         default   2 ", "")
	s.run("", "quota", "show", "default", "--json").want(t, 0, `"snapshots": 2`, "")
	s.run("", "quota", "show", "default", "--json").want(t, 0, `"snapshots": "10000"`, "")
	s.run("", "checkpoint", "ls", "-A").want(t, 0, "default     -         passing   worker    -          Failed   -                -         fork      ", "")
	s.run("", "checkpoint", "ls").want(t, 0, "the disk is full\n", "")
	s.run("", "checkpoint", "show", "mine-v1").want(t, 0, "Runtime     gvisor release-1 sha256:ab\nCPU needs   avx sse\n", "")
	s.run("", "checkpoint", "show", "mine-v1").want(t, 0, "Secrets     yes\n", "")
	s.run("", "checkpoint", "show", "mine-v1", "--json").want(t, 0, `"kind": "Checkpoint"`, "")
	for _, text := range []string{"mine:v1", "mine-v1", "mine"} { // one ID, the object's name, the newest of a name
		s.run("", "snapshot", "show", text, "-n", "default").want(t, 0, "ID          mine:v1\nCheckpoint  default/mine-v1\n", "")
	}
	s.run("", "snapshot", "ls", "-A", "-o", "name").want(t, 0, "mine-v1\npassing\n", "")
	s.run("", "snapshot", "ls", "--namespace", "elsewhere", "-q").want(t, 0, "", "")
	s.run("", "snapshot", "export", "mine:v2", "-").want(t, 1, "", `mine:v2`)
	s.run("", "snapshot", "rm", "-n", "default", "mine").want(t, 1, "", `snapshot "mine" not found in namespace default; `+"`barchan snapshot ls -A` lists all")
	s.run("", "checkpoint", "show", "nope").want(t, 1, "", `"nope" not found`)
	s.run("", "checkpoint", "rm", "nope", "mine:v1", "passing").want(t, 1, "mine:v1\npassing\n", `"nope" not found`)
	s.run("", "checkpoint", "ls", "-A", "--json").want(t, 0, "[]\n", "")
	s.run("", "checkpoint", "show").want(t, 2, "", "SNAPSHOT is missing")
}

// testKeysNamespace has commands over the Kubernetes API work where the key that they are given belongs.
func (s *server) testKeysNamespace(t *testing.T) {
	mine := func(args ...string) result { return s.run("", append([]string{"--api-key", tenantKey}, args...)...) }
	mine("key", "create", "made").want(t, 0, "", "key made of namespace tenant-a;")
	s.run(objects, "--api-key", tenantKey, "apply", "-f", "-").want(t, 0, "sandboxtemplate/py created\n", "")
	mine("pool", "create", "warm", "--template", "py", "--size", "1", "--json").want(t, 0, `"replicas": 1`, "")
	mine("pool", "ls").want(t, 0, "   warm      py ", "")
	mine("pool", "show", "warm").want(t, 0, "Pool       tenant-a/warm\n", "")
	s.run("", "pool", "show", "warm").want(t, 1, "", `"warm" not found`)
	mine("pool", "show", "-n", "default", "warm").want(t, 1, "", `"warm" not found`)
	s.run("", "--api-key", "e2b_none", "pool", "ls").want(t, 1, "", "barchan: find the namespace of the key; --namespace names another: Invalid API key\n")
}

// testVariant has run request another image and other limits than the template's.
func (s *server) testVariant(t *testing.T) {
	var made []extensions.SandboxTemplate
	calls := 0
	s.templates = func(name string) bool {
		if calls++; calls == 1 {
			return false // the view of templates lags
		}
		own, err := app.Get[extensions.SandboxTemplate](t.Context(), s.kubeClient(t), app.TemplatesResource, "tenant-a", name)
		made = append(made, own)
		return err == nil
	}
	defer func() { s.templates = nil }()
	run := []string{"--api-key", tenantKey, "run", "--keep", "--template", "py"}
	s.run("", append(run, "--image", "reg.test/other:1", "--memory", "64Mi")...).want(t, 0, "i000", "")
	if len(made) != 1 {
		t.Fatalf("%d templates were looked up", len(made))
	}
	c := made[0].Spec.PodTemplate.Spec.Containers[0]
	if c.Image != "reg.test/other:1" || c.Resources.Limits.Memory().String() != "64Mi" || c.Resources.Limits.Cpu().String() != "500m" {
		t.Errorf("made of %+v", c)
	}
	if got := s.run("", "template", "ls", "-A", "--json").stdout; strings.Contains(got, made[0].Name) {
		t.Errorf("%s is left", made[0].Name)
	}
	s.run("", append(run, "--cpu", "none")...).want(t, 2, "", `--cpu: "none" is not a quantity`)
	s.run("", append(run, "--memory", "-1Gi")...).want(t, 2, "", `--memory: "-1Gi" is not a quantity`)
	s.run("", "run", "--keep", "--from", "a:b", "--cpu", "1").want(t, 2, "", "a snapshot has its own")
	s.run("", "run", "--keep", "--template", "nope", "--cpu", "1").want(t, 1, "", `"nope" not found`)
}

func (s *server) setCheckpoint(t *testing.T, name string, status barchan.CheckpointStatus) {
	t.Helper()
	client := s.kubeClient(t).Client.Resource(app.CheckpointsResource).Namespace("default")
	u, err := client.Get(t.Context(), name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if u.Object["status"], err = runtime.DefaultUnstructuredConverter.ToUnstructured(&status); err != nil {
		t.Fatal(err)
	}
	if _, err := client.UpdateStatus(t.Context(), u, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
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
	s.run(strings.ReplaceAll(objects, "image:", "imaeg:"), "apply", "-f", "-", "--json").want(t, 1, `"name": "sandboxwarmpool/py-pool",
    "result": "unchanged"`, "imaeg")
	s.run("{apiVersion: v9, kind: Nothing, metadata: {name: a}}", "apply", "-f", "-").
		want(t, 1, "", "barchan: nothing/a: the server has no Nothing of v9\n")
	s.run("", "template", "ls").want(t, 0, "   py     barchan.local/base:latest   gvisor    500m   128Mi", "")
	s.run("", "template", "ls", "-A", "--json").want(t, 0, `"name": "py"`, "")
	s.run("", "template", "show", "py").want(t, 0, "image: barchan.local/base:latest\n", "")
	s.run("", "template", "show", "py", "--json").want(t, 0, `"kind": "SandboxTemplate"`, "")
	s.run("", "template", "show", "nope").want(t, 1, "", `"nope" not found`)
	// What show prints, apply takes.
	s.run(s.run("", "template", "show", "py").stdout, "apply", "--force-conflicts", "-f", "-").
		want(t, 0, "sandboxtemplate/py ", "")
}

func (s *server) testPool(t *testing.T) {
	k, pools := s.kubeClient(t), app.PoolsResource
	s.run("", "pool", "ls").want(t, 0, "   py-pool   py         0       2         -          OnReplenish   -        ", "")
	s.run("", "pool", "show", "py-pool").want(t, 0, "Desired    2\n", "")
	s.run("", "pool", "scale", "py-pool", "5").want(t, 0, "py-pool scaled to 5\n", "")
	s.run("", "pool", "show", "py-pool", "--json").want(t, 0, `"replicas": 5`, "")
	s.run("", "pool", "scale", "py-pool", "0").want(t, 0, "py-pool scaled to 0\n", "")
	for _, count := range []string{"1001", "-1", "many", "99999999999999999999"} {
		s.run("", "pool", "scale", "py-pool", "--", count).want(t, 2, "", `barchan: COUNT: "`+count+`" is not a whole number from 0 to 1000`)
	}
	s.run("", "pool", "scale", "nope", "5").want(t, 1, "", `"nope" not found`)
	s.run("", "pool", "show", "nope").want(t, 1, "", `"nope" not found`)
	id := strings.TrimSpace(s.run("", "pool", "ls", "-q").stdout)
	s.run("", "pool", "show", id).want(t, 0, "Pool       default/py-pool\n", "")
	s.run("", "pool", "scale", id, "0").want(t, 0, "py-pool scaled to 0\n", "")
	s.run("", "pool", "rm", "p000000000000000000z").want(t, 1, "", `pool "p000000000000000000z" not found in namespace default; `+"`barchan pool ls -A` lists all")
	template := strings.Fields(s.run("", "template", "ls", "-q").stdout)[0]
	s.run("", "template", "show", template).want(t, 0, "  name: py\n", "")
	s.run("", "pool", "create", "by-id", "--template", template, "--size", "0").want(t, 0, "by-id\n", "")
	s.run("", "pool", "rm", "by-id").want(t, 0, "by-id\n", "")
	s.offers(t, []string{"py"}, "template", "rm", "py")
	s.offers(t, []string{"py-pool", id}, "pool", "scale", "")
	s.offers(t, nil, "pool", "show", "py-pool", "")
	s.offers(t, []string{"default"}, "pool", "show", "-n", "def")
	s.run("", "pool", "ls", "-n", "elsewhere", "--json").want(t, 0, "[]\n", "")

	s.run("", "pool", "create", "made", "--template", "py", "--size", "3").want(t, 0, "made\n", "")
	s.run("", "pool", "create", "made", "--template", "py").want(t, 1, "", `"made" already exists`)
	s.run("", "pool", "create", "bad").want(t, 2, "", "--template is missing")
	s.run("", "pool", "create", "bad", "--template", "py", "--size", "1001").want(t, 2, "", `--size: "1001" is not`)
	s.run("", "pool", "create", "bad", "--template", "py", "--update", "Never").want(t, 2, "", `--update: "Never" is neither`)
	s.run("", "pool", "create", "bad", "--template", "private").want(t, 1, "", `"private" not found`)
	s.run("", "pool", "create", "of-public", "--template", "shared", "--update", "Recreate").want(t, 0, "of-public\n", "")
	s.run("", "pool", "ls").want(t, 0, "of-public   barchan-system/shared   0       1         -          Recreate", "")
	s.run("", "template", "show", "shared").want(t, 0, "namespace: barchan-system\n", "")

	setStatus(t, k, 0, extensions.SandboxWarmPoolStatus{Replicas: 2, ReadyReplicas: 2, CurrentRevision: revisionA, Conditions: []metav1.Condition{
		{Type: extensions.PoolReady, Status: metav1.ConditionFalse, Reason: extensions.ReasonPoolFilling, Message: "1 of 3 is missing"},
	}, Barchan: &extensions.WarmPoolBarchanStatus{DesiredReplicas: 3, CurrentReplicas: 2, CurrentReadyReplicas: 1, ClaimedReplicas: 7}})
	s.run("", "pool", "ls").want(t, 0, "made        py                      1       3         0000000000   OnReplenish   Filling", "")
	p, err := app.Get[extensions.SandboxWarmPool](t.Context(), k, pools, "default", "made")
	if err != nil {
		t.Fatal(err)
	}
	s.run(fmt.Sprintf(members, p.UID, p.UID), "apply", "-f", "-").want(t, 0, "sandbox/made-old created\nevent/made.1 created\n", "")
	shown := s.run("", "pool", "show", "made")
	shown.want(t, 0, "Ready      1 of the current revision; 2 ready of 2 in all\n", "")
	shown.want(t, 0, "Claimed    7\n", "")
	shown.want(t, 0, "Status     Filling: 1 of 3 is missing\n", "")
	shown.want(t, 0, "made-old   Pending   1111111111 (stale)   -", "")
	shown.want(t, 0, "Made    Normal   ", "")

	s.testWaitForPool(t, k)

	s.run(autoscaled, "apply", "-f", "-").want(t, 0, "sandboxwarmpool/auto created\n", "")
	s.run("", "pool", "scale", "auto", "5").want(t, 1, "", "pool auto scales itself between 2 and 40 by its use")
	s.run("", "pool", "show", "auto").want(t, 0, "Autoscale  2 to 40, 20% spare, down to 2 after 10m without a claim\n", "")
	s.run("", "pool", "rm", "made", "nope", "auto").want(t, 1, "made\nauto\n", `"nope" not found`)
	s.run("", "pool", "rm", "of-public").want(t, 0, "of-public\n", "")
}

const revisionA, revisionB = "0000000000000000000000000000000000000000000000000000", "1111111111111111111111111111111111111111111111111111"

const shared = `
apiVersion: v1
kind: Namespace
metadata: {name: barchan-system}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: shared, namespace: barchan-system}
spec:
  podTemplate: {spec: {containers: [{name: main, image: "barchan.local/base:latest"}]}}
  barchan: {public: true}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: private, namespace: barchan-system}
spec:
  podTemplate: {spec: {containers: [{name: main, image: "barchan.local/base:latest"}]}}
`

const members = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata:
  name: made-old
  labels: {agents.x-k8s.io/warm-pool-sandbox: %s, agents.x-k8s.io/sandbox-template-hash: "` + revisionB + `"}
spec:
  podTemplate: {spec: {containers: [{name: main, image: "barchan.local/base:latest"}]}}
---
apiVersion: v1
kind: Event
metadata: {name: made.1, namespace: default}
involvedObject: {kind: SandboxWarmPool, name: made, namespace: default, uid: %s}
reason: Made
type: Normal
message: two sandboxes were made
lastTimestamp: "2026-01-01T00:00:00Z"
reportingComponent: test
`

const autoscaled = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: auto}
spec:
  sandboxTemplateRef: {name: py}
  barchan: {autoscale: {minReplicas: 2, maxReplicas: 40}}
`

// kubeClient is the client that commands have.
func (s *server) kubeClient(t *testing.T) *app.Kube {
	t.Helper()
	k, err := (&app.App{Kubeconfig: s.status.Addresses.Kubeconfig, LookupEnv: os.LookupEnv}).Kube(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// setStatus does the part of the controller for the pool made, once that has the generation.
func setStatus(t *testing.T, k *app.Kube, generation int64, status extensions.SandboxWarmPoolStatus) {
	t.Helper()
	const name = "made"
	client := k.Client.Resource(app.PoolsResource).Namespace("default")
	eventually.True(t, "the status of "+name, func() bool {
		u, err := client.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Error(err)
			return true
		}
		if u.GetGeneration() < generation {
			return false
		}
		status.ObservedGeneration = u.GetGeneration()
		for i := range status.Conditions {
			status.Conditions[i].LastTransitionTime = metav1.Now()
		}
		content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&status)
		if err == nil {
			u.Object["status"] = content
			_, err = client.UpdateStatus(t.Context(), u, metav1.UpdateOptions{})
		}
		if err != nil {
			t.Error(err)
		}
		return true
	})
}

func (s *server) testWaitForPool(t *testing.T, k *app.Kube) {
	t.Helper()
	ready := func(status metav1.ConditionStatus, message string, count int32) extensions.SandboxWarmPoolStatus {
		return extensions.SandboxWarmPoolStatus{Replicas: count, ReadyReplicas: count, Conditions: []metav1.Condition{
			{Type: extensions.PoolReady, Status: status, Reason: extensions.ReasonPoolFilling, Message: message},
		}, Barchan: &extensions.WarmPoolBarchanStatus{DesiredReplicas: 4, CurrentReplicas: count, CurrentReadyReplicas: count}}
	}
	setStatus(t, k, 0, ready(metav1.ConditionTrue, "full", 3)) // true of the last size
	scaled := make(chan result, 1)
	go func() { scaled <- s.run("", "pool", "scale", "made", "4", "--wait") }()
	setStatus(t, k, 2, ready(metav1.ConditionFalse, "one is being made", 3))
	setStatus(t, k, 2, ready(metav1.ConditionTrue, "full", 4))
	(<-scaled).want(t, 0, "made scaled to 4\n", "")
	p, err := app.Get[extensions.SandboxWarmPool](t.Context(), k, app.PoolsResource, "default", "made")
	if err != nil || !resources.IsFull(&p) {
		t.Errorf("--wait returned over %+v, %v", p.Status, err)
	}
	s.run("", "pool", "scale", "made", "5", "--wait", "--timeout", "50ms").want(t, 1, "made scaled to 5\n", "pool made does not have its size after 50ms")
}

func (s *server) testHistory(t *testing.T) {
	s.run(shared, "apply", "-f", "-").want(t, 0, "sandboxtemplate/private created\n", "")
	k := s.kubeClient(t)
	tpl, err := app.Get[extensions.SandboxTemplate](t.Context(), k, app.TemplatesResource, app.PublicNamespace, "shared")
	if err != nil {
		t.Fatal(err)
	}
	current, _, err := pool.Revision(&tpl)
	if err != nil {
		t.Fatal(err)
	}
	s.run("", "template", "history", "shared").want(t, 0, "NUMBER   REVISION   AGE   CURRENT\n", "")
	for i, r := range []struct{ name, template, revision string }{{"a", "shared", current}, {"b", "shared", revisionA}, {"c", "private", revisionB}} {
		s.run(fmt.Sprintf(`{apiVersion: barchan.dev/v1alpha1, kind: TemplateRevision, metadata: {name: %s, namespace: barchan-system},
			spec: {templateName: %s, revision: "%s", number: %d, content: {}}}`, r.name, r.template, r.revision, 2-i%2), "apply", "-f", "-").
			want(t, 0, "templaterevision/"+r.name+" created\n", "")
	}
	out := s.run("", "template", "history", "shared")
	lines := strings.Split(strings.TrimSpace(out.stdout), "\n")
	if len(lines) != 3 || !strings.HasPrefix(lines[1], "1        0000000000 ") || !strings.HasPrefix(lines[2], "2        "+current[:10]) || !strings.HasSuffix(lines[2], "*") || strings.HasSuffix(lines[1], "*") {
		t.Errorf("history:\n%s", out.stdout)
	}
	s.run("", "template", "history", "shared", "-n", "barchan-system", "--json").want(t, 0, `"revision": "`+current+`"`, "")
	s.run("", "template", "history", "private").want(t, 1, "", `"private" not found`)
	s.run("", "template", "history", "nope").want(t, 1, "", `"nope" not found`)
}

func (s *server) testKey(t *testing.T) {
	atLeast := time.Now().Add(47*time.Hour + 30*time.Minute)
	made := s.run("", "key", "create", "ci", "-n", "team-a", "--description", "for CI", "--expires", "47h30m")
	made.want(t, 0, "e2b_", "key ci of namespace team-a; it is not shown again:\n")
	text := strings.TrimSpace(made.stdout)
	if len(text) != 44 {
		t.Errorf("key %q", text)
	}
	list := s.run("", "key", "ls", "-n", "team-a")
	list.want(t, 0, "   ci     "+text[:10]+"…   admin   47h", "")
	list.want(t, 0, "for CI\n", "")
	var kept []struct {
		Spec struct {
			SHA256, Prefix string
			ExpiresAt      time.Time
		}
	}
	out := s.run("", "key", "ls", "-A", "--json").stdout
	if err := json.Unmarshal([]byte(out), &kept); err != nil || len(kept) != 1 {
		t.Fatalf("%s: %v", out, err)
	}
	sum := sha256.Sum256([]byte(text))
	if kept[0].Spec.SHA256 != hex.EncodeToString(sum[:]) || strings.Contains(out, text) {
		t.Errorf("kept %s", out)
	}
	if kept[0].Spec.ExpiresAt.Before(atLeast) {
		t.Errorf("it ends at %s, before %s", kept[0].Spec.ExpiresAt, atLeast)
	}
	s.run("", "key", "create", "ci", "-n", "team-a").want(t, 1, "", `"ci" already exists`)
	s.run("", "key", "create", "Bad_Name").want(t, 2, "", `NAME: "Bad_Name": a lowercase RFC 1123 subdomain must consist of`)
	s.run("", "key", "create", "--json").want(t, 0, `"namespace": "default"`, "")
	s.run("", "key", "rm", "-n", "team-a", "none", "ci").want(t, 1, "ci\n", `"none" not found`)
	if out := s.run("", "key", "ls", "-n", "team-a", "--json").stdout; out != "[]\n" {
		t.Errorf("left: %s", out)
	}
}
