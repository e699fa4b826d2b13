package manager

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

func TestWarmClaim(t *testing.T) { synctest.Test(t, testWarmClaim) }

func testWarmClaim(t *testing.T) {
	f := newFixture(t)
	member := f.cluster.Fill(t, team, "sized", 1)[0]
	before, writes := time.Now(), f.objects.writes.Load()
	req := request("sized")
	req.Timeout = 5 * time.Second // which a cold start would first make longer
	req.Metadata = map[string]string{"from": "user"}
	req.OnTimeout, req.AutoResume, req.Suspend = agents.TimeoutPause, true, agents.SuspendMemory
	req.Network = &agents.EgressPolicy{Internet: new(false)}
	v := f.mustCreate(t, req)
	if n := f.objects.writes.Load() - writes; n != 1 {
		t.Errorf("%d writes, want 1", n)
	}
	s := f.object(t, v)
	if s.UID != member.UID {
		t.Fatalf("got %s, want the member %s", s.Name, member.Name)
	}
	b := s.Spec.Barchan
	for name, pair := range map[string][2]any{
		"labels": {s.Labels, map[string]string{
			agents.LabelCreatedBy: sandboxes.CreatedBy, agents.LabelLaunchType: agents.LaunchWarm, agents.LabelTemplateHash: f.revision(t),
			pool.LabelOrigin: member.Labels[agents.LabelWarmPoolSandbox],
		}},
		"owners":     {len(s.OwnerReferences), 0},
		"metadata":   {b.Metadata, map[string]string{"from": "user", "keep": "yes"}},
		"on timeout": {b.OnTimeout, agents.TimeoutPause},
		"suspend":    {b.Suspend, agents.SuspendMemory},
		"wake":       {*b.Wake, agents.WakePolicy{OnTraffic: true, TimeoutSeconds: 300}},
		"internet":   {*b.Network.Internet, false},
		"shutdown":   {s.Spec.ShutdownPolicy, agents.ShutdownDelete},
		"token":      {v.AgentToken, f.Sandboxes.Tokens.Agent(v.ID)},
		"template":   {v.TemplateName, "sized"},
		"requests":   {len(f.agents.of(s)), 0},
	} {
		if fmt.Sprint(pair[0]) != fmt.Sprint(pair[1]) {
			t.Errorf("%s: got %v, want %v", name, pair[0], pair[1])
		}
	}
	if v.StartedAt.Before(before) || v.StartedAt.After(time.Now()) {
		t.Errorf("started at %s, want the time of the claim, after %s", v.StartedAt, before)
	}
	if left := v.EndAt.Sub(v.StartedAt); left < 5*time.Second || left > 7*time.Second {
		t.Errorf("lives for %s, want about 5 s", left)
	}
	f.wantReachable(t, v.ID, true)
	if page, err := f.Sandboxes.List(t.Context(), sandboxes.ListRequest{Namespace: team, StartedAfter: before}); err != nil || len(page.Items) != 1 || page.Items[0].ID != v.ID {
		t.Errorf("List = %+v, %v", page, err)
	}
}

