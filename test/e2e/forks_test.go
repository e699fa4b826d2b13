package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// made is a sandbox in a REST response.
type made struct {
	SandboxID       string
	EnvdAccessToken string
}

// forked is what became of one fork.
type forked struct {
	Sandbox *made
	Error   *struct {
		Code    int
		Message string
	}
}

// fork multiplies a sandbox, and returns each answer.
func (s *server) fork(key, id string, body map[string]any) (status int, text string, all []forked) {
	s.t.Helper()
	body["timeout"] = 3600
	status, text = s.call(key, http.MethodPost, "/sandboxes/"+id+"/fork", body)
	if status == http.StatusCreated {
		if err := json.Unmarshal([]byte(text), &all); err != nil {
			s.t.Fatalf("fork: %v\n%s", err, text)
		}
	}
	return status, text, all
}

// mustFork is fork that has to succeed for all.
func (s *server) mustFork(id string, count int, more map[string]any) (all []made) {
	s.t.Helper()
	body := map[string]any{"count": count}
	maps.Copy(body, more)
	status, text, forks := s.fork(s.localKey(), id, body)
	if status != http.StatusCreated || len(forks) != count {
		s.t.Fatalf("%d forks of %s = %d %s\n%s", count, id, status, text, s.tail())
	}
	for _, f := range forks {
		if f.Sandbox == nil {
			s.t.Fatalf("a fork of %s failed: %+v\n%s", id, f.Error, s.tail())
		}
		all = append(all, *f.Sandbox)
		s.t.Cleanup(func() {
			if s.cmd != nil {
				_, _ = s.try("kill", f.Sandbox.SandboxID) // the test may have done it
			}
		})
	}
	return all
}

// snapshot takes one, and returns its ID.
func (s *server) snapshot(id string, body map[string]any) string {
	s.t.Helper()
	status, text := s.call(s.localKey(), http.MethodPost, "/sandboxes/"+id+"/snapshots", body)
	var got struct{ SnapshotID string }
	if err := json.Unmarshal([]byte(text), &got); status != http.StatusCreated || err != nil || got.SnapshotID == "" {
		s.t.Fatalf("snapshot of %s = %d %s\n%s", id, status, text, s.tail())
	}
	return got.SnapshotID
}

// dropSnapshot deletes one, and returns the status.
func (s *server) dropSnapshot(id string) int {
	s.t.Helper()
	status, _ := s.call(s.localKey(), http.MethodDelete, "/templates/"+url.PathEscape(id), nil)
	return status
}

// createFrom makes a sandbox from a template or a snapshot.
func (s *server) createFrom(key string, body map[string]any) (int, string, made) {
	s.t.Helper()
	body["timeout"], body["secure"] = 3600, true
	status, text := s.call(key, http.MethodPost, "/sandboxes", body)
	var m made
	if status == http.StatusCreated {
		if err := json.Unmarshal([]byte(text), &m); err != nil {
			s.t.Fatalf("create: %v\n%s", err, text)
		}
	}
	return status, text, m
}

func (s *server) checkpoints() []string {
	s.t.Helper()
	return strings.Fields(s.mustKubectl("", "get", "checkpoints.barchan.dev", "-A", "-o", "jsonpath={.items[*].metadata.name}"))
}

// TestForks multiplies sandboxes in all the ways that clients may.
func TestForks(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newSleepy(t, "0s")
	for name, test := range map[string]func(*testing.T, *server){
		"twenty at once": testTwentyForks, "secrets": testForkSecrets, "quota": testForkQuota, "a busy writer": testForkOfWriter,
		"a snapshot outlives its source": testSnapshotOutlives, "refusals": testForkRefusals, "runc": testForkOfRunc,
	} {
		t.Run(name, func(t *testing.T) { test(t, s.in(t)) })
	}
	eventually.NoError(t, "no checkpoint is left", func() error {
		if left := s.checkpoints(); len(left) > 0 {
			return fmt.Errorf("%v", left)
		}
		return nil
	})
	s.untilInOrder()
}

// selfKnowledge prints what is unique to a sandbox.
const selfKnowledge = `cat /proc/sys/kernel/random/boot_id; hostname; hostname -I 2>/dev/null || ip -4 -o addr; head -c 16 /dev/urandom | od -An -tx1; echo $E2B_SANDBOX_ID`

