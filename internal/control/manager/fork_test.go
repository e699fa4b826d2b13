package manager

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

func forkRequest(v sandboxes.Sandbox, count int) creating.ForkRequest {
	return creating.ForkRequest{Namespace: team, ID: string(v.ID), Count: count, Timeout: time.Hour}
}

// wantNoCheckpoints fails unless they go.
func (f fixture) wantNoCheckpoints(t *testing.T) {
	t.Helper()
	await(t, func() bool {
		left, err := f.cluster.Checkpoints(t.Context(), "")
		return err == nil && len(left) == 0
	})
}

func TestFork(t *testing.T) { synctest.Test(t, testFork) }

func testFork(t *testing.T) {
	f := newFixture(t)
	req := request("sized")
	req.Metadata = map[string]string{"user": "ann", "step": "1"}
	source := f.mustCreate(t, req)
	fork := forkRequest(source, 3)
	fork.Timeout, fork.Metadata = 20*time.Second, map[string]string{"step": "2"}
	got, err := f.Creates.Fork(t.Context(), fork)
	if err != nil || len(got) != 3 {
		t.Fatalf("Fork = %v, %v", got, err)
	}
	seen := map[sandbox.ID]bool{source.ID: true}
	for i, one := range got {
		v := one.Sandbox
		if one.Err != nil || seen[v.ID] || v.State != sandboxes.StateRunning || v.TemplateID != source.TemplateID || v.AgentToken == source.AgentToken {
			t.Fatalf("fork %d: %+v, %v", i, v, one.Err)
		}
		seen[v.ID] = true
		f.wantFork(t, v)
		if from := f.object(t, v).Annotations[pool.AnnotationForkedFrom]; from != string(source.ID) {
			t.Errorf("fork %d is marked as a copy of %q, not of %s", i, from, source.ID)
		}
	}
	f.wantUntouched(t, source)
	f.wantNoCheckpoints(t)
	if use, _ := f.quotas.Used(team); use.Sandboxes != 4 {
		t.Errorf("%d sandboxes count, want 4", use.Sandboxes)
	}
}

// wantFork fails unless a sandbox is as TestFork requested it.
func (f fixture) wantFork(t *testing.T, v sandboxes.Sandbox) {
	t.Helper()
	if left := time.Until(v.EndAt); left > 21*time.Second || left < 20*time.Second {
		t.Errorf("fork %s ends in %s, want 20 s", v.Name, left)
	}
	s := f.object(t, v)
	if b := s.Spec.Barchan; b.Restore == nil || b.Restore.FilesOnly || fmt.Sprint(b.Metadata) != "map[from:template keep:yes step:2 user:ann]" {
		t.Errorf("fork %s is %+v", v.Name, b)
	}
	f.wantReachable(t, v.ID, true)
}

func TestForkIsOneCheckpointThatGoesByItself(t *testing.T) {
	var made []*barchan.Checkpoint
	f := newFixture(t)
	other := f.replica(t, func(c *Config) { c.Objects = noted{c.Objects, &made} })
	if _, err := other.Creates.Fork(t.Context(), forkRequest(f.mustCreate(t, request("base")), 5)); err != nil {
		t.Fatal(err)
	}
	if len(made) != 1 || made[0].Labels[barchan.LabelPurpose] != barchan.PurposeFork || *made[0].Spec.TTLSeconds != 600 || !made[0].Spec.KeepRunning {
		t.Errorf("made %+v", made)
	}
}

// noted keeps the checkpoints that are made.
type noted struct {
	sandboxes.Objects
	made *[]*barchan.Checkpoint
}

func (n noted) Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error {
	if c, ok := obj.(*barchan.Checkpoint); ok {
		*n.made = append(*n.made, c.DeepCopy())
	}
	return n.Objects.Create(ctx, obj, opts...)
}