func TestWarmClaimTellsTheAgent(t *testing.T) {
	open := func(t *extensions.SandboxTemplate) {
		t.Spec.Barchan = &extensions.TemplateBarchanSpec{Sandbox: &agents.BarchanSpec{Access: &agents.AccessPolicy{OpenAgent: true}}}
	}
	for name, give := range map[string]struct {
		change      func(*creating.Request)
		open        bool // the template's agents require no token
		enqueueDial func(token string) []envd.InitRequest
	}{
		"nothing": {func(*creating.Request) {}, false, func(string) []envd.InitRequest { return nil }},
		"env": {func(r *creating.Request) { r.Env = map[string]string{"A": "$(B) $C"} }, false, func(string) []envd.InitRequest {
			return []envd.InitRequest{{EnvVars: map[string]string{"A": "$(B) $C"}}}
		}},
		"open":         {func(r *creating.Request) { r.Secure = false }, false, func(string) []envd.InitRequest { return []envd.InitRequest{{Open: true}} }},
		"open already": {func(r *creating.Request) { r.Secure = false }, true, func(string) []envd.InitRequest { return nil }},
		"to be closed": {func(*creating.Request) {}, true, func(token string) []envd.InitRequest { return []envd.InitRequest{{AccessToken: token}} }},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			if give.open {
				f.changeTemplate(t, templates.PublicNamespace, "base", func(t *extensions.SandboxTemplate) { open(t); t.Spec.Barchan.Public = true })
			}
			member := f.cluster.Fill(t, team, "base", 1)[0]
			req := request("base")
			give.change(&req)
			v := f.mustCreate(t, req)
			s := f.object(t, v)
			if s.UID != member.UID {
				t.Fatal("the start was cold")
			}
			if got, want := f.agents.of(s), give.enqueueDial(f.Sandboxes.Tokens.Agent(v.ID)); !reflect.DeepEqual(got, want) {
				t.Errorf("the agent received %+v, want %+v", got, want)
			}
			if s.Spec.AgentSecured() != req.Secure || (v.AgentToken != "") != req.Secure {
				t.Errorf("secured %v with token %q, want %v", s.Spec.AgentSecured(), v.AgentToken, req.Secure)
			}
			var want []corev1.EnvVar
			if len(req.Env) > 0 { // as the node reads it, it means the same
				want = []corev1.EnvVar{{Name: "A", Value: "$$(B) $$C"}}
			}
			if got := s.Spec.PodTemplate.Spec.Containers[0].Env; !reflect.DeepEqual(got, want) {
				t.Errorf("env of the object is %v, want %v", got, want)
			}
		})
	}
}

// changeTemplate writes a template again.
func (f fixture) changeTemplate(t *testing.T, namespace, name string, change func(*extensions.SandboxTemplate)) {
	t.Helper()
	tmpl, err := f.cluster.Template(t.Context(), types.NamespacedName{Namespace: namespace, Name: name})
	if err != nil {
		t.Fatal(err)
	}
	change(tmpl)
	if err := f.cluster.Update(t.Context(), tmpl); err != nil {
		t.Fatal(err)
	}
}

func TestAgentsThatFailToBind(t *testing.T) {
	for name, give := range map[string]struct {
		fails, left int
		launch      string
	}{
		"one":  {1, 1, agents.LaunchWarm},
		"both": {2, 1, agents.LaunchCold},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.cluster.Fill(t, team, "base", give.left+2)
			f.agents.fail(give.fails)
			req := request("base")
			req.Env = map[string]string{"A": "1"}
			s := f.object(t, f.mustCreate(t, req))
			if s.Labels[agents.LabelLaunchType] != give.launch {
				t.Errorf("launch type %s, want %s", s.Labels[agents.LabelLaunchType], give.launch)
			}
			f.wantAlive(t, 1, 3-give.fails-len(f.agents.of(s)))
			if use, _ := f.quotas.Used(team); use.Sandboxes != 1 {
				t.Errorf("%d sandboxes used, want 1", use.Sandboxes)
			}
		})
	}
}

// wantAlive counts the sandboxes of the team that live.
func (f fixture) wantAlive(t *testing.T, claimed, spare int) {
	t.Helper()
	all, err := f.cluster.Sandboxes(t.Context(), team)
	if err != nil {
		t.Fatal(err)
	}
	got := map[bool]int{}
	for _, s := range all {
		if !sandbox.DeadForGood(s) {
			got[pool.MemberOf(s) != ""]++
		}
	}
	if got[false] != claimed || got[true] != spare {
		t.Errorf("%d claimed and %d spare, want %d and %d", got[false], got[true], claimed, spare)
	}
}

