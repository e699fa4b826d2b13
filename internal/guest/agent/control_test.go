package agent_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/agent"
	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func wantStatus(t *testing.T, err error, status int, text string) {
	t.Helper()
	var refused *envd.Error
	if !errors.As(err, &refused) || refused.Status != status || !strings.Contains(refused.Message, text) {
		t.Errorf("error %v, want %d %q", err, status, text)
	}
}

func TestToken(t *testing.T) {
	a := start(t, envd.Config{})
	open, right, wrong := a.client("root"), a.client("root", "first"), a.client("root", "wrong")
	ctx := t.Context()
	if _, err := open.Envs(ctx); err != nil {
		t.Errorf("before there is a token: %v", err)
	}
	noError(t, open.Init(ctx, envd.InitRequest{AccessToken: "first"}))
	for _, path := range []string{"/metrics", "/metrics/history", "/envs", "/internal/entrypoint", "/internal/logs", "/nothing"} {
		for _, header := range [][]string{nil, {"X-Access-Token", "wrong"}} {
			if status, _, body := a.do("GET", path, "", header...); status != 401 {
				t.Errorf("%s %v: %d %s", path, header, status, body)
			}
		}
	}
	for _, path := range []string{"/freeze", "/unfreeze", "/files/compose", "/process.Process/List", "/filesystem.Filesystem/Stat", "/health"} {
		if status, _, body := a.do("POST", path, "{}", "Content-Type", "application/json"); status != 401 {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	for _, c := range []*envd.Client{open, wrong} {
		checkStranger(t, c)
	}
	envs, err := right.Envs(ctx)
	if _, ok := envs["STOLEN"]; err != nil || ok {
		t.Errorf("envs %v, error %v", envs, err)
	}
	noError(t, right.Init(ctx, envd.InitRequest{AccessToken: "second"}))
	_, err = right.Envs(ctx)
	wantStatus(t, err, 401, "")
	if _, err := a.client("root", "second").Envs(ctx); err != nil {
		t.Error(err)
	}
	if strings.Contains(a.stderr.String(), "first") || strings.Contains(a.stderr.String(), "second") {
		t.Errorf("a token is in the log: %s", a.stderr)
	}
}

// TestNoTokenYet: an agent that was given neither a token nor leave to be open is closed.
func TestNoTokenYet(t *testing.T) {
	a := startGuarded(t, envd.Config{})
	c, ctx := a.client("root"), t.Context()
	if err := c.Health(ctx); err != nil {
		t.Errorf("health: %v", err)
	}
	_, err := c.Envs(ctx)
	wantStatus(t, err, 401, "X-Access-Token")
	wantCode(t, run(t, c, sh("true")).err, connect.CodeUnauthenticated, "")
	for _, signature := range []string{"", "&signature=" + url.QueryEscape(envd.Sign("/etc/shadow", envd.OpRead, "", "", nil))} {
		if status, _, body := a.do("GET", "/files?path=/etc/shadow"+signature, ""); status != 401 {
			t.Errorf("a file: %d %s", status, body)
		}
	}
	wantStatus(t, c.Init(ctx, envd.InitRequest{Open: true}), 401, "X-Access-Token")
	wantStatus(t, c.Init(ctx, envd.InitRequest{EnvVars: map[string]string{"STOLEN": "1"}}), 401, "X-Access-Token")
	noError(t, c.Init(ctx, envd.InitRequest{AccessToken: "first"}))
	if _, err := a.client("root", "first").Envs(ctx); err != nil {
		t.Errorf("with its token: %v", err)
	}
}

// checkStranger tries all routes without a token.
func checkStranger(t *testing.T, c *envd.Client) {
	t.Helper()
	ctx := t.Context()
	wantCode(t, run(t, c, sh("true")).err, connect.CodeUnauthenticated, "")
	if err := c.Health(ctx); err != nil {
		t.Errorf("health: %v", err)
	}
	wantStatus(t, c.Init(ctx, envd.InitRequest{EnvVars: map[string]string{"STOLEN": "1"}}), 401, "X-Access-Token")
	wantStatus(t, c.Init(ctx, envd.InitRequest{AccessToken: "second"}), 401, "X-Access-Token")
	if err := c.Init(ctx, envd.InitRequest{AccessToken: "first"}); err != nil {
		t.Errorf("repeating a request: %v", err)
	}
}

func TestInit(t *testing.T) {
	a := start(t, envd.Config{Env: map[string]string{"A": "0"}})
	c, ctx := a.client(""), t.Context()
	at := func(sec int64) *time.Time { ts := time.Unix(1_800_000_000+sec, 0); return &ts }
	for _, req := range []envd.InitRequest{
		{EnvVars: map[string]string{"A": "10", "B": "10"}, Timestamp: at(10), DefaultWorkdir: "/usr"},
		{EnvVars: map[string]string{"A": "5", "C": "5"}, Timestamp: at(5), DefaultWorkdir: "/etc"}, // late, so ignored
		{EnvVars: map[string]string{"D": "20"}, Timestamp: at(20)},
		{},
	} {
		noError(t, c.Init(ctx, req))
	}
	envs, err := c.Envs(ctx)
	if err != nil || envs["A"] != "10" || envs["B"] != "10" || envs["C"] != "" || envs["D"] != "20" || envs["E2B_SANDBOX"] != "true" {
		t.Errorf("%v %v", envs, err)
	}
	if r := run(t, c, sh("pwd; echo $A$D")); r.stdout != "/usr\n1020\n" {
		t.Errorf("%+v", r)
	}
}

// TestHomeBeside: the home that a container runtime sets is that of the container's user alone.
func TestHomeBeside(t *testing.T) {
	own, err := account.System().Resolve(strconv.Itoa(os.Getuid()))
	noError(t, err)
	for give, want := range map[string]string{own.Home: "/home/x", "/of/the/template": "/of/the/template"} {
		t.Setenv("HOME", give)
		a := agent.NewBeside(&envd.Config{}, io.Discard)
		if got := agent.Environ(a, account.User{Name: "x", Home: "/home/x"})["HOME"]; got != want {
			t.Errorf("with HOME=%s a process has %s, want %s", give, got, want)
		}
	}
}

// TestEnvironmentBoundLate verifies that a process cannot distinguish variables set at the start
// of the sandbox or later, and that the template's program keeps running.
func TestEnvironmentBoundLate(t *testing.T) {
	template := map[string]string{"PATH": "/bin:/usr/bin", "BOTH": "template", "KEPT": "template", "E2B_TEMPLATE_ID": "mine"}
	claim := map[string]string{"BOTH": "claim", "HOME": "/claimed", "E2B_SANDBOX": "claim", "SECRET": "a $(b) $$ c", "EMPTY": ""}
	program := []string{"/bin/sleep", "1000"}
	both := maps.Clone(template)
	maps.Copy(both, claim)
	early := start(t, envd.Config{SandboxID: "i1", TemplateID: "t1", Env: both, Entrypoint: program})
	late := start(t, envd.Config{SandboxID: "i1", TemplateID: "t1", Env: template, Entrypoint: program, AccessToken: "secret"})
	c := late.client("", "secret")
	before := entrypointOnceRunning(t, c)
	noError(t, c.Init(t.Context(), envd.InitRequest{EnvVars: map[string]string{"BOTH": "first", "SECRET": "first"}}))
	noError(t, c.Init(t.Context(), envd.InitRequest{EnvVars: claim})) // a second one is merged into the first

	show := func(c *envd.Client) string {
		cmd := sh("env | sort")
		cmd.Process.Envs = map[string]string{"KEPT": "request"}
		r := run(t, c, cmd)
		return r.stdout + r.stderr
	}
	want, got := show(early.client("")), show(c)
	if got != want {
		t.Errorf("bound late, a process has\n%s\nand bound early\n%s", got, want)
	}
	for _, line := range []string{"BOTH=claim", "KEPT=request", "HOME=/claimed", "E2B_SANDBOX=claim", "E2B_SANDBOX_ID=i1", "E2B_TEMPLATE_ID=mine", "SECRET=a $(b) $$ c", "EMPTY="} {
		if !slices.Contains(strings.Split(got, "\n"), line) {
			t.Errorf("%q is missing from\n%s", line, got)
		}
	}
	if after := entrypointOnceRunning(t, c); after.PID != before.PID || !after.StartedAt.Equal(*before.StartedAt) {
		t.Errorf("the template's program was %+v and is %+v", before, after)
	}
}

func entrypointOnceRunning(t *testing.T, c *envd.Client) (e envd.Entrypoint) {
	t.Helper()
	eventually.True(t, "the template's program", func() bool {
		var err error
		e, err = c.Entrypoint(t.Context())
		return err == nil && e.Running
	})
	return e
}

func TestOpen(t *testing.T) {
	a := start(t, envd.Config{AccessToken: "secret"})
	stranger, owner := a.client("root"), a.client("root", "secret")
	ctx := t.Context()
	for _, c := range []*envd.Client{stranger, a.client("root", "wrong")} {
		wantStatus(t, c.Init(ctx, envd.InitRequest{Open: true}), 401, "X-Access-Token")
	}
	_, err := stranger.Envs(ctx)
	wantStatus(t, err, 401, "")
	for range 2 { // repeating it is harmless
		noError(t, owner.Init(ctx, envd.InitRequest{Open: true, EnvVars: map[string]string{"A": "1"}}))
	}
	if envs, err := stranger.Envs(ctx); err != nil || envs["A"] != "1" {
		t.Errorf("once open: %v, %v", envs, err)
	}
	noError(t, run(t, stranger, sh("true")).err)
	noError(t, owner.Init(ctx, envd.InitRequest{AccessToken: "secret"}))
	_, err = stranger.Envs(ctx)
	wantStatus(t, err, 401, "")
}

func TestInitRefuses(t *testing.T) {
	a := start(t, envd.Config{})
	c, ctx := a.client(""), t.Context()
	for name, tc := range map[string]struct {
		body   string
		status int
		text   string
	}{
		"not JSON":     {"{", 400, "invalid request body"},
		"wrong type":   {`{"envVars":[]}`, 400, "envVars"},
		"env name":     {`{"envVars":{"A=B":"c","E":"1"}}`, 400, "envVars"},
		"no such user": {`{"defaultUser":"ghost","envVars":{"E":"1"}}`, 400, "defaultUser"},
		"workdir":      {`{"defaultWorkdir":"here","envVars":{"E":"1"}}`, 400, "defaultWorkdir"},
		"certificates": {`{"caBundle":"x","envVars":{"E":"1"}}`, 400, "caBundle"},
		"timestamp":    {`{"timestamp":"yesterday"}`, 400, "invalid request body"},
	} {
		t.Run(name, func(t *testing.T) {
			status, _, body := a.do("POST", "/init", tc.body)
			if _, msg := errorOf(t, body); status != tc.status || !strings.Contains(msg, tc.text) {
				t.Errorf("%d %s", status, body)
			}
		})
	}
	if envs, err := c.Envs(ctx); err != nil || envs["E"] != "" {
		t.Errorf("a refused request changed something: %v %v", envs, err)
	}
	status, h, _ := a.do("POST", "/init", "")
	if status != 204 || h.Get("X-Envd-Version") != envd.Version {
		t.Errorf("%d %v", status, h)
	}
}

func TestDefaultUser(t *testing.T) {
	needRoot(t)
	a := start(t, envd.Config{DefaultUser: "nobody"})
	c := a.client("")
	if r := run(t, c, &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "id", Args: []string{"-un"}, Cwd: new("/")}}); r.stdout != "nobody\n" {
		t.Errorf("%+v", r)
	}
	noError(t, c.Init(t.Context(), envd.InitRequest{DefaultUser: "daemon"}))
	if r := run(t, c, &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "id", Args: []string{"-un"}, Cwd: new("/")}}); r.stdout != "daemon\n" {
		t.Errorf("%+v", r)
	}
}

