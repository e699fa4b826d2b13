package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const webManifest = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: web}
spec:
  podTemplate:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - name: main
        image: barchan.local/base:latest
        command: [sh, -c, "for i in 1 2 3; do echo line $i; done; mkdir -p /tmp/www; echo served > /tmp/www/index.html; cd /tmp/www; python3 -m http.server --bind 127.0.0.1 8081 >/dev/null 2>&1 & cd /tmp/www; exec python3 -m http.server 8080"]
        workingDir: /home/user
        readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1}
`

// TestKubectlInSandboxes has the real kubectl treat sandboxes as Pods: logs, exec, cp, port-forward,
// as the administrator and with a tenant's key.
func TestKubectlInSandboxes(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	s.start()
	s.must("image", "build", "base")
	s.mustKubectl(webManifest, "apply", "-f", "-")
	s.mustKubectl("", "wait", "--for=condition=Ready", "pod/web", patience)
	if out := s.mustKubectl("", "get", "pods", "-l", "app=web"); !strings.Contains(out, "1/1") || !strings.Contains(out, "Running") {
		t.Errorf("kubectl get pods:\n%s", out)
	}
	t.Run("exec", func(t *testing.T) { testKubectlExec(t, s.in(t)) })
	t.Run("terminal", func(t *testing.T) { testKubectlTerminal(t, s.in(t)) })
	t.Run("the client goes", func(t *testing.T) { testKubectlGoes(t, s.in(t)) })
	t.Run("logs", func(t *testing.T) { testKubectlLogs(t, s.in(t)) })
	t.Run("cp", func(t *testing.T) { testKubectlCopy(t, s.in(t)) })
	t.Run("port-forward", func(t *testing.T) { testKubectlForward(t, s.in(t)) })
	t.Run("paused", func(t *testing.T) { testKubectlPaused(t, s.in(t)) })
	t.Run("a tenant's key", func(t *testing.T) { testKubectlTenant(t, s.in(t)) })
}

func testKubectlExec(t *testing.T, s *server) {
	if out := s.mustKubectl("", "exec", "web", "--", "sh", "-c", "id -un; pwd; uname -v"); !strings.HasPrefix(out, "user\n/home/user\n") {
		t.Errorf("inside: %q", out)
	}
	for _, code := range []int{1, 7, 127} {
		if out, err := s.kubectl("", "exec", "web", "--", "sh", "-c", fmt.Sprintf("exit %d", code)); exitCode(err) != code {
			t.Errorf("exit %d: %v\n%s", code, err, out)
		}
	}
	if out, err := s.kubectl("", "exec", "web", "--", "sh", "-c", "kill -9 $$"); exitCode(err) != 128+9 {
		t.Errorf("a command that kills itself: %v\n%s", err, out)
	}
	if out := s.mustKubectl("through stdin", "exec", "-i", "web", "--", "cat"); out != "through stdin" {
		t.Errorf("cat = %q", out)
	}
	cmd := s.kubectlCommand("exec", "-i", "web", "--", "head", "-c", "3")
	cmd.Stdin = strings.NewReader(strings.Repeat("x", 1<<20))
	if out, err := cmd.Output(); err != nil || string(out) != "xxx" { // kubectl may log that it could not copy the rest
		t.Errorf("head = %q, %v", out, err)
	}
	if out, err := s.kubectl("", "exec", "web", "--", "no-such-program"); err == nil || !strings.Contains(out, "no-such-program") {
		t.Errorf("a program that is not there: %v\n%s", err, out)
	}
}

func testKubectlTerminal(t *testing.T, s *server) {
	cmd := s.kubectlCommand("exec", "-it", "web", "--", "bash", "--norc")
	terminal, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 33, Cols: 111})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = terminal.Close() }()
	out := make(chan string, 1)
	go func() {
		all, _ := io.ReadAll(terminal) // it ends with EIO
		out <- string(all)
	}()
	// The shell's size follows kubectl's, which comes a moment after it.
	if _, err := io.WriteString(terminal, "until [ \"$(stty size)\" = '33 111' ]; do sleep 0.1; done; tty; echo size is $(stty size); exit 5\n"); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); exitCode(err) != 5 {
		t.Errorf("kubectl exec -it: %v, want exit code 5", err)
	}
	if text := <-out; !strings.Contains(text, "/dev/pts/") || !strings.Contains(text, "size is 33 111") {
		t.Errorf("on the terminal: %q", text)
	}
}

// testKubectlGoes kills kubectl: the command in the sandbox ends too.
func testKubectlGoes(t *testing.T, s *server) {
	cmd := s.kubectlCommand("exec", "web", "--", "sh", "-c", "echo begun; exec sleep 98765")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, len("begun\n"))); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	eventually.NoError(t, "the command ends with its client", func() error {
		text, err := s.kubectl("", "exec", "web", "--", "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
		if err == nil && strings.Contains(text, "sleep 98765") {
			err = fmt.Errorf("processes: %s", text)
		}
		return err
	})
}

func testKubectlLogs(t *testing.T, s *server) {
	if out := s.mustKubectl("", "logs", "web"); !strings.HasPrefix(out, "line 1\nline 2\nline 3\n") {
		t.Errorf("logs = %q", out)
	}
	if out := s.mustKubectl("", "logs", "web", "--since=1000h", "--limit-bytes=6"); out != "line 1" {
		t.Errorf("the first bytes = %q", out)
	}
	if out := s.mustKubectl("", "logs", "web", "--tail=1"); strings.Count(out, "\n") != 1 {
		t.Errorf("the last line = %q", out)
	}
	cmd := s.kubectlCommand("logs", "-f", "web", "--tail=0")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer func() { _ = cmd.Process.Kill() }()
	// What the server in the sandbox logs comes once kubectl follows it.
	requested := make(chan struct{})
	stop := again(1, func(int, int) {
		select {
		case <-requested:
		default:
			_, _ = s.kubectl("", "exec", "web", "--", "curl", "-s", "127.0.0.1:8080/asked-for")
		}
	})
	defer stop()
	var text string
	buf := make([]byte, 4096)
	for !strings.Contains(text, "/asked-for") {
		n, err := out.Read(buf)
		if err != nil {
			t.Fatalf("kubectl logs -f: %v after %q", err, text)
		}
		text += string(buf[:n])
	}
	close(requested)
}

func testKubectlCopy(t *testing.T, s *server) {
	from, to := t.TempDir(), t.TempDir()
	if err := os.Mkdir(filepath.Join(from, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	content := strings.Repeat("content ", 100_000)
	if err := os.WriteFile(filepath.Join(from, "sub", "file"), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	s.mustKubectl("", "cp", from, "web:/tmp/copied")
	s.mustKubectl("", "cp", "web:/tmp/copied", to)
	if b, err := os.ReadFile(filepath.Join(to, "sub", "file")); err != nil || string(b) != content {
		t.Errorf("there and back again: %d bytes, %v", len(b), err)
	}
}

// testKubectlForward reaches a port that is open to all, and one of the sandbox's loopback.
func testKubectlForward(t *testing.T, s *server) {
	cmd := s.kubectlCommand("port-forward", "web", ":8080", ":8081")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer func() { _ = cmd.Process.Kill() }()
	var text string
	buf := make([]byte, 4096)
	for strings.Count(text, "127.0.0.1:") < 2 || !strings.HasSuffix(text, "\n") {
		n, err := out.Read(buf)
		if err != nil {
			t.Fatalf("kubectl port-forward: %v after %q", err, text)
		}
		text += string(buf[:n])
	}
	for line := range strings.Lines(text) {
		local, _, ok := strings.Cut(strings.TrimPrefix(line, "Forwarding from "), " -> ")
		if !ok || !strings.HasPrefix(local, "127.0.0.1:") {
			continue
		}
		for range 2 {
			ctx, cancel := context.WithTimeout(t.Context(), startTime)
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+local+"/", http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			body, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			cancel()
			if string(body) != "served\n" || err != nil {
				t.Errorf("%s: %q, %v", line, body, err)
			}
		}
	}
}

// testKubectlPaused verifies that exec resumes a sandbox only if traffic may.
func testKubectlPaused(t *testing.T, s *server) {
	pause := func() {
		s.mustKubectl("", "patch", "sandbox", "web", "--type=merge", "-p", `{"spec":{"operatingMode":"Suspended"}}`)
		s.mustKubectl("", "wait", "--for=condition=Suspended", "sandbox/web", patience)
	}
	pause()
	for _, args := range [][]string{{"exec", "web", "--", "true"}, {"logs", "web"}, {"port-forward", "web", ":8080"}} {
		if out, err := s.kubectl("", args...); err == nil || (!strings.Contains(out, "aused") && !strings.Contains(out, "not running")) {
			t.Errorf("kubectl %s of a paused sandbox: %v\n%s", args[0], err, out)
		}
	}
	s.mustKubectl("", "patch", "sandbox", "web", "--type=merge", "-p", `{"spec":{"barchan":{"wake":{"onTraffic":true}}}}`)
	if out := s.mustKubectl("", "exec", "web", "--", "echo", "awake"); out != "awake\n" {
		t.Errorf("exec in a sandbox that traffic resumes = %q", out)
	}
}

// testKubectlTenant has a key of the namespace acme do what it may, and nothing else.
func testKubectlTenant(t *testing.T, s *server) {
	key := s.newKey("--namespace", "acme")
	cfg, err := clientcmd.LoadFromFile(filepath.Join(s.value("BARCHAN_DATA_DIR"), "credentials", "admin.kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range cfg.AuthInfos {
		u.Token = key
	}
	for _, c := range cfg.Contexts {
		c.Namespace = "acme"
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*cfg, file); err != nil {
		t.Fatal(err)
	}
	flag := "--kubeconfig=" + file
	eventually.NoError(t, "the server accepts the key", func() error {
		_, err := s.kubectl("", "get", "sandboxes", flag)
		return err
	})
	s.mustKubectl(webManifest, "apply", "-f", "-", flag)
	s.mustKubectl("", "wait", "--for=condition=Ready", "pod/web", patience, flag)
	if out := s.mustKubectl("", flag, "exec", "web", "--", "echo", "mine"); out != "mine\n" {
		t.Errorf("exec = %q", out)
	}
	for _, args := range [][]string{{"exec", "-n", "default", "web", "--", "true"}, {"get", "sandboxes", "-A"}, {"get", "secrets", "-n", "default"}} {
		if out, err := s.kubectl("", append([]string{flag}, args...)...); err == nil || !strings.Contains(out, "orbidden") {
			t.Errorf("kubectl %v with a tenant's key: %v\n%s", args, err, out)
		}
	}
	weaker := strings.NewReplacer("name: web", "name: weaker", "containers:", "runtimeClassName: runc\n      containers:").Replace(webManifest)
	if out, err := s.kubectl(weaker, "apply", "-f", "-", flag); err == nil || !strings.Contains(out, "runtimeClassName") {
		t.Errorf("a tenant's choice of runc: %v\n%s", err, out)
	}
	s.mustKubectl("", "annotate", "namespace", "acme", "barchan.dev/quota-sandboxes=1")
	if out, err := s.kubectl(strings.Replace(webManifest, "name: web", "name: second", 1), "apply", "-f", "-", flag); err == nil || !strings.Contains(out, "quota") {
		t.Errorf("a sandbox beyond the quota: %v\n%s", err, out)
	}
	s.mustKubectl("", "delete", "sandbox", "web", patience, flag)
}

// kubectlCommand is the real one, to be started; it is killed when the test ends.
func (s *server) kubectlCommand(args ...string) *exec.Cmd {
	s.t.Helper()
	cmd := exec.CommandContext(s.t.Context(), kubectl(s.t), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+filepath.Join(s.value("BARCHAN_DATA_DIR"), "credentials", "admin.kubeconfig"))
	cmd.WaitDelay = 10 * time.Second
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGKILL) }
	return cmd
}