func TestStaleMembersAreNotHandedOut(t *testing.T) {
	f := newFixture(t)
	f.cluster.Fill(t, team, "base", 3)
	f.changeTemplate(t, templates.PublicNamespace, "base", func(t *extensions.SandboxTemplate) { t.Spec.PodTemplate.Spec.Containers[0].Image = "newer" })
	s := f.object(t, f.mustCreate(t, request("base")))
	if image := s.Spec.PodTemplate.Spec.Containers[0].Image; image != "newer" || s.Labels[agents.LabelLaunchType] != agents.LaunchCold {
		t.Errorf("image %s, launch type %s", image, s.Labels[agents.LabelLaunchType])
	}
	if pool.OriginOf(s) == "" {
		t.Error("the pool does not see its use")
	}
	f.wantAlive(t, 1, 3)
}

func TestPoolsOfOthersAreNotUsed(t *testing.T) {
	f := newFixture(t)
	f.cluster.Fill(t, "team-b", "base", 2)
	s := f.object(t, f.mustCreate(t, request("base")))
	if s.Namespace != team || s.Labels[agents.LabelLaunchType] != agents.LaunchCold {
		t.Errorf("got %s/%s, started %s", s.Namespace, s.Name, s.Labels[agents.LabelLaunchType])
	}
}

// TestUnclaimedMembersDoNotExist reads a spare member by its ID through each operation.
func TestUnclaimedMembersDoNotExist(t *testing.T) {
	f := newFixture(t)
	s := f.cluster.Fill(t, team, "base", 1)[0]
	id, ctx := string(sandbox.IDOf(s.UID)), t.Context()
	unknown := string(sandbox.IDOf("unknown"))
	for name, call := range map[string]func(id string) error{
		"get":     func(id string) error { return second(f.Sandboxes.Get(ctx, team, id)) },
		"kill":    func(id string) error { return f.Sandboxes.Kill(ctx, team, id) },
		"connect": func(id string) error { return second2(f.Sandboxes.Connect(ctx, team, id, time.Minute, nil)) },
		"resume":  func(id string) error { return second(f.Sandboxes.Resume(ctx, team, id, time.Minute, nil)) },
		"pause":   func(id string) error { return f.Sandboxes.Pause(ctx, team, id, nil) },
		"timeout": func(id string) error { return f.Sandboxes.SetTimeout(ctx, team, id, time.Minute) },
		"refresh": func(id string) error { return f.Sandboxes.Refresh(ctx, team, id, time.Minute) },
		"network": func(id string) error { return f.Sandboxes.SetNetwork(ctx, team, id, nil) },
		"metrics": func(id string) error { return second(f.Sandboxes.Metrics(ctx, team, id, time.Time{}, time.Time{})) },
		"logs":    func(id string) error { return second(f.Sandboxes.Logs(ctx, team, id, sandboxes.LogRequest{})) },
	} {
		got, _ := errs.PublicMessage(call(id))
		want, _ := errs.PublicMessage(call(unknown))
		wantKind(t, call(id), errs.ErrNotFound, "doesn't exist")
		if len(got) != len(want) {
			t.Errorf("%s: %q for a member, %q for what never was", name, got, want)
		}
	}
	if err := f.Sandboxes.Wake(ctx, sandbox.ID(id)); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("Wake = %v", err)
	}
	if page, err := f.Sandboxes.List(ctx, sandboxes.ListRequest{Namespace: team}); err != nil || len(page.Items) != 0 {
		t.Errorf("List = %+v, %v", page, err)
	}
	if all, err := f.Sandboxes.MetricsOf(ctx, team, []string{id}); err != nil || len(all) != 0 {
		t.Errorf("MetricsOf = %v, %v", all, err)
	}
	if f.routes.Len() != 0 {
		t.Error("it has a route")
	}
	f.wantAlive(t, 0, 1)
}

