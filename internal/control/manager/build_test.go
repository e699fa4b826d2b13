package manager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	buildfiles "github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/manager/builds"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

var filesHash = strings.Repeat("0a", 32)

// withBuilds opens the files of builds.
func withBuilds(t *testing.T) func(*Config) {
	t.Helper()
	files, err := buildfiles.Open(buildfiles.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	return func(c *Config) { c.BuildFiles = files }
}

// newRealBuilds is over the real API server, which runs no builds.
func newRealBuilds(t *testing.T) (*Manager, client.Client) {
	t.Helper()
	_, w := newRealAPI(t)
	m, _ := w.manager(t, w.objects, withBuilds(t))
	return m, w.objects.Live()
}

func built(t *testing.T, name, build string) *extensions.SandboxTemplate {
	t.Helper()
	made := fakecluster.Template(team, name, "base")
	made.Labels = map[string]string{barchan.LabelBuild: build}
	made.Annotations = map[string]string{pool.AnnotationTemplateID: pool.BuiltTemplateID(team, name)}
	return made
}

// TestBuildOnRealAPI goes through a build's life on the real API server, with its validation.
func TestBuildOnRealAPI(t *testing.T) {
	m, objects := newRealBuilds(t)
	ctx := t.Context()
	r, err := m.Builds.Request(ctx, builds.Request{Namespace: team, Name: "mine:default", Tags: []string{"default"}, CPUs: 3, MemoryMB: 700})
	if err != nil || r.TemplateID != pool.BuiltTemplateID(team, "mine") || r.Name != "mine" || !slices.Equal(r.Tags, []string{"default"}) {
		t.Fatalf("Request = %+v, %v", r, err)
	}
	m.wantBuild(t, r, builds.StateWaiting)
	if err := m.Builds.Files.PutFiles(ctx, team, filesHash, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	what := builds.Instructions{FromTemplate: "base", StartCommand: "start", ReadyCommand: "ready", Force: true, Steps: []builds.Step{
		{Type: "RUN", Args: []string{"true", "root"}},
		{Type: "COPY", Args: []string{"a", "b", "", ""}, FilesHash: filesHash, Force: true},
		{Type: "ENV", Args: []string{"A", "b", "C", ""}},
	}}
	if err := m.Builds.Trigger(ctx, team, r.TemplateID, r.BuildID, what); err != nil {
		t.Fatalf("Trigger: %v", err)
	}
	m.wantBuild(t, r, builds.StateBuilding)
	wantKind(t, m.Builds.Trigger(ctx, team, r.TemplateID, r.BuildID, what), errs.ErrConflict, "was started before")
	b := buildObject(t, objects, r)
	want := fmt.Sprintf("mine {Image: ImagePullSecrets:[] TemplateName:base} [{Type:Run Args:[true root] FilesHash: From:<nil> Mounts:[] Network: Force:false} {Type:Copy Args:[a b  ] FilesHash:%s From:<nil> Mounts:[] Network: Force:true} {Type:Env Args:[A b C ] FilesHash: From:<nil> Mounts:[] Network: Force:false}] start ready true 3 700Mi", filesHash)
	if s := b.Spec; fmt.Sprintf("%s %+v %+v %s %s %v %s %s", s.TemplateName, *s.From, s.Steps, s.StartCommand, s.ReadyCommand, s.Force, s.CPU, s.Memory) != want {
		t.Errorf("the object is %+v, want %s", s, want)
	}
}

// TestCredentialsOnRealAPI: a build and its stages from images get the credentials of a registry, as a Secret that the build owns.
func TestCredentialsOnRealAPI(t *testing.T) {
	m, objects := newRealBuilds(t)
	ctx := t.Context()
	request := func() builds.Requested {
		t.Helper()
		r, err := m.Builds.Request(ctx, builds.Request{Namespace: team, Name: "private"})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	what := builds.Instructions{
		FromImage: "registry.test/app", Registry: &builds.Registry{Type: "registry", Username: "ann", Password: "hidden"},
		Stages: []builds.Stage{{Name: "image", FromImage: "registry.test/tools"}, {Name: "template", FromTemplate: "base"}},
	}
	r := request()
	if err := m.Builds.Trigger(ctx, team, r.TemplateID, r.BuildID, what); err != nil {
		t.Fatalf("Trigger: %v", err)
	}
	b, name := buildObject(t, objects, r), barchan.CredentialsName(r.BuildID)
	for i, got := range [][]corev1.LocalObjectReference{b.Spec.From.ImagePullSecrets, b.Spec.Stages[0].From.ImagePullSecrets} {
		if len(got) != 1 || got[0].Name != name {
			t.Errorf("source %d has %v", i, got)
		}
	}
	if got := b.Spec.Stages[1].From.ImagePullSecrets; got != nil {
		t.Errorf("the stage from a template has %v", got)
	}
	secret := &corev1.Secret{}
	if err := objects.Get(ctx, client.ObjectKey{Namespace: team, Name: name}, secret); err != nil || !metav1.IsControlledBy(secret, b) ||
		string(secret.Data[corev1.DockerConfigJsonKey]) != `{"auths":{"registry.test":{"username":"ann","password":"hidden"}}}` {
		t.Errorf("Secret: %v, %v", secret, err)
	}
	// A Secret of another owner stays as it is.
	r = request()
	mine := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: barchan.CredentialsName(r.BuildID)}, StringData: map[string]string{"k": "v"}}
	if err := objects.Create(ctx, mine); err != nil {
		t.Fatal(err)
	}
	wantKind(t, m.Builds.Trigger(ctx, team, r.TemplateID, r.BuildID, what), errs.ErrConflict, "fromImageRegistry: Secret")
	m.wantBuild(t, r, builds.StateWaiting)
}

// wantBuild fails unless a build is in a state.
func (m *Manager) wantBuild(t *testing.T, r builds.Requested, want builds.State) {
	t.Helper()
	if v, err := m.Builds.Status(t.Context(), team, r.TemplateID, r.BuildID, builds.StatusRequest{AtLeast: slog.LevelDebug}); err != nil || v.State != want {
		t.Errorf("status is %+v, %v; want %s", v, err, want)
	}
}

func buildObject(t *testing.T, objects client.Client, r builds.Requested) *barchan.TemplateBuild {
	t.Helper()
	b := &barchan.TemplateBuild{}
	if err := objects.Get(t.Context(), client.ObjectKey{Namespace: team, Name: r.BuildID}, b); err != nil {
		t.Fatal(err)
	}
	return b
}

// TestEndOfBuildOnRealAPI has a build that failed, after one that made the template.
func TestEndOfBuildOnRealAPI(t *testing.T) {
	m, objects := newRealBuilds(t)
	ctx := t.Context()
	r, err := m.Builds.Request(ctx, builds.Request{Namespace: team, Name: "mine", CPUs: 3, MemoryMB: 700})
	if err != nil {
		t.Fatal(err)
	}
	b := buildObject(t, objects, r)
	b.Status.Phase, b.Status.FailedStep = barchan.BuildFailed, "2"
	b.Status.Conditions = []metav1.Condition{{Type: barchan.ConditionReady, Status: metav1.ConditionFalse, Reason: barchan.ReasonFailed, Message: "why", LastTransitionTime: metav1.Now()}}
	b.Status.CompletedAt = new(metav1.Now())
	if err := objects.Status().Update(ctx, b); err != nil {
		t.Fatal(err)
	}
	if v, err := m.Builds.Status(ctx, team, "mine", r.BuildID, builds.StatusRequest{Limit: 1}); err != nil || v.State != builds.StateError || v.Step != "2" || v.Message != "why" || v.TemplateID != r.TemplateID {
		t.Errorf("status is %+v, %v", v, err)
	}
	if err := objects.Create(ctx, built(t, "mine", r.BuildID)); err != nil {
		t.Fatal(err)
	}
	again, err := m.Builds.Request(ctx, builds.Request{Namespace: team, Name: "mine"}) // the cache may not have the template yet
	if err != nil || again.TemplateID != r.TemplateID {
		t.Errorf("Request = %+v, %v", again, err)
	}
	want := fmt.Sprintf("%s waiting false 0 0, %s error true 3 700, ", again.BuildID, r.BuildID)
	await(t, func() bool {
		got := ""
		list, err := m.Builds.List(ctx, client.ObjectKey{Namespace: team, Name: "mine"})
		for _, b := range list {
			got += fmt.Sprintf("%s %s %v %d %d, ", b.ID, b.State, b.EndedAt != nil, b.CPUs, b.MemoryMB)
		}
		return err == nil && got == want
	})
	await(t, func() bool {
		v, err := m.Templates.Get(ctx, team, r.TemplateID)
		return err == nil && v.Build == r.BuildID
	})
	if err := m.Builds.Delete(ctx, team, r.TemplateID); err != nil {
		t.Errorf("Delete: %v", err)
	}
	wantKind(t, second(m.Builds.Status(ctx, team, again.TemplateID, again.BuildID, builds.StatusRequest{AtLeast: slog.LevelDebug})), errs.ErrNotFound, "not found")
}

// TestTriggerOnce: of several triggers at a time one starts the build, although a controller writes its status meanwhile.
func TestTriggerOnce(t *testing.T) {
	m, objects := newRealBuilds(t)
	r, err := m.Builds.Request(t.Context(), builds.Request{Namespace: team, Name: "mine"})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	results := make(chan error, 4)
	for i := range cap(results) {
		wg.Go(func() {
			results <- m.Builds.Trigger(t.Context(), team, r.TemplateID, r.BuildID, builds.Instructions{FromImage: fmt.Sprint("image", i)})
		})
	}
	for range 3 {
		b := buildObject(t, objects, r)
		b.Status.Step++
		if err := objects.Status().Update(t.Context(), b); err != nil {
			t.Log(err) // a conflict
		}
	}
	wg.Wait()
	close(results)
	started := 0
	for err := range results {
		if err == nil {
			started++
		} else {
			wantKind(t, err, errs.ErrConflict, "was started before")
		}
	}
	if started != 1 {
		t.Errorf("%d triggers started the build", started)
	}
}

// contested is a build's object that changes before each of its first writes.
type contested struct {
	sandboxes.Objects
	times int
}

func (c *contested) Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error {
	if c.times--; c.times >= 0 {
		now := &barchan.TemplateBuild{}
		if err := c.Get(ctx, client.ObjectKeyFromObject(obj), now); err != nil {
			return err
		}
		now.Labels = map[string]string{"n": fmt.Sprint(c.times)}
		if err := c.Objects.Update(ctx, now); err != nil {
			return err
		}
	}
	return c.Objects.Update(ctx, obj, opts...)
}

func TestTriggerAfterConflicts(t *testing.T) {
	for times, want := range map[int]bool{3: true, 100: false} {
		f := newFixture(t, withBuilds(t), func(c *Config) { c.Objects = &contested{Objects: c.Objects, times: times} })
		r, err := f.Builds.Request(t.Context(), builds.Request{Namespace: team, Name: "mine"})
		if err != nil {
			t.Fatal(err)
		}
		err = f.Builds.Trigger(t.Context(), team, r.TemplateID, r.BuildID, builds.Instructions{FromImage: "x"})
		if (err == nil) != want || (err != nil && !errors.Is(err, errs.ErrConflict)) {
			t.Errorf("after %d conflicts: %v", times, err)
		}
	}
}

func TestBuildRequestNames(t *testing.T) {
	f := newFixture(t, withBuilds(t))
	made := built(t, "my-app", "b")
	made.Spec.Barchan = &extensions.TemplateBarchanSpec{Aliases: []string{"my_app"}}
	if err := f.cluster.Create(t.Context(), made); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"new": "new", team + "/new": "new", "a.b": "a.b", "my_app": "my-app", "my-app": "my-app", "base": "base", pool.BuiltTemplateID(team, "my-app"): "my-app",
	} {
		if r, err := f.Builds.Request(t.Context(), builds.Request{Namespace: team, Name: name}); err != nil || r.Name != want || r.TemplateID != pool.BuiltTemplateID(team, want) {
			t.Errorf("%s: %+v, %v; want %s", name, r, err, want)
		}
	}
	for name, kind := range map[string]error{
		"": errs.ErrInvalid, ":default": errs.ErrInvalid, "other_app": errs.ErrInvalid, "App": errs.ErrInvalid, "a/b/c": errs.ErrInvalid,
		strings.Repeat("a", 254): errs.ErrInvalid, "x:-v1": errs.ErrInvalid, "sized": errs.ErrConflict,
	} {
		_, err := f.Builds.Request(t.Context(), builds.Request{Namespace: team, Name: name})
		wantKind(t, err, kind, "")
	}
}

