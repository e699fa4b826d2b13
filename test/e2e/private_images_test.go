package e2e

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/tarball"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const privateSandbox = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: %NAME, namespace: %NAMESPACE}
spec:
  podTemplate:
    spec:
      imagePullSecrets: [%SECRETS]
      containers:
      - {name: main, image: "%IMAGE", command: [sleep, "1000000"]}
`

func privateManifest(name, namespace, image, secrets string) string {
	return strings.NewReplacer("%NAMESPACE", namespace, "%NAME", name, "%IMAGE", image, "%SECRETS", secrets).Replace(privateSandbox)
}

// TestPrivateImages: images of a registry that requires a user, for the namespaces that have one; and images that this machine made,
// for a registry and for Docker.
func TestPrivateImages(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	s.start()
	s.must("image", "build", "base")
	host := startRegistry(t)
	private := host + "/private/base:1"
	if out, err := s.tryIn(registryPassword, "image", "push", baseImage, private, "--username", registryUser, "--password-stdin", "--plain-http"); err != nil {
		t.Fatalf("push: %v\n%s", err, out)
	}
	t.Run("imagePullSecrets", func(t *testing.T) { testPullSecrets(t, s.in(t), host, private) })
	t.Run("the unmodified SDK", func(t *testing.T) {
		s := s.in(t)
		runSDK(t, "registry.test.mjs", append(s.clientEnv(), "PRIVATE_IMAGE="+private, "REGISTRY_USER="+registryUser, "REGISTRY_PASSWORD="+registryPassword))
		eventually.True(t, "the build's credentials are gone", func() bool {
			return strings.TrimSpace(s.mustKubectl("", "get", "secrets", "-l", barchan.LabelBuild, "-o", "name")) == ""
		})
	})
	t.Run("barchan build", func(t *testing.T) { testPrivateBuild(t, s.in(t), host, private) })
	t.Run("export", func(t *testing.T) { testImageExport(t, s.in(t), host) })
	t.Run("prune", func(t *testing.T) { testPrune(t, s.in(t), private) })
	if log, err := os.ReadFile(filepath.Join(s.dir, "log")); err != nil || bytes.Contains(log, []byte(registryPassword)) {
		t.Errorf("the server's log has the registry's password (or is not there: %v)", err)
	}
}

func testPullSecrets(t *testing.T, s *server, host, private string) {
	s.mustKubectl("", "create", "namespace", "other")
	s.mustKubectl("", "create", "secret", "docker-registry", "reg", "--docker-server="+host, "--docker-username="+registryUser, "--docker-password="+registryPassword)
	s.mustKubectl(privateManifest("without", "default", private, ""), "apply", "-f", "-")
	s.awaitUnready("default", "without", "access denied")
	s.mustKubectl(privateManifest("with", "default", private, "{name: reg}"), "apply", "-f", "-")
	s.mustKubectl("", "wait", "--for=condition=Ready", "sandbox/with", patience)
	if out := s.mustKubectl("", "describe", "sandbox", "with"); !strings.Contains(out, "Pulled") || !strings.Contains(out, "MiB") {
		t.Errorf("kubectl describe has no event of the pull:\n%s", out)
	}
	// The image is here now, and still not the others'.
	s.mustKubectl(privateManifest("foreign", "other", private, ""), "apply", "-f", "-")
	s.awaitUnready("other", "foreign", "is private")
	s.mustKubectl(privateManifest("missing", "other", private, "{name: reg}"), "apply", "-f", "-")
	s.awaitUnready("other", "missing", "Secret other/reg")
	if out, err := s.kubectl(privateManifest("odd", "other", private, "{name: No_Name}"), "apply", "-f", "-"); err == nil || !strings.Contains(out, "imagePullSecrets[0].name") {
		t.Errorf("a Secret with an odd name: %v\n%s", err, out)
	}
	if b := s.privateStage("private-stage", private, "{name: reg}"); b.Status.Phase != barchan.BuildReady {
		t.Errorf("build with a stage from a private image: %+v\n%s", b.Status, s.tail())
	}
	if b := s.privateStage("foreign-stage", private, ""); b.Status.FailedStep != "tools/base" || !strings.Contains(b.Status.Conditions[0].Message, "is private") {
		t.Errorf("the same without credentials: %+v", b.Status)
	}
	if out := s.must("image", "ls"); !strings.Contains(out, "private") {
		t.Errorf("image ls:\n%s", out)
	}
	s.mustKubectl("", "delete", "sandbox", "without", "with")
	s.mustKubectl("", "delete", "sandbox", "foreign", "missing", "-n", "other")
}

// testPrivateBuild builds from private images with what `docker login` has left, which neither the template nor the log has.
func testPrivateBuild(t *testing.T, s *server, host, private string) {
	dir, config := t.TempDir(), t.TempDir()
	auth := base64.StdEncoding.EncodeToString([]byte(registryUser + ":" + registryPassword))
	if err := errors.Join(
		os.WriteFile(filepath.Join(config, "config.json"), fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, host, auth), 0o600),
		os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte("FROM "+private+" AS tools\nRUN echo staged > /staged\nFROM "+private+"\nCOPY --from=tools /staged /staged\n"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	if out, err := s.try("build", "-t", "private-built", "--registry-auth", "none", dir); err == nil || strings.Contains(out, registryPassword) {
		t.Errorf("without credentials: %v\n%s", err, out)
	}
	out, err := s.try("build", "-t", "private-built", "--registry-auth", config, dir)
	if err != nil || strings.Contains(out, registryPassword) {
		t.Fatalf("build: %v\n%s", err, out)
	}
	if out := s.data("run", "--template", "private-built", "--", "sh", "-c", "cat /staged; env; grep -rl "+registryPassword+" /etc /root /home /.barchan 2>/dev/null; true"); !strings.HasPrefix(out, "staged") ||
		strings.Contains(out, registryPassword) || strings.Contains(out, "/config.json") {
		t.Errorf("the template has\n%s", out)
	}
}

// privateStage builds a template with a file of a private image.
func (s *server) privateStage(name, image, secrets string) *barchan.TemplateBuild {
	s.t.Helper()
	s.apply(fmt.Sprintf(`
