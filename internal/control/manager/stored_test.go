package manager

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/snapshots"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// fill has the team store as much as it may.
func (f fixture) fill(t *testing.T) {
	t.Helper()
	c := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: team, Name: "large"}}
	c.Status.Size = new(resource.MustParse("1Gi"))
	quota.ObserveObjects[*barchan.Checkpoint](f.quotas)(nil, c)
	f.setQuota(t, quota.AnnotationStored, "1Gi")
}

// TestFullStore refuses what a client asks to be stored, with the sandbox as it was, and stores what no client asks for.
func TestFullStore(t *testing.T) {
	f := newFixture(t)
	v, idle, files := f.mustCreate(t, request("base")), f.mustCreate(t, request("base")), f.mustCreate(t, request("base"))
	f.fill(t)
	ctx := t.Context()
	const full = "at most 1Gi of snapshots and memory of paused sandboxes (barchan.dev/quota-stored); they have 1Gi"

	wantKind(t, f.Sandboxes.Pause(ctx, team, string(v.ID), nil), errs.ErrExhausted, full)
	wantKind(t, f.Sandboxes.Pause(ctx, team, string(v.ID), new(true)), errs.ErrExhausted, full)
	if s := f.object(t, v); s.Spec.OperatingMode == agents.ModeSuspended || s.Spec.ShutdownTime == nil {
		t.Errorf("after a refused pause: %s until %v", s.Spec.OperatingMode, s.Spec.ShutdownTime)
	}
	wantKind(t, second(f.Snapshots.Create(ctx, snapshots.Request{Namespace: team, ID: string(v.ID)})), errs.ErrExhausted, full)
	if err := f.Sandboxes.Pause(ctx, team, string(files.ID), new(false)); err != nil {
		t.Errorf("a pause with files only: %v", err)
	}
	if err := f.Sandboxes.PauseIdle(ctx, team, string(idle.ID)); err != nil {
		t.Errorf("a pause by an idle policy: %v", err)
	}
	if got, err := f.Sandboxes.Get(ctx, team, string(idle.ID)); err != nil || got.State != sandboxes.StatePaused {
		t.Errorf("the idle sandbox is %v, %v", got.State, err)
	}
	if _, _, err := f.Sandboxes.Connect(ctx, team, string(idle.ID), time.Minute, nil); err != nil {
		t.Errorf("a resume: %v", err)
	}

	auto := func(id string) creating.Request {
		r := request(id)
		r.OnTimeout = agents.TimeoutPause
		return r
	}
	wantKind(t, second(f.Creates.Create(ctx, auto("base"))), errs.ErrExhausted, full)
	f.setQuota(t, quota.AnnotationStored, "2Gi")
	again := f.mustCreate(t, auto("base"))
	f.setQuota(t, quota.AnnotationStored, "1Gi")
	wantKind(t, second(f.Creates.Fork(ctx, creating.ForkRequest{Namespace: team, ID: string(again.ID), Count: 1, Timeout: time.Minute})), errs.ErrExhausted, full)
	f.mustCreate(t, request("base"))
}

// TestStoredMemory counts the memory of a paused sandbox as its node reports it.
func TestStoredMemory(t *testing.T) {
	f := newFixture(t)
	v, other := f.mustCreate(t, request("base")), f.mustCreate(t, request("base"))
	ctx := t.Context()
	if err := f.Sandboxes.Pause(ctx, team, string(v.ID), nil); err != nil {
		t.Fatal(err)
	}
	f.setQuota(t, quota.AnnotationStored, "50Mi")
	f.memoryIs(t, v.ID, agents.MemoryOnDisk, "50Mi")
	await(t, func() bool { return f.quotas.Stored(team) == 50<<20 })
	if got, err := f.Sandboxes.Get(ctx, team, string(v.ID)); err != nil || got.MemorySize != 50<<20 {
		t.Errorf("Get = %d bytes of memory, %v", got.MemorySize, err)
	}
	wantKind(t, f.Sandboxes.Pause(ctx, team, string(other.ID), nil), errs.ErrExhausted, "they have 50Mi")
	if err := f.Sandboxes.Kill(ctx, team, string(v.ID)); err != nil {
		t.Fatal(err)
	}
	if err := f.Sandboxes.Pause(ctx, team, string(other.ID), nil); err != nil {
		t.Errorf("after a deletion: %v", err)
	}
}

// TestNumberOfSnapshots refuses a snapshot beyond the limit, and counts no failed one.
func TestNumberOfSnapshots(t *testing.T) {
	f := newFixture(t)
	v := f.mustCreate(t, request("base"))
	f.setQuota(t, quota.Snapshots.Annotation(), "1")
	f.mustSnapshot(t, v, "one:v1")
	wantKind(t, second(f.Snapshots.Create(t.Context(), snapshots.Request{Namespace: team, ID: string(v.ID), Name: "two:v1"})), errs.ErrExhausted,
		"at most 1 snapshots, the layers of builds included (barchan.dev/quota-snapshots); it has 1")
	f.setQuota(t, quota.Snapshots.Annotation(), "2")
	f.mustSnapshot(t, v, "two:v1")
}