func TestCertificatesAreInstalled(t *testing.T) {
	needRoot(t)
	a := start(t, envd.Config{}, "unshare", "--mount", "sh", "-c",
		`mount -t tmpfs none /etc/ssl && mount -t tmpfs none /usr/local/share && mkdir /etc/ssl/certs && printf old > /etc/ssl/certs/ca-certificates.crt && exec "$0"`)
	c := a.client("root")
	pem := "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
	for range 2 {
		noError(t, c.Init(t.Context(), envd.InitRequest{CABundle: pem}))
	}
	r := run(t, c, sh("cat /etc/ssl/certs/ca-certificates.crt; echo; cat /usr/local/share/ca-certificates/*.crt; ls -A /etc/ssl/certs"))
	if want := "old\n" + pem + "\n\n" + pem + "ca-certificates.crt\n"; r.stdout != want {
		t.Errorf("%q, want %q, stderr %q", r.stdout, want, r.stderr)
	}
}

func TestMetrics(t *testing.T) {
	a := start(t, envd.Config{})
	m, err := a.client("root").Metrics(t.Context())
	noError(t, err)
	if m.CPUCount < 1 || m.CPUUsedPct < 0 || m.CPUUsedPct > 100 || m.MemTotal == 0 || m.MemUsed == 0 || m.MemUsed > m.MemTotal ||
		m.DiskTotal == 0 || m.DiskUsed > m.DiskTotal || time.Since(time.Unix(m.Timestamp, 0)).Abs() > time.Minute {
		t.Errorf("%+v", m)
	}
	if kept, err := a.client("root").MetricsHistory(t.Context(), time.Time{}); err != nil || len(kept) > 0 {
		t.Errorf("kept before the first interval: %+v, %v", kept, err)
	}
	_, _, body := a.do("GET", "/metrics", "")
	for _, key := range []string{"ts", "cpu_count", "cpu_used_pct", "mem_total", "mem_used", "mem_cache", "disk_used", "disk_total"} {
		if !strings.Contains(body, `"`+key+`":`) {
			t.Errorf("%s is not in %s", key, body)
		}
	}
}

