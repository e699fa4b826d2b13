package manager

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
)

func TestCreateWritesTheWholeWish(t *testing.T) { synctest.Test(t, testCreateWritesTheWholeWish) }

func testCreateWritesTheWholeWish(t *testing.T) {
	f := newFixture(t)
	req := request("sized")
	req.Env = map[string]string{"B": "mine", "C": "new"}
	req.Metadata = map[string]string{"from": "user"}
	req.OnTimeout, req.Suspend, req.AutoResume = agents.TimeoutPause, agents.SuspendMemory, true
	req.Network = &agents.EgressPolicy{Internet: new(false), AllowOut: []string{"example.com"}}
	v := f.mustCreate(t, req)
	s := f.object(t, v)

	b, origin := s.Spec.Barchan, f.pool(t, "sized")
	for name, pair := range map[string][2]any{
		"env":          {s.Spec.PodTemplate.Spec.Containers[0].Env, []corev1.EnvVar{{Name: "A", Value: "template"}, {Name: "B", Value: "mine"}, {Name: "C", Value: "new"}}},
		"metadata":     {b.Metadata, map[string]string{"from": "user", "keep": "yes"}},
		"on timeout":   {b.OnTimeout, agents.TimeoutPause},
		"suspend":      {b.Suspend, agents.SuspendMemory},
		"wake":         {*b.Wake, agents.WakePolicy{OnTraffic: true, TimeoutSeconds: 3600}},
		"secure":       {!b.Access.OpenAgent, true},
		"public":       {*b.Access.PublicTraffic, true},
		"internet":     {*b.Network.Internet, false},
		"shutdown":     {s.Spec.ShutdownPolicy, agents.ShutdownDelete},
		"finalizers":   {s.Finalizers, []string{agents.NodeFinalizer}},
		"labels":       {s.Labels, map[string]string{agents.LabelCreatedBy: sandboxes.CreatedBy, agents.LabelLaunchType: agents.LaunchCold, agents.LabelTemplateHash: f.revision(t), pool.LabelOrigin: origin}},
		"template ref": {s.Annotations[agents.AnnotationTemplateRef], "sized"},
		"size":         {v.Size, templates.Size{CPUs: 2, MemoryMB: 512, DiskMB: 10240}},
		"agent token":  {len(v.AgentToken), 64},
		"traffic":      {v.TrafficToken, ""},
		"state":        {v.State, sandboxes.StateRunning},
	} {
		if fmt.Sprint(pair[0]) != fmt.Sprint(pair[1]) {
			t.Errorf("%s: got %v, want %v", name, pair[0], pair[1])
		}
	}
	if left := time.Until(v.EndAt); left > time.Hour+time.Second || left < time.Hour {
		t.Errorf("ends in %s, want an hour", left)
	}
	f.wantReachable(t, v.ID, true)
}

func TestCreateGivesAShortLifeItsWholeTime(t *testing.T) {
	f := newFixture(t)
	req := request("base")
	req.Timeout = 5 * time.Second
	v := f.mustCreate(t, req)
	if left := time.Until(v.EndAt); left > 6*time.Second {
		t.Errorf("ends in %s, want about 5 s", left)
	}
}

func TestCreateRefuses(t *testing.T) {
	f := newFixture(t)
	no := false
	for name, give := range map[string]struct {
		change func(*creating.Request)
		kind   error
		text   string
	}{
		"unknown template":    {func(r *creating.Request) { r.Template = "nope" }, errs.ErrNotFound, "template 'nope' not found"},
		"foreign template":    {func(r *creating.Request) { r.Template = "secret" }, errs.ErrNotFound, "template 'secret' not found"},
		"qualified foreign":   {func(r *creating.Request) { r.Template = "team-b/secret" }, errs.ErrNotFound, "not found"},
		"private system":      {func(r *creating.Request) { r.Template = "private" }, errs.ErrNotFound, "not found"},
		"path as a template":  {func(r *creating.Request) { r.Template = "../../x" }, errs.ErrNotFound, "not found"},
		"no template":         {func(r *creating.Request) { r.Template = "" }, errs.ErrInvalid, "templateID"},
		"no time":             {func(r *creating.Request) { r.Timeout = 0 }, errs.ErrInvalid, "Timeout must be greater than 0"},
		"too long":            {func(r *creating.Request) { r.Timeout = 25 * time.Hour }, errs.ErrInvalid, "Timeout cannot be greater than 24 hours"},
		"bad variable":        {func(r *creating.Request) { r.Env = map[string]string{"A=B": "x"} }, errs.ErrInvalid, "envVars"},
		"closed but insecure": {func(r *creating.Request) { r.Secure, r.PublicTraffic = false, &no }, errs.ErrInvalid, "allowPublicTraffic"},
		"wake without memory": {func(r *creating.Request) { r.AutoResume, r.Suspend = true, agents.SuspendFiles }, errs.ErrInvalid, "autoResume"},
		"domain without deny": {func(r *creating.Request) { r.Network = &agents.EgressPolicy{AllowOut: []string{"example.com"}} }, errs.ErrInvalid, "network.allowOut[0]"},
		"domain to deny":      {func(r *creating.Request) { r.Network = &agents.EgressPolicy{DenyOut: []string{"example.com"}} }, errs.ErrInvalid, "network.denyOut[0]"},
		"cannot start":        {func(r *creating.Request) { r.Template = "broken" }, errs.ErrInvalid, "PodFailed: the image cannot be used"},
	} {
		t.Run(name, func(t *testing.T) {
			req := request("base")
			give.change(&req)
			_, err := f.Creates.Create(t.Context(), req)
			wantKind(t, err, give.kind, give.text)
		})
	}
	f.wantNothingLeft(t)
}

// wantNothingLeft fails if a sandbox of the team is there and not on its way out.
func (f fixture) wantNothingLeft(t *testing.T) {
	t.Helper()
	all, err := f.cluster.Sandboxes(t.Context(), team)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		if s.DeletionTimestamp == nil {
			t.Errorf("sandbox %s is left behind", s.Name)
		}
	}
}

func TestCreateUndoesWhatDoesNotGetReady(t *testing.T) {
	synctest.Test(t, testCreateUndoesWhatDoesNotGetReady)
}

func testCreateUndoesWhatDoesNotGetReady(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.StartTimeout = 30 * time.Millisecond })
	_, err := f.Creates.Create(t.Context(), request("slow"))
	wantKind(t, err, errs.ErrTimeout, "the image is being unpacked")
	f.wantNothingLeft(t)

	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	f = newFixture(t)
	if _, err := f.Creates.Create(ctx, request("slow")); err == nil {
		t.Error("a create whose caller went away succeeded")
	}
	f.wantNothingLeft(t)
}
