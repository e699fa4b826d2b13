package apiserver_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/apiserver/pods"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// hostPods runs commands on this machine in place of a sandbox; test/e2e has the real ones.
type hostPods struct {
	t      *testing.T
	dial   atomic.Value // of a string: what every port leads to
	mu     sync.Mutex
	lines  []logged            // +checklocks:mu
	more   chan struct{}       // +checklocks:mu
	ended  chan struct{}       // a command's context has ended
	sizes  []pods.TerminalSize // +checklocks:mu
	paused atomic.Bool
}

type logged struct {
	at   time.Time
	text string
}

func (h *hostPods) Ready(_ context.Context, s *agents.Sandbox) (*agents.Sandbox, error) {
	if h.paused.Load() {
		return nil, errs.Public(errs.ErrForbidden, "it is paused, and traffic does not wake it")
	}
	return s, nil
}

func (h *hostPods) Exec(ctx context.Context, _ *agents.Sandbox, c pods.Command) (int, error) {
	if c.Terminal {
		size := <-c.Resize
		h.mu.Lock()
		h.sizes = append(h.sizes, size)
		h.mu.Unlock()
	}
	cmd := exec.CommandContext(ctx, c.Argv[0], c.Argv[1:]...)
	cmd.Stdout, cmd.Stderr = c.Stdout, c.Stderr
	if c.Stdin != nil {
		in, err := cmd.StdinPipe()
		if err != nil {
			return 0, err
		}
		go func() {
			_, _ = io.Copy(in, c.Stdin)
			_ = in.Close()
		}()
	}
	err := cmd.Run()
	if ctx.Err() != nil {
		close(h.ended)
		return 0, ctx.Err()
	}
	if exited, ok := errors.AsType[*exec.ExitError](err); ok {
		return exited.ExitCode(), nil
	}
	return 0, err
}

func (h *hostPods) Logs(ctx context.Context, _ *agents.Sandbox, container string, follow bool, each func(time.Time, string) error) error {
	if container != "" {
		return each(time.Now(), "of container "+container)
	}
	for n := 0; ; {
		h.mu.Lock()
		lines, more := slices.Clone(h.lines[n:]), h.more
		h.mu.Unlock()
		for _, l := range lines {
			if err := each(l.at, l.text); err != nil {
				return err
			}
		}
		n += len(lines)
		if !follow {
			return nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (h *hostPods) log(ago time.Duration, text string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lines = append(h.lines, logged{time.Now().Add(-ago), text})
	close(h.more)
	h.more = make(chan struct{})
}

func (h *hostPods) Dial(ctx context.Context, _ *agents.Sandbox, port uint16) (net.Conn, error) {
	if port == 1 {
		return nil, errs.Public(errs.ErrUnavailable, "nothing listens on port 1 of the sandbox")
	}
	return new(net.Dialer).DialContext(ctx, "tcp", h.dial.Load().(string))
}

const webSandbox = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: web, labels: {own: "yes"}}
spec:
  podTemplate:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: main, image: example.com/web}]}