// testTwentyForks verifies that twenty concurrent forks continue where the source was, each with its own identity.
func testTwentyForks(t *testing.T, s *server) {
	id, nonce := s.echo()
	s.exec(id, "echo shared > /tmp/shared")
	source := strings.Split(s.exec(id, selfKnowledge), "\n")
	forks := s.mustFork(id, 20, nil)
	names := []string{"boot_id", "host name", "address", "random bytes", "ID"}
	seen := map[string]string{}
	note := func(what, value, whose string) {
		t.Helper()
		if other, there := seen[what+value]; there || value == "" {
			t.Errorf("%s %q of %s is that of %s", what, value, whose, other)
		}
		seen[what+value] = whose
	}
	note("token", "-", id) // the source's is not returned again
	for i, name := range names {
		note(name, source[min(i, len(source)-1)], id)
	}
	for _, f := range forks {
		if now := s.nonce(f.SandboxID); now != nonce {
			t.Errorf("fork %s returned %s, the source %s", f.SandboxID, now, nonce)
		}
		note("token", f.EnvdAccessToken, f.SandboxID)
		mine := strings.Split(s.exec(f.SandboxID, selfKnowledge+"; cat /tmp/shared; echo "+f.SandboxID+" > /tmp/shared; cat /tmp/shared"), "\n")
		if len(mine) != len(names)+2 {
			t.Fatalf("fork %s returned %q", f.SandboxID, mine)
		}
		for i, name := range names {
			note(name, mine[i], f.SandboxID)
		}
		if mine[4] != f.SandboxID || mine[5] != "shared" || mine[6] != f.SandboxID {
			t.Errorf("fork %s returned %q", f.SandboxID, mine)
		}
	}
	if out := s.exec(id, "cat /tmp/shared"); out != "shared" {
		t.Errorf("the source has %q of a fork", out)
	}
	if now := s.nonce(id); now != nonce {
		t.Errorf("the source returned %s, want %s", now, nonce)
	}
	status, _ := s.agentStatus(forks[0].SandboxID, forks[1].EnvdAccessToken)
	own, text := s.agentStatus(forks[0].SandboxID, forks[0].EnvdAccessToken)
	if status != http.StatusUnauthorized || own != http.StatusOK {
		t.Errorf("a fork's agent answers %d to another's token, and %d %s to its own", status, own, text)
	}
	s.must(append([]string{"kill"}, append(idsOf(forks), id)...)...)
}

func idsOf(all []made) (ids []string) {
	for _, m := range all {
		ids = append(ids, m.SandboxID)
	}
	return ids
}

// agentStatus makes a request of a sandbox's agent that needs its token.
func (s *server) agentStatus(id, token string) (int, string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), eventually.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.http+"/envs", nil)
	if err != nil {
		s.t.Fatal(err)
	}
	req.Host = "49983-" + id + ".barchan.localhost"
	req.Header.Set("X-Access-Token", token)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	return res.StatusCode, res.Status
}

// testForkSecrets verifies that variables stay with their sandbox unless the request allows more, but for those that the
// tenant sent itself.
func testForkSecrets(t *testing.T, s *server) {
	key := s.localKey()
	status, text, source := s.createFrom(key, map[string]any{"templateID": "echo", "envVars": map[string]string{"SECRET": "of one"}})
	if status != http.StatusCreated {
		t.Fatalf("create = %d %s", status, text)
	}
	nonce := s.nonce(source.SandboxID)
	own := s.mustFork(source.SandboxID, 1, map[string]any{})[0]
	name := s.mustKubectl("", "get", "sandboxes", "-o", `jsonpath={.items[?(@.status.barchan.id=="`+source.SandboxID+`")].metadata.name}`)
	s.mustKubectl("", "annotate", "sandbox", name, "barchan.dev/own-env-") // as one whose variables a SandboxClaim brought
	if status, text, _ := s.fork(key, source.SandboxID, map[string]any{}); status != http.StatusForbidden || !strings.Contains(text, "allowSecrets") {
		t.Errorf("fork of one with secrets = %d %s, want 403 that names allowSecrets", status, text)
	}
	f := s.mustFork(source.SandboxID, 1, map[string]any{"allowSecrets": true, "envVars": map[string]string{"MORE": "of the fork"}})[0]
	if out := s.exec(f.SandboxID, "echo $SECRET, $MORE"); out != "of one, of the fork" {
		t.Errorf("the fork that was allowed has %q", out)
	}
	if now := s.nonce(f.SandboxID); now != nonce {
		t.Errorf("the fork returned %s, the source %s", now, nonce)
	}
	snapshot := s.snapshot(source.SandboxID, map[string]any{"name": "secret"})
	if status, text, _ := s.createFrom(key, map[string]any{"templateID": snapshot}); status != http.StatusForbidden || !strings.Contains(text, "allowSecrets") {
		t.Errorf("create from a snapshot with secrets = %d %s", status, text)
	}
	status, text, again := s.createFrom(key, map[string]any{"templateID": snapshot, "allowSecrets": true})
	if status != http.StatusCreated {
		t.Fatalf("create that allows secrets = %d %s", status, text)
	}
	s.written(source.SandboxID, strings.ReplaceAll(snapshot, ":", "-"), nonce)
	s.must("kill", source.SandboxID, own.SandboxID, f.SandboxID, again.SandboxID)
	if status := s.dropSnapshot(snapshot); status != http.StatusNoContent {
		t.Errorf("delete of the snapshot = %d", status)
	}
}

