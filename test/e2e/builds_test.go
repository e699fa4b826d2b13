package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const buildManifest = `
apiVersion: barchan.dev/v1alpha1
kind: TemplateBuild
metadata: {name: %s}
spec:
  templateName: %s
  from: {%s}
  steps: [%s]
  startCommand: %q
  readyCommand: %q
`

// built applies a build and returns it when it has ended.
func (s *server) built(name, template, from, steps, start, ready string) *barchan.TemplateBuild {
	s.t.Helper()
	s.apply(fmt.Sprintf(buildManifest, name, template, from, steps, start, ready))
	return s.ended(name)
}

// ended returns a build when it has ended.
func (s *server) ended(name string) *barchan.TemplateBuild {
	s.t.Helper()
	c, b := s.client(), &barchan.TemplateBuild{}
	eventually.True(s.t, "build "+name+" ends", func() bool {
		if err := c.Get(s.t.Context(), client.ObjectKey{Namespace: "default", Name: name}, b); err != nil {
			s.t.Fatal(err)
		}
		return b.Status.Phase == barchan.BuildReady || b.Status.Phase == barchan.BuildFailed
	})
	return b
}

func (s *server) mustBuild(name, template, from, steps, start, ready string) *barchan.TemplateBuild {
	s.t.Helper()
	b := s.built(name, template, from, steps, start, ready)
	if b.Status.Phase != barchan.BuildReady {
		s.t.Fatalf("build %s: %+v\n%s", name, b.Status, s.tail())
	}
	return b
}

