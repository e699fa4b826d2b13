package manager

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

// What production hands in must fit.
var (
	_ Cache            = (*cache.Cache)(nil)
	_ sandboxes.Routes = (*route.Table)(nil)
)

const team = "team-a"

type fakeWitness struct {
	lines   []envd.LogLine
	history []envd.Metrics
}

func (f *fakeWitness) Stats(context.Context, *agents.Sandbox) (envd.Metrics, error) {
	return envd.Metrics{Timestamp: time.Now().Unix(), CPUCount: 2, MemUsed: 7, DiskUsed: 1 << 40, DiskTotal: 1 << 42}, nil // the machine's disk
}

func (f *fakeWitness) StatsHistory(ctx context.Context, s *agents.Sandbox, _ time.Time) ([]envd.Metrics, error) {
	now, err := f.Stats(ctx, s)
	return append(slices.Clone(f.history), now), err
}

func (f *fakeWitness) Logs(context.Context, *agents.Sandbox, string, time.Time) ([]envd.LogLine, error) {
	return slices.Clone(f.lines), nil
}

// fakeAgents stands for the agents of all sandboxes.
type fakeAgents struct {
	mu    sync.Mutex
	fails int // so many requests fail; +checklocks:mu
	// +checklocks:mu
	requests map[types.UID][]envd.InitRequest
}

func (*fakeAgents) Wake(context.Context, *agents.Sandbox) {}

func (f *fakeAgents) Bind(_ context.Context, s *agents.Sandbox, req envd.InitRequest) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fails > 0 {
		f.fails--
		return errs.ErrUnavailable
	}
	if f.requests == nil {
		f.requests = map[types.UID][]envd.InitRequest{}
	}
	f.requests[s.UID] = append(f.requests[s.UID], req)
	return nil
}

func (f *fakeAgents) fail(times int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fails = times
}

func (f *fakeAgents) of(s *agents.Sandbox) []envd.InitRequest {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.requests[s.UID]
}

// counted counts writes.
type counted struct {
	sandboxes.Objects
	writes atomic.Int64
}

func (c *counted) Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error {
	c.writes.Add(1)
	return c.Objects.Create(ctx, obj, opts...)
}

func (c *counted) Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error {
	c.writes.Add(1)
	return c.Objects.Update(ctx, obj, opts...)
}

func (c *counted) Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error {
	c.writes.Add(1)
	return c.Objects.Delete(ctx, obj, opts...)
}

type fixture struct {
	*Manager
	cluster *fakecluster.Cluster
	objects *counted
	routes  *route.Table
	witness *fakeWitness
	agents  *fakeAgents
	quotas  *quota.Quotas
}

func newFixture(t *testing.T, change ...func(*Config)) fixture {
	t.Helper()
	f := fixture{
		cluster: fakecluster.New(
			t,
			fakecluster.Template(templates.PublicNamespace, "base", "base", fakecluster.Public("default-base")),
			fakecluster.Template(templates.PublicNamespace, "private", "base"),
			fakecluster.Template(team, "broken", fakecluster.ImageBroken),
			fakecluster.Template(team, "slow", fakecluster.ImageSlow),
			fakecluster.Template("team-b", "secret", "base"),
			fakecluster.Template(team, "sized", "base", sized),
			fakecluster.Pool(team, "base", templates.PublicNamespace, "base"),
			fakecluster.Pool("team-b", "base", templates.PublicNamespace, "base"),
			fakecluster.Pool(team, "sized", "", "sized"),
			&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: team}},
		),
		routes: route.NewTable(), witness: &fakeWitness{}, agents: &fakeAgents{},
	}
	f.objects = &counted{Objects: f.cluster}
	f.Manager = f.replica(t, change...)
	f.quotas = f.Sandboxes.Quota
	return f
}