// TestManyOpenBuilds: a tenant may have a number of builds that have not ended.
func TestManyOpenBuilds(t *testing.T) {
	f := newFixture(t, withBuilds(t))
	f.setQuota(t, quota.Builds.Annotation(), "3")
	f.setQuota(t, quota.Templates.Annotation(), "4")
	var last builds.Requested
	for range 3 {
		var err error
		if last, err = f.Builds.Request(t.Context(), builds.Request{Namespace: team, Name: "mine"}); err != nil {
			t.Fatal(err)
		}
	}
	req := builds.Request{Namespace: team, Name: "mine"}
	wantKind(t, second(f.Builds.Request(t.Context(), req)), errs.ErrExhausted, "at most 3 template builds")
	if _, err := f.Builds.Request(t.Context(), builds.Request{Namespace: "team-b", Name: "mine"}); err != nil {
		t.Errorf("another team's: %v", err)
	}
	b := buildObject(t, f.cluster, last)
	b.Status.Phase = barchan.BuildFailed
	if err := f.cluster.Status().Update(t.Context(), b); err != nil {
		t.Fatal(err)
	}
	quota.ObserveObjects[*barchan.TemplateBuild](f.quotas)(nil, b)
	req.Tags = []string{"a", "b", "c", "d", "e"}
	wantKind(t, second(f.Builds.Request(t.Context(), req)), errs.ErrExhausted, "at most 4 templates, tags included")
	req.Tags = nil
	if _, err := f.Builds.Request(t.Context(), req); err != nil {
		t.Errorf("after the end of one: %v", err)
	}
}

