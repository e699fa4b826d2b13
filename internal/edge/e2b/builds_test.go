package e2b

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/edge/e2b/api"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
	"github.com/barchan-dev/barchan/internal/testkit/npm"
)

// newBuildFixture has builds, which nothing runs.
func newBuildFixture(t *testing.T, cfg builds.Config) (*fixture, *builds.Store) {
	t.Helper()
	cfg.Dir = t.TempDir()
	files, err := builds.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return newFixtureOf(t, func(c *manager.Config) { c.BuildFiles = files }), files
}

// builder stands in for the controller of builds. It does no step: the image "held" leaves the build alone, a step that
// runs "fail now" fails, and others succeed with a log of 250 entries.
type builder struct {
	*fixture
	files *builds.Store
}

// run works until ctx is done.
func (b *builder) run(ctx context.Context) {
	for tick := time.NewTicker(5 * time.Millisecond); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
		all, err := b.cluster.TemplateBuilds(ctx, "")
		for i := range all {
			if one := &all[i]; one.Spec.From != nil && one.Spec.From.Image != "held" && one.Status.Phase == "" {
				err = errors.Join(err, b.build(ctx, one))
			}
		}
		if err != nil && ctx.Err() == nil {
			b.t.Errorf("stand-in: %v", err)
		}
	}
}

func (b *builder) build(ctx context.Context, one *barchan.TemplateBuild) error {
	one.Status.Phase = barchan.BuildReady
	for i, step := range one.Spec.Steps {
		switch {
		case step.Type == barchan.StepCopy:
			if err := b.unpack(one.Namespace, &step); err != nil {
				return err
			}
		case step.Type == barchan.StepRun && step.Args[0] == "fail now":
			one.Status.Phase, one.Status.FailedStep = barchan.BuildFailed, fmt.Sprint(i+1)
			meta.SetStatusCondition(&one.Status.Conditions, metav1.Condition{
				Type: barchan.ConditionReady, Status: metav1.ConditionFalse, Reason: barchan.ReasonFailed, Message: "failed to run command 'fail now': exit status 1",
			})
			return b.cluster.Status().Update(ctx, one)
		}
	}
	for i := range 250 {
		if err := b.files.Append(one.UID, builds.Entry{Timestamp: time.Now(), Level: builds.LevelInfo, Message: fmt.Sprint("entry ", i), Step: "1"}); err != nil {
			return err
		}
	}
	for _, tag := range one.Spec.Tags {
		made := pool.NewTag(one.Namespace, one.Spec.TemplateName, tag)
		pool.SetBuild(made, pool.Result{Build: one.Name, Blueprint: &fakecluster.Template(one.Namespace, "x", "base").Spec.SandboxBlueprint, Policies: &agents.BarchanSpec{}})
		if err := client.IgnoreAlreadyExists(b.cluster.Create(ctx, made)); err != nil {
			return err
		}
	}
	return b.cluster.Status().Update(ctx, one)
}

// unpack reads the archive of a copy as the node will.
func (b *builder) unpack(namespace string, step *barchan.BuildStep) (err error) {
	f, err := b.files.Files(namespace, step.FilesHash)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	plain, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	var names []string
	for r := tar.NewReader(plain); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if _, err := io.Copy(io.Discard, r); err != nil {
			return err
		}
		names = append(names, h.Name)
	}
	if step.Args[0] == "src" && !slices.Equal(names, []string{"src/", "src/app.txt", "src/large.bin"}) || len(names) == 0 {
		b.t.Errorf("the archive of %v has %v", step.Args, names)
	}
	return nil
}

// TestUnmodifiedSDKBuilds drives the template builds of E2B's own SDK.
func TestUnmodifiedSDKBuilds(t *testing.T) {
	for _, version := range []string{"2.51.0", "2.45.0"} {
		t.Run(version, func(t *testing.T) {
			module := filepath.Join(npm.Package(t, "e2b@"+version), "node_modules", "e2b", "dist", "index.mjs")
			f, files := newBuildFixture(t, builds.Config{})
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() { (&builder{f, files}).run(ctx) })
			defer wg.Wait()
			defer cancel()
			cmd := exec.CommandContext(t.Context(), "node", "testdata/build.mjs", module, t.TempDir())
			cmd.Env = append(os.Environ(), "E2B_API_KEY="+f.key, "OTHER_API_KEY="+f.other, "E2B_API_URL="+f.URL)
			if out, err := cmd.CombinedOutput(); err != nil || !strings.HasSuffix(string(out), "ok\n") {
				t.Errorf("the SDK: %v\n%s", err, out)
			}
			f.wantBuilt()
		})
	}
}

