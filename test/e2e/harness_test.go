package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// set gives the server a setting by its environment variable.
func (s *server) set(key, value string) {
	for i, kv := range s.env {
		if strings.HasPrefix(kv, key+"=") {
			s.env[i] = key + "=" + value
			return
		}
	}
	s.env = append(s.env, key+"="+value)
}

// data is what a command of ours wrote to its standard output; its stderr is for failures.
func (s *server) data(args ...string) string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, programs.barchan, args...)
	var out, stderr bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = s.env, &out, &stderr
	if err := cmd.Run(); err != nil {
		s.t.Fatalf("barchan %s: %v\n%s%s\n%s", strings.Join(args, " "), err, out.String(), stderr.String(), s.tail())
	}
	return out.String()
}

// read decodes what a command prints with --json.
func (s *server) read(into any, args ...string) {
	s.t.Helper()
	text := s.data(append(args, "--json")...)
	if err := json.Unmarshal([]byte(text), into); err != nil {
		s.t.Fatalf("barchan %s --json: %v\n%s", strings.Join(args, " "), err, text)
	}
}

// apply applies a manifest by our own command.
func (s *server) apply(manifest string) {
	s.t.Helper()
	if out, err := s.tryIn(manifest, "apply", "-f", "-"); err != nil {
		s.t.Fatalf("barchan apply: %v\n%s\n%s", err, out, manifest)
	}
}

// keep runs a command in a new sandbox that stays until the test ends, and returns the
// sandbox's ID with the command's output.
func (s *server) keep(template string, command ...string) (id, out string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, programs.barchan, append([]string{"run", "--template", template, "--keep", "--"}, command...)...)
	var text, stderr bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr = s.env, &text, &stderr
	err := cmd.Run()
	if at := strings.Index(stderr.String(), "sandbox "); at >= 0 {
		id = strings.Fields(stderr.String()[at:])[1]
	}
	if err != nil || len(id) != 20 {
		s.t.Fatalf("barchan run --template %s -- %s: %v\n%s%s\n%s", template, strings.Join(command, " "), err, text.String(), stderr.String(), s.tail())
	}
	s.t.Cleanup(func() {
		if s.cmd != nil {
			_, _ = s.try("kill", id) // the test may have done it
		}
	})
	return id, text.String()
}

// exec runs a shell line in a sandbox, which must succeed.
func (s *server) exec(id, line string) string {
	s.t.Helper()
	return strings.TrimSuffix(s.data("exec", id, "--", "sh", "-c", line), "\n")
}

// patience is the flag by which kubectl waits as long as package eventually does.
var patience = "--timeout=" + eventually.Patience.String()

// kubectl runs the real one against the server.
func (s *server) kubectl(stdin string, args ...string) (string, error) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), eventually.Patience+startTime) // it reports itself what it waited for
	defer cancel()
	cmd := exec.CommandContext(ctx, kubectl(s.t), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+filepath.Join(s.value("BARCHAN_DATA_DIR"), "credentials", "admin.kubeconfig"))
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (s *server) mustKubectl(stdin string, args ...string) string {
	s.t.Helper()
	out, err := s.kubectl(stdin, args...)
	if err != nil {
		s.t.Fatalf("kubectl %s: %v\n%s\n%s", strings.Join(args, " "), err, out, s.tail())
	}
	return out
}

// localKey is the key of the command line on this machine.
func (s *server) localKey() string {
	s.t.Helper()
	key, err := s.readKey()
	if err != nil {
		s.t.Fatal(err)
	}
	return key
}

// readKey is localKey for any goroutine.
func (s *server) readKey() (string, error) {
	b, err := os.ReadFile(filepath.Join(s.value("BARCHAN_DATA_DIR"), "credentials", "api-key"))
	return strings.TrimSpace(string(b)), err
}

// call makes one request of the REST API and returns the status and the body.
func (s *server) call(key, method, path string, body any) (int, string) {
	s.t.Helper()
	status, text, err := s.tryCall(key, method, path, body)
	if err != nil {
		s.t.Fatalf("%v\n%s", err, s.tail())
	}
	return status, text
}

// tryCall is call for any goroutine. No response is an error.
func (s *server) tryCall(key, method, path string, body any) (int, string, error) {
	var in io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return 0, "", err
		}
		in = bytes.NewReader(b)
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+s.http+path, in)
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("X-API-Key", key)
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, "", fmt.Errorf("%s %s: %w", method, path, err)
	}
	return resp.StatusCode, string(b), nil
}

// create makes a sandbox by the REST API and returns its ID.
func (s *server) create(key, template string) string {
	s.t.Helper()
	id, err := s.makeOf(key, template)
	if err != nil {
		s.t.Fatalf("%v\n%s", err, s.tail())
	}
	return id
}

// makeOf is create for any goroutine.
func (s *server) makeOf(key, template string) (string, error) {
	status, body, err := s.tryCall(key, http.MethodPost, "/sandboxes", map[string]any{"templateID": template, "timeout": 3600, "secure": true})
	if err != nil {
		return "", err
	}
	var made struct{ SandboxID string }
	if err := json.Unmarshal([]byte(body), &made); status != http.StatusCreated || err != nil {
		return "", fmt.Errorf("create of %s = %d %s", template, status, body)
	}
	return made.SandboxID, nil
}

// again has clients do something over and over, until it is stopped. Stop returns when none does any
// more, and may be called twice: a test that fails must not end before its clients.
func again(clients int, do func(client, n int)) (stop func()) {
	var running sync.WaitGroup
	var over atomic.Bool
	for c := range clients {
		running.Go(func() {
			for n := 0; !over.Load(); n++ {
				do(c, n)
			}
		})
	}
	return func() {
		over.Store(true)
		running.Wait()
	}
}

// visit gets a page from a port of a sandbox by the gateway's host names.
func (s *server) visit(id string, port int, path string) (int, string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), eventually.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.http+path, nil)
	if err != nil {
		return 0, "", err
	}
	req.Host = fmt.Sprintf("%d-%s.barchan.localhost", port, id)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// untilServed waits until port 8080 of a sandbox answers 200, and returns the body.
func (s *server) untilServed(id, path string) (body string) {
	s.t.Helper()
	const port = 8080
	eventually.NoError(s.t, fmt.Sprintf("port %d of %s", port, id), func() error {
		status, text, err := s.visit(id, port, path)
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("%d %s", status, text)
		}
		body = text
		return err
	})
	return body
}

// condition is a condition of an object in namespace default, a sandbox: its status, reason and message.
func (s *server) condition(name, kind string) string {
	s.t.Helper()
	out, err := s.kubectl("", "get", "sandbox", name, "-o",
		`jsonpath={range .status.conditions[?(@.type=="`+kind+`")]}{.status} {.reason}: {.message}{end}`)
	if err != nil {
		return out
	}
	return out
}

// sandboxes are the IDs that the command line lists.
func (s *server) sandboxes() (ids []string) {
	s.t.Helper()
	var list []struct{ SandboxID string }
	s.read(&list, "ls")
	for _, x := range list {
		ids = append(ids, x.SandboxID)
	}
	return ids
}
