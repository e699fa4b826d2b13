package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestSnapshotsAndForks is what people and the unmodified SDK do with the memory of sandboxes. The
// parts share one server and follow each other.
func TestSnapshotsAndForks(t *testing.T) {
	t.Parallel()
	s := newRacedServer(t)
	s.set("BARCHAN_STORE_AFTER", "2s")
	s.start()
	s.must("image", "build", "base")
	t.Run("the unmodified SDK", func(t *testing.T) { runSDK(t, "snapshots.test.mjs", s.in(t).clientEnv()) })
	t.Run("the command line", func(t *testing.T) { testSnapshotCommands(t, s.in(t)) })
	t.Run("our own fields", func(t *testing.T) { testSnapshotFields(t, s.in(t)) })
	t.Run("over a restart", func(t *testing.T) { testSnapshotRestart(t, s.in(t)) })
	t.Run("kubectl", func(t *testing.T) { testSnapshotObjects(t, s.in(t)) })
	t.Run("several containers", func(t *testing.T) { testSnapshotOfSeveral(t, s.in(t)) })
	t.Run("damaged memory", func(t *testing.T) { testSnapshotOfDamaged(t, s.in(t)) })
}

// startNumber starts a process that keeps a number in memory only.
const startNumber = `nohup sh -c 'n=$(od -An -N4 -tu4 /dev/urandom); while :; do echo $$ $n > /tmp/number.new; mv /tmp/number.new /tmp/number; sleep 0.05; done' >/dev/null 2>&1 &`

// number is the current output of that process, not an earlier one's.
func (s *server) number(id string) string {
	s.t.Helper()
	s.exec(id, "rm -f /tmp/number")
	var out string
	eventually.NoError(s.t, "the process in "+id, func() error {
		if out = s.exec(id, "cat /tmp/number 2>/dev/null || true"); len(strings.Fields(out)) != 2 {
			return fmt.Errorf("%q", out)
		}
		return nil
	})
	return out
}

func (s *server) withNumber() (id, number string) {
	s.t.Helper()
	id, _ = s.keep("base", "true")
	s.exec(id, startNumber)
	return id, s.number(id)
}

func testSnapshotCommands(t *testing.T, s *server) {
	id, number := s.withNumber()
	snap := strings.TrimSpace(s.data("snapshot", id, "--name", "cli", "--ttl", "1h"))
	if !strings.HasPrefix(snap, "cli:") {
		t.Fatalf("snapshot returned %q", snap)
	}
	if out := s.data("snapshot", "ls"); !strings.Contains(out, snap) || !strings.Contains(out, "memory and files") {
		t.Errorf("snapshot ls:\n%s", out)
	}
	if out := s.data("snapshot", "show", "cli"); !strings.Contains(out, id) {
		t.Errorf("snapshot show:\n%s", out)
	}
	if out := s.data("checkpoint", "ls", "-A"); !strings.Contains(out, snap) || !strings.Contains(out, "Ready") {
		t.Errorf("checkpoint ls:\n%s", out)
	}
	object := strings.ReplaceAll(snap, ":", "-")
	if out := s.data("checkpoint", "show", object); !strings.Contains(out, "runsc") && !strings.Contains(out, "gvisor") {
		t.Errorf("checkpoint show:\n%s", out)
	}
	copied := strings.TrimSpace(s.data("run", "--from", snap, "--keep"))
	if got := s.number(copied); got != number {
		t.Errorf("the copy returned %q, its source %q", got, number)
	}
	files := strings.TrimSpace(s.data("run", "--from", snap, "--files-only", "--keep"))
	if out := s.exec(files, "test -e /tmp/[n]umber && pgrep -f tmp/[n]umber || echo none"); out != "none" {
		t.Errorf("from files only, a process runs: %s", out)
	}
	forks := strings.Fields(s.data("fork", id, "--count", "3", "--timeout", "10m"))
	if len(forks) != 3 || slices.Contains(forks, id) {
		t.Fatalf("fork returned %q", forks)
	}
	for _, f := range forks {
		if got := s.number(f); got != number {
			t.Errorf("the fork returned %q, its source %q", got, number)
		}
	}
	s.must(append([]string{"kill", copied, files}, forks...)...)
	s.must("snapshot", "rm", snap)
	if out, err := s.try("snapshot", "rm", snap); exitCode(err) != 1 || !strings.Contains(out, "not found") {
		t.Errorf("snapshot rm again = %v\n%s", err, out)
	}
	if out, err := s.try("fork", id, "--count", "0"); exitCode(err) != 2 {
		t.Errorf("fork of none = %v\n%s", err, out)
	}

	s.must("pause", id)
	s.must("resume", id, "--files-only")
	if out := s.exec(id, "pgrep -f tmp/[n]umber || echo none"); out != "none" {
		t.Errorf("after a resume from files, a process runs: %s", out)
	}
	s.must("pause", id, "--files-only")
	s.must("resume", id)
	if got := s.exec(id, "test -e /tmp/number && echo there"); got != "there" {
		t.Errorf("its files: %q", got)
	}
	s.must("kill", id)
	s.wantNoCheckpoints()
}

