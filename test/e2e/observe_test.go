package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// testObservability checks metrics and machine-readable output.
func testObservability(t *testing.T, s *server) {
	id, _ := s.keep("base", "true")
	t.Run("metrics", func(t *testing.T) {
		var text string
		for _, series := range []string{
			`barchan_manager_operation_seconds_bucket{operation="claim",result="ok",le="0.00025"}`,
			`barchan_manager_operation_seconds_bucket{operation="create",result="ok",le="0.00025"}`,
			`barchan_node_step_seconds_bucket{runtime="gvisor",step="start",le="0.00025"}`,
			`barchan_node_step_seconds_bucket{runtime="gvisor",step="total",le="0.00025"}`,
			`barchan_gateway_exec_seconds_bucket{le="0.00025"}`,
			`barchan_gateway_first_byte_seconds_bucket{le="0.00025"}`,
			`barchan_api_request_seconds_count{route="POST /v2/sandboxes",status="201"}`,
			`barchan_gateway_requests_total{class="2xx"}`,
			`barchan_build_info{version=`,
		} {
			eventually.NoError(t, "what was answered is counted", func() error {
				if _, text = query(t, http.DefaultClient, "http://"+s.metrics+"/metrics", nil); !strings.Contains(text, "\n"+series) {
					return fmt.Errorf("/metrics has no %s", series)
				}
				return nil
			})
		}
		for line := range strings.Lines(text) {
			if strings.HasPrefix(line, "barchan_gateway_exec_seconds_count") && strings.HasSuffix(line, " 0\n") {
				t.Error("no exec was counted")
			}
			if strings.Contains(line, id) {
				t.Errorf("a series per sandbox: %s", line)
			}
		}
		checkDocumented(t, text, "server")
	})
	t.Run("what sandboxes use", func(t *testing.T) {
		s := s.in(t)
		type use struct {
			SandboxID string
			Metrics   struct{ MemUsed, MemTotal uint64 }
		}
		var used []use
		s.read(&used, "top", "--once", "--sort", "memory", "-n", "1000")
		i := slices.IndexFunc(used, func(u use) bool { return u.SandboxID == id })
		if i < 0 || used[i].Metrics.MemUsed == 0 || used[i].Metrics.MemTotal < used[i].Metrics.MemUsed {
			t.Errorf("top shows %+v, without %s or what it uses", used, id)
		}
		if out := s.data("top"); !strings.Contains(out, "MEMORY") || !strings.Contains(out, id) { // no terminal: once
			t.Errorf("top shows\n%s", out)
		}
	})
	t.Run("events as they happen", func(t *testing.T) {
		s := s.in(t)
		watch := s.command("events", id, "--watch", "--json")
		defer func() { _ = watch.Process.Kill() }()
		lines := json.NewDecoder(watch.out)
		next := func(want string) {
			t.Helper()
			var e struct{ Type, SandboxID string }
			if err := lines.Decode(&e); err != nil || e.Type != "sandbox.lifecycle."+want || e.SandboxID != id {
				t.Fatalf("the next event is %+v, %v; want %s", e, err, want)
			}
		}
		next("created")
		s.must("pause", id)
		next("paused")
		s.must("resume", id)
		next("resumed")
		if err := watch.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		watch.ends(130, "")
	})
	t.Run("health and phases", func(t *testing.T) {
		if resp, _ := query(t, http.DefaultClient, "http://"+s.http+"/healthz", nil); resp.StatusCode != http.StatusOK {
			t.Errorf("/healthz = %s", resp.Status)
		}
		for path, want := range map[string]string{"/readyz": "{\"ready\":true}\n", "/metrics": "no such route"} { // the API tells no details
			if _, text := query(t, http.DefaultClient, "http://"+s.http+path, nil); !strings.Contains(text, want) || strings.Contains(text, "barchan_") {
				t.Errorf("%s of the API = %s, want %s", path, text, want)
			}
		}
		_, text := query(t, http.DefaultClient, "http://"+s.metrics+"/readyz", nil)
		var ready struct {
			Ready  bool
			Phase  string
			Phases []struct {
				Name string
				Done bool
			}
		}
		if err := json.Unmarshal([]byte(text), &ready); err != nil || !ready.Ready || ready.Phase != "ready" {
			t.Errorf("/readyz = %s, %v", text, err)
		}
		var names []string
		for _, p := range ready.Phases {
			if names = append(names, p.Name); !p.Done {
				t.Errorf("phase %s is not done", p.Name)
			}
		}
		want := []string{
			"disk", "lock", "bind", "migrate", "open-node", "api", "migrate-objects", "defaults", "caches", "node", "routes", "peers", "manager", "controllers", "serve",
		}
		if !slices.Equal(names, want) {
			t.Errorf("phases %v, want %v", names, want)
		}
	})
	t.Run("json of every read", func(t *testing.T) {
		s := s.in(t)
		for _, args := range [][]string{
			{"status"},
			{"ls"},
			{"show", id},
			{"template", "ls"},
			{"template", "ls", "-A"},
			{"template", "show", "base", "-n", "barchan-system"},
			{"pool", "ls"},
			{"pool", "ls", "-A"},
			{"key", "ls"},
			{"image", "ls"},
			{"doctor"},
			{"version"},
			{"config"},
			{"port", id, "80"},
		} {
			var parsed any
			s.read(&parsed, args...)
		}
		if out := s.data("template", "ls"); !strings.Contains(out, "base ") {
			t.Errorf("template ls does not show the public template:\n%s", out)
		}
		for line := range strings.Lines(s.data("logs", id, "--json")) {
			if !json.Valid([]byte(line)) {
				t.Errorf("logs --json: %s", line)
			}
		}
	})
	t.Run("config prints the source of each setting", func(t *testing.T) {
		s := s.in(t)
		out := s.must("config", "--log-level", "debug")
		for _, want := range []string{"logLevel: debug # --log-level", "httpAddr: " + s.http + " # BARCHAN_HTTP_ADDR", "# default"} {
			if !strings.Contains(out, want) {
				t.Errorf("config has no %q:\n%s", want, out)
			}
		}
	})
	t.Run("completion", func(t *testing.T) { testCompletion(t, s.in(t)) })
	t.Run("kubectl explain and watch", func(t *testing.T) { testExplainAndWatch(t, s.in(t)) })
}