`

// startPods serves Pods, of which there is one, which runs.
func startPods(t *testing.T) (*apiserver.Server, *hostPods, kubectl) {
	t.Helper()
	h := &hostPods{t: t, more: make(chan struct{}), ended: make(chan struct{})}
	s := start(t, func(c *apiserver.Config) { c.Pods = h })
	k := newKubectl(t, s)
	k.ok(webSandbox, "apply", "-f", "-")
	k.ok("", "patch", "sandbox", "web", "--subresource=status", "--type=merge", "-p",
		`{"status":{"podIPs":["10.0.0.7"],"nodeName":"here","conditions":[{"type":"Ready","status":"True","reason":"DependenciesReady","message":"","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`)
	return s, h, k
}

func TestPodsAreAViewOfSandboxes(t *testing.T) {
	_, _, k := startPods(t)
	table := k.ok("", "get", "pods", "-o", "wide")
	for _, want := range []string{"NAME", "READY", "STATUS", "web", "1/1", "Running", "10.0.0.7", "here"} {
		if !strings.Contains(table, want) {
			t.Errorf("kubectl get pods printed %q, want %q in it", table, want)
		}
	}
	for _, selector := range [][]string{{"-l", "app=web"}, {"-l", "own=yes"}, {"--field-selector", "status.phase=Running"}, {"--field-selector", "metadata.name=web"}} {
		if got := k.ok("", append([]string{"get", "pods", "-o", "name"}, selector...)...); got != "pod/web\n" {
			t.Errorf("with %v: %q, want the pod", selector, got)
		}
	}
	for _, selector := range [][]string{{"-l", "app=other"}, {"--field-selector", "status.phase=Failed"}} {
		if got := k.ok("", append([]string{"get", "pods", "-o", "name"}, selector...)...); got != "" {
			t.Errorf("with %v: %q, want nothing", selector, got)
		}
	}
	k.ok("", "wait", "--for=condition=Ready", "pod/web", "--timeout=60s")
	k.ok("", "describe", "pod", "web")
	k.fails("", []string{"the server does not allow this method"}, "delete", "pod", "web")
	k.fails("", []string{"not found"}, "get", "pod", "nosuch")
}

// A watch with a selector reports a Pod that stops to match as deleted, and one that begins to match again.
func TestWatchOfPodsBySelector(t *testing.T) {
	s, _, k := startPods(t)
	w, err := clientAs(t, s, apiserver.UserAdmin).Watch(t.Context(), &corev1.PodList{}, client.InNamespace("default"), client.MatchingLabels{"own": "yes"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	next := func(want watch.EventType) {
		t.Helper()
		e, open := <-w.ResultChan()
		if pod, ok := e.Object.(*corev1.Pod); !open || !ok || e.Type != want || pod.Name != "web" {
			t.Fatalf("%s %T, want %s of the pod", e.Type, e.Object, want)
		}
	}
	next(watch.Added)
	k.ok("", "label", "sandbox", "web", "own=no", "--overwrite")
	k.ok("", "label", "sandbox", "web", "more=1") // not reported: it is out already
	next(watch.Deleted)
	k.ok("", "label", "sandbox", "web", "own=yes", "--overwrite")
	next(watch.Modified)
}

func TestKubectlExec(t *testing.T) {
	s, h, k := startPods(t)
	for name, env := range map[string]string{"WebSocket": "true", "SPDY": "false"} {
		t.Run(name, func(t *testing.T) {
			k := k
			k.t, k.env = t, []string{"KUBECTL_REMOTE_COMMAND_WEBSOCKETS=" + env}
			if got := k.ok("", "exec", "web", "--", "sh", "-c", "echo out; echo err >&2"); !strings.Contains(got, "out\n") || !strings.Contains(got, "err\n") {
				t.Errorf("output %q", got)
			}
			if got := k.ok("hello", "exec", "-i", "web", "--", "cat"); got != "hello" {
				t.Errorf("cat printed %q, want its input", got)
			}
			if _, err := k.try("", "exec", "web", "-c", "main", "--", "sh", "-c", "exit 7"); exitCode(err) != 7 {
				t.Errorf("kubectl exec of exit 7: %v", err)
			}
			large := strings.Repeat("0123456789abcdef", 64<<10)
			if got := k.ok(large, "exec", "-i", "web", "--", "cat"); got != large {
				t.Errorf("cat of %d bytes printed %d", len(large), len(got))
			}
			from, to := filepath.Join(t.TempDir(), "from"), filepath.Join(t.TempDir(), "to")
			if err := os.WriteFile(from, []byte(large), 0o600); err != nil {
				t.Fatal(err)
			}
			k.ok("", "cp", from, "web:"+to)
			if got, err := os.ReadFile(to); err != nil || string(got) != large {
				t.Errorf("kubectl cp wrote %d bytes (%v), want %d", len(got), err, len(large))
			}
		})
	}
	k.fails("", []string{"container other is not valid"}, "exec", "web", "-c", "other", "--", "true")
	h.paused.Store(true)
	k.fails("", []string{"paused"}, "exec", "web", "--", "true")
	h.paused.Store(false)

	t.Run("terminal", func(t *testing.T) { testTerminal(t, s, h) })
	t.Run("the client goes", func(t *testing.T) { testClientGoes(t, s, h) })
}

func exitCode(err error) int {
	if exited, ok := errors.AsType[*exec.ExitError](err); ok {
		return exited.ExitCode()
	}
	return -1
}

// executor is client-go's, as kubectl has it.
func executor(t *testing.T, s *apiserver.Server, o *corev1.PodExecOptions) remotecommand.Executor {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", s.AdminKubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	cfg.APIPath, cfg.GroupVersion, cfg.NegotiatedSerializer = "/api", &corev1.SchemeGroupVersion, scheme.Codecs
	c, err := rest.RESTClientFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	u := c.Get().Resource("pods").Namespace(metav1.NamespaceDefault).Name("web").SubResource("exec").VersionedParams(o, scheme.ParameterCodec).URL()
	x, err := remotecommand.NewWebSocketExecutor(cfg, http.MethodGet, u.String())
	if err != nil {
		t.Fatal(err)
	}
	return x
}

type oneSize struct{ sent bool }

func (o *oneSize) Next() *remotecommand.TerminalSize {
	if o.sent {
		return nil
	}
	o.sent = true
	return &remotecommand.TerminalSize{Width: 123, Height: 45}
}

func testTerminal(t *testing.T, s *apiserver.Server, h *hostPods) {
	x := executor(t, s, &corev1.PodExecOptions{Command: []string{"sh", "-c", "echo on a terminal; exit 3"}, Stdin: true, Stdout: true, TTY: true})
	var out bytes.Buffer
	in, _ := io.Pipe()
	err := x.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdin: in, Stdout: &out, Tty: true, TerminalSizeQueue: &oneSize{}})
	if exited, ok := errors.AsType[utilexec.CodeExitError](err); !ok || exited.Code != 3 {
		t.Errorf("Stream = %v, want exit code 3", err)
	}
	if out.String() != "on a terminal\n" {
		t.Errorf("output %q", out.String())
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if want := (pods.TerminalSize{Cols: 123, Rows: 45}); len(h.sizes) != 1 || h.sizes[0] != want {
		t.Errorf("sizes %v, want %v", h.sizes, want)
	}
}

// A command ends when its client has gone.
func testClientGoes(t *testing.T, s *apiserver.Server, h *hostPods) {
	x := executor(t, s, &corev1.PodExecOptions{Command: []string{"sh", "-c", "echo begun; exec sleep 3600"}, Stdout: true})
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	go func() { _, _ = r.Read(make([]byte, 16)); cancel() }()
	_ = x.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: w})
	select {
	case <-h.ended:
	case <-time.After(eventually.Patience):
		t.Error("the command still runs")
	}
}

func TestKubectlLogs(t *testing.T) {
	_, h, k := startPods(t)
	h.log(time.Hour, "an hour ago")
	h.log(time.Minute, "a minute ago")
	h.log(0, "now")
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"all":   {nil, "an hour ago\na minute ago\nnow\n"},
		"tail":  {[]string{"--tail=2"}, "a minute ago\nnow\n"},
		"none":  {[]string{"--tail=0"}, ""},
		"since": {[]string{"--since=10m"}, "a minute ago\nnow\n"},
		"both":  {[]string{"--since=10m", "--tail=1"}, "now\n"},
		"limit": {[]string{"--limit-bytes=5"}, "an ho"},
		"name":  {[]string{"-c", "main", "--tail=1"}, "now\n"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := k.ok("", append([]string{"logs", "web"}, tc.args...)...); got != tc.want {
				t.Errorf("kubectl logs %v = %q, want %q", tc.args, got, tc.want)
			}
		})
	}
	if got := k.ok("", "logs", "web", "--tail=1", "--timestamps"); !strings.HasSuffix(got, "Z now\n") {
		t.Errorf("with timestamps: %q", got)
	}
	k.fails("", []string{"previous"}, "logs", "web", "--previous")

	cmd := exec.CommandContext(t.Context(), k.bin, "logs", "web", "-f", "--tail=1")
	cmd.Env = []string{"KUBECONFIG=" + k.kubeconfig, "HOME=" + k.home}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer func() { _ = cmd.Process.Kill() }()
	for _, want := range []string{"now\n", "one more\n", "and another\n"} {
		if want != "now\n" {
			h.log(0, strings.TrimSpace(want))
		}
		got := make([]byte, len(want))
		if _, err := io.ReadFull(out, got); err != nil || string(got) != want {
			t.Fatalf("followed %q (%v), want %q", got, err, want)
		}
	}
}

