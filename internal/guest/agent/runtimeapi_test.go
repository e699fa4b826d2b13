package agent_test

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/guest/agent"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// TestRuntimeFiles makes the calls about files of agent-sandbox's clients.
func TestRuntimeFiles(t *testing.T) {
	a := start(t, envd.Config{AccessToken: "secret"})
	dir := t.TempDir()
	at := func(route string) string { return route + strings.ReplaceAll(dir, "/", "%2F") }
	form := "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"" + dir + "/a.txt\"\r\n\r\ncontent\r\n--b--\r\n"
	a.runtime("POST", "/upload", form, 200, nil, "Content-Type", "multipart/form-data; boundary=b")
	if status, _, text := a.do("GET", at("/download/")+"%2Fa.txt", "", envd.HeaderAccessToken, "secret"); status != 200 || text != "content" {
		t.Errorf("download: %d %q", status, text)
	}
	noError(t, os.Mkdir(filepath.Join(dir, "sub"), 0o755))
	noError(t, os.Symlink("nowhere", filepath.Join(dir, "link")))
	var list []struct {
		Name, Type string
		Size       int64
		ModTime    float64 `json:"mod_time"`
	}
	a.runtime("GET", at("/list/"), "", 200, &list)
	if len(list) != 2 || list[0].Name != "a.txt" || list[0].Type != "file" || list[0].Size != 7 || list[0].ModTime < 1e9 || list[1].Type != "directory" {
		t.Errorf("list: %+v", list)
	}
	a.runtime("GET", at("/list/")+"%2Fa.txt", "", 404, nil)
	for name, want := range map[string]bool{"a.txt": true, "sub": true, "none": false} {
		var exists struct{ Exists bool }
		if a.runtime("GET", at("/exists/")+"%2F"+name, "", 200, &exists); exists.Exists != want {
			t.Errorf("exists %s: %t", name, exists.Exists)
		}
	}
	a.runtime("GET", at("/download/")+"%2Fnone", "", 404, nil)
	for _, path := range []string{"/exists/x", "/list/x", "/download/x"} {
		if status, _, _ := a.do(http.MethodGet, path, ""); status != http.StatusUnauthorized {
			t.Errorf("%s without the token: %d", path, status)
		}
	}
}

// runtime makes a call, and decodes the answer into into if it is not nil.
func (a *testAgent) runtime(method, path, body string, want int, into any, more ...string) {
	a.t.Helper()
	status, _, text := a.do(method, path, body, append([]string{envd.HeaderAccessToken, "secret"}, more...)...)
	if status != want {
		a.t.Errorf("%s %s: %d %s, want %d", method, path, status, text, want)
	}
	if into != nil {
		if err := json.Unmarshal([]byte(text), into); err != nil {
			a.t.Errorf("%s %s: %v in %s", method, path, err, text)
		}
	}
}

// TestExecute runs commands as agent-sandbox's clients do.
func TestExecute(t *testing.T) {
	a := start(t, envd.Config{AccessToken: "secret"})
	var run struct {
		Stdout, Stderr string
		ExitCode       int `json:"exit_code"`
	}
	a.runtime("POST", "/execute", `{"command":"sh -c 'echo out; echo err >&2; exit 3'"}`, 200, &run)
	if run.Stdout != "out\n" || run.Stderr != "err\n" || run.ExitCode != 3 {
		t.Errorf("a command: %+v", run)
	}
	a.runtime("POST", "/execute", `{"command":"echo $HOME '$x' && b"}`, 200, &run) // no shell
	if run.Stdout != "$HOME $x && b\n" {
		t.Errorf("words: %+v", run)
	}
	a.runtime("POST", "/execute", `{"command":"no-such-program"}`, 200, &run)
	if run.ExitCode != 1 || !strings.Contains(run.Stderr, "Failed to execute command") {
		t.Errorf("no such program: %+v", run)
	}
	a.runtime("POST", "/execute", `{"command":"head -c 3000000 /dev/zero"}`, 200, &run)
	if len(run.Stdout) != 2<<20 || !strings.Contains(run.Stderr, "cut") {
		t.Errorf("%d bytes of output, %q", len(run.Stdout), run.Stderr)
	}
	a.runtime("POST", "/execute", `{"command":"'"}`, 400, nil)
	a.runtime("POST", "/execute", `{}`, 400, nil)
	if status, _, _ := a.do(http.MethodPost, "/execute", `{"command":"true"}`); status != http.StatusUnauthorized {
		t.Errorf("execute without the token: %d", status)
	}
}

func TestSplitCommand(t *testing.T) {
	for line, want := range map[string][]string{
		"a  b\tc": {"a", "b", "c"}, `a 'b c' "d e"`: {"a", "b c", "d e"}, `a\ b`: {"a b"}, `"\$x \n"`: {`$x \n`}, `''`: {""}, `a''b`: {"ab"}, `'\'`: {`\`},
		"": nil, " ": nil, `"`: nil, `a\`: nil,
	} {
		if got, err := agent.SplitCommand(line); !slices.Equal(got, want) || (err == nil) != (want != nil) {
			t.Errorf("%q: %q, %v, want %q", line, got, err, want)
		}
	}
}

func FuzzSplitCommand(f *testing.F) {
	f.Add(`a 'b c' "d\"e" f\ g`)
	f.Fuzz(func(t *testing.T, line string) {
		if words, err := agent.SplitCommand(line); err == nil && len(strings.Join(words, "")) > 3*len(line) {
			t.Errorf("%q: %q", line, words)
		}
	})
}
