package cli

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

// exactly runs a command whose whole output must be stdout.
func (s *server) exactly(t *testing.T, stdout string, args ...string) {
	t.Helper()
	if r := s.run("", args...); r.code != 0 || r.stdout != stdout || r.stderr != "" {
		t.Errorf("%v: %+v, want %q", args, r, stdout)
	}
}

// offered is what a shell is offered for the last of the words.
func (s *server) offered(args ...string) (words []string, directive string) {
	s.t.Helper()
	lines := strings.Split(strings.TrimSpace(s.run("", append([]string{"__complete"}, args...)...).stdout), "\n")
	for _, line := range lines[:len(lines)-1] {
		word, _, _ := strings.Cut(line, "\t")
		words = append(words, word)
	}
	return words, lines[len(lines)-1]
}

func (s *server) offers(t *testing.T, want []string, args ...string) {
	t.Helper()
	if got, directive := s.offered(args...); !slices.Equal(got, want) || directive != ":4" { // no files
		t.Errorf("%v: %v %s, want %v", args, got, directive, want)
	}
}

// TestNamesOrIDs: every command takes a sandbox by its ID, its name, or the beginning of its ID, in this order.
func TestNamesOrIDs(t *testing.T) {
	const likeID = "iname000000000000001"
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	s.add(id2, "running", nil)
	s.sandboxes[id2].Name = likeID
	for text, want := range map[string]string{id1: id1, "sb-0001": id1, "iaaa": id1, likeID: id2, id1 + "-client": id1} {
		s.run("", "show", text).want(t, 0, "ID           "+want+"\n", "")
	}
	s.sandboxes[id2].Name = id1
	s.run("", "show", id1).want(t, 0, "ID           "+id1+"\n", "")
	s.sandboxes[id2].Name = "iaaa"
	s.run("", "show", "iaaa").want(t, 0, "ID           "+id2+"\n", "")

	s.run("", "snapshot", "sb-0001", "--name", "named").want(t, 0, "named\n", "")
	s.run("", "fork", "sb-0001").want(t, 0, "i0000000000000000000\n", "")
	s.run("", "logs", "sb-0001").want(t, 0, "", "")
	s.run("", "port", "sb-0001", "80").want(t, 0, "http://80-"+id1, "")
	s.run("", "snapshot", "ls", "--sandbox", "sb-0001").want(t, 0, id1, "")
	s.run("", "stop", "sb-0001").want(t, 0, id1+"\n", "")
	s.run("", "exec", "sb-0001", "--", "true").want(t, 1, "", "sandbox "+id1+" is paused")
	s.run("", "start", "sb-0001").want(t, 0, id1+"\n", "")
	s.run("", "rm", "sb-0001").want(t, 0, id1+"\n", "")
	s.run("", "rm", "sb-0001").want(t, 1, "", `no sandbox has the name "sb-0001", or an ID that begins so; `+"`barchan ls` lists them")
	s.run("", "show", id1).want(t, 1, "", "doesn't exist or you don't have access")
	s.run("", "show", "").want(t, 2, "", "SANDBOX is empty")
}

// TestShowMemory: the API returns the place of the memory.
func TestShowMemory(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "paused", nil)
	s.sandboxes[id1].Memory = "Disk"
	s.run("", "show", id1).want(t, 0, "State        paused\nMemory in    Disk\n", "")
	s.run("", "show", id1, "--json").want(t, 0, `"memory": "Disk"`, "")
	s.sandboxes[id1].MemoryBytes = 3 << 20
	s.run("", "show", id1).want(t, 0, "Memory in    Disk, 3.0 MiB\n", "")
	s.sandboxes[id1].CreatedByKey = "ci"
	s.run("", "show", id1).want(t, 0, "Created by   ci\nStarted", "")
	s.sandboxes[id1].CreatedByKey = ""
	s.sandboxes[id1].Memory, s.sandboxes[id1].MemoryBytes = "", 0
	s.run("", "show", id1).want(t, 0, "State        paused\nTemplate", "")
}

func TestCompletion(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	s.add(id2, "paused", nil)
	s.run("", "snapshot", id1, "--name", "mine:v1").want(t, 0, "mine:v1", "")
	all := []string{"sb-0001", id1, "sb-0002", id2}
	for _, args := range [][]string{{"show"}, {"kill"}, {"rm"}, {"stop"}, {"logs"}, {"exec"}, {"exec", "-i"}, {"snapshot", "ls", "--sandbox"}, {"port"}, {"net", "trace"}} {
		s.offers(t, all, append(args, "")...)
	}
	s.offers(t, []string{"sb-0001", id1, id2}, "kill", "sb-0002", "") // several are taken, none twice
	s.offers(t, nil, "show", id1, "")
	s.offers(t, nil, "port", id1, "")
	s.offers(t, []string{"mine", "mine:v1"}, "snapshot", "rm", "")
	s.offers(t, []string{"mine", "mine:v1"}, "run", "--from", "")
	s.offers(t, []string{"base", "t0000000000000000001"}, "run", "--template", "")
	s.offers(t, []string{"running", "paused"}, "ls", "--state", "")
	s.offers(t, []string{"json", "name", "wide"}, "pool", "ls", "-o", "")
	s.offers(t, []string{"held"}, "net", "leases", "--state", "h")
	s.offers(t, []string{"debug", "info", "warn", "error"}, "up", "--log-level", "")
	for _, args := range [][]string{{"apply", "-f"}, {"image", "import"}, {"snapshot", "export", "mine:v1"}, {"--config"}} {
		if words, directive := s.offered(append(args, "")...); len(words) > 0 || directive != ":0" { // the shell's files
			t.Errorf("%v: %v %s, want files", args, words, directive)
		}
	}
	s.down()
	s.front.Close()
	if r := s.run("", "__complete", "kill", ""); r.stdout != ":4\n" {
		t.Errorf("without a server: %+v", r)
	}
}