apiVersion: barchan.dev/v1alpha1
kind: TemplateBuild
metadata: {name: %s}
spec:
  templateName: %[1]s
  from: {image: %q}
  stages: [{name: tools, from: {image: %q, imagePullSecrets: [%s]}, steps: [{type: Run, args: ["echo staged > /staged", root]}]}]
  steps: [{type: Copy, args: [/staged, /staged], from: {stage: tools}}]
`, name, baseImage, image, secrets))
	return s.ended(name)
}

// awaitUnready waits until a sandbox lacks its image for a reason.
func (s *server) awaitUnready(namespace, name, why string) {
	s.t.Helper()
	eventually.True(s.t, name+" lacks its image", func() bool {
		got, _ := s.kubectl("", "get", "sandbox", name, "-n", namespace, "-o", `jsonpath={range .status.conditions[?(@.type=="Ready")]}{.reason}: {.message}{end}`)
		if strings.Contains(got, "ImageUnavailable") && !strings.Contains(got, why) {
			s.t.Fatalf("condition of %s: %s, want %q", name, got, why)
		}
		return strings.Contains(got, "ImageUnavailable")
	})
}

// testImageExport exports what a build made to a file and a registry, and runs it again from both.
func testImageExport(t *testing.T, s *server, host string) {
	steps := `{type: Run, args: ["echo made > made; rm /etc/issue", root]}, {type: Env, args: [WORD, "a $b"]}, {type: Workdir, args: [/srv]}`
	s.mustBuild("exported", "exported", "image: "+baseImage, steps, "exec python3 -m http.server 8080", "curl -sf localhost:8080/")
	file := filepath.Join(t.TempDir(), "image.tar")
	s.must("image", "export", "exported", file, "--name", "local.test/exported:1")
	img, err := tarball.ImageFromPath(file, nil) // as `docker load`
	if err != nil {
		t.Fatal(err)
	}
	c := mustConfig(t, img)
	if h := c.History; len(h) < 2 || !strings.Contains(h[len(h)-2].CreatedBy, "RUN echo made") || !slices.Contains(c.Config.Env, "WORD=a $b") ||
		c.Config.WorkingDir != "/srv" || c.Config.User != "user" || !strings.Contains(strings.Join(c.Config.Cmd, " "), "http.server 8080") {
		t.Errorf("the image's configuration: %+v\nhistory %+v", c.Config, h)
	}
	s.must("image", "import", file)
	out := s.data("image", "push", "exported", host+"/apps/exported:1", "--plain-http")
	if !strings.HasPrefix(out, host+"/apps/exported@sha256:") {
		t.Errorf("push printed %q", out)
	}
	for name, image := range map[string]string{"imported": "local.test/exported:1", "pulled": host + "/apps/exported:1"} {
		s.apply(imageTemplate(name, image, ""))
		id, out := s.keep(name, "sh", "-c", `cat ~user/made /made 2>/dev/null; ls /etc/issue 2>&1; echo "$WORD"; pwd; id -un`)
		if !strings.Contains(out, "made\n") || !strings.Contains(out, "No such file") || !strings.HasSuffix(out, "a $b\n/srv\nuser\n") {
			t.Errorf("%s: %q", name, out)
		}
		if body := s.untilServed(id, "/"); !strings.Contains(body, "Directory listing") {
			t.Errorf("%s: its program serves %q", name, body)
		}
		s.must("rm", id)
	}
	if out, err := s.try("image", "export", "no-such", filepath.Join(t.TempDir(), "x")); err == nil || !strings.Contains(out, "no such template") {
		t.Errorf("export of nothing: %v\n%s", err, out)
	}
}

// testPrune removes what nothing uses: not what a template names, nor what no registry has.
func testPrune(t *testing.T, s *server, private string) {
	wantImages := func(when string, want map[string]bool) {
		t.Helper()
		for ref, kept := range want {
			if _, ok := s.image(ref); ok != kept {
				t.Errorf("%s: image %s is there: %v, want %v", when, ref, ok, kept)
			}
		}
	}
	s.must("image", "prune")
	wantImages("while a template names it", map[string]bool{private: true, baseImage: true, "local.test/exported:1": true})
	s.mustKubectl("", "delete", "sandboxtemplate", "private-built", "imported")
	if out := s.must("image", "prune"); !strings.Contains(out, private) {
		t.Errorf("image prune printed %q", out)
	}
	wantImages("without the template", map[string]bool{private: false, baseImage: true, "local.test/exported:1": true})
	s.must("image", "prune", "--all")
	wantImages("with --all", map[string]bool{baseImage: true, "local.test/exported:1": false})
}
