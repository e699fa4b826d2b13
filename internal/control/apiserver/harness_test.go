package apiserver_test

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// start runs a server that stops with the test.
func start(t testing.TB, change ...func(*apiserver.Config)) *apiserver.Server {
	t.Helper()
	s := newServer(t, change...)
	if err := s.Start(t.Context()); err != nil {
		t.Fatalf("Start = %v", err)
	}
	t.Cleanup(s.Stop)
	return s
}

func newServer(t testing.TB, change ...func(*apiserver.Config)) *apiserver.Server {
	t.Helper()
	cfg := apiserver.Config{DataDir: t.TempDir(), Listen: "127.0.0.1:0", Log: testLog(t)}
	for _, f := range change {
		f(&cfg)
	}
	s, err := apiserver.New(cfg)
	if err != nil {
		t.Fatalf("New = %v", err)
	}
	return s
}

// testLog writes warnings to stderr if BARCHAN_TEST_LOG is set: libraries log after tests end.
func testLog(t testing.TB) *slog.Logger {
	t.Helper()
	if os.Getenv("BARCHAN_TEST_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo})).With("test", t.Name())
}

func testScheme(t testing.TB) *runtime.Scheme {
	t.Helper()
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		clientgoscheme.AddToScheme, agents.AddToScheme, extensions.AddToScheme, barchan.AddToScheme,
	} {
		if err := add(s); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// clientAs returns a client that calls the server in the process.
func clientAs(t testing.TB, s *apiserver.Server, user string) client.WithWatch {
	t.Helper()
	c, err := client.NewWithWatch(s.RESTConfig(user), client.Options{Scheme: testScheme(t)})
	if err != nil {
		t.Fatalf("client for %s: %v", user, err)
	}
	return c
}

// until waits until f holds.
func until(t testing.TB, what string, f func(ctx context.Context) (bool, error)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	var last error
	for {
		ok, err := f(ctx)
		if ok && err == nil {
			return
		}
		last = err
		select {
		case <-ctx.Done():
			t.Fatalf("%s: not within %s (last error: %v)", what, eventually.Patience, last)
		case <-tick.C:
		}
	}
}

// kubectl is the real one, on one server.
type kubectl struct {
	t          *testing.T
	bin        string
	kubeconfig string
	home       string
	env        []string
}

func newKubectl(t *testing.T, s *apiserver.Server) kubectl {
	t.Helper()
	return kubectl{t: t, bin: findKubectl(t), kubeconfig: s.AdminKubeconfig(), home: t.TempDir()}
}

func findKubectl(t *testing.T) string {
	t.Helper()
	cache := os.Getenv("BARCHAN_CACHE")
	if cache == "" {
		cache = "/var/cache/barchan"
	}
	for _, p := range []string{filepath.Join(cache, "bin", "kubectl"), "/tmp/cache/bin/kubectl"} {
		if _, err := os.Stat(p); err == nil {
			return p
		}
	}
	if p, err := exec.LookPath("kubectl"); err == nil {
		return p
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("kubectl is missing; build it from tools/kubectl into $BARCHAN_CACHE/bin")
	}
	t.Skip("SKIPPED: no kubectl in $BARCHAN_CACHE/bin or PATH")
	return ""
}

// try runs kubectl with stdin and returns what it wrote.
func (k kubectl) try(stdin string, args ...string) (string, error) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(k.t.Context(), eventually.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, k.bin, args...)
	cmd.Env = append([]string{"KUBECONFIG=" + k.kubeconfig, "HOME=" + k.home, "PATH=" + os.Getenv("PATH")}, k.env...)
	cmd.Stdin = strings.NewReader(stdin)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// ok runs kubectl, which must succeed.
func (k kubectl) ok(stdin string, args ...string) string {
	k.t.Helper()
	out, err := k.try(stdin, args...)
	if err != nil {
		k.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// fails runs kubectl, which must fail and print every one of want.
func (k kubectl) fails(stdin string, want []string, args ...string) string {
	k.t.Helper()
	out, err := k.try(stdin, args...)
	if err == nil {
		k.t.Fatalf("kubectl %s succeeded:\n%s", strings.Join(args, " "), out)
	}
	for _, w := range want {
		if !strings.Contains(out, w) {
			k.t.Errorf("kubectl %s printed %q, want %q in it", strings.Join(args, " "), out, w)
		}
	}
	return out
}
