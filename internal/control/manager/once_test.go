package manager

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/idempotency"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/picker"
)

func keyed(key string) creating.Request {
	req := request("base")
	req.IdempotencyKey, req.Metadata = key, map[string]string{"a": "1", "b": "2"}
	return req
}

func TestIdempotentCreate(t *testing.T) {
	for name, members := range map[string]int{"cold": 0, "warm": 5} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.cluster.Fill(t, team, "base", members)
			first := f.mustCreate(t, keyed("k"))
			if again := f.mustCreate(t, keyed("k")); again.ID != first.ID || again.AgentToken != first.AgentToken {
				t.Errorf("the second create gave %s, the first %s", again.ID, first.ID)
			}
			other := keyed("k")
			other.Metadata["b"] = "3"
			_, err := f.Creates.Create(t.Context(), other)
			wantKind(t, err, idempotency.ErrKeyReused, "Idempotency-Key")
			if v := f.mustCreate(t, keyed("another")); v.ID == first.ID {
				t.Error("another key gave the same sandbox")
			}
			foreign := keyed("k")
			foreign.Namespace = "team-b"
			if v := f.mustCreate(t, foreign); v.ID == first.ID {
				t.Error("another tenant got the sandbox")
			}
			f.wantAlive(t, 2, max(members-2, 0))

			if err := f.Sandboxes.Pause(t.Context(), team, string(first.ID), nil); err != nil {
				t.Fatal(err)
			}
			if again := f.mustCreate(t, keyed("k")); again.ID != first.ID || again.State != sandboxes.StatePaused {
				t.Errorf("while it is paused, create gave %s, %s", again.ID, again.State)
			}
			if err := f.Sandboxes.Kill(t.Context(), team, string(first.ID)); err != nil {
				t.Fatal(err)
			}
			if v := f.mustCreate(t, other); v.ID == first.ID {
				t.Error("a key that is free again gave what is dead")
			}
			if _, err := f.Creates.Create(t.Context(), keyed("k")); !errors.Is(err, idempotency.ErrKeyReused) {
				t.Errorf("the first body under the second's key: %v", err)
			}
		})
	}
}

func TestKeys(t *testing.T) {
	f := newFixture(t)
	for _, key := range []string{"a", " ", "~!", strings.Repeat("k", 255)} {
		f.mustCreate(t, keyed(key))
	}
	for _, key := range []string{"\x00", "a\n", "é", "\x7f", strings.Repeat("k", 256)} {
		_, err := f.Creates.Create(t.Context(), keyed(key))
		wantKind(t, err, errs.ErrInvalid, "Idempotency-Key: must have")
	}
	f.wantAlive(t, 4, 0)
}

// TestOneFlightForOneKey sends the same request many times at once, to two replicas that start
// sandboxes cold.
func TestOneFlightForOneKey(t *testing.T) {
	f := newFixture(t)
	managers := []*Manager{f.Manager, f.replica(t)}
	ids := make([]sandbox.ID, 40)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			v, err := managers[i%2].Creates.Create(t.Context(), keyed("k"))
			if err != nil {
				t.Errorf("Create: %v", err)
			}
			ids[i] = v.ID
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Fatalf("two sandboxes: %s and %s", ids[0], id)
		}
	}
	f.wantAlive(t, 1, 0)
	if use, _ := f.quotas.Used(team); use.Sandboxes != 1 {
		t.Errorf("%d sandboxes used, want 1", use.Sandboxes)
	}
}

// TestACallerThatGoesAwayHarmsNoOther cancels the first of two callers, which does the work.
func TestACallerThatGoesAwayHarmsNoOther(t *testing.T) {
	f := newFixture(t)
	f.cluster.Hold(true)
	ctx, leave := context.WithCancel(t.Context())
	results := make(chan sandboxes.Sandbox, 2)
	for _, ctx := range []context.Context{ctx, t.Context()} {
		go func() {
			v, err := f.Creates.Create(ctx, keyed("k"))
			if err != nil {
				t.Errorf("Create: %v", err)
			}
			results <- v
		}()
		await(t, func() bool { all, _ := f.cluster.Sandboxes(t.Context(), team); return len(all) == 1 })
	}
	impatient, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := f.Creates.Create(impatient, keyed("k")); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that joins and leaves: %v", err)
	}
	other := keyed("k")
	other.Template = "sized"
	_, err := f.Creates.Create(t.Context(), other)
	wantKind(t, err, idempotency.ErrKeyReused, "Idempotency-Key")
	leave()
	f.cluster.Hold(false)
	if a, b := <-results, <-results; a.ID != b.ID || a.ID == "" {
		t.Errorf("%q and %q", a.ID, b.ID)
	}
	f.wantAlive(t, 1, 0)
}

// mortal is the API server as a process sees it that is killed: after so many writes of sandboxes none gets through.
type mortal struct {
	sandboxes.Objects
	left atomic.Int64
}

func (o *mortal) dies() error {
	if o.left.Add(-1) < 0 {
		return errs.ErrUnavailable
	}
	return nil
}

func (o *mortal) Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error {
	if err := o.dies(); err != nil {
		return err
	}
	return o.Objects.Create(ctx, obj, opts...)
}

func (o *mortal) Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error {
	if err := o.dies(); err != nil {
		return err
	}
	return o.Objects.Update(ctx, obj, opts...)
}