// checkDocumented compares the metrics of a process with docs/metrics.md: each is there, with its type, for the role.
func checkDocumented(t *testing.T, metrics, role string) {
	t.Helper()
	page, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]string{} // types
	for _, section := range strings.Split(string(page), "\nRoles: ")[1:] {
		roles, table, _ := strings.Cut(section, ".\n")
		roles, _, _ = strings.Cut(roles, ";")
		if !slices.Contains(strings.Split(roles, ", "), role) {
			continue
		}
		for _, m := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\| (\\w+),").FindAllStringSubmatch(table, -1) {
			documented[m[1]] = m[2]
		}
	}
	found := 0
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (barchan_\w+) (\w+)$`).FindAllStringSubmatch(metrics, -1) {
		if found++; documented[m[1]] != m[2] {
			t.Errorf("docs/metrics.md has the type %q of %s for the role %s, the process says %s", documented[m[1]], m[1], role, m[2])
		}
	}
	if found == 0 {
		t.Errorf("the %s has no metrics:\n%s", role, metrics)
	}
}

func testCompletion(t *testing.T, s *server) {
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if out := s.data("completion", shell); !strings.Contains(out, "barchan") {
			t.Errorf("completion %s:\n%s", shell, out)
		}
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-n")
	cmd.Stdin = strings.NewReader(s.data("completion", "bash"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("bash does not read its completion: %v\n%s", err, out)
	}
	if out := s.data("__complete", "im"); !strings.Contains(out, "image") {
		t.Errorf("im<TAB> offers\n%s", out)
	}
}

func testExplainAndWatch(t *testing.T, s *server) {
	for what, want := range map[string]string{
		"sandbox.spec.podTemplate": "PodSpec", "sandbox.spec.shutdownTime": "when the sandbox ends", "sandboxtemplate.spec": "podTemplate", "apikey.spec": "sha256",
	} {
		if out := s.mustKubectl("", "explain", what); !strings.Contains(out, want) {
			t.Errorf("kubectl explain %s has no %q:\n%s", what, want, out)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	watch := exec.CommandContext(ctx, kubectl(t), "get", "sandboxtemplates", "--watch-only", "-o", "name")
	watch.Env = append(os.Environ(), "KUBECONFIG="+s.value("BARCHAN_DATA_DIR")+"/credentials/admin.kubeconfig")
	out, err := watch.StdoutPipe()
	if err == nil {
		err = watch.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { cancel(); _ = watch.Wait() }()
	seen := make(chan string, 1)
	go func() {
		buf := make([]byte, 4096)
		n, _ := out.Read(buf)
		seen <- string(buf[:n])
	}()
	for i := 0; ; i++ { // until the watch has begun
		s.apply(strings.Replace(imageTemplate("watched", baseImage, ""), "{name: watched}", fmt.Sprintf("{name: watched, labels: {n: \"%d\"}}", i), 1))
		select {
		case got := <-seen:
			if !strings.Contains(got, "/watched") {
				t.Errorf("the watch shows %q", got)
			}
			return
		case <-ctx.Done():
			t.Fatal("the watch shows nothing")
		default:
		}
	}
}