// wantNoCheckpoints waits until none is left, in any namespace.
func (s *server) wantNoCheckpoints() {
	s.t.Helper()
	eventually.NoError(s.t, "checkpoints go", func() error {
		var list []struct{ Metadata struct{ Name string } }
		s.read(&list, "checkpoint", "ls", "-A")
		if len(list) > 0 {
			return fmt.Errorf("left: %v", list)
		}
		return nil
	})
}

// testSnapshotFields is what our API has beyond E2B's.
func testSnapshotFields(t *testing.T, s *server) {
	key := s.localKey()
	query := func(want int, method, path string, body, into any) {
		t.Helper()
		status, text := s.call(key, method, path, body)
		if status != want {
			t.Fatalf("%s %s = %d %s, want %d\n%s", method, path, status, text, want, s.tail())
		}
		if into != nil {
			if err := json.Unmarshal([]byte(text), into); err != nil {
				t.Fatalf("%s %s: %v\n%s", method, path, err, text)
			}
		}
	}
	var source struct{ SandboxID string }
	query(http.StatusCreated, http.MethodPost, "/v2/sandboxes", map[string]any{"templateID": "base", "envVars": map[string]string{"TOKEN": "s3cret"}, "metadata": map[string]string{"a": "1"}}, &source)
	var snap struct {
		SnapshotID, SandboxID, ExpiresAt string
		Memory, Secrets                  bool
		MemoryBytes                      int64
		Names                            []string
	}
	query(http.StatusCreated, http.MethodPost, "/sandboxes/"+source.SandboxID+"/snapshots", map[string]any{"memory": false, "ttl": 3600}, &snap)
	if snap.Memory || !snap.Secrets || snap.MemoryBytes != 0 || snap.ExpiresAt == "" || snap.SandboxID != source.SandboxID {
		t.Errorf("the snapshot is %+v", snap)
	}
	var copied struct{ SandboxID string }
	query(http.StatusCreated, http.MethodPost, "/v2/sandboxes", map[string]any{"templateID": snap.SnapshotID}, &copied) // the variables are the tenant's own
	var forks []struct{ Sandbox struct{ SandboxID string } }
	query(http.StatusCreated, http.MethodPost, "/sandboxes/"+source.SandboxID+"/fork",
		map[string]any{"count": 2, "timeout": 600, "metadata": map[string]string{"b": "2"}, "envVars": map[string]string{"MORE": "yes"}}, &forks)
	for _, f := range forks {
		if out := s.exec(f.Sandbox.SandboxID, "echo $TOKEN $MORE"); out != "s3cret yes" {
			t.Errorf("a new process in the fork has %q", out)
		}
		var d struct{ Metadata map[string]string }
		query(http.StatusOK, http.MethodGet, "/sandboxes/"+f.Sandbox.SandboxID, nil, &d)
		if fmt.Sprint(d.Metadata) != "map[a:1 b:2]" {
			t.Errorf("the fork's metadata are %v", d.Metadata)
		}
		s.must("kill", f.Sandbox.SandboxID)
	}
	query(http.StatusForbidden, http.MethodDelete, "/templates/base", nil, nil)
	query(http.StatusNoContent, http.MethodDelete, "/templates/"+url.PathEscape(snap.Names[0]), nil, nil)
	query(http.StatusNotFound, http.MethodDelete, "/templates/"+url.PathEscape(snap.SnapshotID), nil, nil)
	s.must("kill", source.SandboxID, copied.SandboxID)
	s.wantNoCheckpoints()
}