// wantBuilt compares the objects with what the SDK was told to build.
func (f *fixture) wantBuilt() {
	f.t.Helper()
	all, err := f.cluster.TemplateBuilds(f.t.Context(), team)
	if err != nil {
		f.t.Fatal(err)
	}
	i := slices.IndexFunc(all, func(b barchan.TemplateBuild) bool { return b.Spec.TemplateName == "mine" && b.Spec.From != nil })
	if i < 0 {
		f.t.Fatalf("no build of mine in %+v", all)
	}
	spec := all[i].Spec
	if len(spec.Steps) == 0 {
		f.t.Fatalf("the build is %+v", spec)
	}
	spec.Steps[0].FilesHash = ""
	got := fmt.Sprintf("%s %s %s %+v %s %s", spec.From.Image, spec.CPU, spec.Memory, spec.Steps, spec.StartCommand, spec.ReadyCommand)
	want := "debian:12 2 512Mi [{Type:Copy Args:[src /app/ root 0755] FilesHash: From:<nil> Mounts:[] Network: Force:false} {Type:Run Args:[echo hi root] FilesHash: From:<nil> Mounts:[] Network: Force:false}" +
		" {Type:Workdir Args:[/app] FilesHash: From:<nil> Mounts:[] Network: Force:false} {Type:User Args:[user] FilesHash: From:<nil> Mounts:[] Network: Force:false} {Type:Env Args:[A b C d] FilesHash: From:<nil> Mounts:[] Network: Force:false}] sleep 1 sleep 1"
	if got != want {
		f.t.Errorf("the build is\n%s, want\n%s", got, want)
	}
}

// request asks for a build and returns the paths of its routes.
func (f *fixture) request(name string) (build api.RequestedTemplateBuild, start, read string) {
	f.t.Helper()
	f.want(202, &build, "POST", "/v3/templates", fmt.Sprintf(`{"name":%q}`, name))
	path := "/templates/" + build.TemplateID + "/builds/" + build.BuildID
	return build, "/v2" + path, path
}

var buildHash = strings.Repeat("ab", 32)