func (o *mortal) Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error {
	if err := o.dies(); err != nil {
		return err
	}
	return o.Objects.Delete(ctx, obj, opts...)
}

// TestRetryAcrossACrash: the manager ends after some of a create's writes, the template may change, and the
// client retries at another.
func TestRetryAcrossACrash(t *testing.T) {
	for _, give := range []struct {
		name            string
		members, writes int
		answered, given bool // an answer was given, or may have been
	}{
		{"cold, written", 0, 1, false, false},
		{"cold, answered", 0, 2, true, true},
		{"warm, adopted", 1, 1, false, true},
		{"warm, answered", 1, 2, true, true},
	} {
		for _, changed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, changed %v", give.name, changed), func(t *testing.T) {
				testRetryAcrossACrash(t, give.members, give.writes, give.answered, give.given, changed)
			})
		}
	}
}

func testRetryAcrossACrash(t *testing.T, members, writes int, answered, given, changed bool) {
	f := newFixture(t)
	req := keyed("k")
	req.Template, req.Env = "sized", map[string]string{"A": "1"}
	made := f.createAndDie(t, req, members, writes, answered)
	if changed {
		f.changeTemplate(t, team, "sized", func(t *extensions.SandboxTemplate) {
			t.Spec.PodTemplate.Spec.Containers[0].Args = []string{"new"}
		})
	}
	after := &fakeAgents{}
	other := f.replica(t, func(c *Config) { c.Binder = after })
	var ids []sandbox.ID
	for range 2 {
		v, err := other.Creates.Create(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		s := f.object(t, v)
		if same, want := s.UID == made.UID, given || !changed; same != want {
			t.Fatalf("the same sandbox: %v, want %v", same, want)
		}
		if fits := pool.Fits(s, pool.TemplateKey(s), f.revision(t)); !given && !fits {
			t.Error("an unclaimed sandbox was returned that is not of the template as it is now")
		}
		if got := after.of(s); members > 0 && (len(got) == 0 || got[0].EnvVars["A"] != "1" || got[0].Open) {
			t.Errorf("the agent received %+v, want its variables", got)
		}
		if left := time.Until(v.EndAt); left > time.Hour+2*time.Second || s.Annotations[pool.AnnotationPending] != "" {
			t.Errorf("it is not finished: ends in %s, marked %v", left, s.Annotations)
		}
		ids = append(ids, v.ID)
	}
	if ids[0] != ids[1] {
		t.Errorf("two sandboxes, %s and %s", ids[0], ids[1])
	}
	f.wantAlive(t, 1, 0)
}

// createAndDie has a manager make a sandbox and end after so many writes. The sandbox keeps running.
func (f fixture) createAndDie(t *testing.T, req creating.Request, members, writes int, answered bool) *agents.Sandbox {
	t.Helper()
	dying := &mortal{Objects: f.objects}
	dying.left.Store(int64(writes))
	m, err := picker.New(picker.Config{Writer: dying})
	if err != nil {
		t.Fatal(err)
	}
	f.cluster.Watch(m.Observe)
	f.cluster.Fill(t, team, "sized", members)
	silent := &fakeAgents{}
	if !answered {
		silent.fail(1)
	}
	before := f.replica(t, func(c *Config) { c.Objects, c.Picker, c.Binder = dying, m, silent })
	if _, err := before.Creates.Create(t.Context(), req); (err == nil) != answered {
		t.Fatalf("Create = %v, want an answer: %v", err, answered)
	}
	all := f.sandboxes(t)
	if len(all) != 1 {
		t.Fatalf("%d sandboxes after the crash, want 1", len(all))
	}
	f.waitUntilRuns(t, all[0])
	return all[0]
}

// waitUntilRuns returns when a sandbox runs without a further request.
func (f fixture) waitUntilRuns(t *testing.T, s *agents.Sandbox) {
	t.Helper()
	_, err := f.cluster.WaitSandbox(t.Context(), client.ObjectKeyFromObject(s), func(s *agents.Sandbox) (bool, error) {
		return sandbox.PhaseOf(s) == sandbox.Running, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestAFailedCreateKeepsNoKey: what did not become ready does not answer the next request.
func TestAFailedCreateKeepsNoKey(t *testing.T) { synctest.Test(t, testAFailedCreateKeepsNoKey) }

func testAFailedCreateKeepsNoKey(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.StartTimeout = 50 * time.Millisecond })
	req := keyed("k")
	req.Template = "slow"
	for range 2 {
		_, err := f.Creates.Create(t.Context(), req)
		wantKind(t, err, errs.ErrTimeout, "was not ready")
	}
	f.wantNothingLeft(t)
	f.changeImage(t, "slow", "base")
	if s := f.object(t, f.mustCreate(t, req)); !strings.HasPrefix(s.Name, "once-") || s.Annotations[idempotency.AnnotationBody] == "" {
		t.Errorf("name %s, annotations %v", s.Name, s.Annotations)
	}
}

// changeImage of a template of the team.
func (f fixture) changeImage(t *testing.T, name, image string) {
	t.Helper()
	f.changeTemplate(t, team, name, func(t *extensions.SandboxTemplate) { t.Spec.PodTemplate.Spec.Containers[0].Image = image })
}