func (f fixture) setQuota(t *testing.T, annotation, value string) {
	t.Helper()
	ns, err := f.cluster.Namespace(t.Context(), team)
	if err != nil {
		t.Fatal(err)
	}
	if ns.Annotations == nil {
		ns.Annotations = map[string]string{}
	}
	ns.Annotations[annotation] = value
	if err := f.cluster.Update(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
}

// TestQuotaUnderConcurrency claims warm and cold at once, with agents that fail.
func TestQuotaUnderConcurrency(t *testing.T) {
	f := newFixture(t)
	f.cluster.Fill(t, team, "base", 8)
	f.setQuota(t, quota.AnnotationSandboxes, "12")
	var mu sync.Mutex
	var granted, refused int
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			_, err := f.Creates.Create(t.Context(), request("base"))
			mu.Lock()
			defer mu.Unlock()
			switch text, _ := errs.PublicMessage(err); {
			case err == nil:
				granted++
			case errors.Is(err, errs.ErrExhausted) && text != "":
				refused++
			default:
				t.Errorf("Create: %v", err)
			}
		})
	}
	wg.Wait()
	if granted != 12 || refused != 28 {
		t.Errorf("%d granted, %d refused; want 12 and 28", granted, refused)
	}
	f.wantAlive(t, 12, 0)
}

func TestQuotaHoldsForResume(t *testing.T) {
	f := newFixture(t)
	f.setQuota(t, quota.AnnotationSandboxes, "1")
	ctx := t.Context()
	req := request("base")
	req.AutoResume, req.Suspend = true, agents.SuspendMemory
	first := f.mustCreate(t, req)
	if err := f.Sandboxes.Pause(ctx, team, string(first.ID), nil); err != nil {
		t.Fatal(err)
	}
	second := f.mustCreate(t, request("base"))
	wantKind(t, second2(f.Sandboxes.Connect(ctx, team, string(first.ID), time.Minute, nil)), errs.ErrExhausted, "at most 1 sandboxes; 1 are running")
	wantKind(t, f.Sandboxes.Wake(ctx, first.ID), errs.ErrExhausted, "at most 1 sandboxes")
	if _, _, err := f.Sandboxes.Connect(ctx, team, string(second.ID), time.Minute, nil); err != nil {
		t.Errorf("connect to one that runs: %v", err)
	}
	if err := f.Sandboxes.Kill(ctx, team, string(second.ID)); err != nil {
		t.Fatal(err)
	}
	if _, resumed, err := f.Sandboxes.Connect(ctx, team, string(first.ID), time.Minute, nil); err != nil || !resumed {
		t.Errorf("Connect = resumed %v, %v", resumed, err)
	}
	if use, paused := f.quotas.Used(team); use.Sandboxes != 1 || paused.Sandboxes != 0 {
		t.Errorf("%d running and %d paused count, want 1 and 0", use.Sandboxes, paused.Sandboxes)
	}
}

func TestFailedCreatesGiveBackTheirQuota(t *testing.T) {
	f := newFixture(t)
	f.setQuota(t, quota.AnnotationSandboxes, "1")
	for range 3 {
		_, err := f.Creates.Create(t.Context(), request("broken"))
		wantKind(t, err, errs.ErrInvalid, "the image cannot be used")
	}
	f.mustCreate(t, request("base"))
}

func TestOrphansAreRemoved(t *testing.T) {
	orphans := make(chan *agents.Sandbox, 2)
	f := newFixture(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		f.Creates.RemoveOrphans(ctx, orphans)
		done <- f.Run(ctx)
	}()
	v, claimed := f.mustCreate(t, request("base")), f.mustCreate(t, request("base"))
	theirs := f.object(t, claimed)
	theirs.Labels[agents.LabelClaimUID] = "a claim's"
	orphans <- theirs
	orphans <- f.object(t, v)
	_, err := f.cluster.WaitSandbox(ctx, client.ObjectKey{Namespace: v.Namespace, Name: v.Name}, func(s *agents.Sandbox) (bool, error) { return s == nil, nil })
	if err != nil {
		t.Fatal(err)
	}
	f.wantAlive(t, 1, 0)
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run = %v", err)
	}
}
