package manager

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/envd"
	"github.com/barchan-dev/barchan/internal/errs"
	"github.com/barchan-dev/barchan/internal/sandbox"
)

func keyed(key string) CreateRequest {
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
			_, err := f.Create(t.Context(), other)
			wantKind(t, err, ErrKeyReused, "Idempotency-Key")
			if v := f.mustCreate(t, keyed("another")); v.ID == first.ID {
				t.Error("another key gave the same sandbox")
			}
			foreign := keyed("k")
			foreign.Namespace = "team-b"
			if v := f.mustCreate(t, foreign); v.ID == first.ID {
				t.Error("another tenant got the sandbox")
			}
			f.wantAlive(t, 2, max(members-2, 0))

			if err := f.Pause(t.Context(), team, string(first.ID), nil); err != nil {
				t.Fatal(err)
			}
			if again := f.mustCreate(t, keyed("k")); again.ID != first.ID || again.State != StatePaused {
				t.Errorf("while it sleeps, create gave %s, %s", again.ID, again.State)
			}
			if err := f.Kill(t.Context(), team, string(first.ID)); err != nil {
				t.Fatal(err)
			}
			if v := f.mustCreate(t, other); v.ID == first.ID {
				t.Error("a key that is free again gave what is dead")
			}
			if _, err := f.Create(t.Context(), keyed("k")); !errors.Is(err, ErrKeyReused) {
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
		_, err := f.Create(t.Context(), keyed(key))
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
			v, err := managers[i%2].Create(t.Context(), keyed("k"))
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

// TestACallerThatGoesAwayHarmsNoOther has the first of two leave, who does the work.
func TestACallerThatGoesAwayHarmsNoOther(t *testing.T) {
	f := newFixture(t)
	f.cluster.Hold(true)
	ctx, leave := context.WithCancel(t.Context())
	results := make(chan Sandbox, 2)
	for _, ctx := range []context.Context{ctx, t.Context()} {
		go func() {
			v, err := f.Create(ctx, keyed("k"))
			if err != nil {
				t.Errorf("Create: %v", err)
			}
			results <- v
		}()
		await(t, func() bool { all, _ := f.cluster.Sandboxes(t.Context(), team); return len(all) == 1 })
	}
	impatient, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := f.Create(impatient, keyed("k")); !errors.Is(err, context.Canceled) {
		t.Errorf("who joins and leaves: %v", err)
	}
	other := keyed("k")
	other.Template = "sized"
	_, err := f.Create(t.Context(), other)
	wantKind(t, err, ErrKeyReused, "Idempotency-Key")
	leave()
	f.cluster.Hold(false)
	if a, b := <-results, <-results; a.ID != b.ID || a.ID == "" {
		t.Errorf("%q and %q", a.ID, b.ID)
	}
	f.wantAlive(t, 1, 0)
}

// TestAClaimOfADeadManagerIsFinished: the adoption was written, the agent was not told.
func TestAClaimOfADeadManagerIsFinished(t *testing.T) {
	f := newFixture(t)
	f.cluster.Fill(t, team, "base", 1)
	req := keyed("k")
	req.Env = map[string]string{"A": "1"}
	first := f.mustCreate(t, req)
	s := f.object(t, first)
	after := &fakeAgents{}
	m := f.replica(t, func(c *Config) { c.Binder = after })
	again, err := m.Create(t.Context(), req)
	if err != nil || again.ID != first.ID {
		t.Fatalf("Create = %s, %v; want %s", again.ID, err, first.ID)
	}
	want := envd.InitRequest{EnvVars: req.Env}
	if heard := after.of(s); len(heard) != 1 || heard[0].EnvVars["A"] != want.EnvVars["A"] || heard[0].Open {
		t.Errorf("the agent heard %+v, want %+v", heard, want)
	}
}

// TestAFailedCreateKeepsNoKey: what did not become ready does not answer the next request.
func TestAFailedCreateKeepsNoKey(t *testing.T) { synctest.Test(t, testAFailedCreateKeepsNoKey) }

func testAFailedCreateKeepsNoKey(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.StartTimeout = 50 * time.Millisecond })
	req := keyed("k")
	req.Template = "slow"
	for range 2 {
		_, err := f.Create(t.Context(), req)
		wantKind(t, err, errs.ErrTimeout, "was not ready")
	}
	f.wantNothingLeft(t)
	f.changeImage(t, "slow", "base")
	if s := f.object(t, f.mustCreate(t, req)); !strings.HasPrefix(s.Name, "once-") || s.Annotations[AnnotationIdempotencyBody] == "" {
		t.Errorf("name %s, annotations %v", s.Name, s.Annotations)
	}
}

// changeImage of a template of the team.
func (f fixture) changeImage(t *testing.T, name, image string) {
	t.Helper()
	f.changeTemplate(t, team, name, func(t *extensions.SandboxTemplate) { t.Spec.PodTemplate.Spec.Containers[0].Image = image })
}