func TestBrowsers(t *testing.T) {
	a := start(t, envd.Config{AccessToken: "secret"})
	status, h, _ := a.do("OPTIONS", "/process.Process/Start", "", "Origin", "https://x.test",
		"Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "x-access-token,authorization")
	if status != 204 || h.Get("Access-Control-Allow-Origin") != "*" || !strings.Contains(h.Get("Access-Control-Allow-Methods"), "POST") ||
		h.Get("Access-Control-Allow-Headers") != "x-access-token,authorization" {
		t.Errorf("%d %v", status, h)
	}
	if _, h, _ := a.do("GET", "/envs", "", "Origin", "https://x.test"); h.Get("Access-Control-Allow-Origin") != "*" {
		t.Errorf("a refusal that a browser cannot read: %v", h)
	}
}

// The SDKs speak JSON over HTTP/1.1 or HTTP/2.
func TestWire(t *testing.T) {
	a := start(t, envd.Config{})
	basic := "Basic " + base64.StdEncoding.EncodeToString([]byte("root:"))
	status, _, body := a.do("POST", "/filesystem.Filesystem/Stat", `{"path":"/"}`, "Content-Type", "application/json", "Authorization", basic)
	var st struct {
		Entry struct{ Name, Path, Type, Size, Permissions, ModifiedTime string }
	}
	if err := json.Unmarshal([]byte(body), &st); err != nil || status != 200 || st.Entry.Type != "FILE_TYPE_DIRECTORY" || st.Entry.ModifiedTime == "" || st.Entry.Size == "" {
		t.Errorf("%d %s %v", status, body, err)
	}
	status, _, body = a.do("POST", "/filesystem.Filesystem/Stat", `{"path":"/"}`, "Content-Type", "application/json", "Authorization", "Bearer x")
	if status != 401 || !strings.Contains(body, `"code":"unauthenticated"`) {
		t.Errorf("%d %s", status, body)
	}
}

func TestStreamOnTheWire(t *testing.T) {
	a := start(t, envd.Config{})
	message := `{"process":{"cmd":"/bin/sh","args":["-c","printf hi; exit 2"]},"stdin":false}`
	envelope := "\x00\x00\x00\x00" + string(rune(len(message))) + message
	status, h, body := a.do("POST", "/process.Process/Start", envelope, "Content-Type", "application/connect+json", "Connect-Protocol-Version", "1")
	if status != 200 || h.Get("Content-Type") != "application/connect+json" {
		t.Fatalf("%d %v %s", status, h, body)
	}
	var got []string
	for len(body) >= 5 {
		n := int(body[1])<<24 | int(body[2])<<16 | int(body[3])<<8 | int(body[4])
		got = append(got, strings.ReplaceAll(body[5:5+n], " ", ""))
		body = body[5+n:]
	}
	if len(got) != 4 || !strings.HasPrefix(got[0], `{"event":{"start":{"pid":`) || got[1] != `{"event":{"data":{"stdout":"aGk="}}}` ||
		got[2] != `{"event":{"end":{"exitCode":2,"exited":true,"status":"exitstatus2","error":"exitstatus2"}}}` || got[3] != "{}" {
		t.Errorf("%q", got)
	}
}

func TestHTTP2(t *testing.T) {
	a := start(t, envd.Config{})
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: protocols}
	defer tr.CloseIdleConnections()
	c, err := envd.NewClient(envd.ClientConfig{HTTP: &http.Client{Transport: tr}, BaseURL: a.base})
	noError(t, err)
	if r := run(t, c, sh("echo over http/2")); r.err != nil || r.stdout != "over http/2\n" {
		t.Errorf("%+v", r)
	}
}

