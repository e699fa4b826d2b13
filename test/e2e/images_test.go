package e2e

import (
	"archive/tar"
	"bytes"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// helloProgram builds the program of the small images.
func helloProgram(t *testing.T) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "hello")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-ldflags", "-s -w", "-o", path, "./testdata/hello")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build hello: %v\n%s", err, out)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// helloImage is an image with nothing but that program: no shell, no users, no /etc.
func helloImage(t *testing.T, program []byte, greeting string) v1.Image {
	t.Helper()
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, h := range []*tar.Header{
		{Name: "bin/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "work/", Typeflag: tar.TypeDir, Mode: 0o755, Uid: 1234, Gid: 1234},
		{Name: "bin/hello", Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(program))},
	} {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Write(program); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		t.Fatal(err)
	}
	img, err = mutate.ConfigFile(img, &v1.ConfigFile{
		Architecture: "amd64", OS: "linux", RootFS: mustConfig(t, img).RootFS,
		Config: v1.Config{Entrypoint: []string{"/bin/hello", "serve"}, Env: []string{"GREETING=" + greeting}, WorkingDir: "/work", User: "1234:1234"},
	})
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func mustConfig(t *testing.T, img v1.Image) *v1.ConfigFile {
	t.Helper()
	c, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// The one user of the registry's private half.
const registryUser, registryPassword = "puller", "s3cret word"

// startRegistry serves a registry on loopback without TLS and returns its host. What lies
// below private/ requires a user.
func startRegistry(t *testing.T) string {
	t.Helper()
	store := registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)))
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		if strings.HasPrefix(r.URL.Path, "/v2/private/") && (user != registryUser || password != registryPassword) {
			w.Header().Set("WWW-Authenticate", `Basic realm="private"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}`, http.StatusUnauthorized)
			return
		}
		store.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	return strings.TrimPrefix(srv.URL, "http://")
}

func push(t *testing.T, ref string, img v1.Image) string {
	t.Helper()
	tag, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(tag, img, remote.WithContext(t.Context()), remote.WithAuth(&authn.Basic{Username: registryUser, Password: registryPassword})); err != nil {
		t.Fatalf("push %s: %v", ref, err)
	}
	d, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return d.String()
}

func imageTemplate(name, image, more string) string {
	return `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: ` + name + `}
spec:
  podTemplate:
    spec:
      containers:
      - name: main
        image: ` + image + more + "\n"
}

type listedImage struct {
	Ref, Digest string
	Size        int64
}

func (s *server) image(ref string) (listedImage, bool) {
	s.t.Helper()
	var all []listedImage
	s.read(&all, "image", "ls")
	for _, x := range all {
		if x.Ref == ref {
			return x, true
		}
	}
	return listedImage{}, false
}

