package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// poolManifests are written as for upstream; only the image is ours.
const poolManifests = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata:
  name: py
spec:
  envVarsInjectionPolicy: Overrides
  podTemplate:
    metadata:
      labels:
        app: py
    spec:
      containers:
      - name: main
        image: ` + baseImage + `
        command: ["sleep", "infinity"]
        env:
        - name: VERSION
          value: "%d"
        resources:
          limits:
            cpu: 500m
            memory: 256Mi
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata:
  name: py-pool
spec:
  replicas: %d
  sandboxTemplateRef:
    name: py
  updateStrategy:
    type: %s
`

const claimManifest = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxClaim
metadata:
  name: %s
spec:
  warmPoolRef:
    name: py-pool
  env:
  - name: WHO
    value: %s
---
`

// poolFor is how many members the tests' pool holds.
const poolFor = 3

// TestWarmPools takes the way of a user from two manifests to warm sandboxes. The parts share
// one server and follow each other.
func TestWarmPools(t *testing.T) {
	t.Parallel()
	s := newRacedServer(t)
	s.start()
	s.must("image", "build", "base")
	t.Run("it fills", func(t *testing.T) {
		s := s.in(t)
		s.mustKubectl(fmt.Sprintf(poolManifests, 1, poolFor, "OnReplenish"), "apply", "-f", "-")
		s.poolFills()
		if out := s.must("pool", "show", "py-pool"); !strings.Contains(out, "Ready      3 of the current revision; 3 ready of 3 in all") {
			t.Errorf("pool show:\n%s", out)
		}
	})
	t.Run("the SDK gets a member", func(t *testing.T) { testSDKGetsMember(t, s.in(t)) })
	t.Run("the command line gets a member", func(t *testing.T) {
		s := s.in(t)
		s.poolFills()
		id, out := s.keep("py", "sh", "-c", "echo $VERSION")
		if out != "1\n" || !launchedWarm(s.sandbox(id)) {
			t.Errorf("run: %q, sandbox %+v", out, s.sandbox(id).Labels)
		}
		s.must("kill", id)
	})
	t.Run("a changed template", func(t *testing.T) {
		s := s.in(t)
		s.poolFills()
		testTemplateChanges(t, s, 2, "OnReplenish")
		testTemplateChanges(t, s, 3, "Recreate")
	})
	t.Run("a SandboxClaim", func(t *testing.T) { testClaimByKubectl(t, s.in(t)) })
	t.Run("what was bound outlives the container", func(t *testing.T) { testBoundOutlives(t, s.in(t)) })
	t.Run("the server is killed during claims", func(t *testing.T) { testDeathAmidClaims(t, s.in(t)) })
	t.Run("the pool is deleted", func(t *testing.T) { testPoolDeleted(t, s.in(t)) })
}

// objects reads all objects of a kind in the default namespace.
func objects[T any](s *server, kind string) (all []T) {
	s.t.Helper()
	var list struct{ Items []T }
	out := s.mustKubectl("", "get", kind, "-o", "json")
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		s.t.Fatalf("kubectl get %s: %v\n%s", kind, err, out)
	}
	return list.Items
}

// sandbox is the object of an ID.
func (s *server) sandbox(id string) *agents.Sandbox {
	s.t.Helper()
	all := objects[agents.Sandbox](s, "sandboxes")
	i := slices.IndexFunc(all, func(x agents.Sandbox) bool { return x.Status.Barchan != nil && x.Status.Barchan.ID == id })
	if i < 0 {
		s.t.Fatalf("no object of sandbox %s", id)
	}
	return &all[i]
}

func isMember(x *agents.Sandbox) bool { return x.Labels[agents.LabelWarmPoolSandbox] != "" }

// launchedWarm reports whether a claimed sandbox was a member before.
func launchedWarm(x *agents.Sandbox) bool {
	return !isMember(x) && x.Labels[agents.LabelLaunchType] == agents.LaunchWarm && strings.HasPrefix(x.Name, "py-pool-")
}

// poolFills waits until the pool has the desired size, and no more.
func (s *server) poolFills() {
	s.t.Helper()
	eventually.NoError(s.t, "the pool fills", func() error {
		p := objects[extensions.SandboxWarmPool](s, "sandboxwarmpools")[0]
		if p.Status.ObservedGeneration < p.Generation || !meta.IsStatusConditionTrue(p.Status.Conditions, extensions.PoolReady) || p.Status.ReadyReplicas != poolFor {
			return fmt.Errorf("status %+v", p.Status)
		}
		members := slices.DeleteFunc(objects[agents.Sandbox](s, "sandboxes"), func(x agents.Sandbox) bool { return !isMember(&x) || x.DeletionTimestamp != nil })
		if len(members) != poolFor {
			return fmt.Errorf("%d members", len(members))
		}
		return nil
	})
}