func TestEntrypoint(t *testing.T) {
	needRoot(t)
	logs := t.TempDir()
	a := start(t, envd.Config{
		Entrypoint: []string{"sh", "-c", "id -u; pwd; echo $V; echo problem >&2; printf unended; exit 5"},
		Env:        map[string]string{"V": "value"}, User: "12345:54321", Workdir: "/usr",
		StdoutPath: logs + "/out", StderrPath: logs + "/err",
	})
	c := a.client("root")
	var e envd.Entrypoint
	eventually.True(t, "entrypoint's end", func() bool {
		var err error
		if e, err = c.Entrypoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		return !e.Running && e.ExitCode != nil
	})
	if !e.Configured || *e.ExitCode != 5 || e.PID == 0 || e.StartedAt == nil || e.FinishedAt.Before(*e.StartedAt) || e.Error != "" {
		t.Errorf("%+v", e)
	}
	lines := func() map[string]string { return entrypointLines(t, c) }
	eventually.True(t, "last lines", func() bool { // each stream is copied on its own
		got := lines()
		return strings.Contains(got["stdout"], "unended") && got["stderr"] != ""
	})
	if got := lines(); got["stdout"] != "12345\n/usr\nvalue\nunended\n" || got["stderr"] != "problem\n" {
		t.Errorf("lines %q", got)
	}
	if out, err := readFile(t, logs+"/out"), readFile(t, logs+"/err"); out != "12345\n/usr\nvalue\nunended" || err != "problem\n" {
		t.Errorf("files %q %q", out, err)
	}
	if r := run(t, c, sh("echo alive")); r.stdout != "alive\n" {
		t.Errorf("after the entrypoint's end: %+v", r)
	}
}