func TestBuildErrors(t *testing.T) {
	f, _ := newBuildFixture(t, builds.Config{})
	_, start, read := f.request("mine")
	_, used, _ := f.request("used")
	f.want(202, nil, "POST", used, `{"fromImage":"debian"}`)
	f.want(409, nil, "POST", used, `{"fromImage":"debian"}`)
	step := func(s string) string {
		return `{"fromImage":"debian","steps":[{"type":"RUN","args":["true"]},` + s + `]}`
	}
	for name, give := range map[string]struct {
		method, path, body string
		header             []string
		status             int
		text               string
	}{
		"no name":          {"POST", "/v3/templates", `{}`, nil, 400, "name: must name a template"},
		"name":             {"POST", "/v3/templates", `{"name":"My_App"}`, nil, 400, `name: "My_App" must have`},
		"path as a name":   {"POST", "/v2/templates", `{"name":"../x"}`, nil, 400, `name: ".." is not your team`},
		"other team":       {"POST", "/v3/templates", `{"name":"team-b/x"}`, nil, 400, `name: "team-b" is not your team`},
		"tag":              {"POST", "/v3/templates", `{"name":"x:-v1"}`, nil, 400, "tags[0]: "},
		"tags":             {"POST", "/v3/templates", `{"name":"x","tags":["default","v/1"]}`, nil, 400, "tags[1]: "},
		"build as a tag":   {"POST", "/v3/templates", `{"name":"x","tags":["` + used[len(used)-36:] + `"]}`, nil, 400, "must not be a UUID"},
		"no tags":          {"POST", "/templates/tags", `{"target":"x","tags":[]}`, nil, 400, "tags: must have at least one"},
		"unknown target":   {"POST", "/templates/tags", `{"target":"nope:v1","tags":["v2"]}`, nil, 404, "template 'nope' not found"},
		"operator's tag":   {"POST", "/templates/tags", `{"target":"broken","tags":["v2"]}`, nil, 403, "not made by a build of yours"},
		"foreign target":   {"POST", "/templates/tags", `{"target":"team-b/x","tags":["v2"]}`, nil, 400, `target: "team-b" is not your team`},
		"default tag":      {"DELETE", "/templates/tags", `{"name":"x","tags":["default"]}`, nil, 400, "cannot delete the 'default' tag"},
		"tag in the name":  {"DELETE", "/templates/tags", `{"name":"x:v1","tags":["v2"]}`, nil, 400, "name: must not have a tag"},
		"tags of nothing":  {"GET", "/templates/nope/tags", "", nil, 404, "template 'nope' not found"},
		"publishing":       {"PATCH", "/v2/templates/broken", `{"public":true}`, nil, 403, "public: templates of a team cannot be published"},
		"pushed image":     {"POST", "/templates", `{"dockerfile":"FROM x"}`, nil, 403, "use `e2b template create`, or Template.build"},
		"another rebuild":  {"POST", "/templates/mine", `{"dockerfile":"FROM x"}`, nil, 403, "use `e2b template create`"},
		"foreign cancel":   {"DELETE", read, "", []string{"X-API-Key", f.other}, 404, "not found"},
		"cpuCount":         {"POST", "/v3/templates", `{"name":"x","cpuCount":-1}`, nil, 400, "cpuCount: must be from 1"},
		"memoryMB":         {"POST", "/v3/templates", `{"name":"x","memoryMB":2147483647}`, nil, 400, "memoryMB: must be from 1"},
		"no number":        {"POST", "/v3/templates", `{"name":"x","memoryMB":"1Gi"}`, nil, 400, "memoryMB: must be an integer"},
		"disk":             {"POST", "/v3/templates", `{"name":"x","minFreeDiskMb":2147483647}`, nil, 400, "minFreeDiskMb: the server's disk"},
		"no build's":       {"POST", "/v3/templates", `{"name":"broken"}`, nil, 409, "not made by a build"},
		"unknown build":    {"POST", "/v2/templates/mine/builds/nope", `{"fromImage":"x"}`, nil, 404, "build 'nope' of template 'mine' not found"},
		"odd build":        {"GET", "/templates/mine/builds/..%2fx/status", "", nil, 404, "not found"},
		"another template": {"GET", strings.Replace(read, "templates/t", "templates/x", 1) + "/status", "", nil, 404, "not found"},
		"another team":     {"POST", start, `{"fromImage":"x"}`, []string{"X-API-Key", f.other}, 404, "not found"},
		"its log":          {"GET", read + "/logs", "", []string{"X-API-Key", f.other}, 404, "not found"},
		"no source":        {"POST", start, `{}`, nil, 400, "fromImage: name either an image"},
		"two sources":      {"POST", start, `{"fromImage":"x","fromTemplate":"base"}`, nil, 400, "fromImage: name either an image"},
		"no template":      {"POST", start, `{"fromTemplate":"nope"}`, nil, 400, "fromTemplate: template 'nope' not found"},
		"registry of AWS":  {"POST", start, `{"fromImage":"x","fromImageRegistry":{"type":"aws","awsAccessKeyId":"a","awsSecretAccessKey":"b","awsRegion":"evil.test/"}}`, nil, 400, "fromImageRegistry.awsRegion: "},
		"odd registry":     {"POST", start, `{"fromImage":"x","fromImageRegistry":{"type":"ftp"}}`, nil, 400, "fromImageRegistry.type: "},
		"no password":      {"POST", start, `{"fromImage":"x","fromImageRegistry":{"type":"registry","username":"u"}}`, nil, 400, "fromImageRegistry.password: is empty"},
		"no key":           {"POST", start, `{"fromImage":"x","fromImageRegistry":{"type":"gcp","serviceAccountJson":"{"}}`, nil, 400, "fromImageRegistry.serviceAccountJson: "},
		"a stage's":        {"POST", start, `{"fromImage":"x","stages":[{"name":"a","fromImage":"y","fromImageRegistry":{"type":"registry","username":"u"}}]}`, nil, 400, "stages[0].fromImageRegistry.password: is empty"},
		"two for one":      {"POST", start, `{"fromImage":"x","stages":[{"name":"a","fromImage":"r.test/y","fromImageRegistry":{"type":"registry","username":"u","password":"p"}},{"name":"b","fromImage":"r.test/y:2","fromImageRegistry":{"type":"registry","username":"u","password":"q"}}]}`, nil, 400, "stages[1].fromImageRegistry: differs"},
		"no image":         {"POST", start, `{"fromTemplate":"base","fromImageRegistry":{"type":"registry","username":"u","password":"p"}}`, nil, 400, "fromImageRegistry: is for fromImage"},
		"step":             {"POST", start, step(`{"type":"ADD","args":["a"]}`), nil, 400, `steps[1].type: "ADD" is none of`},
		"no arguments":     {"POST", start, step(`{"type":"RUN"}`), nil, 400, "steps[1].args: "},
		"many arguments":   {"POST", start, step(`{"type":"USER","args":["a","b"]}`), nil, 400, "steps[1].args: "},
		"odd environment":  {"POST", start, step(`{"type":"ENV","args":["a","b","c"]}`), nil, 400, "steps[1].args: "},
		"no hash":          {"POST", start, step(`{"type":"COPY","args":["a","b"]}`), nil, 400, "steps[1].filesHash: "},
		"bad hash":         {"POST", start, step(`{"type":"COPY","args":["a","b"],"filesHash":"../x"}`), nil, 400, "steps[1].filesHash: "},
		"no files":         {"POST", start, step(`{"type":"COPY","args":["a","b"],"filesHash":"` + buildHash + `"}`), nil, 400, "steps[1].filesHash: the files of step 2 (COPY a b)"},
		"files' hash":      {"GET", "/templates/mine/files/" + strings.ToUpper(buildHash), "", nil, 400, "hash: "},
		"offset":           {"GET", read + "/status?logsOffset=-1", "", nil, 400, "logsOffset: must be 0 or more"},
		"limit":            {"GET", read + "/status?limit=101", "", nil, 400, "limit: must be from 1 to 100"},
		"direction":        {"GET", read + "/logs?direction=up", "", nil, 400, "direction: "},
		"level":            {"GET", read + "/logs?level=loud", "", nil, 400, "level: "},
		"public template":  {"DELETE", "/templates/base", "", nil, 403, "not made by a build of yours"},
		"operator's":       {"DELETE", "/templates/broken", "", nil, 403, "not made by a build of yours"},
	} {
		t.Run(name, func(t *testing.T) {
			status, text, _ := f.do(give.method, give.path, give.body, give.header...)
			if status != give.status || !strings.Contains(strings.ReplaceAll(text, `\"`, `"`), give.text) {
				t.Errorf("%s %s = %d %s, want %d and %s", give.method, give.path, status, text, give.status, give.text)
			}
		})
	}
	f.want(202, nil, "POST", start, step(`{"type":"WORKDIR","args":["/x"]}`)) // none of these has started it
}

