package manager

import (
	"errors"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// While the gate is closed nothing new is begun, with or without warm members, and what there is
// can be read, prolonged, paused and ended.
func TestClosedGate(t *testing.T) {
	gate, err := health.NewGate(telemetry.Discard(), nil)
	if err != nil {
		t.Fatal(err)
	}
	f := newFixture(t, func(c *Config) { c.Gate = gate })
	keyed := request("base")
	keyed.IdempotencyKey = "once"
	v, other := f.mustCreate(t, keyed), f.mustCreate(t, request("base"))
	ctx, id := t.Context(), string(v.ID)

	gate.Set("disk", errs.Public(nil, "no room"))
	before := f.objects.writes.Load()
	wantKind(t, second(f.Creates.Create(ctx, request("base"))), errs.ErrUnavailable, "disk: no room")
	wantKind(t, second(f.Creates.Create(ctx, request("sized"))), errs.ErrUnavailable, "disk: no room")
	if wrote := f.objects.writes.Load() - before; wrote != 0 {
		t.Errorf("%d writes for what was refused", wrote)
	}
	if again, err := f.Creates.Create(ctx, keyed); err != nil || again.ID != v.ID {
		t.Errorf("the same request again = %v, %v; want the sandbox that it made", again.ID, err)
	}
	if _, resumed, err := f.Sandboxes.Connect(ctx, team, id, time.Hour, nil); err != nil || resumed {
		t.Errorf("Connect to what runs = %v", err)
	}
	if err := f.Sandboxes.SetTimeout(ctx, team, id, time.Minute); err != nil {
		t.Errorf("SetTimeout = %v", err)
	}
	if err := f.Sandboxes.Pause(ctx, team, id, nil); err != nil {
		t.Fatalf("Pause = %v", err)
	}
	wantKind(t, second(f.Sandboxes.Resume(ctx, team, id, time.Minute, nil)), errs.ErrUnavailable, "disk: no room")
	wantKind(t, second2(f.Sandboxes.Connect(ctx, team, id, time.Minute, nil)), errs.ErrUnavailable, "disk: no room")
	f.memoryIs(t, v.ID, agents.MemoryInRAM, "0")
	wantKind(t, second(f.Sandboxes.Resume(ctx, team, id, time.Minute, new(false))), errs.ErrUnavailable, "disk: no room")
	if err := errors.Join(second(f.Sandboxes.Resume(ctx, team, id, time.Minute, nil)), f.Sandboxes.Pause(ctx, team, id, nil)); err != nil {
		t.Fatalf("Resume of what is in RAM, and Pause = %v", err)
	}
	f.memoryIs(t, v.ID, agents.MemoryOnDisk, "1Mi")
	await(t, func() bool {
		now, err := f.Sandboxes.Get(ctx, team, id)
		return err == nil && now.Memory == agents.MemoryOnDisk
	})
	wantKind(t, second(f.Sandboxes.Resume(ctx, team, id, time.Minute, nil)), errs.ErrUnavailable, "disk: no room")
	if err := f.Sandboxes.Kill(ctx, team, string(other.ID)); err != nil {
		t.Errorf("Kill = %v", err)
	}

	gate.Set("disk", nil)
	if _, err := f.Sandboxes.Resume(ctx, team, id, time.Minute, nil); err != nil {
		t.Errorf("Resume afterwards = %v", err)
	}
	if now, err := f.Sandboxes.Get(ctx, team, id); err != nil || now.Memory != "" {
		t.Errorf("memory of what runs is in %q, %v", now.Memory, err)
	}
	f.mustCreate(t, request("base"))
}

// memoryIs sets where the memory of a paused sandbox is, as a node would.
func (f fixture) memoryIs(t *testing.T, id sandbox.ID, place agents.MemoryPlace, size string) {
	t.Helper()
	for {
		s, err := f.cluster.SandboxByID(t.Context(), id)
		if err == nil {
			s.Status.Barchan.Memory, s.Status.Barchan.MemorySize = place, new(resource.MustParse(size))
			err = f.cluster.Status().Update(t.Context(), s)
		}
		if err == nil {
			return
		}
		if !apierrors.IsConflict(err) {
			t.Fatal(err)
		}
	}
}

// A create that the gate overtakes is refused, and does not wait for its time to run out.
func TestGateClosesAmidCreate(t *testing.T) {
	gate, err := health.NewGate(telemetry.Discard(), nil)
	if err != nil {
		t.Fatal(err)
	}
	f := newFixture(t, func(c *Config) { c.Gate, c.StartTimeout = gate, time.Hour })
	f.cluster.Hold(true)
	failed := make(chan error, 1)
	go func() { failed <- second(f.Creates.Create(t.Context(), request("slow"))) }()
	var list []*agents.Sandbox
	await(t, func() bool {
		list, err = f.cluster.Sandboxes(t.Context(), team)
		return err == nil && len(list) == 1
	})
	gate.Set("disk", errs.Public(nil, "no room"))
	meta.SetStatusCondition(&list[0].Status.Conditions, metav1.Condition{
		Type: agents.ConditionReady, Status: metav1.ConditionFalse, Reason: agents.ReasonReconcilerError, Message: "no room",
	})
	if err := f.cluster.Status().Update(t.Context(), list[0]); err != nil {
		t.Fatal(err)
	}
	wantKind(t, <-failed, errs.ErrUnavailable, "disk: no room")
	f.cluster.Hold(false)
	await(t, func() bool {
		left, err := f.cluster.Sandboxes(t.Context(), team)
		return err == nil && len(left) == 0
	})
}
