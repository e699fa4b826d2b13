package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

func (s *server) hasSnapshot(id string) bool {
	return slices.ContainsFunc(s.snapshots, func(x client.Snapshot) bool { return x.SnapshotID == id })
}

func (s *server) snapshot(w http.ResponseWriter, r *http.Request, d *client.SandboxDetail) {
	var n struct {
		client.SnapshotOptions
		TTL int64 `json:"ttl"`
	}
	if err := json.NewDecoder(r.Body).Decode(&n); err != nil || n.Name == "Bad" {
		refuse(w, http.StatusBadRequest, "name: is bad")
		return
	}
	x := client.Snapshot{
		SnapshotID: fmt.Sprintf("base:%d", len(s.snapshots)), SandboxID: d.SandboxID, TemplateID: "base", CreatedAt: time.Now().Add(-3 * time.Minute),
		SizeBytes: 3 << 20, MemoryBytes: 1 << 20, Memory: n.Memory == nil,
	}
	if n.Name != "" {
		x.SnapshotID = n.Name
	}
	if n.TTL > 0 {
		x.ExpiresAt = new(time.Now().Add(time.Duration(n.TTL)*time.Second + leeway))
	}
	s.snapshots = append(s.snapshots, x)
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(x)
}

func (s *server) snapshotList(w http.ResponseWriter, r *http.Request) {
	if id, ok := strings.CutPrefix(r.URL.Path, "/templates/"); ok {
		if !s.hasSnapshot(id) {
			refuse(w, http.StatusNotFound, fmt.Sprintf("snapshot '%s' not found", id))
			return
		}
		s.snapshots = slices.DeleteFunc(s.snapshots, func(x client.Snapshot) bool { return x.SnapshotID == id })
		w.WriteHeader(http.StatusNoContent)
		return
	}
	if r.URL.Path == "/v2/templates" {
		_ = json.NewEncoder(w).Encode([]client.Template{{TemplateID: "t0000000000000000001", Aliases: []string{"base"}}})
		return
	}
	q, list := r.URL.Query(), []client.Snapshot{}
	for _, x := range s.snapshots {
		if strings.HasPrefix(x.SnapshotID, q.Get("name")) && strings.HasPrefix(x.SandboxID, q.Get("sandboxID")) {
			list = append(list, x)
		}
	}
	_ = json.NewEncoder(w).Encode(list)
}