// TestBuildsWhileDegraded: nothing new is begun, and what there is can be read.
func TestBuildsWhileDegraded(t *testing.T) {
	gate, err := health.NewGate(telemetry.Discard(), nil)
	if err != nil {
		t.Fatal(err)
	}
	f := newFixture(t, withBuilds(t), func(c *Config) { c.Gate = gate })
	ctx := t.Context()
	r, err := f.Builds.Request(ctx, builds.Request{Namespace: team, Name: "mine"})
	if err != nil {
		t.Fatal(err)
	}
	_, path, err := f.Builds.UploadURL(team, filesHash)
	if err != nil {
		t.Fatal(err)
	}
	gate.Set("disk", errs.Public(nil, "no room"))
	wantKind(t, second(f.Builds.Request(ctx, builds.Request{Namespace: team, Name: "mine"})), errs.ErrUnavailable, "disk: no room")
	wantKind(t, f.Builds.Trigger(ctx, team, r.TemplateID, r.BuildID, builds.Instructions{FromImage: "x"}), errs.ErrUnavailable, "disk: no room")
	wantKind(t, f.Builds.Upload(ctx, path, 1, strings.NewReader("x")), errs.ErrUnavailable, "disk: no room")
	_, _, err = f.Builds.UploadURL(team, filesHash)
	wantKind(t, err, errs.ErrUnavailable, "disk: no room")
	if v, err := f.Builds.Status(ctx, team, r.TemplateID, r.BuildID, builds.StatusRequest{AtLeast: slog.LevelDebug}); err != nil || v.State != builds.StateWaiting {
		t.Errorf("status is %+v, %v", v, err)
	}
}