// replica returns one more manager of the same cluster, with a picker and quotas of its own.
func (f fixture) replica(t *testing.T, change ...func(*Config)) *Manager {
	t.Helper()
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	members, err := picker.New(picker.Config{Writer: f.objects})
	if err != nil {
		t.Fatal(err)
	}
	quotas, err := quota.New(quota.Config{Reader: f.cluster, Log: telemetry.Discard()})
	if err != nil {
		t.Fatal(err)
	}
	listing := sandboxes.NewListing()
	assumed := assumecache.New(listing.Sandbox)
	f.cluster.Watch(func(older, newer *agents.Sandbox) {
		listing.Observe(older, newer)
		assumed.Observe(older, newer)
		members.Observe(older, newer)
		quotas.Observe(older, newer)
		if newer != nil {
			f.routes.Apply(newer)
		}
	})
	earlier, err := f.cluster.Sandboxes(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range earlier { // as the first list of a watch has them
		listing.Observe(nil, s)
	}
	cfg := Config{
		Objects: f.objects, Cache: f.cluster, Routes: f.routes, Agents: f.witness, Tokens: tokens, Log: telemetry.Discard(),
		Picker: members, Quota: quotas, Assumed: assumed, Listing: listing, Binder: f.agents,
		DiskUsed:     func(context.Context, sandbox.Ref) (int64, error) { return 4096, nil },
		StartTimeout: eventually.Patience, MoveTimeout: eventually.Patience,
	}
	for _, c := range change {
		c(&cfg)
	}
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// pool is the UID of a pool of the team.
func (f fixture) pool(t *testing.T, name string) string {
	t.Helper()
	p := &extensions.SandboxWarmPool{}
	if err := f.cluster.Get(t.Context(), client.ObjectKey{Namespace: team, Name: name}, p); err != nil {
		t.Fatal(err)
	}
	return string(p.UID)
}

// revision is that of the template "sized".
func (f fixture) revision(t *testing.T) string {
	t.Helper()
	_, revision, err := f.cluster.CurrentTemplate(t.Context(), types.NamespacedName{Namespace: team, Name: "sized"})
	if err != nil {
		t.Fatal(err)
	}
	return revision
}

func sized(t *extensions.SandboxTemplate) {
	c := &t.Spec.PodTemplate.Spec.Containers[0]
	c.Env = []corev1.EnvVar{{Name: "A", Value: "template"}, {Name: "B", Value: "template"}}
	c.Resources.Limits = corev1.ResourceList{"cpu": resource.MustParse("1500m"), "memory": resource.MustParse("512Mi")}
	t.Spec.Barchan = &extensions.TemplateBarchanSpec{Sandbox: &agents.BarchanSpec{
		Metadata: map[string]string{"from": "template", "keep": "yes"}, Suspend: agents.SuspendFiles,
	}}
}

func request(template string) creating.Request {
	return creating.Request{Namespace: team, Template: template, Timeout: time.Hour, Secure: true}
}

func (f fixture) mustCreate(t *testing.T, req creating.Request) sandboxes.Sandbox {
	t.Helper()
	v, err := f.Creates.Create(t.Context(), req)
	if err != nil {
		t.Fatalf("Create: %v", err)
	}
	return v
}

// wantReachable fails unless there is a route, and it is open or closed as wanted.
func (f fixture) wantReachable(t *testing.T, id sandbox.ID, want bool) {
	t.Helper()
	if e, ok := f.routes.Lookup(id); !ok || e.Reachable() != want {
		t.Errorf("route is %+v, %v; want reachable %v", e.Route, ok, want)
	}
}

// object reads the sandbox behind a view.
func (f fixture) object(t *testing.T, v sandboxes.Sandbox) *agents.Sandbox {
	t.Helper()
	s := &agents.Sandbox{}
	if err := f.cluster.Get(t.Context(), client.ObjectKey{Namespace: v.Namespace, Name: v.Name}, s); err != nil {
		t.Fatal(err)
	}
	return s
}

// edit writes a sandbox again, as often as its controller does so meanwhile.
func (f fixture) edit(t *testing.T, v sandboxes.Sandbox, change func(*agents.Sandbox)) {
	t.Helper()
	for {
		s := f.object(t, v)
		change(s)
		err := f.cluster.Update(t.Context(), s)
		if err == nil {
			return
		}
		if !apierrors.IsConflict(err) {
			t.Fatal(err)
		}
	}
}

func wantKind(t *testing.T, err, kind error, text string) {
	t.Helper()
	message, _ := errs.PublicMessage(err)
	if !errors.Is(err, kind) || !strings.Contains(message, text) {
		t.Errorf("error is %v (public %q), want kind %v and text %q", err, message, kind, text)
	}
}

// await polls, for what has no event of its own.
func await(t *testing.T, done func() bool) {
	t.Helper()
	eventually.True(t, "waited in vain", done)
}

func second[T any](_ T, err error) error { return err }

func second2[A, B any](_ A, _ B, err error) error { return err }

func TestNewRefusesHalfAConfig(t *testing.T) {
	if _, err := New(Config{}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("New = %v", err)
	}
}