// fork lets the second fork fail. It reports the last one first, and the others once that was printed.
func (s *server) fork(w http.ResponseWriter, r *http.Request) {
	var n client.ForkOptions
	if err := json.NewDecoder(r.Body).Decode(&n); err != nil {
		refuse(w, http.StatusBadRequest, "bad")
		return
	}
	all := make([]client.Forked, n.Count)
	for i := range all {
		if all[i].Sandbox = (&client.Sandbox{SandboxID: fmt.Sprintf("i%019d", i), AgentToken: "a-secret"}); i == 1 {
			all[i] = client.Forked{Error: &client.ForkError{Code: 429, Message: "quota of the namespace"}}
		}
	}
	if r.URL.Query().Get("stream") != "true" {
		refuse(w, http.StatusBadRequest, "stream: want true")
		return
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.WriteHeader(http.StatusCreated)
	for i := n.Count - 1; i >= 0; i-- {
		_ = json.NewEncoder(w).Encode(struct {
			Index int `json:"index"`
			client.Forked
		}{i, all[i]})
		_ = http.NewResponseController(w).Flush()
		if s.printed != nil {
			select {
			case <-s.printed:
			case <-r.Context().Done():
			}
		}
	}
}

func TestSnapshots(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	s.run("", "snapshot", "ls").want(t, 0, "", "no snapshots; `barchan snapshot SANDBOX` makes one")
	s.run("", "snapshot", "ls", "--json").want(t, 0, "[]\n", "")
	if r := s.run("", "snapshot", "iaaa"); r.stdout != "base:0\n" || r.stderr != "" {
		t.Errorf("%+v", r)
	}
	s.run("", "snapshot", id1, "--name", "mine:v1", "--files-only", "--ttl", "10m", "--json").want(t, 0, `"snapshotID": "mine:v1"`, "")
	if last := s.bodies[len(s.bodies)-1]; last != `snapshots {"name":"mine:v1","memory":false,"ttl":600}` {
		t.Errorf("requested %s", last)
	}
	s.run("", "snapshot", "ls").want(t, 0, ""+
		"ID        NAME   SANDBOX                TEMPLATE   CONTENT            SIZE      SECRETS   AGE   ENDS IN\n"+
		"base:0    base   "+id1+"   base       memory and files   3.0 MiB   no        3m    -\n"+
		"mine:v1   mine   "+id1+"   base       files              3.0 MiB   no        3m    10m\n", "")
	s.exactly(t, "base:0\nmine:v1\n", "snapshot", "ls", "-q")
	s.run("", "snapshot", "ls", "-A", "--name", "mine").want(t, 2, "", "leave out --namespace and -A")
	s.run("", "snapshot", "lss").want(t, 1, "", "did you mean `barchan snapshot ls`?")
	if r := s.run("", "snapshot", "ls", "--name", "mine"); strings.Contains(r.stdout, "base:0") {
		t.Errorf("filtered: %s", r.stdout)
	}
	s.run("", "snapshot", "ls", "--sandbox", "iaaa").want(t, 0, "mine:v1", "")
	s.run("", "snapshot", "show", "mine:v1").want(t, 0, "Content    files\nSize       3.0 MiB, of which memory 1.0 MiB\n", "")
	s.run("", "snapshot", "show", "mine:v1", "--json").want(t, 0, `"memory": false`, "")
	s.run("", "snapshot", "show", "nope").want(t, 1, "", `barchan: snapshot "nope" not found; `+"`barchan snapshot ls` lists them\n")
	s.run("", "snapshot", "rm", "nope", "mine:v1").want(t, 1, "mine:v1\n", `barchan: snapshot "nope" not found; `+"`barchan snapshot ls` lists them\n")
	s.run("", "snapshot", "iaaa", "--name", "Bad").want(t, 1, "", "barchan: name: is bad\n")
	s.run("", "snapshot", "iaaa", "--ttl", "1ms").want(t, 2, "", "--ttl: 1ms is too short")
	s.run("", "snapshot").want(t, 2, "", "SANDBOX is missing")
	s.run("", "snapshot", "nope").want(t, 1, "", `no sandbox has the name "nope", or an ID that begins so`)
	s.run("", "snapshot", "ls", "-n", "-1").want(t, 2, "", "--limit: -1 is negative")
}

func TestFork(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	s.run("", "fork", "iaaa").want(t, 0, "i0000000000000000000\n", "")
	s.run("", "fork", "iaaa", "--count", "3", "--timeout", "90s", "--allow-secrets", "--metadata", "k=v").
		want(t, 1, "i0000000000000000002\ni0000000000000000000\n", "barchan: fork 2: quota of the namespace\n")
	if last := s.bodies[len(s.bodies)-1]; last != `fork {"count":3,"metadata":{"k":"v"},"allowSecrets":true,"timeout":90}` {
		t.Errorf("requested %s", last)
	}
	r := s.run("", "fork", "iaaa", "--count", "2", "--json")
	var all []client.Forked
	if err := json.Unmarshal([]byte(r.stdout), &all); err != nil || r.code != 1 || len(all) != 2 || all[1].Error.Code != 429 || strings.Contains(r.stdout, "a-secret") {
		t.Errorf("%+v, %v", r, err)
	}
	s.run("", "fork", "iaaa", "--count", "0").want(t, 2, "", "--count: 0 is not from 1 to 100")
	s.run("", "fork", "iaaa", "--count", "101").want(t, 2, "", "--count: 101 is not from 1 to 100")
	s.run("", "fork", "iaaa", "--timeout", "1ms").want(t, 2, "", "--timeout: 1ms is too short")
	s.run("", "fork", "iaaa", "--metadata", "x").want(t, 2, "", `"x" is not NAME=VALUE`)
	s.run("", "fork").want(t, 2, "", "SANDBOX is missing")
}

// firstWrite closes a channel at the first write.
type firstWrite struct {
	screen
	once sync.Once
	c    chan struct{}
}

func (h *firstWrite) Write(b []byte) (int, error) {
	h.once.Do(func() { close(h.c) })
	return h.screen.Write(b)
}

// TestForksAreReportedAtOnce: the server waits for the first ID to be printed before it reports another.
func TestForksAreReportedAtOnce(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	out := &firstWrite{c: make(chan struct{})}
	s.printed = out.c
	var stderr bytes.Buffer
	code := Run(t.Context(), []string{"--data-dir", s.dir, "fork", "iaaa", "--count", "3"}, strings.NewReader(""), out, &stderr, app.Deps{Version: "1.2.3"})
	if got := out.b.String(); code != 1 || got != "i0000000000000000002\ni0000000000000000000\n" || stderr.String() != "barchan: fork 2: quota of the namespace\n" {
		t.Errorf("%d, %q, %q", code, got, stderr.String())
	}
}

// TestForksOnATerminal counts them at the end, for people.
func TestForksOnATerminal(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	cmd := exec.CommandContext(t.Context(), "barchan", "--data-dir", s.dir, "fork", "iaaa", "--count", "4")
	keys, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 24, Cols: 80})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = keys.Close() }()
	shows := &screen{}
	_, _ = io.Copy(shows, keys) // ends with an error when the terminal does
	if err := cmd.Wait(); err == nil || !shows.has("3 of 4 forks of "+id1+" run\r\n") {
		t.Errorf("%v, shows %q", err, shows.b.String())
	}
}

func TestFilesOnly(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	for _, step := range [][2]string{
		{"pause", "pause {}"},
		{"resume", `connect {"timeout":3600}`},
		{"pause --files-only", `pause {"memory":false}`},
		{"resume --files-only", `connect {"timeout":3600,"memory":false}`},
	} {
		s.run("", append(strings.Fields(step[0]), id1)...).want(t, 0, id1+"\n", "")
		if last := s.bodies[len(s.bodies)-1]; last != step[1] {
			t.Errorf("%s requested %s, want %s", step[0], last, step[1])
		}
	}
}

func TestRunFromASnapshot(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	s.run("", "snapshot", id1).want(t, 0, "base:0\n", "")
	s.run("", "run", "--from", "base:0", "--files-only", "--allow-secrets", "--keep").want(t, 0, "i000", "")
	if n := s.created[len(s.created)-1]; n.TemplateID != "base:0" || !n.AllowSecrets || n.Memory == nil || *n.Memory {
		t.Errorf("created %+v", n)
	}
	s.run("", "run", "--from", "nope:1", "--keep").want(t, 1, "", `barchan: snapshot "nope:1" not found; `)
	s.run("", "run", "--from", "base:0", "--template", "base", "--keep").want(t, 2, "", "want either --template or --from")
	s.run("", "run", "--files-only", "--keep").want(t, 2, "", "--files-only and --allow-secrets need --from")
}