// poolRevision is the revision of the template that the pool has seen.
func (s *server) poolRevision() string {
	s.t.Helper()
	return objects[extensions.SandboxWarmPool](s, "sandboxwarmpools")[0].Status.CurrentRevision
}

// poolSees waits until the pool has seen that its template is not the one of a revision any more. Until
// then no member is stale.
func (s *server) poolSees(before string) {
	s.t.Helper()
	eventually.True(s.t, "the pool sees the template's change", func() bool { return s.poolRevision() != before })
}

// poolRolls waits until the pool has no member of an earlier revision, and is full.
func (s *server) poolRolls() {
	s.t.Helper()
	eventually.NoError(s.t, "stale members go", func() error {
		if out := s.must("pool", "show", "py-pool"); strings.Contains(out, "(stale)") {
			return errors.New(out)
		}
		return nil
	})
	s.poolFills()
}

// script runs a program of the unmodified SDK.
func (s *server) script(code string) string {
	s.t.Helper()
	installSDK(s.t)
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, "node", "-e", "import('e2b').then(async ({Sandbox}) => {"+code+"; process.exit(0)}).catch((e) => { console.error(e); process.exit(1) })")
	cmd.Dir, cmd.Env = "sdk", s.clientEnv()
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.t.Fatalf("%s: %v\n%s\n%s", code, err, out, s.tail())
	}
	return strings.TrimSpace(string(out))
}

func testSDKGetsMember(t *testing.T, s *server) {
	out := s.script(`const s = await Sandbox.create('py', {timeoutMs: 600000, envs: {WHO: 'me', ODD: 'a $(b) $$ "c"'}, metadata: {suite: 'pools'}});
		console.log(s.sandboxId); console.log((await s.commands.run('echo $WHO $VERSION; echo "$ODD"')).stdout.trim())`)
	id, printed, _ := strings.Cut(out, "\n")
	if printed != "me 1\na $(b) $$ \"c\"" {
		t.Errorf("inside: %q", printed)
	}
	if x := s.sandbox(id); !launchedWarm(x) || x.OwnerReferences != nil {
		t.Errorf("the sandbox was no member, or has an owner: %v, %v", x.Labels, x.OwnerReferences)
	}
	s.poolFills()
	brief := s.script(`const s = await Sandbox.create('py', {timeoutMs: 2000}); console.log(s.sandboxId)`)
	eventually.NoError(t, "its timeout ends it", func() error {
		if status, body := s.call(s.localKey(), http.MethodGet, "/sandboxes/"+brief, nil); status != http.StatusNotFound {
			return fmt.Errorf("%d %s", status, body)
		}
		return nil
	})
	if status, body := s.call(s.localKey(), http.MethodGet, "/sandboxes/"+id, nil); status != http.StatusOK || !strings.Contains(body, `"suite":"pools"`) {
		t.Errorf("the other is %d %s", status, body)
	}
	s.must("kill", id)
	s.poolFills()
}

// testTemplateChanges verifies that the first claim after a change has it, for any warm members.
func testTemplateChanges(t *testing.T, s *server, version int, strategy string) {
	t.Helper()
	before := s.poolRevision()
	s.mustKubectl(fmt.Sprintf(poolManifests, version, poolFor, strategy), "apply", "-f", "-")
	for range 2 {
		id := s.create(s.localKey(), "py")
		if got := s.exec(id, "echo $VERSION"); got != fmt.Sprint(version) {
			t.Errorf("%s: a claim after the change to version %d got %s", strategy, version, got)
		}
		s.must("kill", id)
	}
	s.poolSees(before)
	if strategy == "Recreate" {
		s.poolRolls()
		id := s.create(s.localKey(), "py")
		if got := s.exec(id, "echo $VERSION"); got != fmt.Sprint(version) || !launchedWarm(s.sandbox(id)) {
			t.Errorf("from the pool rolled out: version %s, labels %v", got, s.sandbox(id).Labels)
		}
		s.must("kill", id)
	}
	eventually.NoError(t, "the history has the change", func() error {
		var history []struct{ Spec struct{ Number int } }
		s.read(&history, "template", "history", "py")
		if len(history) != version || history[version-1].Spec.Number != version {
			return fmt.Errorf("%+v", history)
		}
		return nil
	})
}

