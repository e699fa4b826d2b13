package adminapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func TestMain(m *testing.M) { eventually.LeaveNoGoroutines(m) }

// backend behaves like a server with two images.
type backend struct {
	images   map[string]adminclient.Image
	forced   bool // the last removal
	ready    bool
	sandbox  int
	stopped  chan struct{}
	prepared error
}

func newBackend() *backend {
	return &backend{
		images: map[string]adminclient.Image{
			"reg.test:5000/a/b:1": {Ref: "reg.test:5000/a/b:1", Digest: "sha256:aa", Size: 7},
		},
		ready: true, sandbox: 2, stopped: make(chan struct{}, 1),
	}
}

func (b *backend) Status(context.Context) (adminclient.Status, error) {
	return adminclient.Status{Version: "1.2.3", PID: os.Getpid(), Ready: b.ready, Sandboxes: map[string]int{"Running": b.sandbox}}, nil
}

func (b *backend) audit(context.Context) ([]adminclient.Finding, error) {
	return []adminclient.Finding{{Where: adminclient.InFiles, What: "x", Remedy: "y"}}, nil
}

func (b *backend) Doctor(context.Context) ([]adminclient.Check, error) { return nil, nil }

func (b *backend) Prepare(_ context.Context, req adminclient.ShutdownRequest, progress func(adminclient.Event)) error {
	if b.prepared != nil {
		return b.prepared
	}
	for ; req.All && b.sandbox > 0; b.sandbox-- {
		progress(adminclient.Event{Step: "removed", Message: fmt.Sprintf("sandbox %d", b.sandbox)})
	}
	return nil
}

func (b *backend) Stop() { b.stopped <- struct{}{} }

func (b *backend) List(context.Context) ([]adminclient.Image, error) {
	if !b.ready {
		return nil, errs.Public(errs.ErrUnavailable, "the server is still starting")
	}
	var out []adminclient.Image
	for _, i := range b.images {
		out = append(out, i)
	}
	return out, nil
}

func (b *backend) Pull(ctx context.Context, req adminclient.PullRequest, progress func(adminclient.Event)) (adminclient.Image, error) {
	if strings.HasPrefix(req.Ref, "slow") {
		progress(adminclient.Event{Step: "pull"})
		<-ctx.Done()
		return adminclient.Image{}, ctx.Err()
	}
	if strings.HasPrefix(req.Ref, "none") {
		return adminclient.Image{}, fmt.Errorf("pull %s: %w", req.Ref, errs.ErrNotFound)
	}
	progress(adminclient.Event{Step: "layer", Done: 1, Total: 2, Bytes: true})
	progress(adminclient.Event{Step: "layer", Done: 2, Total: 2, Bytes: true})
	return adminclient.Image{Ref: req.Ref, Size: 2}, nil
}

