package manager

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/cache"
	"github.com/barchan-dev/barchan/internal/envd"
	"github.com/barchan-dev/barchan/internal/errs"
	"github.com/barchan-dev/barchan/internal/route"
	"github.com/barchan-dev/barchan/internal/sandbox"
	"github.com/barchan-dev/barchan/internal/telemetry"
	"github.com/barchan-dev/barchan/internal/testkit/standin"
)

// What production hands in must fit.
var (
	_ Cache  = (*cache.Cache)(nil)
	_ Routes = (*route.Table)(nil)
)

const team = "team-a"

type fakeNode struct{ lines []envd.LogLine }

func (f *fakeNode) Stats(context.Context, sandbox.Ref) (envd.Metrics, error) {
	return envd.Metrics{Timestamp: time.Now().Unix(), CPUCount: 2, MemUsed: 7}, nil
}

func (f *fakeNode) Logs(context.Context, sandbox.Ref, time.Time) ([]envd.LogLine, error) {
	return slices.Clone(f.lines), nil
}

type fixture struct {
	*Manager
	cluster *standin.Cluster
	routes  *route.Table
	node    *fakeNode
}

func newFixture(t *testing.T, change ...func(*Config)) fixture {
	t.Helper()
	f := fixture{
		cluster: standin.New(
			t,
			standin.Template(DefaultPublicNamespace, "base", "base", standin.Public("default-base")),
			standin.Template(DefaultPublicNamespace, "private", "base"),
			standin.Template(team, "broken", standin.ImageBroken),
			standin.Template(team, "slow", standin.ImageSlow),
			standin.Template("team-b", "secret", "base"),
			standin.Template(team, "sized", "base", sized),
		),
		routes: route.NewTable(),
		node:   &fakeNode{},
	}
	tokens, err := sandbox.NewTokens([]byte(strings.Repeat("s", 32)))
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{Objects: f.cluster, Cache: f.cluster, Routes: f.routes, Node: f.node, Tokens: tokens, Log: telemetry.Discard()}
	for _, c := range change {
		c(&cfg)
	}
	if f.Manager, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	return f
}

func sized(t *extensions.SandboxTemplate) {
	c := &t.Spec.PodTemplate.Spec.Containers[0]
	c.Env = []corev1.EnvVar{{Name: "A", Value: "template"}, {Name: "B", Value: "template"}}
	c.Resources.Limits = corev1.ResourceList{"cpu": resource.MustParse("1500m"), "memory": resource.MustParse("512Mi")}
	t.Spec.Barchan = &extensions.TemplateBarchanSpec{Sandbox: &agents.BarchanSpec{
		Metadata: map[string]string{"from": "template", "keep": "yes"}, Suspend: agents.SuspendFiles,
	}}
}

func request(template string) CreateRequest {
	return CreateRequest{Namespace: team, Template: template, Timeout: time.Hour, Secure: true}
}

func (f fixture) mustCreate(t *testing.T, req CreateRequest) Sandbox {
	t.Helper()
	v, err := f.Create(t.Context(), req)
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
func (f fixture) object(t *testing.T, v Sandbox) *agents.Sandbox {
	t.Helper()
	s := &agents.Sandbox{}
	if err := f.cluster.Get(t.Context(), client.ObjectKey{Namespace: v.Namespace, Name: v.Name}, s); err != nil {
		t.Fatal(err)
	}
	return s
}

func wantKind(t *testing.T, err, kind error, text string) {
	t.Helper()
	message, _ := errs.PublicMessage(err)
	if !errors.Is(err, kind) || !strings.Contains(message, text) {
		t.Errorf("error is %v (public %q), want kind %v and text %q", err, message, kind, text)
	}
}

// await polls with a deadline, for what has no event of its own.
func await(t *testing.T, done func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(10 * time.Second)
	for !done() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("waited in vain")
		}
	}
}

func second[T any](_ T, err error) error { return err }

func second2[A, B any](_ A, _ B, err error) error { return err }

func TestNewRefusesHalfAConfig(t *testing.T) {
	if _, err := New(Config{}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("New = %v", err)
	}
}