func TestTemplateBuilds(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: a whole server needs root")
	}
	s := newServer(t)
	s.set("BARCHAN_SANDBOX_DISK", buildDisk)
	s.start()
	s.must("image", "build", "base")
	const image = "image: " + baseImage
	steps := `{type: Run, args: ["id -un > who; mkdir d; echo first > d/f"]}, {type: Env, args: [WORD, "a $b"]}, {type: Workdir, args: [/srv/work]}, ` +
		`{type: Run, args: ['echo "$WORD" > word; pwd >> word; id -un >> word']}, {type: User, args: [root]}`
	b := s.mustBuild("one", "built", image, steps, "", "")
	if b.Status.CachedSteps != 0 || b.Status.TemplateID == "" {
		t.Errorf("status: %+v", b.Status)
	}
	id, out := s.keep("built", "sh", "-c", `cat ~user/who ~user/d/f /srv/work/word; pwd; id -un; echo "$WORD"`)
	if want := "user\nfirst\na $b\n/srv/work\nuser\n/srv/work\nroot\na $b\n"; out != want {
		t.Errorf("in a sandbox of it: %q, want %q", out, want)
	}
	s.must("rm", id)

	t.Run("again", func(t *testing.T) {
		s := s.in(t)
		if b := s.mustBuild("two", "built", image, steps, "", ""); b.Status.CachedSteps != 5 {
			t.Errorf("%d steps of 5 are taken from the build before", b.Status.CachedSteps)
		}
		more := strings.Replace(steps, "pwd >> word", "date >> word", 1)
		if b := s.mustBuild("three", "other", image, more, "", ""); b.Status.CachedSteps != 1 {
			t.Errorf("after a change of the fourth step %d are taken, want the first alone", b.Status.CachedSteps)
		}
	})
	t.Run("a step fails", func(t *testing.T) {
		s := s.in(t)
		b := s.built("four", "broken", image, `{type: Run, args: ["true"]}, {type: Run, args: ["echo no >&2; exit 3"]}`, "", "")
		why := b.Status.Conditions[0].Message
		if b.Status.Phase != barchan.BuildFailed || b.Status.FailedStep != "2" || why != "failed to run command 'echo no >&2; exit 3': command failed: exit status 3" {
			t.Errorf("%+v: %s", b.Status, why)
		}
		if n := len(b.Status.Log); n < 2 || !slices.Equal(b.Status.Log[n-2:], []string{"[2] no", "[2] " + why}) {
			t.Errorf("its log in the status: %q", b.Status.Log)
		}
		b = s.built("five", "broken", image, `{type: User, args: [root123]}`, "", "")
		why = b.Status.Conditions[0].Message
		if b.Status.FailedStep != "1" || why != "failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'" {
			t.Errorf("%+v: %s", b.Status, why)
		}
		b = s.built("numbers", "numbered", image, `{type: User, args: ["1234:60"]}, {type: Workdir, args: [/numbered]}, {type: Run, args: ["id -u > who; id -g >> who"]}`, "", "")
		_, out := s.keep("numbered", "sh", "-c", "cat who; id -u; id -g; stat -c %u:%g who .")
		if want := "1234\n60\n1234\n60\n1234:60\n1234:60\n"; out != want {
			t.Errorf("of a user without a name: %q, want %q: %+v", out, want, b.Status)
		}
		b = s.built("hog", "broken", image, `{type: Run, args: ["python3 -c 'bytearray(3 << 30)'"]}`, "", "")
		if why = b.Status.Conditions[0].Message; b.Status.FailedStep != "1" || !strings.Contains(why, "failed to run command") {
			t.Errorf("without memory: %+v: %s", b.Status, why)
		}
		t.Log(why)
		if out, err := s.try("template", "show", "broken"); err == nil {
			t.Errorf("there is a template after it failed: %s", out)
		}
	})
	t.Run("started", func(t *testing.T) {
		s := s.in(t)
		s.mustBuild("six", "served", "templateName: built", `{type: Run, args: ["echo served > page"]}`, "sleep 3; exec python3 -m http.server 8080", "curl -sf localhost:8080/page")
		id, _ := s.keep("served", "true")
		if got := s.untilServed(id, "/page"); got != "served\n" {
			t.Errorf("its server says %q", got)
		}
		if out := s.exec(id, "pgrep -f http.server | head -1"); out == "" {
			t.Error("the start command does not run")
		}
		// Members of a pool start from the same memory, so a warm claim has the server too.
		s.must("pool", "create", "served", "--template", "served", "--size", "1", "--wait")
		claimed, out := s.keep("served", "curl", "-s", "localhost:8080/page")
		var box agents.SandboxList
		if err := s.client().List(t.Context(), &box, client.MatchingLabels{agents.LabelLaunchType: agents.LaunchWarm}); err != nil {
			t.Fatal(err)
		}
		warm := slices.ContainsFunc(box.Items, func(x agents.Sandbox) bool {
			return x.Status.Barchan != nil && x.Status.Barchan.ID == claimed && pool.MemberOf(&x) == ""
		})
		if out != "served\n" || !warm {
			t.Errorf("%s, which was a member: %v, answers %q", claimed, warm, out)
		}
		s.must("pool", "rm", "served")
	})
	t.Run("the unmodified SDK", func(t *testing.T) {
		runSDK(t, "builds.test.mjs", append(s.in(t).clientEnv(), "BASE_IMAGE="+baseImage))
	})
	t.Run("a Dockerfile", func(t *testing.T) {
		s, dir := s.in(t), t.TempDir()
		for name, text := range map[string]string{
			".dockerignore": "secret\n", "secret": "no", "app/page": "from a file\n", "app/sub/b": "b",
			"Dockerfile": "ARG TAG=latest\nFROM barchan.local/base:${TAG}\nENV PORT=8090\nRUN echo \"$PORT\" > /port && id -un >> /port\nCOPY --chown=user . /srv/\nWORKDIR /srv/app\nUSER user\n" +
				"CMD python3 -m http.server $PORT\nHEALTHCHECK CMD curl -sf localhost:8090/page\n",
		} {
			path := filepath.Join(dir, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		_, tag, _ := strings.Cut(baseImage, ":")
		out := s.must("build", "-t", "docked", "--build-arg", "TAG="+tag, dir)
		t.Log(out)
		_, got := s.keep("docked", "sh", "-c", "cat /port; curl -s localhost:8090/page; ls -A /srv; id -un; pwd")
		if want := "8090\nroot\nfrom a file\n.dockerignore\nDockerfile\napp\nuser\n/srv/app\n"; got != want {
			t.Errorf("in a sandbox of it: %q, want %q", got, want)
		}
		out = s.must("build", "-t", "docked", "--build-arg", "TAG="+tag, dir)
		if n := strings.Count(out, "(cached)"); n != 7 {
			t.Errorf("%d steps are cached:\n%s", n, out)
		}
		if err := os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte("FROM "+baseImage+"\nRUN true\n\nRUN exit 9\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := s.try("build", "-t", "docked", dir)
		if err == nil || !strings.Contains(out, "Dockerfile:4") {
			t.Errorf("a failing step = %v, want the line:\n%s", err, out)
		}
		t.Log(out)
	})
	t.Run("a Dockerfile with stages", func(t *testing.T) { s.in(t).stages(t) })
	t.Run("an object with stages", func(t *testing.T) { s.in(t).objects(t) })
	t.Run("its log is in its status while it runs", func(t *testing.T) {
		s := s.in(t)
		s.apply(fmt.Sprintf(buildManifest, "talks", "talks", image, `{type: Run, args: ["echo first; sleep 6; echo second"]}, {type: Run, args: ["true"]}`, "", ""))
		c, b := s.client(), &barchan.TemplateBuild{}
		eventually.True(t, "the first line is in the status", func() bool {
			if err := c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "talks"}, b); err != nil {
				t.Fatal(err)
			}
			return slices.Contains(b.Status.Log, "[1] first")
		})
		if b.Ended() || b.Status.Step != 1 {
			t.Errorf("the line is there when the step has ended: %+v", b.Status)
		}
		before := b.DeepCopy()
		b.Labels = map[string]string{"of": "another"} // a write between two of the build's own
		if err := c.Patch(t.Context(), b, client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
		b = s.ended("talks")
		text := strings.Join(b.Status.Log, "\n")
		if b.Status.Phase != barchan.BuildReady || b.Labels["of"] == "" || strings.Count(text, "[1] second") != 1 || strings.Contains(text, "anew") ||
			!strings.HasSuffix(text, "[finalize] template talks is ready") {
			t.Errorf("%v, %+v", b.Labels, b.Status)
		}
	})
	t.Run("hostile archives", func(t *testing.T) { s.in(t).archives(t) })
	t.Run("deleted while it runs", func(t *testing.T) {
		s := s.in(t)
		s.apply(fmt.Sprintf(buildManifest, "seven", "never", image, `{type: Run, args: ["sleep 600"]}`, "", ""))
		c := s.client()
		steps := func() (n int) {
			var boxes agents.SandboxList
			if err := c.List(t.Context(), &boxes, client.MatchingLabels{barchan.LabelBuild: "seven"}); err != nil {
				t.Fatal(err)
			}
			return len(boxes.Items)
		}
		eventually.True(t, "the step runs", func() bool { return steps() == 1 })
		b := &barchan.TemplateBuild{}
		b.Namespace, b.Name = "default", "seven"
		if err := c.Delete(t.Context(), b); err != nil {
			t.Fatal(err)
		}
		eventually.True(t, "its sandbox is gone", func() bool { return steps() == 0 })
	})
	if left := s.data("list", "-q"); strings.Contains(left, "build-") {
		t.Errorf("sandboxes of builds are listed: %s", left)
	}
	s.untilNothingWrong()
}
