package cli

import (
	"bufio"
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
)

// agentProgram is a program of an AI agent that uses the protocol.
type agentProgram struct {
	t *testing.T
	*sdk.ClientSession
}

func connectMCP(t *testing.T, over sdk.Transport) *agentProgram {
	t.Helper()
	c, err := sdk.NewClient(&sdk.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), over, nil)
	if err != nil {
		t.Fatal(err)
	}
	return &agentProgram{t, c}
}

// call calls a tool and decodes what it returns. A refusal is returned as its text.
func (p *agentProgram) call(tool string, args map[string]any, into any) (refusal string) {
	p.t.Helper()
	res, err := p.CallTool(p.t.Context(), &sdk.CallToolParams{Name: tool, Arguments: args})
	if err != nil {
		p.t.Fatalf("%s: %v", tool, err)
	}
	text := ""
	for _, c := range res.Content {
		if x, ok := c.(*sdk.TextContent); ok {
			text += x.Text
		}
	}
	if res.IsError {
		return text
	}
	if into != nil {
		if err := json.Unmarshal([]byte(text), into); err != nil {
			p.t.Fatalf("%s: %v: %s", tool, err, text)
		}
	}
	return ""
}

// must is call of what may not be refused.
func (p *agentProgram) must(tool string, args map[string]any, into any) {
	p.t.Helper()
	if refusal := p.call(tool, args, into); refusal != "" {
		p.t.Fatalf("%s: refused: %s", tool, refusal)
	}
}

func (s *server) mcp(args ...string) *agentProgram {
	return connectMCP(s.t, &sdk.CommandTransport{Command: exec.Command("barchan", append([]string{"--data-dir", s.dir, "mcp"}, args...)...)}) //nolint:noctx // ended by the session
}

func TestMCPSession(t *testing.T) {
	t.Parallel()
	s := newServer(t, startAgent(t))
	p := s.mcp("--timeout", "7m")
	tools, err := p.ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, tool := range tools.Tools {
		if tool.Description == "" || tool.Annotations == nil {
			t.Errorf("%s has no description or annotations", tool.Name)
		}
	}
	var made struct {
		ID string `json:"sandbox_id"`
	}
	p.must("create_sandbox", map[string]any{"env": map[string]string{"A": "b"}, "allow_hosts": []string{"pypi.org"}}, &made)
	s.mu.Lock()
	if n := s.created[len(s.created)-1]; n.Timeout != 7*time.Minute || n.EnvVars["A"] != "b" || n.Network == nil || !slices.Equal(n.Network.DenyOut, []string{"0.0.0.0/0"}) {
		t.Errorf("created by %+v", n)
	}
	s.mu.Unlock()
	var other, killed struct {
		ID string `json:"sandbox_id"`
	}
	p.must("create_sandbox", nil, &other)
	p.must("kill_sandbox", map[string]any{"sandbox_id": other.ID}, &killed)
	p.must("kill_sandbox", map[string]any{"sandbox_id": other.ID}, &killed) // again
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	s.wantSandboxes()

	kept := s.mcp("--keep")
	kept.must("create_sandbox", nil, &made)
	if err := kept.Close(); err != nil {
		t.Error(err)
	}
	s.wantSandboxes(made.ID)
}

// inSandbox has an agent's program and a sandbox, and returns arguments for it.
func inSandbox(t *testing.T) (p *agentProgram, in func(more map[string]any) map[string]any, dir string) {
	t.Helper()
	s := newServer(t, startAgent(t))
	p = s.mcp()
	var made struct {
		ID string `json:"sandbox_id"`
	}
	p.must("create_sandbox", nil, &made)
	return p, func(more map[string]any) map[string]any {
		args := map[string]any{"sandbox_id": made.ID}
		maps.Copy(args, more)
		return args
	}, t.TempDir()
}

func TestMCPCommands(t *testing.T) {
	t.Parallel()
	p, in, dir := inSandbox(t)
	var ran struct {
		Code     int `json:"exit_code"`
		Stdout   string
		Stderr   string
		TimedOut bool `json:"timed_out"`
	}
	p.must("run_command", in(map[string]any{"command": `cat; echo "$B in $PWD" >&2; exit 3`, "stdin": "input", "env": map[string]string{"B": "c"}, "workdir": dir}), &ran)
	if ran.Code != 3 || ran.Stdout != "input" || ran.Stderr != "c in "+dir+"\n" {
		t.Errorf("a command: %+v", ran)
	}
	p.must("run_command", in(map[string]any{"command": "echo begin; yes | head -c 200000; echo end"}), &ran)
	if len(ran.Stdout) > 40<<10 || !strings.HasPrefix(ran.Stdout, "begin\ny\n") || !strings.HasSuffix(ran.Stdout, "y\nend\n") || !strings.Contains(ran.Stdout, "bytes left out") {
		t.Errorf("long output: %d bytes, %.40q … %.40q", len(ran.Stdout), ran.Stdout, ran.Stdout[max(0, len(ran.Stdout)-40):])
	}
	p.must("run_command", in(map[string]any{"command": "echo before; sleep 600", "timeout_seconds": 1}), &ran)
	if !ran.TimedOut || ran.Code != 124 || ran.Stdout != "before\n" {
		t.Errorf("at its timeout: %+v", ran)
	}
}