func testImages(t *testing.T, s *server, program []byte) {
	host := startRegistry(t)
	img := helloImage(t, program, "pulled")
	public, private := host+"/apps/hello:1", host+"/private/hello:1"
	digest := push(t, public, img)
	push(t, private, helloImage(t, program, "private"))
	push(t, host+"/apps/demand:1", helloImage(t, program, "on demand"))

	t.Run("pull", func(t *testing.T) {
		s := s.in(t)
		out := s.must("image", "pull", public)
		for _, want := range []string{"resolve", "unpack", "done", public} {
			if !strings.Contains(out, want) {
				t.Errorf("pull does not contain %q:\n%s", want, out)
			}
		}
		got, ok := s.image(public)
		if !ok || got.Digest != digest || got.Size == 0 {
			t.Errorf("image ls --json has %+v, want digest %s", got, digest)
		}
		s.must("image", "pull", public) // again is harmless
	})
	t.Run("an image without anything but a program", func(t *testing.T) {
		s := s.in(t)
		s.apply(imageTemplate("hello", public, ""))
		id, out := s.keep("hello", "/bin/hello", "a b", "c")
		if want := "args=a b,c dir=/work uid=1234 gid=1234 GREETING=pulled\n"; out != want {
			t.Errorf("the program returned %q, want %q", out, want)
		}
		if body := s.untilServed(id, "/"); !strings.Contains(body, "args=serve dir=/work uid=1234 gid=1234 GREETING=pulled") {
			t.Errorf("the image's entrypoint returned %q", body)
		}
		if out, err := s.try("exec", id, "--", "/bin/no-such-program"); err == nil || !strings.Contains(out, "no-such-program") {
			t.Errorf("a program that is not there: %v\n%s", err, out)
		}
		t.Run("it cannot be removed while it runs", func(t *testing.T) {
			s := s.in(t)
			for _, args := range [][]string{{"image", "rm", public}, {"image", "rm", "--force", public}} {
				if out, err := s.try(args...); err == nil || !strings.Contains(out, "it is used by sandboxes "+id) {
					t.Errorf("%s = %v\n%s", args, err, out)
				}
			}
			if _, ok := s.image(public); !ok {
				t.Errorf("image ls has no %s", public)
			}
			s.must("pause", id)
			s.must("resume", id)
			if out := s.data("exec", id, "--", "/bin/hello"); !strings.Contains(out, "GREETING=pulled") {
				t.Errorf("after the refusals, its sandbox returned %q", out)
			}
			s.must("kill", id)
			if out, err := s.try("image", "rm", public); err == nil || !strings.Contains(out, "templates default/hello; delete them first, or use --force") {
				t.Errorf("image rm of a template's = %v\n%s", err, out)
			}
			s.must("image", "rm", "--force", public)
			if _, ok := s.image(public); ok {
				t.Errorf("image ls still has %s", public)
			}
		})
	})
	t.Run("removed twice", func(t *testing.T) {
		_, _ = s.in(t).try("image", "rm", "--force", public)
		if out, err := s.in(t).try("image", "rm", public); err == nil || !strings.Contains(out, public) || !strings.Contains(out, "not found") {
			t.Errorf("image rm of none = %v\n%s", err, out)
		}
	})
	t.Run("credentials", func(t *testing.T) { testCredentials(t, s.in(t), private) })
	t.Run("pulled when a sandbox needs it", func(t *testing.T) {
		s := s.in(t)
		s.apply(imageTemplate("demand", host+"/apps/demand:1", ""))
		if _, out := s.keep("demand", "/bin/hello"); !strings.Contains(out, "GREETING=on demand") {
			t.Errorf("it returned %q", out)
		}
	})
	t.Run("import", func(t *testing.T) { testImport(t, s.in(t), program) })
	t.Run("unknown image", func(t *testing.T) { testUnknownImage(t, s.in(t), host) })
}

func testCredentials(t *testing.T, s *server, private string) {
	for name, give := range map[string]struct {
		stdin string
		args  []string
		want  string
	}{
		"none":            {"", []string{"image", "pull", private}, "access denied"},
		"wrong":           {"wrong", []string{"image", "pull", private, "--username", registryUser, "--password-stdin"}, "access denied"},
		"no terminal":     {"", []string{"image", "pull", private, "--username", registryUser}, "--password-stdin"},
		"no user":         {"x", []string{"image", "pull", private, "--password-stdin"}, "--username"},
		"unknown tag":     {"", []string{"image", "pull", strings.TrimSuffix(strings.Replace(private, "private", "apps", 1), "1") + "nope"}, "no such image"},
		"no registry":     {"", []string{"image", "pull", "127.0.0.1:1/x:1"}, "connection refused"},
		"no image's name": {"", []string{"image", "pull", "UPPER/case"}, "UPPER/case"},
	} {
		if out, err := s.tryIn(give.stdin, give.args...); err == nil || !strings.Contains(out, give.want) {
			t.Errorf("%s: barchan %s = %v, want %q\n%s", name, strings.Join(give.args, " "), err, give.want, out)
		}
	}
	if out, err := s.tryIn(registryPassword+"\n", "image", "pull", private, "--username", registryUser, "--password-stdin"); err != nil {
		t.Fatalf("pull with credentials: %v\n%s", err, out)
	}
	if _, ok := s.image(private); !ok {
		t.Errorf("image ls has no %s", private)
	}
	if log, err := os.ReadFile(filepath.Join(s.dir, "log")); err != nil || bytes.Contains(log, []byte(registryPassword)) {
		t.Errorf("the server's log has the registry's password (or is not there: %v)", err)
	}
}