func testClaimByKubectl(t *testing.T, s *server) {
	s.poolFills()
	s.mustKubectl(fmt.Sprintf(claimManifest, "mine", "claim"), "apply", "-f", "-")
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandboxclaim/mine", patience)
	name := s.mustKubectl("", "get", "sandboxclaim", "mine", "-o", "jsonpath={.status.sandbox.name}")
	id := s.mustKubectl("", "get", "sandbox", name, "-o", "jsonpath={.status.barchan.id}")
	x := s.sandbox(id)
	if owner := metav1.GetControllerOf(x); !launchedWarm(x) || owner == nil || owner.Kind != "SandboxClaim" || owner.Name != "mine" {
		t.Errorf("the claim's sandbox: labels %v, owners %v", x.Labels, x.OwnerReferences)
	}
	if got := s.exec(id, "echo $WHO"); got != "claim" {
		t.Errorf("its variable is %q", got)
	}
	s.mustKubectl("", "delete", "sandboxclaim", "mine", patience)
	eventually.NoError(t, "the claim's sandbox goes", func() error {
		if out, err := s.kubectl("", "get", "sandbox", name); err == nil || !strings.Contains(out, "NotFound") {
			return errors.New(out)
		}
		return nil
	})
}

// testBoundOutlives verifies the variables of a claim in a container that is restarted, by a
// server that has seen neither the claim nor the start.
func testBoundOutlives(t *testing.T, s *server) {
	before := s.poolRevision()
	s.mustKubectl("", "patch", "sandboxtemplate", "py", "--type=merge", "-p", `{"spec":{"podTemplate":{"spec":{"restartPolicy":"Always"}}}}`)
	s.poolSees(before)
	s.poolRolls()
	id := s.script(`const s = await Sandbox.create('py', {timeoutMs: 600000, envs: {WHO: 'me'}}); console.log(s.sandboxId)`)
	if !launchedWarm(s.sandbox(id)) {
		t.Fatalf("not warm: %v", s.sandbox(id).Labels)
	}
	s.stop(syscall.SIGKILL)
	s.start()
	s.exec(id, "tail -f /dev/null > /dev/null 2>&1 &")
	// The container goes with the template's program, and the requesting process with the container.
	_, _ = s.try("exec", id, "--", "sudo", "pkill", "-x", "sleep")
	eventually.NoError(t, "the container is restarted, with its variables", func() error {
		out, err := s.try("exec", id, "--", "sh", "-c", "pgrep -x sleep > /dev/null && ! pgrep -x tail && echo $WHO")
		if err != nil || out != "me\n" {
			return fmt.Errorf("%w: %q", err, out)
		}
		return nil
	})
	s.must("kill", id)
}

// answer is what one create got.
type answer struct {
	key, id string
	err     error
}

// createOnce requests a sandbox under an idempotency key.
func (s *server) createOnce(ctx context.Context, apiKey, key string) answer {
	body, err := json.Marshal(map[string]any{"templateID": "py", "timeout": 600, "secure": true, "envVars": map[string]string{"WHO": key}})
	if err != nil {
		return answer{key: key, err: err}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.http+"/sandboxes", bytes.NewReader(body))
	if err != nil {
		return answer{key: key, err: err}
	}
	req.Header.Set("X-API-Key", apiKey)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", key)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return answer{key: key, err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	var made struct{ SandboxID string }
	if err == nil {
		err = json.Unmarshal(b, &made)
	}
	if err == nil && (resp.StatusCode != http.StatusCreated || made.SandboxID == "") {
		err = fmt.Errorf("%d %s", resp.StatusCode, b)
	}
	return answer{key: key, id: made.SandboxID, err: err}
}