func (b *backend) Import(_ context.Context, tar io.Reader, name string, progress func(adminclient.Event)) ([]adminclient.Image, error) {
	// Progress comes while the tar is read, which needs both directions at once.
	buf := make([]byte, 32<<10)
	var n int64
	for {
		got, err := tar.Read(buf)
		n += int64(got)
		progress(adminclient.Event{Step: "import", Done: n})
		if errors.Is(err, io.EOF) {
			return []adminclient.Image{{Ref: name, Size: n}}, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

func (b *backend) Export(_ context.Context, req adminclient.ImageExport, w io.Writer) error {
	switch req.Source {
	case "none":
		return errs.Public(errs.ErrNotFound, "no image none")
	case "half":
		_, _ = io.WriteString(w, "half a tar")
		return errs.Public(errs.ErrUnavailable, "containerd went away")
	}
	_, err := io.WriteString(w, req.Namespace+"/"+req.Source+" as "+req.Name)
	return err
}

func (b *backend) Prune(_ context.Context, req adminclient.PruneRequest) ([]adminclient.Image, error) {
	if !req.All {
		return nil, nil
	}
	return []adminclient.Image{{Ref: "x.test/unused:1"}}, nil
}

func (b *backend) Remove(_ context.Context, ref string, force bool) error {
	b.forced = force
	if _, ok := b.images[ref]; !ok {
		return errs.Public(errs.ErrNotFound, "no image "+ref)
	}
	delete(b.images, ref)
	return nil
}

func (b *backend) BuildImage(_ context.Context, req adminclient.BuildImageRequest, _ func(adminclient.Event)) (adminclient.Image, error) {
	return adminclient.Image{Ref: fmt.Sprintf("base:%v", req.Force)}, nil
}

// start serves a backend on a real socket until the test ends.
func start(t *testing.T, b *backend) (*adminclient.Client, string, func() error) {
	t.Helper()
	return startConfig(t, Config{Server: b, Images: b, Build: b, Audit: b.audit, Log: telemetry.Discard()})
}

func startConfig(t *testing.T, cfg Config) (*adminclient.Client, string, func() error) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "run", "admin.sock")
	cfg.Socket = socket
	api, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	var ended error
	go func() {
		defer close(done)
		ended = api.Run(ctx)
	}()
	stop := func() error {
		cancel()
		<-done
		return ended
	}
	t.Cleanup(func() { _ = stop() })
	eventually.True(t, "the socket", func() bool {
		select {
		case <-done:
			t.Fatalf("ended early: %v", ended)
		default:
		}
		_, err := os.Stat(socket)
		return err == nil
	})
	return adminclient.New(socket, "/data"), socket, stop
}

func TestAudit(t *testing.T) {
	client, _, _ := start(t, newBackend())
	found, err := client.Audit(t.Context())
	if want := (adminclient.Finding{Where: adminclient.InFiles, What: "x", Remedy: "y"}); err != nil || len(found) != 1 || found[0] != want {
		t.Errorf("audit %v, %v", found, err)
	}
}

func TestReads(t *testing.T) {
	client, socket, stop := start(t, newBackend())
	s, err := client.Status(t.Context())
	if err != nil || s.Version != "1.2.3" || s.Sandboxes["Running"] != 2 {
		t.Errorf("status %+v, %v", s, err)
	}
	images, err := client.Images(t.Context())
	if err != nil || len(images) != 1 || images[0].Size != 7 {
		t.Errorf("images %+v, %v", images, err)
	}
	checks, err := client.Doctor(t.Context())
	if err != nil || checks == nil || len(checks) != 0 {
		t.Errorf("doctor %v, %v; want an empty list", checks, err)
	}
	info, err := os.Stat(socket)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket %v, %v", info.Mode(), err)
	}
	if err := stop(); err != nil {
		t.Errorf("stop: %v", err)
	}
	if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("socket is left: %v", err)
	}
}

func TestStreams(t *testing.T) {
	client, _, _ := start(t, newBackend())
	var seen []adminclient.Event
	r, err := client.Pull(t.Context(), adminclient.PullRequest{Ref: "x"}, func(e adminclient.Event) { seen = append(seen, e) })
	if err != nil || len(r.Images) != 1 || r.Images[0].Ref != "x" {
		t.Errorf("pull %+v, %v", r, err)
	}
	if len(seen) != 2 || seen[1].Done != 2 || !seen[1].Bytes {
		t.Errorf("progress %+v", seen)
	}
	r, err = client.BuildImage(t.Context(), adminclient.BuildImageRequest{Force: true}, nil)
	if err != nil || r.Images[0].Ref != "base:true" {
		t.Errorf("build %+v, %v", r, err)
	}
	tar := strings.Repeat("x", 1<<20)
	r, err = client.Import(t.Context(), strings.NewReader(tar), "n", nil)
	if err != nil || r.Images[0] != (adminclient.Image{Ref: "n", Size: 1 << 20}) {
		t.Errorf("import %+v, %v", r, err)
	}
}

func TestErrorsKeepTheirKind(t *testing.T) {
	b := newBackend()
	client, _, _ := start(t, b)
	_, err := client.Pull(t.Context(), adminclient.PullRequest{Ref: "none"}, nil)
	if !errors.Is(err, errs.ErrNotFound) || !strings.Contains(err.Error(), "pull none") {
		t.Errorf("in a stream: %v", err)
	}
	if _, err := client.Pull(t.Context(), adminclient.PullRequest{}, nil); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("no name: %v", err)
	}
	if err := client.RemoveImage(t.Context(), "no/such:1", false); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("remove: %v", err)
	}
	if b.forced {
		t.Error("removed with force, unasked")
	}
	if err := client.RemoveImage(t.Context(), "reg.test:5000/a/b:1", true); err != nil || len(b.images) != 0 || !b.forced {
		t.Errorf("remove a name with slashes: %v", err)
	}
	wantExports(t, client)
	if gone, err := client.Prune(t.Context(), adminclient.PruneRequest{All: true}); err != nil || len(gone) != 1 || gone[0].Ref != "x.test/unused:1" {
		t.Errorf("pruned %v, %v", gone, err)
	}
	b.ready = false
	_, err = client.Images(t.Context())
	if text, ok := errs.PublicMessage(err); !errors.Is(err, errs.ErrUnavailable) || !ok || text != "the server is still starting" {
		t.Errorf("while it starts: %v", err)
	}
}

