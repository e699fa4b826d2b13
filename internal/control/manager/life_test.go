package manager

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
)

func TestKillWhileStarting(t *testing.T) {
	f := newFixture(t)
	failed := make(chan error, 1)
	go func() {
		_, err := f.Creates.Create(t.Context(), request("slow"))
		failed <- err
	}()
	var v sandboxes.Sandbox
	await(t, func() bool {
		all, err := f.cluster.Sandboxes(t.Context(), team)
		if err != nil || len(all) == 0 {
			return false
		}
		v = f.Sandboxes.View(all[0])
		return true
	})
	if err := f.Sandboxes.Kill(t.Context(), team, string(v.ID)); err != nil {
		t.Fatalf("Kill: %v", err)
	}
	wantKind(t, <-failed, errs.ErrConflict, "was killed")
}

func TestKill(t *testing.T) {
	f := newFixture(t)
	for name, prepare := range map[string]func(*testing.T, sandboxes.Sandbox){
		"running": func(*testing.T, sandboxes.Sandbox) {},
		"paused": func(t *testing.T, v sandboxes.Sandbox) {
			if err := f.Sandboxes.Pause(t.Context(), team, string(v.ID), nil); err != nil {
				t.Fatal(err)
			}
		},
		"with an obsolete client ID": func(*testing.T, sandboxes.Sandbox) {},
	} {
		t.Run(name, func(t *testing.T) {
			v := f.mustCreate(t, request("base"))
			prepare(t, v)
			id := string(v.ID)
			if strings.HasPrefix(name, "with") {
				id += "-abc"
			}
			f.cluster.Hold(true)
			defer f.cluster.Hold(false)
			if err := f.Sandboxes.Kill(t.Context(), team, id); err != nil {
				t.Fatalf("Kill: %v", err)
			}
			if _, ok := f.routes.Lookup(v.ID); ok {
				t.Error("the route outlived the kill")
			}
			wantKind(t, f.Sandboxes.Kill(t.Context(), team, id), errs.ErrNotFound, "doesn't exist or you don't have access to it")
			_, err := f.Sandboxes.Get(t.Context(), team, id)
			wantKind(t, err, errs.ErrNotFound, fmt.Sprintf(`Sandbox "%s" doesn't exist`, id))
			_, _, err = f.Sandboxes.Connect(t.Context(), team, id, time.Minute, nil)
			wantKind(t, err, errs.ErrNotFound, "doesn't exist")
		})
	}
}

func TestOtherTenantsSeeNothing(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	ctx, id, other := t.Context(), string(v.ID), "team-b"
	for name, err := range map[string]error{
		"Get":        second(f.Sandboxes.Get(ctx, other, id)),
		"Kill":       f.Sandboxes.Kill(ctx, other, id),
		"SetTimeout": f.Sandboxes.SetTimeout(ctx, other, id, time.Minute),
		"Refresh":    f.Sandboxes.Refresh(ctx, other, id, time.Minute),
		"Pause":      f.Sandboxes.Pause(ctx, other, id, nil),
		"Resume":     second(f.Sandboxes.Resume(ctx, other, id, time.Minute, nil)),
		"SetNetwork": f.Sandboxes.SetNetwork(ctx, other, id, nil),
		"Metrics":    second(f.Sandboxes.Metrics(ctx, other, id, time.Time{}, time.Time{})),
		"Logs":       second(f.Sandboxes.Logs(ctx, other, id, sandboxes.LogRequest{})),
	} {
		t.Run(name, func(t *testing.T) { wantKind(t, err, errs.ErrNotFound, "doesn't exist or you don't have access to it") })
	}
	page, err := f.Sandboxes.List(ctx, sandboxes.ListRequest{Namespace: other})
	if err != nil || len(page.Items) != 0 || page.Running != 0 {
		t.Errorf("List = %+v, %v", page, err)
	}
	if _, err := f.Sandboxes.Get(ctx, team, id); err != nil {
		t.Errorf("the owner lost it: %v", err)
	}
}

func TestTimeouts(t *testing.T) { synctest.Test(t, testTimeouts) }

