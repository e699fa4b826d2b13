package images

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	corev1 "k8s.io/api/core/v1"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ctrd/ctrdtest"
	"github.com/barchan-dev/barchan/internal/node/ctrd/pull"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// guarded is a registry that two users may pull from.
type guarded struct {
	host  string
	store http.Handler
	// blobs counts the layers that were requested, ranges those from the middle on.
	blobs, ranges atomic.Int32
	// fault, unless it is nil, answers what it returns true for.
	fault atomic.Pointer[func(http.ResponseWriter, *http.Request) bool]
	// open: without a password.
	open atomic.Bool
}

var accounts = map[string]string{"ann": "secret-of-ann", "ben": "secret-of-ben"}

func newGuarded(t *testing.T) *guarded {
	t.Helper()
	g := &guarded{}
	g.store = registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, 0)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		if !g.open.Load() && (password == "" || accounts[user] != password) {
			w.Header().Set("WWW-Authenticate", `Basic realm="all"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			g.blobs.Add(1)
			if from := r.Header.Get("Range"); from != "" && !strings.HasPrefix(from, "bytes=0-") {
				g.ranges.Add(1)
			}
		}
		if f := g.fault.Load(); f == nil || !(*f)(w, r) {
			g.serve(w, r)
		}
	}))
	t.Cleanup(srv.Close)
	g.host = strings.TrimPrefix(srv.URL, "http://")
	return g
}

// serve answers with any range of a blob.
func (g *guarded) serve(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet || r.Header.Get("Range") == "" {
		g.store.ServeHTTP(w, r)
		return
	}
	whole, all := httptest.NewRecorder(), r.Clone(r.Context())
	all.Header.Del("Range")
	g.store.ServeHTTP(whole, all)
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(whole.Body.Bytes()))
}

// push sends an image of one layer with random content, and returns its name.
func (g *guarded) push(t *testing.T, repository string, layers ...[]byte) string {
	t.Helper()
	img := empty.Image
	for _, l := range layers {
		var err error
		if img, err = mutate.AppendLayers(img, static.NewLayer(l, types.OCIUncompressedLayer)); err != nil {
			t.Fatal(err)
		}
	}
	cfg, err := img.ConfigFile()
	must(t, err)
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture = "linux", runtime.GOARCH
	img, err = mutate.ConfigFile(img, cfg)
	must(t, err)
	ref := g.host + "/" + repository + ":1"
	parsed, err := name.ParseReference(ref)
	must(t, err)
	must(t, remote.Write(parsed, img, remote.WithAuth(&authn.Basic{Username: "ann", Password: accounts["ann"]})))
	return ref
}

// layer is a tar of one file with random bytes.
func layer(t *testing.T, bytes int) []byte {
	t.Helper()
	content := make([]byte, bytes)
	_, _ = rand.Read(content)
	return tarOf(t, "file-"+rand.Text()[:6], content)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// secrets are those of all namespaces.
type secrets map[string]*corev1.Secret

func (s secrets) Secret(_ context.Context, namespace, name string) (*corev1.Secret, error) {
	return s[namespace+"/"+name], nil
}

func (secrets) ConfigMap(context.Context, string, string) (*corev1.ConfigMap, error) { return nil, nil }

func (s secrets) put(namespace, name, host, user, password string) {
	text := fmt.Appendf(nil, `{"auths":{%q:{"username":%q,"password":%q}}}`, host, user, password)
	s[namespace+"/"+name] = &corev1.Secret{Type: corev1.SecretTypeDockerConfigJson, Data: map[string][]byte{corev1.DockerConfigJsonKey: text}}
}

// started starts a containerd that ends with the test, and a store on it.
func started(t *testing.T, limits pull.Config, change func(*Config)) *Store {
	t.Helper()
	d := ctrdtest.Start(t, ctrdtest.Dir(t))
	c, err := ctrd.NewClient(ctrd.Config{Address: d.Address(), Namespace: "test", CallTimeout: eventually.Patience, Pull: limits})
	must(t, err)
	t.Cleanup(func() {
		_ = c.Close()
		d.End(t)
	})
	cfg := Config{Containerd: c, Log: slog.New(slog.DiscardHandler), Later: func(f func(context.Context)) { f(t.Context()) }}
	if change != nil {
		change(&cfg)
	}
	s, err := New(cfg)
	must(t, err)
	return s
}

// An error of a pull names the image once, and what the registry did.
func TestPullErrors(t *testing.T) {
	s := started(t, pull.Config{}, nil)
	g := newGuarded(t)
	g.open.Store(true)
	silent := program.Address(t)
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	t.Cleanup(broken.Close)
	for ref, want := range map[string]string{
		g.host + "/open/none:1": "the registry has no such image",
		silent + "/a/b:1":       "the registry does not answer: dial tcp " + silent + ": connect: connection refused",
		strings.TrimPrefix(broken.URL, "http://") + "/a/b:1": "the registry answered 418 I'm a teapot",
	} {
		_, err := s.Find(t.Context(), Ask{Ref: ref})
		if got := errs.Text(orNone(err)); got != fmt.Sprintf("image is not on this node: pull image %q: %s", ref, want) {
			t.Errorf("%s: %s", ref, got)
		}
	}
}

// The name of an image that is made here leads to no registry, and its error to the command that makes it.
func TestImageThatIsNotMadeYet(t *testing.T) {
	s := started(t, pull.Config{}, nil)
	_, err := s.Find(t.Context(), Ask{Ref: "barchan.local/base:latest"})
	const want = "image \"barchan.local/base:latest\" is not on this node; images of barchan.local are made by `barchan image build`"
	if got := errs.Text(orNone(err)); got != want || !errors.Is(err, errs.ErrUnavailable) || !errors.Is(err, sandbox.ErrImage) {
		t.Errorf("%s: %v", got, err)
	}
}

// An image that one namespace has pulled with its credentials is another's only with credentials that the registry accepts.
func TestPrivateImages(t *testing.T) {
	have := secrets{}
	s := started(t, pull.Config{}, func(c *Config) { c.Objects = have })
	g := newGuarded(t)
	ref := g.push(t, "team/private", layer(t, 1<<16))
	have.put("a", "reg", g.host, "ann", accounts["ann"])
	have.put("b", "reg", g.host, "ben", accounts["ben"])
	have.put("b", "wrong", g.host, "ben", "guessed")
	have.put("b", "elsewhere", "registry.test", "ann", accounts["ann"])
	have["b/opaque"] = &corev1.Secret{Type: corev1.SecretTypeOpaque}
	ask := func(namespace string, policy corev1.PullPolicy, names ...string) error {
		_, err := s.Find(t.Context(), Ask{Ref: ref, Policy: policy, Namespace: namespace, Secrets: names})
		return err
	}
	if err := ask("a", ""); !errors.Is(err, errs.ErrForbidden) || !errors.Is(err, sandbox.ErrImage) {
		t.Errorf("without credentials: %v", err)
	}
	must(t, ask("a", "", "reg"))
	fetched := g.blobs.Load()
	for name, tt := range map[string]struct {
		secrets []string
		policy  corev1.PullPolicy
		want    error
		text    string
	}{
		"none":            {nil, "", errs.ErrForbidden, "private"},
		"none, never":     {nil, corev1.PullNever, errs.ErrForbidden, "private"},
		"none, always":    {nil, corev1.PullAlways, errs.ErrForbidden, fmt.Sprintf("image is not on this node: pull image %q: access denied by the registry; the image may not exist", ref)},
		"a wrong one":     {[]string{"wrong"}, "", errs.ErrForbidden, "access denied"},
		"another host's":  {[]string{"elsewhere"}, "", errs.ErrForbidden, "private"},
		"a missing one":   {[]string{"gone"}, "", errs.ErrNotFound, "Secret b/gone"},
		"one of no type":  {[]string{"opaque"}, "", errs.ErrInvalid, "dockerconfigjson"},
		"a good one":      {[]string{"reg"}, "", nil, ""},
		"a good one last": {[]string{"elsewhere", "reg"}, corev1.PullNever, nil, ""},
	} {
		err := ask("b", tt.policy, tt.secrets...)
		if !errors.Is(err, tt.want) || (tt.want != nil && !errors.Is(err, sandbox.ErrImage)) || !strings.Contains(errs.Text(orNone(err)), tt.text) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
		if strings.Contains(fmt.Sprint(err), "guessed") || strings.Contains(fmt.Sprint(err), "secret-of") {
			t.Errorf("%s: the error has a password: %v", name, err)
		}
	}
	if now := g.blobs.Load(); now != fetched {
		t.Errorf("%d layers were fetched to check credentials", now-fetched)
	}
	testRecords(t, s, g, ref, ask)
}

// testRecords checks what is kept of the credentials, and when it holds.
func testRecords(t *testing.T, s *Store, g *guarded, ref string, ask func(string, corev1.PullPolicy, ...string) error) {
	t.Helper()
	list, err := s.List(t.Context())
	must(t, err)
	if len(list) != 1 || !list[0].Private || !list[0].Pulled || list[0].LastUsed.IsZero() {
		t.Fatalf("listed %+v", list)
	}
	for key, value := range list[0].Labels {
		if strings.Contains(value, "secret-of") || strings.Contains(value, "ann") {
			t.Errorf("label %s=%s has credentials", key, value)
		}
	}
	refuse := func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	}
	g.fault.Store(&refuse)
	if err := errors.Join(ask("a", "", "reg"), ask("b", "", "reg")); err != nil {
		t.Errorf("granted, without the registry: %v", err)
	}
	if err := ask("b", ""); err == nil {
		t.Error("namespace b uses the image without its Secret")
	}
	g.fault.Store(nil)
	g.open.Store(true)
	must(t, ask("c", "")) // anyone may pull it now
	if _, err := s.Find(t.Context(), Ask{Ref: ref}); err != nil {
		t.Errorf("the operator: %v", err)
	}
}

// Any number of waiters is one pull, which ends with the last of them.
func TestPullsAreShared(t *testing.T) {
	s := started(t, pull.Config{}, nil)
	g := newGuarded(t)
	g.open.Store(true)
	ref := g.push(t, "shared", layer(t, 1<<20))
	arrived, release := make(chan struct{}, 1), make(chan struct{})
	slow := func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/blobs/") {
			select {
			case arrived <- struct{}{}:
			default:
			}
			select {
			case <-release:
			case <-r.Context().Done():
			}
		}
		return false
	}
	g.fault.Store(&slow)
	const waiters = 8
	var all sync.WaitGroup
	var steps atomic.Int32
	left, leave := context.WithCancel(t.Context())
	for i := range waiters {
		all.Go(func() {
			ctx := t.Context() //nolint:contextcheck // that of the others ends early
			if i == 0 {
				ctx = left
			}
			_, err := s.Find(ctx, Ask{Ref: ref, Namespace: fmt.Sprint("n", i), Progress: func(ctrd.Progress) { steps.Add(1) }})
			if (err != nil) != (i == 0) {
				t.Errorf("waiter %d: %v", i, err)
			}
		})
	}
	<-arrived
	eventually.True(t, "all wait", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, f := range s.flights {
			return f.waiters == waiters
		}
		return false
	})
	leave()
	close(release)
	all.Wait()
	if n := g.blobs.Load(); n != 2 { // a layer and a config
		t.Errorf("%d blobs were fetched, want 2", n)
	}
	if steps.Load() < waiters-1 {
		t.Errorf("%d reports of progress", steps.Load())
	}
	if n := len(s.flights); n != 0 {
		t.Errorf("%d pulls are left", n)
	}
}

// A pull that broke off goes on from there, in another process too; where the registry has no ranges, from the start.
func TestPullResumes(t *testing.T) {
	for name, noRanges := range map[string]bool{"ranges": false, "no ranges": true} {
		t.Run(name, func(t *testing.T) { testResume(t, noRanges) })
	}
}

func testResume(t *testing.T, noRanges bool) {
	t.Helper()
	s := started(t, pull.Config{}, nil)
	g := newGuarded(t)
	g.open.Store(true)
	const size = 8 << 20
	ref := g.push(t, "resumed", layer(t, size))
	var broken atomic.Bool
	breaks := func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/") {
			return false
		}
		if !broken.CompareAndSwap(false, true) {
			panic(http.ErrAbortHandler)
		}
		g.serve(&cutWriter{ResponseWriter: w, left: size / 2}, r)
		broken.Store(false) // a small blob
		return true
	}
	g.fault.Store(&breaks)
	if _, err := s.Find(t.Context(), Ask{Ref: ref}); err == nil {
		t.Fatal("pulled from a registry that breaks off")
	}
	g.fault.Store(nil)
	g.ranges.Store(0)
	if noRanges {
		g.fault.Store(new(func(w http.ResponseWriter, r *http.Request) bool {
			refused := r.Method == http.MethodGet && r.Header.Get("Range") != "" && !strings.HasPrefix(r.Header.Get("Range"), "bytes=0-")
			if refused {
				w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
			}
			return refused
		}))
	}
	again, err := New(s.cfg)
	must(t, err)
	if _, err := again.Find(t.Context(), Ask{Ref: ref}); err != nil {
		t.Fatal(err)
	}
	if g.ranges.Load() == 0 {
		t.Error("the layer was fetched from its start")
	}
}

// cutWriter breaks a response off after some bytes.
type cutWriter struct {
	http.ResponseWriter
	left int
}

// Write ends the connection when nothing is left.
func (c *cutWriter) Write(b []byte) (int, error) {
	if len(b) > c.left {
		_, _ = c.ResponseWriter.Write(b[:c.left])
		_ = http.NewResponseController(c.ResponseWriter).Flush()
		panic(http.ErrAbortHandler)
	}
	c.left -= len(b)
	return c.ResponseWriter.Write(b)
}

// What is too large, has too many layers or does not fit is refused before its layers are fetched; a registry that sends nothing
// is left.
func TestPullBounds(t *testing.T) {
	full := fmt.Errorf("no room: %w", errs.ErrExhausted)
	var room, space atomic.Pointer[error]
	s := started(t, pull.Config{MaxBytes: 1 << 20, StallTimeout: time.Second}, func(c *Config) {
		c.Room = func(_ context.Context, bytes int64) error {
			if bytes < 1000 {
				t.Errorf("room for %d bytes", bytes)
			}
			return deref(room.Load())
		}
		c.Space = func() error { return deref(space.Load()) }
	})
	g := newGuarded(t)
	g.open.Store(true)
	large, deep, fits := g.push(t, "large", layer(t, 1<<20)), g.push(t, "deep", slices.Repeat([][]byte{layer(t, 10)}, 257)...), g.push(t, "fits", layer(t, 1<<16))
	find := func(ref string, want error, text string) {
		t.Helper()
		_, err := s.Find(t.Context(), Ask{Ref: ref})
		if !errors.Is(err, want) || !strings.Contains(errs.Text(orNone(err)), text) {
			t.Errorf("%s: %v, want %v %q", ref, err, want, text)
		}
	}
	find(large, errs.ErrTooLarge, "maxImage")
	find(deep, errs.ErrTooLarge, "257 layers")
	room.Store(&full)
	find(fits, errs.ErrExhausted, "no room")
	room.Store(nil)
	if n := g.blobs.Load(); n != 0 {
		t.Errorf("%d blobs were fetched", n)
	}
	hangs := func(_ http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/blobs/") {
			<-r.Context().Done()
		}
		return false
	}
	g.fault.Store(&hangs)
	space.Store(&full)
	find(fits, errs.ErrExhausted, "no room")
	space.Store(nil)
	find(fits, errs.ErrUnavailable, "has sent nothing for 1s")
	g.fault.Store(nil)
	find(fits, nil, "")
}

func deref(err *error) error {
	if err == nil {
		return nil
	}
	return *err
}

// Mirrors come first, without the credentials of the registry, which comes last.
func TestMirrors(t *testing.T) {
	front, back := newGuarded(t), newGuarded(t)
	ref := back.push(t, "mirrored", layer(t, 1<<16))
	have := secrets{}
	have.put("a", "reg", back.host, "ann", accounts["ann"])
	s := started(t, pull.Config{Registries: pull.Registries{Mirrors: map[string][]string{back.host: {"http://" + front.host}}}}, func(c *Config) { c.Objects = have })
	var seen atomic.Int32
	watch := func(_ http.ResponseWriter, r *http.Request) bool {
		seen.Add(1)
		if r.Header.Get("Authorization") != "" {
			t.Error("the mirror received credentials")
		}
		return false
	}
	front.fault.Store(&watch)
	ask := Ask{Ref: ref, Namespace: "a", Secrets: []string{"reg"}, Policy: corev1.PullAlways}
	if _, err := s.Find(t.Context(), ask); err != nil { // the mirror denies, or has nothing
		t.Fatal(err)
	}
	front.open.Store(true)
	if _, err := s.Find(t.Context(), ask); err != nil || seen.Load() == 0 {
		t.Fatalf("by a mirror without the image: %v, %d requests", err, seen.Load())
	}
	front.fault.Store(nil)
	front.push(t, "mirrored", layer(t, 1<<16)) // the mirror has an image of its own
	front.fault.Store(&watch)
	back.fault.Store(new(func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(http.StatusBadGateway); return true }))
	if img, err := s.Find(t.Context(), ask); err != nil || img.Ref != ref {
		t.Errorf("by the mirror alone: %+v, %v", img, err)
	}
}

// tarOf returns a tar of one file.
func tarOf(t *testing.T, name string, content []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	must(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content)), Typeflag: tar.TypeReg}))
	_, err := w.Write(content)
	must(t, err)
	must(t, w.Close())
	return b.Bytes()
}

func orNone(err error) error {
	if err == nil {
		return errors.New("")
	}
	return err
}