func TestRefusedRequests(t *testing.T) {
	_, socket, _ := start(t, newBackend())
	for body, want := range map[string]int{`{"ref":"x","colour":1}`: 400, `{`: 400, strings.Repeat(" ", maxRequest+1): 400} {
		if got := post(t, socket, adminclient.PathPull, body); got != want {
			t.Errorf("body %.30q: %d", body, got)
		}
	}
	if got := post(t, socket, "/v1/nothing", ""); got != http.StatusNotFound {
		t.Errorf("unknown route: %d", got)
	}
}

func post(t *testing.T, socket, path, body string) int {
	t.Helper()
	return request(t, socket, http.MethodPost, path, body)
}

func request(t *testing.T, socket, method, path, body string) int {
	t.Helper()
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
	}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://x"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	res, err := transport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	return res.StatusCode
}

func TestShutdown(t *testing.T) {
	b := newBackend()
	client, _, _ := start(t, b)
	b.prepared = fmt.Errorf("remove sandbox 1: %w", errs.ErrTimeout)
	if _, err := client.Shutdown(t.Context(), adminclient.ShutdownRequest{All: true}, nil); !errors.Is(err, errs.ErrTimeout) {
		t.Errorf("got %v", err)
	}
	select {
	case <-b.stopped:
		t.Fatal("stopped, although the removal did not succeed")
	default:
	}
	b.prepared = nil
	var removed []string
	_, err := client.Shutdown(t.Context(), adminclient.ShutdownRequest{All: true}, func(e adminclient.Event) { removed = append(removed, e.Message) })
	if err != nil || !slices.Equal(removed, []string{"sandbox 2", "sandbox 1"}) {
		t.Errorf("removed %v, %v", removed, err)
	}
	<-b.stopped
}

// TestStopEndsWork stops the API in the middle of a pull; the client receives an error.
func TestStopEndsWork(t *testing.T) {
	client, _, stop := start(t, newBackend())
	begun, result := make(chan struct{}), make(chan error, 1)
	begins := sync.OnceFunc(func() { close(begun) })
	go func() {
		_, err := client.Pull(t.Context(), adminclient.PullRequest{Ref: "slow"}, func(adminclient.Event) { begins() })
		begins()
		result <- err
	}()
	<-begun
	if err := stop(); err != nil {
		t.Errorf("stop: %v", err)
	}
	if err := <-result; err == nil {
		t.Error("the pull succeeded")
	}
}

func TestNobodyServes(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "admin.sock")
	_, err := adminclient.New(socket, "/data").Status(t.Context())
	if !errors.Is(err, adminclient.ErrNotRunning) || !strings.Contains(err.Error(), "barchan is not running on /data; start it with `barchan up`") {
		t.Errorf("no socket: %v", err)
	}
	l, err := net.Listen("unix", socket) //nolint:noctx // listens at once
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := adminclient.New(socket, "/data").Status(t.Context()); !errors.Is(err, adminclient.ErrNotRunning) {
		t.Errorf("deserted socket: %v", err)
	}
}

func TestOldSocketIsReplaced(t *testing.T) {
	b := newBackend()
	socket := filepath.Join(t.TempDir(), "admin.sock")
	if err := os.WriteFile(socket, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	at := Socket{Path: socket, GID: -1}
	l, err := at.listen(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	api, err := New(Config{Socket: socket, Server: b, Images: b, Build: b, Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- at.serve(ctx, l, api.Handler(), telemetry.Discard()) }()
	if _, err := adminclient.New(socket, "/data").Status(t.Context()); err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestNewRefuses(t *testing.T) {
	b := newBackend()
	for name, cfg := range map[string]Config{
		"relative socket": {Socket: "a", Server: b, Images: b, Build: b, Log: telemetry.Discard()},
		"no images":       {Socket: "/a", Server: b, Build: b, Log: telemetry.Discard()},
	} {
		if _, err := New(cfg); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// wantExports exports an image, none, and one that breaks off.
func wantExports(t *testing.T, client *adminclient.Client) {
	t.Helper()
	for source, want := range map[string]struct {
		body string
		open error
		read error
	}{
		"a":    {body: "ns/a as n"},
		"none": {open: errs.ErrNotFound},
		"half": {body: "half a tar", read: errs.ErrUnavailable},
		"":     {open: errs.ErrInvalid},
	} {
		in, err := client.ExportImage(t.Context(), adminclient.ImageExport{Namespace: "ns", Source: source, Name: "n"})
		if !errors.Is(err, want.open) || (err != nil && want.open == nil) {
			t.Errorf("export %q: %v, want %v", source, err, want.open)
		}
		if err != nil {
			continue
		}
		body, err := io.ReadAll(in)
		if string(body) != want.body || !errors.Is(err, want.read) || (err != nil && want.read == nil) {
			t.Errorf("export %q: %q, %v", source, body, err)
		}
		if err := in.Close(); err != nil {
			t.Error(err)
		}
	}
}