// TestCompletionOfPaths: one side of a copy is in a sandbox, the other is a file here.
func TestCompletionOfPaths(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	t.Chdir(t.TempDir())
	if err := os.MkdirAll(filepath.Join("out", "in"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"notes", ".hidden", "out/a"} {
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, give := range []struct {
		args []string
		want string
	}{
		{[]string{""}, "notes out/ sb-0001: " + id1 + ":"},
		{[]string{"no"}, "notes"},
		{[]string{".h"}, ".hidden"},
		{[]string{"out/"}, "out/a out/in/"},
		{[]string{"./ou"}, "./out/"},
		{[]string{"/nonexistent/"}, ""},
		{[]string{"sb-0001:/etc"}, ""},
		{[]string{"sb-0001:/etc", ""}, "notes out/"},
		{[]string{"notes", "sb"}, "sb-0001:"},
	} {
		words, directive := s.offered(append([]string{"cp"}, give.args...)...)
		if got := strings.Join(words, " "); got != give.want || directive != ":6" { // no space, no other files
			t.Errorf("%v: %q %s, want %q", give.args, got, directive, give.want)
		}
	}
}

// TestE2BVariables: they count where neither a flag nor a variable of ours is set, and for their own
// server only.
func TestE2BVariables(t *testing.T) {
	s := newServer(t, nil)
	s.add(id1, "running", nil)
	var keys []string
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		keys = append(keys, r.Header.Get("X-API-Key"))
		_ = json.NewEncoder(w).Encode([]client.SandboxInfo{{SandboxID: id2}})
	}))
	t.Cleanup(other.Close)
	const local, remote = id1 + "\n", id2 + "\n"
	for _, give := range []struct {
		name string
		env  map[string]string
		args []string
		want string // whose sandboxes
		key  string // that the other server gets
	}{
		{"none", nil, nil, local, ""},
		{"URL and key", map[string]string{"E2B_API_URL": other.URL, "E2B_API_KEY": "k1"}, nil, remote, "k1"},
		{"access token", map[string]string{"E2B_API_URL": other.URL, "E2B_ACCESS_TOKEN": "k2"}, nil, remote, "k2"},
		{"key before token", map[string]string{"E2B_API_URL": other.URL, "E2B_ACCESS_TOKEN": "k2", "E2B_API_KEY": "k1"}, nil, remote, "k1"},
		{"our key", map[string]string{"E2B_API_URL": other.URL, "E2B_API_KEY": "k1", "BARCHAN_API_KEY": "k3"}, nil, remote, "k3"},
		{"our URL", map[string]string{"E2B_API_URL": other.URL, "E2B_API_KEY": "k1", "BARCHAN_API_URL": s.front.URL, "BARCHAN_API_KEY": testKey}, nil, local, ""},
		{"flags", map[string]string{"E2B_API_URL": other.URL, "BARCHAN_API_KEY": "k3"}, []string{"--api-url", s.front.URL, "--api-key", testKey}, local, ""},
		{"a key of E2B's cloud", map[string]string{"E2B_API_KEY": "k1"}, nil, local, ""},
		{"the local domain", map[string]string{"E2B_DOMAIN": "barchan.localhost:7743", "E2B_API_KEY": testKey}, nil, local, ""},
		{"a domain and a URL", map[string]string{"E2B_DOMAIN": "elsewhere.test", "E2B_API_URL": s.front.URL, "E2B_API_KEY": testKey}, nil, local, ""},
	} {
		t.Run(give.name, func(t *testing.T) {
			for name, value := range give.env {
				t.Setenv(name, value)
			}
			keys = nil
			s.exactly(t, give.want, append(give.args, "ls", "-q")...)
			if got := strings.Join(keys, ","); got != give.key {
				t.Errorf("the other server got the keys %q, want %q", got, give.key)
			}
		})
	}
	t.Run("another domain", func(t *testing.T) {
		t.Setenv("E2B_DOMAIN", "barchan.invalid")
		t.Setenv("E2B_API_KEY", "k1")
		s.run("", "ls").want(t, 1, "", "https://api.barchan.invalid/v2/sandboxes")
	})
	t.Run("no key", func(t *testing.T) {
		t.Setenv("E2B_API_URL", other.URL)
		s.run("", "ls").want(t, 1, "", "no key for "+other.URL)
	})
	t.Run("the local server's", func(t *testing.T) { // as after eval "$(barchan env)"
		t.Setenv("E2B_API_URL", s.front.URL)
		t.Setenv("E2B_API_KEY", testKey)
		t.Setenv("E2B_DOMAIN", "barchan.localhost:7743")
		s.run("", "port", id1, "80").want(t, 0, "http://80-"+id1+".barchan.localhost:", "")
	})
	t.Run("the gateway", func(t *testing.T) {
		t.Setenv("E2B_SANDBOX_URL", other.URL)
		for _, a := range []*app.App{{APIURL: s.front.URL, APIKey: testKey}} {
			a.LookupEnv = os.LookupEnv
			if got, err := a.Server(t.Context()); err != nil || got.SandboxURL != "" {
				t.Errorf("sandboxes of another server are looked for at %q, %v", got.SandboxURL, err)
			}
		}
		t.Setenv("E2B_API_URL", other.URL)
		t.Setenv("E2B_API_KEY", "k1")
		got, err := (&app.App{LookupEnv: os.LookupEnv}).Server(t.Context())
		if err != nil || got.SandboxURL != other.URL {
			t.Errorf("sandboxes are looked for at %q, %v; want %s", got.SandboxURL, err, other.URL)
		}
	})
}