// testSnapshotRestart: a snapshot outlives its source and the server.
func testSnapshotRestart(t *testing.T, s *server) {
	id, number := s.withNumber()
	snap := strings.TrimSpace(s.data("snapshot", id))
	s.must("kill", id)
	s.stop(syscall.SIGKILL)
	s.start()
	copied := strings.TrimSpace(s.data("run", "--from", snap, "--keep"))
	if got := s.number(copied); got != number {
		t.Errorf("the copy returned %q, want %q", got, number)
	}
	s.must("snapshot", "rm", snap)
	if got := s.number(copied); got != number {
		t.Errorf("after its snapshot has gone the copy returned %q", got)
	}
	s.must("kill", copied)
	s.wantNoCheckpoints()
}

// testSnapshotObjects: what kubectl makes is a snapshot of the API.
func testSnapshotObjects(t *testing.T, s *server) {
	id, number := s.withNumber()
	name := s.mustKubectl("", "get", "sandboxes", "-o", `jsonpath={.items[?(@.status.barchan.id=="`+id+`")].metadata.name}`)
	s.mustKubectl("apiVersion: barchan.dev/v1alpha1\nkind: Checkpoint\nmetadata: {name: by-hand}\nspec: {sandboxName: "+name+", keepRunning: true}\n", "apply", "-f", "-")
	s.mustKubectl("", "wait", "--for=condition=Ready", "checkpoint/by-hand", patience)
	copied := strings.TrimSpace(s.data("run", "--from", "by-hand", "--keep"))
	if got := s.number(copied); got != number {
		t.Errorf("the copy returned %q, its source %q", got, number)
	}
	s.must("kill", id, copied)
	s.mustKubectl("", "delete", "checkpoint", "by-hand", patience)
	s.wantNoCheckpoints()
}

// testSnapshotOfDamaged changes one bit of the memory of a paused sandbox: there is no snapshot of that
// memory, which is reported at once, permanently; there is one of the files, and of memory that is whole again.
func testSnapshotOfDamaged(t *testing.T, s *server) {
	id, number := s.withNumber()
	name := s.mustKubectl("", "get", "sandboxes", "-o", `jsonpath={.items[?(@.status.barchan.id=="`+id+`")].metadata.name}`)
	s.must("pause", id)
	s.onDisk(id)
	path := filepath.Join(s.value("BARCHAN_DATA_DIR"), "node", "memory", id, "pages.img")
	flipMiddle(t, path)
	if out, err := s.try("snapshot", id); exitCode(err) != 1 || !strings.Contains(out, "damaged") || !strings.Contains(out, "--files-only") {
		t.Errorf("snapshot = %v, want a text that the memory is damaged, and what may help\n%s", err, out)
	}
	s.mustKubectl("apiVersion: barchan.dev/v1alpha1\nkind: Checkpoint\nmetadata: {name: harmed}\nspec: {sandboxName: "+name+"}\n", "apply", "-f", "-")
	s.mustKubectl("", "wait", "--for=jsonpath={.status.phase}=Failed", "checkpoint/harmed", patience)
	if message := s.mustKubectl("", "get", "checkpoint", "harmed", "-o", "jsonpath={.status.conditions[0].message}"); !strings.Contains(message, "damaged") || !strings.Contains(message, "spec.content: Files") {
		t.Errorf("the checkpoint returned %q", message)
	}
	s.mustKubectl("", "delete", "checkpoint", "harmed", patience)
	files := strings.TrimSpace(s.data("snapshot", id, "--files-only"))
	copied := strings.TrimSpace(s.data("run", "--from", files, "--keep"))
	if out := s.exec(copied, "cat /tmp/number"); out != number {
		t.Errorf("of the files: %q, want %q", out, number)
	}
	flipMiddle(t, path)
	whole := strings.TrimSpace(s.data("snapshot", id))
	again := strings.TrimSpace(s.data("run", "--from", whole, "--keep"))
	if got := s.number(again); got != number {
		t.Errorf("the copy returned %q, want %q", got, number)
	}
	s.must("snapshot", "rm", files, whole)
	s.must("kill", id, copied, again)
	s.wantNoCheckpoints()
}

// flipMiddle changes a bit in the middle of a file, or back.
func flipMiddle(t *testing.T, path string) {
	t.Helper()
	info, err := os.Stat(path)
	if err == nil {
		err = flip(path, info.Size()/2)
	}
	if err != nil {
		t.Fatal(err)
	}
}