// entrypointLines has the lines of each stream.
func entrypointLines(t *testing.T, c *envd.Client) map[string]string {
	t.Helper()
	got := map[string]string{}
	noError(t, c.Logs(t.Context(), envd.SourceEntrypoint, false, func(l envd.LogLine) error {
		got[l.Stream] += l.Line + "\n"
		if l.Source != envd.SourceEntrypoint || time.Since(l.Timestamp).Abs() > time.Minute {
			t.Errorf("line %+v", l)
		}
		return nil
	}))
	return got
}

func TestEntrypointThatFails(t *testing.T) {
	for name, tc := range map[string]struct {
		cfg  envd.Config
		text string
	}{
		"no program": {envd.Config{Entrypoint: []string{"no-such-program"}}, "executable file not found"},
		"no user":    {envd.Config{Entrypoint: []string{"true"}, User: "ghost"}, "ghost"},
		"no group":   {envd.Config{Entrypoint: []string{"true"}, User: "root:ghosts"}, "ghosts"},
		"killed":     {envd.Config{Entrypoint: []string{"sh", "-c", "kill -9 $$"}}, "signal: killed"},
	} {
		t.Run(name, func(t *testing.T) {
			c := start(t, tc.cfg).client("root")
			eventually.True(t, "error", func() bool {
				e, err := c.Entrypoint(t.Context())
				return err == nil && !e.Running && strings.Contains(e.Error, tc.text)
			})
			if name == "killed" {
				if e, err := c.Entrypoint(t.Context()); err != nil || *e.ExitCode != 137 {
					t.Errorf("%+v %v", e, err)
				}
			}
		})
	}
	c := start(t, envd.Config{}).client("root")
	if e, err := c.Entrypoint(t.Context()); err != nil || e.Configured || e.Running {
		t.Errorf("%+v %v", e, err)
	}
}