// written makes, with kubectl, a sandbox that is like another but for what it starts from: a checkpoint
// with secrets. It is not started before its own policy allows that.
func (s *server) written(like, checkpoint, nonce string) {
	s.t.Helper()
	name := s.mustKubectl("", "get", "sandboxes", "-o", `jsonpath={.items[?(@.status.barchan.id=="`+like+`")].metadata.name}`)
	var o map[string]any
	if err := json.Unmarshal([]byte(s.mustKubectl("", "get", "sandbox", name, "-o", "json")), &o); err != nil {
		s.t.Fatal(err)
	}
	spec, _ := o["spec"].(map[string]any)
	spec["barchan"] = map[string]any{"restore": map[string]any{"checkpointName": checkpoint}}
	delete(spec, "shutdownTime")
	o["metadata"] = map[string]any{"name": "by-hand"}
	delete(o, "status")
	manifest, err := json.Marshal(o)
	if err != nil {
		s.t.Fatal(err)
	}
	s.mustKubectl(string(manifest), "create", "-f", "-")
	s.t.Cleanup(func() {
		if s.cmd != nil {
			s.mustKubectl("", "delete", "sandbox", "by-hand", "--ignore-not-found")
		}
	})
	s.mustKubectl("", "wait", `--for=jsonpath={.status.conditions[?(@.type=="Ready")].reason}=SecretsRefused`, "sandbox/by-hand", patience)
	message := s.mustKubectl("", "get", "sandbox", "by-hand", "-o", `jsonpath={.status.barchan.startedAt}{.status.podIPs}{.status.conditions[?(@.type=="Ready")].message}`)
	if !strings.HasPrefix(message, "spec.barchan.restore.checkpointName: checkpoint ") || !strings.Contains(message, "spec.barchan.fork.secrets: Allow") {
		s.t.Errorf("it returned %q, want the field, what would allow it, and no start", message)
	}
	if object := s.mustKubectl("", "get", "events", "--field-selector", "reason=SecretsRefused", "-o", "jsonpath={.items[*].regarding.name}{.items[*].involvedObject.name}"); !strings.Contains(object, "by-hand") {
		s.t.Errorf("its event is of %q", object)
	}
	s.mustKubectl("", "patch", "sandbox", "by-hand", "--type=merge", "-p", `{"spec":{"barchan":{"fork":{"secrets":"Allow"}}}}`)
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandbox/by-hand", patience)
	id := s.mustKubectl("", "get", "sandbox", "by-hand", "-o", "jsonpath={.status.barchan.id}")
	if now := s.nonce(id); now != nonce {
		s.t.Errorf("it returned %s, the source %s", now, nonce)
	}
	if out := s.exec(id, "echo $SECRET"); out != "of one" {
		s.t.Errorf("it has %q", out)
	}
	s.must("kill", id)
}

// testForkQuota has room for three more.
func testForkQuota(t *testing.T, s *server) {
	key := s.newKey("quota", "--namespace", "team-q")
	s.mustKubectl("", "annotate", "--overwrite", "namespace", "team-q", "barchan.dev/quota-sandboxes=4")
	status, text, source := s.createFrom(key, map[string]any{"templateID": "base"})
	if status != http.StatusCreated {
		t.Fatalf("create = %d %s", status, text)
	}
	status, text, forks := s.fork(key, source.SandboxID, map[string]any{"count": 5})
	got := map[int]int{}
	for _, f := range forks {
		if f.Sandbox != nil {
			got[0]++
		} else {
			got[f.Error.Code]++
		}
	}
	if status != http.StatusCreated || got[0] != 3 || got[http.StatusTooManyRequests] != 2 {
		t.Errorf("5 forks where there is room for 3 = %d %s", status, text)
	}
	for _, f := range forks {
		if f.Sandbox != nil {
			s.call(key, http.MethodDelete, "/sandboxes/"+f.Sandbox.SandboxID, nil)
		}
	}
	s.call(key, http.MethodDelete, "/sandboxes/"+source.SandboxID, nil)
}