func testImport(t *testing.T, s *server, program []byte) {
	img := helloImage(t, program, "imported")
	tag, err := name.NewTag("local.test/hello:2")
	if err != nil {
		t.Fatal(err)
	}
	var saved bytes.Buffer
	if err := tarball.Write(tag, img, &saved); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "hello.tar")
	if err := os.WriteFile(file, saved.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := s.must("image", "import", file); !strings.Contains(out, "local.test/hello:2") {
		t.Errorf("image import FILE:\n%s", out)
	}
	s.must("image", "rm", "local.test/hello:2")
	if out, err := s.tryIn(saved.String(), "image", "import", "-", "--name", "local.test/renamed:3"); err != nil || !strings.Contains(out, "local.test/renamed:3") {
		t.Errorf("image import - --name: %v\n%s", err, out)
	}
	s.apply(imageTemplate("imported", "local.test/renamed:3", ""))
	if _, out := s.keep("imported", "/bin/hello"); !strings.Contains(out, "GREETING=imported") {
		t.Errorf("it returned %q", out)
	}
	for name, content := range map[string]string{"text": "no tar at all, but some text that is longer than a header" + strings.Repeat("x", 2000), "nothing": ""} {
		if out, err := s.tryIn(content, "image", "import", "-"); err == nil || !strings.Contains(out, "import image") {
			t.Errorf("import of %s = %v\n%s", name, err, out)
		}
	}
	if out, err := s.tryIn(saved.String()[:saved.Len()/2], "image", "import", "-", "--name", "local.test/half:1"); err == nil {
		t.Errorf("import of half a tar succeeded:\n%s", out)
	}
	if _, ok := s.image("local.test/half:1"); ok {
		t.Error("half a tar left an image")
	}
}

// testUnknownImage verifies an immediate error and no leftovers, whether the registry rejects it or is unreachable.
func testUnknownImage(t *testing.T, s *server, host string) {
	gone := program.Address(t)
	for kind, image := range map[string]string{"unknown": host + "/apps/typo:1", "away": gone + "/apps/hello:1"} {
		s.apply(imageTemplate(kind, image, ""))
		out, err := s.try("run", "--template", kind, "--", "true")
		if err == nil || !strings.Contains(out, image) || strings.Contains(out, "not ready within") {
			t.Errorf("run of image %s = %v, want its name at once\n%s", image, err, out)
		}
		status, body := s.call(s.localKey(), http.MethodPost, "/sandboxes", map[string]any{"templateID": kind})
		if status < 400 || !strings.Contains(body, image) {
			t.Errorf("POST /sandboxes with image %s = %d %s", image, status, body)
		}
	}
	s.mustKubectl(strings.Replace(sandboxManifest, "barchan.local/base:latest", host+"/apps/typo:1", 1), "apply", "-f", "-")
	s.mustKubectl("", "wait", "--for=condition=Finished", "sandbox/by-kubectl", patience)
	if got := s.condition("by-kubectl", "Ready"); !strings.Contains(got, "False ImageUnavailable") || !strings.Contains(got, host+"/apps/typo:1") {
		t.Errorf("condition Ready = %q", got)
	}
	if out := s.mustKubectl("", "describe", "sandbox", "by-kubectl"); !strings.Contains(out, "Failed") || !strings.Contains(out, "typo:1") {
		t.Errorf("kubectl describe has no event of it:\n%s", out)
	}
	s.mustKubectl("", "delete", "sandbox", "by-kubectl", patience)
	eventually.NoError(t, "nothing is left", s.onlyLive)
}

// TestImageThatChanges imports another image of a name that is in use: members of pools that wait
// are replaced, and what is claimed, or was captured, keeps the image that it has.
func TestImageThatChanges(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newServer(t)
	s.start()
	program := helloProgram(t)
	arrives := func(greeting string) {
		t.Helper()
		tag, err := name.NewTag(baseImage)
		if err != nil {
			t.Fatal(err)
		}
		var saved bytes.Buffer
		if err := tarball.Write(tag, helloImage(t, program, greeting), &saved); err != nil {
			t.Fatal(err)
		}
		if out, err := s.tryIn(saved.String(), "image", "import", "-"); err != nil {
			t.Fatalf("import: %v\n%s", err, out)
		}
	}
	arrives("old")
	s.must("pool", "create", "base", "--template", "base", "--size", "1", "--wait")
	key := s.localKey()
	claimed := s.create(key, "base")
	snapshot := strings.TrimSpace(s.data("snapshot", claimed))
	eventually.True(t, "the pool is full again", func() bool {
		return objects[extensions.SandboxWarmPool](s, "sandboxwarmpools")[0].Status.ReadyReplicas == 1
	})
	arrives("new")
	greeting := func(id string) string {
		t.Helper()
		for line := range strings.Lines(s.data("exec", id, "--", "/bin/hello")) {
			if _, after, ok := strings.Cut(strings.TrimSpace(line), "GREETING="); ok {
				return after
			}
		}
		return ""
	}
	if got := greeting(s.create(key, "base")); got != "new" {
		t.Errorf("a sandbox made after the import runs the %s image", got)
	}
	for what, id := range map[string]string{"the sandbox": claimed, "its copy": s.create(key, snapshot)} {
		if got := greeting(id); got != "old" {
			t.Errorf("%s runs the %s image", what, got)
		}
	}
}