func TestFollowLogs(t *testing.T) {
	a := start(t, envd.Config{Entrypoint: []string{"sh", "-c", "echo one; read x < $FIFO; echo two"}, Env: map[string]string{"FIFO": fifo(t)}})
	c := a.client("root")
	enough := errors.New("enough")
	var got []string
	err := c.Logs(t.Context(), envd.SourceEntrypoint, true, func(l envd.LogLine) error {
		got = append(got, l.Line)
		if l.Line == "one" {
			run(t, c, sh("echo go > $FIFO"))
		}
		if l.Line == "two" {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) || strings.Join(got, " ") != "one two" {
		t.Errorf("%v %v", got, err)
	}
	found := false
	if err := c.Logs(t.Context(), envd.SourceAgent, false, func(l envd.LogLine) error {
		found = found || strings.Contains(l.Line, "agent serves")
		return nil
	}); err != nil || !found {
		t.Errorf("the agent's own lines: %v, error %v", found, err)
	}
}

func fifo(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fifo")
	noError(t, syscall.Mkfifo(path, 0o600))
	return path
}

// Waiting streams do not block the agent's end, and processes receive a signal.
func TestStop(t *testing.T) {
	a := start(t, envd.Config{Entrypoint: []string{"sh", "-c", "trap 'echo bye; exit 0' TERM; while :; do sleep 0.02; done"}, StdoutPath: filepath.Join(t.TempDir(), "out")})
	c := a.client("root")
	following := make(chan struct{})
	go func() {
		defer close(following)
		// It ends with the agent, with or without an error.
		_ = c.Logs(context.WithoutCancel(t.Context()), "", true, func(envd.LogLine) error { return nil })
	}()
	mark := a.dir + "/mark"
	r := runWith(t.Context(), t, c, sh("trap 'echo ended > "+mark+"; exit 3' TERM; echo ready; while :; do sleep 0.02; done"), func(r *result) {
		if r.stdout == "ready\n" && r.end == nil {
			if err := a.cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Error(err)
			}
		}
	})
	if r.err != nil || r.end.GetExitCode() != 3 || readFile(t, mark) != "ended\n" {
		t.Errorf("%+v", r)
	}
	<-a.exited
	<-following
	if !a.cmd.ProcessState.Success() {
		t.Errorf("%s: %s", a.cmd.ProcessState, a.stderr)
	}
}

// As PID 1 it reaps orphans, signals all processes when it ends, and exits cleanly.
func TestPID1(t *testing.T) {
	needRoot(t)
	mark := filepath.Join(t.TempDir(), "mark")
	a := start(t, envd.Config{}, "unshare", "--fork", "--kill-child", "--pid", "--mount-proc")
	c := a.client("root")
	r := run(t, c, sh("tr '\\0' '\\n' < /proc/1/cmdline | head -1"))
	if !strings.Contains(r.stdout, ".test") {
		t.Fatalf("PID 1 is %q %q", r.stdout, r.stderr)
	}
	// A grandchild in a session of its own.
	run(t, c, sh("setsid sh -c 'trap \"echo ended > "+mark+"; exit\" TERM; : > "+mark+".up; while :; do sleep 0.02; done' >/dev/null 2>&1 &"))
	eventually.True(t, "stranger", func() bool { _, err := os.Stat(mark + ".up"); return err == nil })
	for range 20 {
		if r := run(t, c, sh("(true &) ; (sleep 0.01 &) ; exit 4")); r.err != nil || r.end.GetExitCode() != 4 {
			t.Errorf("%+v", r)
		}
	}
	eventually.True(t, "no zombies", func() bool {
		r := run(t, c, sh("grep -l '^State:.Z' /proc/[0-9]*/status"))
		return r.stdout == ""
	})
	// unshare does not pass signals on: the agent gets its own.
	out := run(t, c, sh("kill -TERM 1; sleep 1000"))
	if out.err == nil && out.end.GetExited() {
		t.Errorf("%+v", out)
	}
	<-a.exited
	if !a.cmd.ProcessState.Success() {
		t.Errorf("%s: %s", a.cmd.ProcessState, a.stderr)
	}
	if b, err := os.ReadFile(mark); err != nil || string(b) != "ended\n" {
		t.Errorf("stranger: %q %v", b, err)
	}
}

func TestHostnameAndHosts(t *testing.T) {
	needRoot(t)
	a := start(t, envd.Config{Hostname: "sandbox-1", Hosts: []envd.HostEntry{{IP: "127.0.0.1", Names: []string{"localhost", "sandbox-1"}}}},
		"unshare", "--uts", "--mount", "sh", "-c", `: > /tmp/.hosts-$$ && mount --bind /tmp/.hosts-$$ /etc/hosts && rm /tmp/.hosts-$$ && exec "$0"`)
	if r := run(t, a.client("root"), sh("uname -n; cat /etc/hosts")); r.stdout != "sandbox-1\n127.0.0.1\tlocalhost sandbox-1\n" {
		t.Errorf("%+v", r)
	}
}

func TestBadStart(t *testing.T) {
	a := start(t, envd.Config{})
	port := a.base[strings.LastIndex(a.base, ":")+1:]
	file := filepath.Join(t.TempDir(), "config.json")
	writeFile(t, file, `{"listenAddress":"127.0.0.1","port":`+port+`}`)
	cmd := testCommand(t, file)
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "address already in use") {
		t.Errorf("a port in use: %v %s", err, out)
	}
	out, err = testCommand(t, file+".none").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "no such file") {
		t.Errorf("no configuration: %v %s", err, out)
	}
}

// TestLevelsOfOwnLines: a line of the agent keeps its slog level.
func TestLevelsOfOwnLines(t *testing.T) {
	a := start(t, envd.Config{Entrypoint: []string{"no-such-program"}})
	eventually.True(t, "a line of the agent", func() bool {
		_, _, body := a.do("GET", envd.PathLogs+"?source="+envd.SourceAgent, "")
		levels := 0
		for text := range strings.Lines(body) {
			var l envd.LogLine
			noError(t, json.Unmarshal([]byte(text), &l))
			if l.Level == "" || !strings.Contains(l.Line, "level="+l.Level+" ") || (l.Level == "INFO") != (l.Severity() == slog.LevelInfo) {
				t.Errorf("line %+v of severity %v", l, l.Severity())
			}
			levels++
		}
		return levels > 0
	})
}