func testTimeouts(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	ctx, id := t.Context(), string(v.ID)
	left := func() time.Duration {
		t.Helper()
		v, err := f.Sandboxes.Get(ctx, team, id)
		if err != nil {
			t.Fatal(err)
		}
		return time.Until(v.EndAt).Round(time.Minute)
	}
	for _, step := range []struct {
		name        string
		do          func() error
		enqueueDial time.Duration
	}{
		{"shorten", func() error { return f.Sandboxes.SetTimeout(ctx, team, id, 10*time.Minute) }, 10 * time.Minute},
		{"connect does not shorten", func() error { _, _, err := f.Sandboxes.Connect(ctx, team, id, time.Minute, nil); return err }, 10 * time.Minute},
		{"connect extends", func() error { _, _, err := f.Sandboxes.Connect(ctx, team, id, 20*time.Minute, nil); return err }, 20 * time.Minute},
		{"refresh does not shorten", func() error { return f.Sandboxes.Refresh(ctx, team, id, time.Second) }, 20 * time.Minute},
		{"refresh extends", func() error { return f.Sandboxes.Refresh(ctx, team, id, 30*time.Minute) }, 30 * time.Minute},
		{"most", func() error { return f.Sandboxes.SetTimeout(ctx, team, id, 24*time.Hour) }, 24 * time.Hour},
	} {
		if err := step.do(); err != nil || left() != step.enqueueDial {
			t.Errorf("%s: %v, %s left, want %s", step.name, err, left(), step.enqueueDial)
		}
	}
	wantKind(t, f.Sandboxes.SetTimeout(ctx, team, id, 24*time.Hour+1), errs.ErrInvalid, "Timeout cannot be greater than 24 hours")
	wantKind(t, f.Sandboxes.Refresh(ctx, team, id, 2*time.Hour), errs.ErrInvalid, "3600")

	if err := f.cluster.Aged(ctx, v.ID, time.Now().Add(-20*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if err := f.Sandboxes.SetTimeout(ctx, team, id, 10*time.Hour); err != nil || left() != 4*time.Hour {
		t.Errorf("an old sandbox: %v, %s left, want 4h by the longest life", err, left())
	}
	if err := f.cluster.Aged(ctx, v.ID, time.Now().Add(-25*time.Hour)); err != nil {
		t.Fatal(err)
	}
	wantKind(t, f.Sandboxes.SetTimeout(ctx, team, id, time.Hour), errs.ErrInvalid, "Max instance length exceeded")
}

// TestTimeoutOfNothing ends a sandbox now, and extends or resumes none.
func TestTimeoutOfNothing(t *testing.T) {
	for _, d := range []time.Duration{0, -time.Second, -1 << 62} {
		f := newFixture(t)
		v := f.mustCreate(t, request("base"))
		ctx, id := t.Context(), string(v.ID)
		if got, resumed, err := f.Sandboxes.Connect(ctx, team, id, d, nil); err != nil || resumed || !got.EndAt.Equal(v.EndAt) {
			t.Errorf("Connect for %s: ends %s, was %s, %v", d, got.EndAt, v.EndAt, err)
		}
		if err := f.Sandboxes.Pause(ctx, team, id, nil); err != nil {
			t.Fatal(err)
		}
		_, _, err := f.Sandboxes.Connect(ctx, team, id, d, nil)
		wantKind(t, err, errs.ErrInvalid, "Timeout must be greater than 0")
		if _, err := f.Sandboxes.Resume(ctx, team, id, time.Hour, nil); err != nil {
			t.Fatal(err)
		}
		if err := f.Sandboxes.SetTimeout(ctx, team, id, d); err != nil {
			t.Fatalf("SetTimeout(%s): %v", d, err)
		}
		if end := f.object(t, v).Spec.ShutdownTime; end == nil || end.After(time.Now()) {
			t.Errorf("after SetTimeout(%s) it ends %s, want now", d, end)
		}
		req := request("base")
		req.Timeout = d
		wantKind(t, second(f.Creates.Create(ctx, req)), errs.ErrInvalid, "Timeout must be greater than 0")
	}
}

func TestPause(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	ctx, id := t.Context(), string(v.ID)
	if err := f.Sandboxes.Pause(ctx, team, id, new(false)); err != nil {
		t.Fatalf("Pause: %v", err)
	}
	s := f.object(t, v)
	if s.Spec.OperatingMode != agents.ModeSuspended || s.Spec.ShutdownTime != nil || s.Spec.Barchan.Suspend != agents.SuspendFiles {
		t.Errorf("spec is %+v", s.Spec)
	}
	got, err := f.Sandboxes.Get(ctx, team, id)
	if err != nil || got.State != sandboxes.StatePaused || got.EndAt.Equal(sandboxes.Never) {
		t.Errorf("Get = %+v, %v", got, err)
	}
	wantKind(t, f.Sandboxes.Pause(ctx, team, id, nil), errs.ErrConflict, "already paused")
	wantKind(t, f.Sandboxes.SetTimeout(ctx, team, id, time.Minute), errs.ErrConflict, "paused")
}

func TestResume(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	ctx, id := t.Context(), string(v.ID)
	_, err := f.Sandboxes.Resume(ctx, team, id, time.Minute, nil)
	wantKind(t, err, errs.ErrConflict, "already running")
	if err := f.Sandboxes.Pause(ctx, team, id, new(true)); err != nil {
		t.Fatal(err)
	}
	got, resumed, err := f.Sandboxes.Connect(ctx, team, id, time.Minute, nil)
	if err != nil || !resumed || got.State != sandboxes.StateRunning || time.Until(got.EndAt) > 61*time.Second || got.AgentToken != v.AgentToken {
		t.Errorf("Connect = %+v, %v, %v", got, resumed, err)
	}
	f.wantReachable(t, v.ID, true)
	if err := f.Sandboxes.Pause(ctx, team, id, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Sandboxes.Resume(ctx, team, id, time.Minute, nil); err != nil {
		t.Errorf("Resume: %v", err)
	}
}

func TestPauseClosesTheRouteBeforeAnythingHappens(t *testing.T) {
	f := newFixture(t, func(c *Config) { c.MoveTimeout = 20 * time.Millisecond })
	v := f.mustCreate(t, request("base"))
	f.cluster.Hold(true)
	wantKind(t, f.Sandboxes.Pause(t.Context(), team, string(v.ID), nil), errs.ErrConflict, "still Pausing")
	f.wantReachable(t, v.ID, false)
	if got, err := f.Sandboxes.Get(t.Context(), team, string(v.ID)); err != nil || got.State != sandboxes.StatePaused {
		t.Errorf("Get = %v, %v", got.State, err)
	}
	if err := f.Sandboxes.Kill(t.Context(), team, string(v.ID)); err != nil {
		t.Errorf("Kill while pausing: %v", err)
	}
	f.cluster.Hold(false)
}

func TestConnectWhilePausingWaitsAndResumes(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	f.cluster.Hold(true)
	var wg sync.WaitGroup
	wg.Go(func() { _ = f.Sandboxes.Pause(t.Context(), team, string(v.ID), nil) })
	await(t, func() bool { return f.object(t, v).Spec.OperatingMode == agents.ModeSuspended })
	wg.Go(func() {
		if _, resumed, err := f.Sandboxes.Connect(t.Context(), team, string(v.ID), time.Minute, nil); err != nil || !resumed {
			t.Errorf("Connect: resumed %v, %v", resumed, err)
		}
	})
	f.cluster.Hold(false)
	wg.Wait()
}

func TestManyChangesAtOnceLoseNone(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := f.Sandboxes.Refresh(t.Context(), team, string(v.ID), time.Hour); err != nil {
				t.Errorf("Refresh: %v", err)
			}
			if err := f.Sandboxes.SetTimeout(t.Context(), team, string(v.ID), 2*time.Hour); err != nil {
				t.Errorf("SetTimeout: %v", err)
			}
		})
	}
	wg.Wait()
}