// testForkOfWriter forks a sandbox that writes a database all the time: each fork has it whole, and
// writes on.
func testForkOfWriter(t *testing.T, s *server) {
	s.apply(runtimeTemplate("roomy", "gvisor", "1536Mi"))
	c := canary{name: "sqlite", grows: true, files: map[string]string{"testdata/canary/sqlite.py": "/home/user/sqlite.py"}, start: "python3 /home/user/sqlite.py"}
	id, before := s.hatch(c)
	for range 3 {
		forks := s.mustFork(id, 3, nil)
		for _, f := range forks {
			s.checkCanary(c, f.SandboxID, witnessPort, before, "in fork "+f.SandboxID)
		}
		before = s.checkCanary(c, id, witnessPort, before, "in the source")
		s.must(append([]string{"kill"}, idsOf(forks)...)...)
	}
	snapshot := s.snapshot(id, map[string]any{"name": "files", "memory": false})
	status, text, m := s.createFrom(s.localKey(), map[string]any{"templateID": snapshot})
	if status != http.StatusCreated {
		t.Fatalf("create from files = %d %s", status, text)
	}
	check := `import sqlite3; print(sqlite3.connect("/home/user/rows.db").execute("pragma integrity_check").fetchone()[0])`
	if out := s.exec(m.SandboxID, "python3 -c '"+check+"'; pgrep -x python3 || echo none"); out != "ok\nnone" {
		t.Errorf("a sandbox from files alone returned %q", out)
	}
	s.must("kill", m.SandboxID, id)
	s.dropSnapshot(snapshot)
}

// testSnapshotOutlives kills the source of a snapshot, and starts from it twice.
func testSnapshotOutlives(t *testing.T, s *server) {
	for _, paused := range []bool{false, true} {
		id, nonce := s.echo()
		if paused {
			s.must("pause", id)
		}
		snapshot := s.snapshot(id, map[string]any{"name": "kept"})
		s.must("kill", id)
		var ids []string
		for range 2 {
			status, text, m := s.createFrom(s.localKey(), map[string]any{"templateID": snapshot})
			if status != http.StatusCreated {
				t.Fatalf("create from %s = %d %s\n%s", snapshot, status, text, s.tail())
			}
			if now := s.nonce(m.SandboxID); now != nonce {
				t.Errorf("it returned %s, want %s", now, nonce)
			}
			ids = append(ids, m.SandboxID)
		}
		for i, want := range []int{http.StatusNoContent, http.StatusNotFound} {
			if got := s.dropSnapshot(snapshot); got != want {
				t.Errorf("delete %d of the snapshot = %d, want %d", i+1, got, want)
			}
		}
		// What was started from it needs it no more: not to run, and not to sleep.
		for _, x := range ids {
			s.must("pause", x)
			s.must("resume", x)
			if now := s.nonce(x); now != nonce {
				t.Errorf("it returned %s, want %s", now, nonce)
			}
		}
		s.must(append([]string{"kill"}, ids...)...)
	}
}

// testForkRefusals verifies that bad input is rejected at once, by field name, and leaves nothing.
func testForkRefusals(t *testing.T, s *server) {
	key := s.localKey()
	id, _ := s.echo()
	for _, count := range []int{0, 101, -1} {
		if status, text, _ := s.fork(key, id, map[string]any{"count": count}); status != http.StatusBadRequest || !strings.Contains(text, "count") {
			t.Errorf("fork %s times = %d %s", strconv.Itoa(count), status, text)
		}
	}
	if status, text := s.call(key, http.MethodPost, "/sandboxes/"+id+"/snapshots", map[string]any{"name": "No Name"}); status != http.StatusBadRequest || !strings.Contains(text, "name") {
		t.Errorf("snapshot with a bad name = %d %s", status, text)
	}
	s.must("pause", id)
	if status, text, _ := s.fork(key, id, map[string]any{}); status != http.StatusConflict || !strings.Contains(text, "paused") {
		t.Errorf("fork of a paused sandbox = %d %s", status, text)
	}
	s.must("kill", id)
	if status, text, _ := s.fork(key, id, map[string]any{}); status != http.StatusNotFound {
		t.Errorf("fork of none = %d %s", status, text)
	}
	if status, text, _ := s.createFrom(key, map[string]any{"templateID": "none:nothing"}); status != http.StatusNotFound {
		t.Errorf("create from no snapshot = %d %s", status, text)
	}
}

// testForkOfRunc verifies that forks of a class without memory have the files.
func testForkOfRunc(t *testing.T, s *server) {
	s.apply(runtimeTemplate("plain", "runc", "256Mi"))
	id := s.create(s.localKey(), "plain")
	s.exec(id, "echo kept > /home/user/kept; setsid sleep 99999 >/dev/null 2>&1 &")
	f := s.mustFork(id, 1, nil)[0]
	if out := s.exec(f.SandboxID, "cat /home/user/kept; pgrep -x sleep || echo none"); out != "kept\nnone" {
		t.Errorf("the fork returned %q", out)
	}
	if out := s.exec(id, "pgrep -xc sleep"); out != "1" {
		t.Errorf("the source has %s programs", out)
	}
	s.must("kill", id, f.SandboxID)
}