// TestBuildLog pages through a log, and reads it backwards.
func TestBuildLog(t *testing.T) {
	f := newFixture(t, withBuilds(t))
	r, err := f.Builds.Request(t.Context(), builds.Request{Namespace: team, Name: "mine"})
	if err != nil {
		t.Fatal(err)
	}
	b := buildObject(t, f.cluster, r)
	var want []string
	for i := range 150 {
		want = append(want, fmt.Sprint(i))
		if err := f.Builds.Files.Append(b.UID, buildfiles.Entry{Timestamp: time.UnixMilli(int64(i)), Level: buildfiles.LevelInfo, Message: fmt.Sprint(i)}); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for pages := 0; ; pages++ {
		v, err := f.Builds.Status(t.Context(), team, r.TemplateID, r.BuildID, builds.StatusRequest{Offset: len(got), AtLeast: slog.LevelDebug})
		if err != nil || len(v.Entries) > builds.MaxEntries {
			t.Fatal(len(v.Entries), err)
		}
		if len(v.Entries) == 0 {
			if pages != 2 {
				t.Errorf("%d pages, want 2", pages)
			}
			break
		}
		got = append(got, messages(v.Entries)...)
	}
	if !slices.Equal(got, want) {
		t.Errorf("entries are %v", got)
	}
	back, err := f.Builds.Entries(t.Context(), team, r.TemplateID, r.BuildID, builds.LogRequest{Backward: true, Limit: 2, From: time.UnixMilli(100)})
	if err != nil || !slices.Equal(messages(back), []string{"100", "99"}) {
		t.Errorf("backwards: %v, %v", back, err)
	}
}

func messages(entries []buildfiles.Entry) (texts []string) {
	for _, e := range entries {
		texts = append(texts, e.Message)
	}
	return texts
}