func TestKubectlPortForward(t *testing.T) {
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "served ", r.URL.Path) }))
	defer web.Close()
	for name, env := range map[string]string{"WebSocket": "true", "SPDY": "false"} {
		t.Run(name, func(t *testing.T) {
			_, h, k := startPods(t)
			h.dial.Store(web.Listener.Addr().String())
			cmd := exec.CommandContext(t.Context(), k.bin, "port-forward", "web", ":8080", ":1")
			cmd.Env = []string{"KUBECONFIG=" + k.kubeconfig, "HOME=" + k.home, "KUBECTL_PORT_FORWARD_WEBSOCKETS=" + env}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ports := forwarded(t, out, "8080", "1")
			for range 3 {
				if got := fetch(t, "http://127.0.0.1:"+ports["8080"]+"/a"); got != "served /a" {
					t.Errorf("over the forwarded port: %q", got)
				}
			}
			for range 5 { // kubectl prints "Stream reset" in place of our reason if it is slow to read the one before the other
				resp, err := http.DefaultClient.Do(request(t, "http://127.0.0.1:"+ports["1"]+"/"))
				if err == nil {
					_ = resp.Body.Close()
					t.Error("a port on which nothing listens answered")
				}
			}
			// Another sandbox of that name is not what was forwarded to.
			k.ok("", "delete", "sandbox", "web")
			k.ok(webSandbox, "apply", "-f", "-")
			http.DefaultClient.CloseIdleConnections() // they may not have been cut yet
			resp, err := http.DefaultClient.Do(request(t, "http://127.0.0.1:"+ports["8080"]+"/other"))
			if err == nil {
				_ = resp.Body.Close()
				t.Error("the port led to another sandbox")
			}
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			if !strings.Contains(stderr.String(), "nothing listens on port 1") {
				t.Errorf("kubectl printed %q", stderr.String())
			}
		})
	}
}