func TestMCPFiles(t *testing.T) {
	t.Parallel()
	p, in, dir := inSandbox(t)
	path := dir + "/below/text"
	var wrote struct{ Bytes int }
	p.must("write_file", in(map[string]any{"path": path, "content": "grüß dich"}), &wrote)
	if wrote.Bytes != 11 {
		t.Errorf("wrote %d bytes", wrote.Bytes)
	}
	type part struct {
		Content string
		Base64  bool
		Next    int64 `json:"next_offset"`
	}
	for _, x := range []struct {
		offset, most int
		want         part
	}{
		{0, 0, part{Content: "grüß dich"}},
		{2, 2, part{Content: "ü", Next: 4}},
		{0, 3, part{Content: "gr", Next: 2}}, // not half a character
		{11, 0, part{}},
		{99, 0, part{}},
		{3, 1, part{Content: "vA==", Base64: true, Next: 4}},
	} {
		var read part
		p.must("read_file", in(map[string]any{"path": path, "offset": x.offset, "max_bytes": x.most}), &read)
		if read != x.want {
			t.Errorf("from %d, %d bytes: %+v, want %+v", x.offset, x.most, read, x.want)
		}
	}
	var read part
	p.must("write_file", in(map[string]any{"path": path, "content": "AP8=", "base64": true}), &wrote)
	p.must("read_file", in(map[string]any{"path": path}), &read)
	if !read.Base64 || read.Content != "AP8=" {
		t.Errorf("a binary file: %+v", read)
	}
	var listed struct {
		Entries []struct{ Path, Type string }
	}
	p.must("list_files", in(map[string]any{"path": dir, "depth": 2}), &listed)
	if len(listed.Entries) != 2 || listed.Entries[0].Type != "directory" || listed.Entries[1].Path != path {
		t.Errorf("files: %+v", listed)
	}
	var url struct {
		URL     string
		Headers map[string]string
	}
	p.must("port_url", in(map[string]any{"port": 8080}), &url)
	if url.URL == "" || url.Headers["E2b-Sandbox-Port"] != "8080" {
		t.Errorf("port: %+v", url)
	}
}

func TestMCPRefusals(t *testing.T) {
	t.Parallel()
	p, in, dir := inSandbox(t)
	for name, x := range map[string]struct {
		tool string
		args map[string]any
		want string
	}{
		"unknown sandbox":  {"run_command", map[string]any{"sandbox_id": "nope", "command": "true"}, "nope"},
		"missing file":     {"read_file", in(map[string]any{"path": dir + "/none"}), "none"},
		"timeout":          {"run_command", in(map[string]any{"command": "true", "timeout_seconds": 3601}), "timeout_seconds: 3601"},
		"content":          {"write_file", in(map[string]any{"path": dir, "content": "%", "base64": true}), "content: not base64"},
		"count":            {"fork_sandbox", in(map[string]any{"count": 101}), "count: 101"},
		"port":             {"port_url", in(map[string]any{"port": 0}), "port: 0"},
		"max_bytes":        {"read_file", in(map[string]any{"path": dir, "max_bytes": 1 << 20}), "max_bytes"},
		"offline and host": {"create_sandbox", map[string]any{"offline": true, "allow_hosts": []string{"a.b"}}, "offline"},
	} {
		if got := p.call(x.tool, x.args, nil); !strings.Contains(got, x.want) {
			t.Errorf("%s: %q, want %q", name, got, x.want)
		}
	}
}

// wantSandboxes wants these to be all.
func (s *server) wantSandboxes(ids ...string) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.sandboxes) != len(ids) {
		s.t.Errorf("%d sandboxes, want %v", len(s.sandboxes), ids)
	}
	for _, id := range ids {
		if s.sandboxes[id] == nil {
			s.t.Errorf("sandbox %s is gone", id)
		}
	}
}

// TestMCPOverHTTP has two keys, each with its own sandboxes and sessions.
func TestMCPOverHTTP(t *testing.T) {
	t.Parallel()
	s := newServer(t, startAgent(t))
	p := s.program()
	p.Stderr = nil
	stderr, err := p.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.start("mcp", "--listen", "127.0.0.1:0")
	defer func() {
		_ = p.Process.Signal(os.Interrupt)
		_ = p.Wait()
	}()
	line, err := bufio.NewReader(stderr).ReadString('\n')
	_, url, found := strings.Cut(strings.TrimSpace(line), "serving ")
	if !found {
		t.Fatalf("it says %q, %v", line, err)
	}
	as := func(key string) *sdk.StreamableClientTransport {
		return &sdk.StreamableClientTransport{Endpoint: url, HTTPClient: &http.Client{Transport: bearer(key)}, MaxRetries: -1}
	}
	for _, key := range []string{"", "e2b_0000"} {
		if c, err := sdk.NewClient(&sdk.Implementation{Name: "test", Version: "1"}, nil).Connect(t.Context(), as(key), nil); err == nil {
			t.Errorf("key %q is accepted", key)
			_ = c.Close()
		}
	}
	one := connectMCP(t, as(testKey))
	var made struct {
		ID string `json:"sandbox_id"`
	}
	one.must("create_sandbox", nil, &made)
	var ran struct{ Stdout string }
	one.must("run_command", map[string]any{"sandbox_id": made.ID, "command": "echo over http"}, &ran)
	if ran.Stdout != "over http\n" {
		t.Errorf("a command: %+v", ran)
	}
	// Another key may not go on with the session.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(`{"jsonrpc":"2.0","id":9,"method":"tools/list"}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	req.Header.Set("Mcp-Session-Id", one.ID())
	resp, err := bearer(tenantKey).RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusForbidden {
		t.Errorf("another key's request in the session: %s", resp.Status)
	}
	if err := one.Close(); err != nil {
		t.Error(err)
	}
	s.wantSandboxes(made.ID)
}

// bearer sends a key.
type bearer string

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	if b != "" {
		r.Header.Set("Authorization", "Bearer "+string(b))
	}
	return http.DefaultTransport.RoundTrip(r)
}