func TestBuildStatusOverTheWire(t *testing.T) {
	f, _ := newBuildFixture(t, builds.Config{})
	build, start, read := f.request("mine")
	if want := pool.BuiltTemplateID(team, "mine"); build.TemplateID != want || fmt.Sprint(build.Names, build.Tags, build.Aliases, build.Public) != "[team-a/mine] [default] [mine] false" {
		t.Errorf("the build is %+v, want the template %s", build, want)
	}
	var info api.TemplateBuildInfo
	f.want(200, &info, "GET", read+"/status", "")
	if info.Status != "waiting" || info.TemplateID != build.TemplateID || info.BuildID != build.BuildID || info.Logs == nil {
		t.Errorf("before the start it is %+v", info)
	}
	f.want(202, nil, "POST", start, `{"fromTemplate":"base","force":true}`)
	f.want(200, &info, "GET", strings.Replace(read, build.TemplateID, "mine", 1)+"/status", "")
	if info.Status != "building" {
		t.Errorf("after the start it is %+v", info)
	}
	one := f.buildObject(build.BuildID)
	one.Status.Phase, one.Status.FailedStep = barchan.BuildFailed, barchan.BuildStepBase
	meta.SetStatusCondition(&one.Status.Conditions, metav1.Condition{Type: barchan.ConditionReady, Status: metav1.ConditionFalse, Reason: barchan.ReasonFailed, Message: "no such image"})
	if err := f.cluster.Status().Update(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	info = api.TemplateBuildInfo{}
	f.want(200, &info, "GET", read+"/status?logsOffset=4", "")
	if info.Status != "error" || info.Reason == nil || len(info.LogEntries) != 0 || info.LogEntries == nil {
		t.Fatalf("after its end it is %+v", info)
	}
	if got := *info.Reason; got.Message != "no such image" || request.Deref(got.Step) != "base" {
		t.Errorf("the reason is %+v", got)
	}
}

func TestBuildLogsOverTheWire(t *testing.T) {
	f, files := newBuildFixture(t, builds.Config{})
	build, _, read := f.request("mine")
	one := f.buildObject(build.BuildID)
	for i, level := range []string{"debug", "info", "warn", "error"} {
		if err := files.Append(one.UID, builds.Entry{Timestamp: time.UnixMilli(int64(1000 * i)), Level: level, Message: level, Step: "2"}); err != nil {
			t.Fatal(err)
		}
	}
	var info api.TemplateBuildInfo
	f.want(200, &info, "GET", read+"/status?logsOffset=1&limit=2", "")
	if len(info.LogEntries) != 2 || info.LogEntries[0].Message != "info" || request.Deref(info.LogEntries[0].Step) != "2" || info.LogEntries[1].Level != api.LevelWarn {
		t.Errorf("entries are %+v", info.LogEntries)
	}
	for query, want := range map[string]string{
		"": "info warn error", "?level=debug&direction=backward": "error warn info debug", "?level=warn": "warn error",
		"?cursor=1500": "warn error", "?cursor=1500&direction=backward": "info", "?limit=1&level=debug": "debug",
	} {
		var logs api.GetTemplateBuildLogs200JSONResponse
		f.want(200, &logs, "GET", read+"/logs"+query, "")
		var got []string
		for _, e := range logs.Logs {
			got = append(got, e.Message)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %v, want %s", query, got, want)
		}
	}
}

// buildObject reads a build's object.
func (f *fixture) buildObject(name string) *barchan.TemplateBuild {
	f.t.Helper()
	b := &barchan.TemplateBuild{}
	if err := f.cluster.Get(f.t.Context(), client.ObjectKey{Namespace: team, Name: name}, b); err != nil {
		f.t.Fatal(err)
	}
	return b
}

// built has a template that a build has made.
func built(t *testing.T) (*fixture, api.RequestedTemplateBuild) {
	t.Helper()
	f, files := newBuildFixture(t, builds.Config{})
	build, start, _ := f.request("mine")
	f.want(202, nil, "POST", start, `{"fromImage":"debian"}`)
	if err := (&builder{f, files}).build(t.Context(), f.buildObject(build.BuildID)); err != nil {
		t.Fatal(err)
	}
	return f, build
}

// TestBuiltTemplate lists the builds of a template.
func TestBuiltTemplate(t *testing.T) {
	f, build := built(t)
	second, _, _ := f.request("mine")
	var list []api.Template
	f.want(200, &list, "GET", "/templates", "")
	i := slices.IndexFunc(list, func(one api.Template) bool { return one.TemplateID == build.TemplateID })
	if i < 0 || list[i].BuildID != build.BuildID || second.TemplateID != build.TemplateID {
		t.Errorf("templates are %+v; the second build is %+v", list, second)
	}
	var one api.TemplateWithBuilds
	f.want(200, &one, "GET", "/templates/"+build.TemplateID, "")
	var got []string
	for _, b := range one.Builds {
		got = append(got, fmt.Sprint(b.BuildID, " ", b.Status, " ", b.FinishedAt != nil, " ", b.MemoryMB))
	}
	if want := []string{second.BuildID + " waiting false 1024", build.BuildID + " ready false 1024"}; !slices.Equal(got, want) {
		t.Errorf("builds are %q, want %q", got, want)
	}
	f.create(`{"templateID":"` + build.TemplateID + `"}`)
}

func TestDeletionOfBuiltTemplate(t *testing.T) {
	f, build := built(t)
	f.request("mine")
	p := fakecluster.Pool(team, "uses-it", "", "mine")
	if err := f.cluster.Create(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if status, text, _ := f.do("DELETE", "/templates/mine", ""); status != 409 || !strings.Contains(text, "uses-it") {
		t.Errorf("delete of one in use: %d %s", status, text)
	}
	if err := f.cluster.Delete(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	f.want(404, nil, "DELETE", "/templates/"+build.TemplateID, "", "X-API-Key", f.other)
	f.want(204, nil, "DELETE", "/templates/"+build.TemplateID, "")
	f.want(404, nil, "DELETE", "/templates/"+build.TemplateID, "")
	all, err := f.cluster.TemplateBuilds(t.Context(), team)
	if err != nil || len(all) != 1 || all[0].Name != build.BuildID {
		t.Errorf("builds are %+v, %v; want the one that has ended", all, err)
	}
}