// forwarded reads the local ports of the remote ones, as kubectl prints them.
func forwarded(t *testing.T, out io.Reader, remote ...string) map[string]string {
	t.Helper()
	ports := map[string]string{}
	var text string
	buf := make([]byte, 4096)
	for len(ports) < len(remote) {
		n, err := out.Read(buf)
		if err != nil {
			t.Fatalf("kubectl port-forward: %v after %q", err, text)
		}
		text += string(buf[:n])
		for line := range strings.Lines(text) {
			local, to, ok := strings.Cut(strings.TrimPrefix(line, "Forwarding from 127.0.0.1:"), " -> ")
			if to = strings.TrimSpace(to); ok && strings.HasPrefix(line, "Forwarding from 127.0.0.1:") && slices.Contains(remote, to) {
				ports[to] = local
			}
		}
	}
	return ports
}

func fetch(t *testing.T, url string) string {
	t.Helper()
	resp, err := http.DefaultClient.Do(request(t, url))
	if err != nil {
		t.Error(err)
		return ""
	}
	defer func() { _ = resp.Body.Close() }()
	body, _ := io.ReadAll(resp.Body)
	return string(body)
}

// A server that stops cuts what is connected to sandboxes.
func TestStopCutsStreams(t *testing.T) {
	s, h, _ := startPods(t)
	x := executor(t, s, &corev1.PodExecOptions{Command: []string{"sh", "-c", "echo begun; exec sleep 3600"}, Stdout: true})
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- x.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdout: w}) }()
	if _, err := r.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	if err := <-ended; err == nil {
		t.Error("the stream ended without an error")
	}
	<-h.ended
}