// TestForkTellsOfEach: of those without room, and of those that run, while another is still being made.
func TestForkTellsOfEach(t *testing.T) {
	f := newFixture(t)
	held := make(chan struct{})
	other := f.replica(t, func(c *Config) { c.Objects = &oneHeld{Objects: c.Objects, until: held} })
	source := f.mustCreate(t, request("base"))
	f.setQuota(t, quota.AnnotationSandboxes, "4")
	var reported []int
	err := other.Creates.ForkEach(t.Context(), forkRequest(source, 5), func(n int, one creating.Forked) {
		reported = append(reported, n)
		switch len(reported) {
		case 1, 2:
			if !errors.Is(one.Err, errs.ErrExhausted) {
				t.Errorf("fork %d: %+v, want those without room first", n, one)
			}
			return
		case 4: // all but the one that is held
			close(held)
		}
		if one.Err != nil || one.Sandbox.State != sandboxes.StateRunning {
			t.Errorf("fork %d: %+v", n, one)
		}
		f.wantReachable(t, one.Sandbox.ID, true)
	})
	if slices.Sort(reported); err != nil || !slices.Equal(reported, []int{0, 1, 2, 3, 4}) {
		t.Errorf("reported %v, %v", reported, err)
	}
	f.wantNoCheckpoints(t)
	if err := f.Sandboxes.Pause(t.Context(), team, string(source.ID), nil); err != nil {
		t.Fatal(err)
	}
	err = f.Creates.ForkEach(t.Context(), forkRequest(source, 2), func(n int, _ creating.Forked) { t.Errorf("reported %d before an error", n) })
	wantKind(t, err, errs.ErrConflict, "is paused")
}

// oneHeld holds up the making of one sandbox.
type oneHeld struct {
	sandboxes.Objects
	until <-chan struct{}
	once  sync.Once
}