// testDeathAmidClaims kills the server while both kinds of claims arrive. What was not answered
// is requested again under its key.
func testDeathAmidClaims(t *testing.T, s *server) {
	s.poolFills()
	const each = 5
	var manifest strings.Builder
	for i := range each {
		fmt.Fprintf(&manifest, claimManifest, fmt.Sprintf("c%d", i), fmt.Sprintf("claim-%d", i))
	}
	s.mustKubectl(manifest.String(), "apply", "-f", "-")
	apiKey, answers := s.localKey(), make(chan answer, each)
	ctx, cancel := context.WithTimeout(t.Context(), 5*startTime) // for all of them, one after the other
	defer cancel()
	var asking sync.WaitGroup
	for i := range each {
		asking.Go(func() { answers <- s.createOnce(ctx, apiKey, fmt.Sprintf("key-%d", i)) })
	}
	first := <-answers // now the others are in the middle
	s.stop(syscall.SIGKILL)
	asking.Wait()
	close(answers)
	s.start()

	owner := map[string]string{} // by sandbox ID
	take := func(id, by string) {
		t.Helper()
		if other := owner[id]; other != "" && other != by {
			t.Errorf("sandbox %s belongs to %s and %s", id, other, by)
		}
		owner[id] = by
	}
	lost := 0
	for a, more := first, true; more; a, more = <-answers {
		if a.err != nil {
			lost++
			key := a.key
			eventually.NoError(t, "an answer for "+key, func() error {
				a = s.createOnce(ctx, apiKey, key)
				return a.err
			})
		}
		take(a.id, a.key)
	}
	t.Logf("%d of %d answers were lost", lost, each)
	for i := range each {
		name := fmt.Sprintf("c%d", i)
		s.mustKubectl("", "wait", "--for=condition=Ready", "sandboxclaim/"+name, patience)
		of := s.mustKubectl("", "get", "sandboxclaim", name, "-o", "jsonpath={.status.sandbox.name}")
		take(s.mustKubectl("", "get", "sandbox", of, "-o", "jsonpath={.status.barchan.id}"), fmt.Sprintf("claim-%d", i))
	}
	if len(owner) != 2*each {
		t.Errorf("%d sandboxes for %d claims: %v", len(owner), 2*each, owner)
	}
	for id, by := range owner {
		if got := s.exec(id, "echo $WHO"); got != by {
			t.Errorf("the sandbox of %s has the variable of %q", by, got)
		}
	}
	s.poolFills()
	for _, x := range objects[agents.Sandbox](s, "sandboxes") {
		if !isMember(&x) && owner[x.Status.Barchan.ID] == "" {
			t.Errorf("sandbox %s is neither a member nor claimed: %v", x.Name, x.Labels)
		}
	}
	for id, by := range owner {
		if strings.HasPrefix(by, "key-") {
			s.must("kill", id)
		}
	}
	s.mustKubectl("", "delete", "sandboxclaims", "--all", patience)
	eventually.NoError(t, "only members are left", func() error {
		for _, x := range objects[agents.Sandbox](s, "sandboxes") {
			if !isMember(&x) {
				return fmt.Errorf("sandbox %s", x.Name)
			}
		}
		return nil
	})
}

func testPoolDeleted(t *testing.T, s *server) {
	s.poolFills()
	id := s.create(s.localKey(), "py")
	s.mustKubectl(fmt.Sprintf(claimManifest, "stays", "claim"), "apply", "-f", "-")
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandboxclaim/stays", patience)
	s.must("pool", "rm", "py-pool")
	eventually.NoError(t, "the members go", func() error {
		for _, x := range objects[agents.Sandbox](s, "sandboxes") {
			if isMember(&x) {
				return fmt.Errorf("member %s", x.Name)
			}
		}
		return nil
	})
	if got := s.exec(id, "echo alive"); got != "alive" {
		t.Errorf("a claimed sandbox after its pool: %q", got)
	}
	if out := s.mustKubectl("", "get", "sandboxclaim", "stays", "-o", `jsonpath={.status.conditions[?(@.type=="Ready")].status}`); out != "True" {
		t.Errorf("a claim after its pool is %q", out)
	}
	s.must("kill", id)
	s.mustKubectl("", "delete", "sandboxclaim", "stays", patience)
	eventually.NoError(t, "all are gone", func() error {
		if left := objects[agents.Sandbox](s, "sandboxes"); len(left) > 0 {
			return fmt.Errorf("%d sandboxes", len(left))
		}
		return nil
	})
}

// TestDefaultPool has the pool that a new server begins with fill as soon as its image is there.
func TestDefaultPool(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newServer(t)
	s.env = append(s.env, "BARCHAN_POOL_SIZE=2")
	s.start()
	eventually.NoError(t, "a member lacks its image", func() error {
		for _, x := range objects[agents.Sandbox](s, "sandboxes") {
			if c := meta.FindStatusCondition(x.Status.Conditions, agents.ConditionReady); c != nil && c.Reason == "ImageUnavailable" {
				return nil
			}
		}
		return errors.New("none does")
	})
	s.must("image", "build", "base")
	eventually.NoError(t, "the pool is full", func() error {
		if out := s.must("pool", "ls"); !strings.Contains(out, "Full") {
			return errors.New(out)
		}
		return nil
	})
	id, out := s.keep("base", "echo", "here")
	if x := s.sandbox(id); out != "here\n" || x.Labels[agents.LabelLaunchType] != agents.LaunchWarm {
		t.Errorf("run: %q, sandbox %+v", out, x.Labels)
	}
	s.must("kill", id)
}