func TestWake(t *testing.T) { synctest.Test(t, testWake) }

func testWake(t *testing.T) {
	f := newFixture(t)
	req := request("base")
	req.Timeout = time.Minute
	deaf := f.mustCreate(t, req)
	req.AutoResume = true
	light := f.mustCreate(t, req)
	for _, v := range []sandboxes.Sandbox{deaf, light} {
		if err := f.Sandboxes.Wake(t.Context(), v.ID); err != nil {
			t.Errorf("Wake of a running one: %v", err)
		}
		if err := f.Sandboxes.Pause(t.Context(), team, string(v.ID), nil); err != nil {
			t.Fatal(err)
		}
	}
	wantKind(t, f.Sandboxes.Wake(t.Context(), deaf.ID), errs.ErrForbidden, "does not wake")
	if err := f.Sandboxes.Wake(t.Context(), light.ID); err != nil {
		t.Fatalf("Wake: %v", err)
	}
	got, err := f.Sandboxes.Get(t.Context(), team, string(light.ID))
	if left := time.Until(got.EndAt); err != nil || got.State != sandboxes.StateRunning || left < 299*time.Second || left > 301*time.Second {
		t.Errorf("after the wake: %s, %s left, %v; want 300 s", got.State, left, err)
	}
	if err := f.Sandboxes.Wake(t.Context(), sandbox.IDOf("unknown")); !errors.Is(err, errs.ErrNotFound) {
		t.Errorf("Wake of none = %v", err)
	}
}

func TestSetNetwork(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	ctx, id := t.Context(), string(v.ID)
	policy := &agents.EgressPolicy{Internet: new(true), DenyOut: []string{"0.0.0.0/0"}, AllowOut: []string{"example.com"}}
	if err := f.Sandboxes.SetNetwork(ctx, team, id, policy); err != nil {
		t.Fatal(err)
	}
	if got, err := f.Sandboxes.Get(ctx, team, id); err != nil || !slices.Equal(got.Network.AllowOut, policy.AllowOut) {
		t.Errorf("Get = %+v, %v", got.Network, err)
	}
	wantKind(t, f.Sandboxes.SetNetwork(ctx, team, id, &agents.EgressPolicy{DenyOut: []string{"x y"}}), errs.ErrInvalid, "network.denyOut[0]")
	if err := f.Sandboxes.SetNetwork(ctx, team, id, nil); err != nil {
		t.Fatal(err)
	}
	if got, err := f.Sandboxes.Get(ctx, team, id); err != nil || got.Network != nil {
		t.Errorf("Get = %+v, %v", got.Network, err)
	}
}