func (o *oneHeld) Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error {
	if _, is := obj.(*agents.Sandbox); is {
		mine := false
		o.once.Do(func() { mine = true })
		if mine {
			select {
			case <-o.until:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	return o.Objects.Create(ctx, obj, opts...)
}

func TestForkRefuses(t *testing.T) {
	f := newFixture(t)
	v, paused, bad := f.mustCreate(t, request("base")), f.mustCreate(t, request("base")), f.mustCreate(t, f.imaged(t, fakecluster.ImageUncapturable))
	with := request("base")
	with.Env = map[string]string{"TOKEN": "s3cret"}
	bound := f.mustCreate(t, with)
	f.edit(t, bound, func(s *agents.Sandbox) { pool.BindEnv(s, false) }) // as a SandboxClaim does
	if err := f.Sandboxes.Pause(t.Context(), team, string(paused.ID), nil); err != nil {
		t.Fatal(err)
	}
	before := len(f.sandboxes(t))
	for name, give := range map[string]struct {
		req  creating.ForkRequest
		kind error
		text string
	}{
		"none":          {forkRequest(v, 0), errs.ErrInvalid, "count: must be from 1 to 100"},
		"too many":      {forkRequest(v, 101), errs.ErrInvalid, "count: must be from 1 to 100"},
		"no time":       {creating.ForkRequest{Namespace: team, ID: string(v.ID), Count: 1}, errs.ErrInvalid, "Timeout must be greater than 0"},
		"another's":     {creating.ForkRequest{Namespace: "team-b", ID: string(v.ID), Count: 1, Timeout: time.Hour}, errs.ErrNotFound, "doesn't exist"},
		"bad variable":  {creating.ForkRequest{Namespace: team, ID: string(v.ID), Count: 1, Timeout: time.Hour, Env: map[string]string{"A=": ""}}, errs.ErrInvalid, "envVars"},
		"paused":        {forkRequest(paused, 1), errs.ErrConflict, "is paused"},
		"secrets":       {forkRequest(bound, 1), errs.ErrForbidden, "allow it by allowSecrets"},
		"what went bad": {forkRequest(bad, 2), errs.ErrConflict, "the disk is full"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := f.Creates.Fork(t.Context(), give.req)
			wantKind(t, err, give.kind, give.text)
		})
	}
	if n := len(f.sandboxes(t)); n != before {
		t.Errorf("%d sandboxes, want %d as before", n, before)
	}
	if use, _ := f.quotas.Used(team); int(use.Sandboxes) != before-1 {
		t.Errorf("%d sandboxes count, want %d", use.Sandboxes, before-1)
	}
	f.wantNoCheckpoints(t)
	allowed := forkRequest(bound, 1)
	allowed.AllowSecrets = true
	if got, err := f.Creates.Fork(t.Context(), allowed); err != nil || got[0].Err != nil {
		t.Errorf("with leave: %v, %v", got, err)
	} else if s := f.object(t, got[0].Sandbox); !pool.BoundEnv(s) || pool.OwnEnv(s) {
		t.Errorf("a fork with another's variables is marked %v", s.Annotations)
	}
}

// TestForkOfOneWithVariablesOfItsOwn needs no word: the tenant sent them. Its forks are like it.
func TestForkOfOneWithVariablesOfItsOwn(t *testing.T) {
	f := newFixture(t)
	f.cluster.Fill(t, team, "base", 1)
	with := request("base")
	with.Env = map[string]string{"TOKEN": "s3cret"}
	v := f.mustCreate(t, with)
	for generation := range 3 { // a fork of a fork, too
		got, err := f.Creates.Fork(t.Context(), forkRequest(v, 1))
		if err != nil || got[0].Err != nil {
			t.Fatalf("generation %d: %v, %v", generation, got, err)
		}
		v = got[0].Sandbox
		if s := f.object(t, v); !pool.BoundEnv(s) || !pool.OwnEnv(s) || !pool.AllowsSecrets(s) {
			t.Errorf("generation %d is marked %v", generation, s.Annotations)
		}
	}
}

// sandboxes are all objects of the team.
func (f fixture) sandboxes(t *testing.T) []*agents.Sandbox {
	t.Helper()
	all, err := f.cluster.Sandboxes(t.Context(), team)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestForkWithinAQuota: paused ones count as the namespace sets, and forks beyond it fail each.
func TestForkWithinAQuota(t *testing.T) {
	for counts, want := range map[string]int{quota.CountRunning: 3, quota.CountAll: 2} {
		t.Run(counts, func(t *testing.T) {
			f := newFixture(t)
			source, paused := f.mustCreate(t, request("base")), f.mustCreate(t, request("base"))
			if err := f.Sandboxes.Pause(t.Context(), team, string(paused.ID), nil); err != nil {
				t.Fatal(err)
			}
			f.setQuota(t, quota.AnnotationSandboxes, "4")
			f.setQuota(t, quota.AnnotationCounts, counts)
			got, err := f.Creates.Fork(t.Context(), forkRequest(source, 10))
			if err != nil {
				t.Fatal(err)
			}
			made := 0
			for i, one := range got {
				switch {
				case one.Err == nil:
					made++
				case !errors.Is(one.Err, errs.ErrExhausted):
					t.Errorf("fork %d: %v", i, one.Err)
				}
			}
			if made != want {
				t.Errorf("%d forks, want %d", made, want)
			}
			if _, err := f.Creates.Create(t.Context(), request("base")); !errors.Is(err, errs.ErrExhausted) {
				t.Errorf("one more: %v", err)
			}
			all, err := f.Creates.Fork(t.Context(), forkRequest(source, 2))
			if err != nil || !errors.Is(all[0].Err, errs.ErrExhausted) || !errors.Is(all[1].Err, errs.ErrExhausted) {
				t.Errorf("without room for any: %v, %v", all, err)
			}
			f.wantNoCheckpoints(t)
		})
	}
}

// TestForkLeavesNothingOfACallerWhoHasGone: neither sandboxes nor the checkpoint.
func TestForkLeavesNothingOfACallerWhoHasGone(t *testing.T) {
	f := newFixture(t)
	source := f.mustCreate(t, request("base"))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	f.cluster.Hold(true)
	wg.Go(func() {
		if got, err := f.Creates.Fork(ctx, forkRequest(source, 4)); err == nil {
			t.Errorf("Fork = %v", got)
		}
	})
	await(t, func() bool {
		all, err := f.cluster.Checkpoints(t.Context(), team)
		return err == nil && len(all) == 1
	})
	cancel()
	wg.Wait()
	f.cluster.Hold(false)
	f.wantNoCheckpoints(t)
	await(t, func() bool { return len(f.sandboxes(t)) == 1 })
	if use, _ := f.quotas.Used(team); use.Sandboxes != 1 {
		t.Errorf("%d sandboxes count, want 1", use.Sandboxes)
	}
}

func TestForkMany(t *testing.T) { synctest.Test(t, testForkMany) }

func testForkMany(t *testing.T) {
	f := newFixture(t)
	got, err := f.Creates.Fork(t.Context(), forkRequest(f.mustCreate(t, request("base")), creating.MaxForks))
	if err != nil {
		t.Fatal(err)
	}
	seen := map[sandbox.ID]bool{}
	for _, one := range got {
		if one.Err != nil {
			t.Fatal(one.Err)
		}
		seen[one.Sandbox.ID] = true
	}
	if len(seen) != creating.MaxForks {
		t.Errorf("%d forks, want %d", len(seen), creating.MaxForks)
	}
}
