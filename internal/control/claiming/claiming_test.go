package claiming

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	namespace           = "team"
	warmPool  types.UID = "pool"
)

var template = types.NamespacedName{Namespace: namespace, Name: "t"}

// fakeAPI is an API server with one template and one pool, its own cache, and the owner of a claim.
type fakeAPI struct {
	mu       sync.Mutex
	revision string
	gone     bool  // the template is deleted
	reads    int   // of the template
	fails    error // of each write
	version  int
	written  []*agents.Sandbox
	bound    []envd.InitRequest
	woken    []string // members, with the write that followed
	// Of the template: its warm-up, and the checkpoint of that.
	warmUp        *agents.WarmUp
	checkpoint    *barchan.Checkpoint
	checkpointErr error
	// Of the owner.
	cold     bool
	binds    bool
	resolved []string

	picker  *picker.Picker
	quotas  *quota.Quotas
	assumed *assumecache.Sandboxes
	*Claimer
}

func newFakeAPI(t *testing.T) *fakeAPI {
	t.Helper()
	w := &fakeAPI{revision: "r1"}
	var err error
	if w.picker, err = picker.New(picker.Config{Writer: w}); err != nil {
		t.Fatal(err)
	}
	limits := quota.Limits{Sandboxes: quota.Limit{Set: true, Most: 1}}
	if w.quotas, err = quota.New(quota.Config{Reader: w, Log: telemetry.Discard(), Defaults: limits}); err != nil {
		t.Fatal(err)
	}
	w.assumed = assumecache.New(func(context.Context, types.NamespacedName) (*agents.Sandbox, error) { return nil, errs.ErrNotFound })
	w.Claimer, err = New(Config{Creator: w, Reader: w, Picker: w.picker, Quota: w.quotas, Binder: w, Assumed: w.assumed})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *fakeAPI) begin() *Claim {
	return w.Begin(namespace, template, w)
}

func (w *fakeAPI) CurrentTemplate(context.Context, types.NamespacedName) (*extensions.SandboxTemplate, string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reads++
	if w.gone {
		return nil, "", errs.ErrNotFound
	}
	t := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "t", UID: "t"}}
	t.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "main", Image: w.revision}}
	if w.warmUp != nil {
		t.Spec.Barchan = &extensions.TemplateBarchanSpec{Sandbox: &agents.BarchanSpec{WarmUp: w.warmUp}}
	}
	return t, w.revision, nil
}

func (w *fakeAPI) Checkpoint(_ context.Context, key types.NamespacedName) (*barchan.Checkpoint, error) {
	if w.checkpointErr != nil {
		return nil, w.checkpointErr
	}
	if w.checkpoint == nil || key != client.ObjectKeyFromObject(w.checkpoint) {
		return nil, errs.ErrNotFound
	}
	return w.checkpoint, nil
}

func (w *fakeAPI) Namespace(context.Context, string) (*corev1.Namespace, error) {
	return nil, errs.ErrNotFound
}

func (w *fakeAPI) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errors.New("not served")
}

func (w *fakeAPI) Update(_ context.Context, obj client.Object, _ ...client.UpdateOption) error {
	return w.write(obj)
}

func (w *fakeAPI) Create(_ context.Context, obj client.Object, _ ...client.CreateOption) error {
	obj.SetUID(types.UID(obj.GetName()))
	return w.write(obj)
}

func (w *fakeAPI) write(obj client.Object) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fails != nil {
		return w.fails
	}
	w.version++
	s, _ := obj.(*agents.Sandbox)
	s.ResourceVersion = strconv.Itoa(1000 + w.version)
	w.written = append(w.written, s.DeepCopy())
	return nil
}

// Wake notes the member, and how many writes came before.
func (w *fakeAPI) Wake(_ context.Context, member *agents.Sandbox) {
	w.woken = append(w.woken, fmt.Sprintf("%s before write %d", member.Name, len(w.written)+1))
}

func (w *fakeAPI) Bind(_ context.Context, _ *agents.Sandbox, req envd.InitRequest) error {
	w.bound = append(w.bound, req)
	return nil
}

func (w *fakeAPI) Resolved(t Template, err error) error {
	w.resolved = append(w.resolved, t.Revision)
	if err != nil {
		return fmt.Errorf("no template for the owner: %w", err)
	}
	return nil
}

func (w *fakeAPI) Warm() bool { return !w.cold }

func (w *fakeAPI) Adopt(member *agents.Sandbox, _ Template) *agents.Sandbox {
	return pool.Adopt(member, nil)
}

func (w *fakeAPI) Binds() bool { return w.binds }

func (w *fakeAPI) New(t Template) *agents.Sandbox {
	s := pool.NewSandbox(t.SandboxTemplate, t.Revision, namespace)
	s.Name = "cold"
	return s
}

// member shows the picker one of a revision; it is being created unless it is ready.
func (w *fakeAPI) member(name, revision string, ready bool) *agents.Sandbox {
	w.mu.Lock()
	w.version++
	version := strconv.Itoa(w.version)
	w.mu.Unlock()
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(name), ResourceVersion: version, Labels: map[string]string{
		agents.LabelWarmPoolSandbox: string(warmPool), agents.LabelTemplateHash: revision, agents.LabelLaunchType: agents.LaunchWarm,
	}, Annotations: map[string]string{agents.AnnotationTemplateRef: template.Name, pool.AnnotationTemplateNamespace: template.Namespace}}}
	if ready {
		s.Status.PodIPs = []string{"10.0.0.1"}
		s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}}
	}
	w.picker.Observe(nil, s)
	return s
}

// roll changes the template.
func (w *fakeAPI) roll(revision string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.revision = revision
}

func TestTakeWarm(t *testing.T) {
	w := newFakeAPI(t)
	w.binds = true
	w.member("m", "r1", true)
	x := w.begin()
	if err := x.Resolve(t.Context()); err != nil {
		t.Fatal(err)
	}
	s, err := x.TakeWarm(t.Context(), warmPool)
	if err != nil || s.Name != "m" || len(w.written) != 1 || w.reads != 1 {
		t.Fatalf("TakeWarm = %v, %v with %d writes and %d reads of the template; want 1 and 1", s, err, len(w.written), w.reads)
	}
	if !slices.Equal(w.woken, []string{"m before write 1"}) {
		t.Errorf("woken: %q", w.woken)
	}
	if a := w.assumed.Find(func(*agents.Sandbox) bool { return true }); a == nil || a.ResourceVersion != s.ResourceVersion {
		t.Errorf("assumed is %v", a)
	}
	if use, _ := w.quotas.Used(namespace); use.Sandboxes != 1 || !x.Wrote() {
		t.Errorf("%d sandboxes are reserved", use.Sandboxes)
	}
	if err := w.Claimer.Bind(t.Context(), s, envd.InitRequest{Open: true}); err != nil || len(w.bound) != 1 {
		t.Errorf("Bind = %v, with %d requests", err, len(w.bound))
	}
}

// An agent that gets no request rests on.
func TestTakeWarmWithoutBind(t *testing.T) {
	w := newFakeAPI(t)
	w.member("m", "r1", true)
	if _, err := w.begin().TakeWarm(t.Context(), warmPool); err != nil || len(w.woken) > 0 {
		t.Errorf("TakeWarm: %v, woken: %q", err, w.woken)
	}
}

// A wait may last long: what the claim read before it is old.
func TestTemplateIsReadAfterAWait(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*fakeAPI)
		want   error
		name   string
	}{
		"as it was":       {func(*fakeAPI) {}, nil, "m1"},
		"rolled":          {func(w *fakeAPI) { w.roll("r2"); w.member("m2", "r2", true) }, nil, "m2"},
		"rolled to none":  {func(w *fakeAPI) { w.roll("r2") }, picker.ErrNone, ""},
		"now cold":        {func(w *fakeAPI) { w.cold = true }, picker.ErrNone, ""},
		"template gone":   {func(w *fakeAPI) { w.gone = true }, errs.ErrNotFound, ""},
		"rolled and back": {func(w *fakeAPI) { w.roll("r2"); w.roll("r1") }, nil, "m1"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFakeAPI(t)
				coming := w.member("m1", "r1", false)
				var s *agents.Sandbox
				var err error
				go func() { s, err = w.begin().TakeWarm(t.Context(), warmPool) }()
				time.Sleep(180 * time.Millisecond)
				synctest.Wait()
				tt.change(w)
				w.version += 10
				ready := w.member("ignored", "none", true).DeepCopy()
				ready.Name, ready.UID, ready.Labels = coming.Name, coming.UID, coming.Labels
				w.picker.Observe(coming, ready)
				synctest.Wait()
				if !errors.Is(err, tt.want) || (err == nil) != (tt.want == nil) || (tt.name != "" && (s == nil || s.Name != tt.name)) {
					t.Fatalf("TakeWarm = %v, %v; want %s, %v", s, err, tt.name, tt.want)
				}
				if s != nil && pool.WaitsOf(s) != (pool.Waits{Member: 180 * time.Millisecond}) {
					t.Errorf("the sandbox notes %+v, want the wait for the member", pool.WaitsOf(s))
				}
				if n := w.picker.Ready(warmPool, template, "r1"); (n == 1) != (tt.name != "m1") {
					t.Errorf("%d members of r1 are ready", n)
				}
			})
		})
	}
}

// A cold start that follows a wait is of the template as it is after it.
func TestColdStartAfterAWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeAPI(t)
		coming := w.member("m1", "r1", false)
		x := w.begin()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := x.TakeWarm(ctx, warmPool); !errors.Is(err, errs.ErrTimeout) {
			t.Fatalf("TakeWarm = %v", err)
		}
		w.roll("r2")
		s, err := x.Create(t.Context(), true)
		if err != nil || pool.RevisionOf(s) != "r2" || s.Spec.PodTemplate.Spec.Containers[0].Image != "r2" {
			t.Errorf("Create = %v, %v; want one of r2", s, err)
		}
		if got := pool.WaitsOf(s); got != (pool.Waits{Member: time.Second}) {
			t.Errorf("the sandbox notes %+v, want the wait in vain", got)
		}
		w.picker.Observe(coming, nil)
	})
}

// Between the wait's end and the write, nothing waits: the template is read once for each.
func TestReadsOfTheTemplate(t *testing.T) {
	w := newFakeAPI(t)
	x := w.begin()
	ctx := t.Context()
	if _, err := x.TakeWarm(ctx, warmPool); !errors.Is(err, picker.ErrNone) {
		t.Fatal(err)
	}
	if _, err := x.Create(ctx, true); err != nil || w.reads != 2 {
		t.Errorf("Create = %v; the template was read %d times, want once before each", err, w.reads)
	}
}

func TestQuotaOfAClaim(t *testing.T) {
	w := newFakeAPI(t)
	ctx := t.Context()
	w.fails = errors.New("the disk is full")
	x := w.begin()
	if s, err := x.Create(ctx, true); !errors.Is(err, w.fails) || s == nil {
		t.Fatalf("Create = %v, %v; want the sandbox and the server's error", s, err)
	}
	if _, err := w.begin().Create(ctx, true); !errors.Is(err, errs.ErrExhausted) {
		t.Errorf("a second claim = %v; want it to be over the quota", err)
	}
	x.Release()
	x.Release()
	w.fails = nil
	if _, err := w.begin().Create(ctx, true); err != nil {
		t.Errorf("after the release: %v", err)
	}
}

// TestReservationOfTheOwner: one that the owner has got is the claim's, which reserves nothing more and releases it.
func TestReservationOfTheOwner(t *testing.T) {
	w := newFakeAPI(t)
	x := w.begin()
	if err := x.Resolve(t.Context()); err != nil {
		t.Fatal(err)
	}
	hold, err := w.quotas.Hold(t.Context(), quota.Request{Namespace: namespace, Size: x.Size()}) // all that there is
	if err != nil {
		t.Fatal(err)
	}
	x.Use(hold)
	if _, err := x.Create(t.Context(), true); err != nil {
		t.Errorf("Create = %v; want the reservation to be used", err)
	}
	x.Release()
	if _, err := w.begin().Create(t.Context(), true); err != nil {
		t.Errorf("after the release: %v", err)
	}
}

// TestStartFromTheWarmUp: a cold start takes the checkpoint of its template's warm-up, if there is one of that revision, unless
// the owner takes none that others have warmed.
func TestStartFromTheWarmUp(t *testing.T) {
	ready := func(revision string) *barchan.Checkpoint {
		t := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "t", UID: "t"}}
		c := pool.NewWarmCheckpoint(t, revision, namespace, nil)
		c.Name = pool.WarmName("t", "r1")
		c.Status = barchan.CheckpointStatus{Phase: barchan.CheckpointReady, Content: barchan.ContentMemoryAndFiles}
		return c
	}
	unreadable := errors.New("the cache has stopped")
	for name, c := range map[string]struct {
		checkpoint *barchan.Checkpoint
		err        error // of its read
		noWarmUp   bool
		asked      bool // for it
		cold       bool // the owner takes no warmed one
		restores   bool
	}{
		"its checkpoint":                {checkpoint: ready("r1"), asked: true, restores: true},
		"none is ready yet":             {asked: true},
		"that of another revision":      {checkpoint: ready("r2"), asked: true},
		"the template has no warm-up":   {checkpoint: ready("r1"), asked: true, noWarmUp: true},
		"a start without it":            {checkpoint: ready("r1")},
		"an owner that takes none":      {checkpoint: ready("r1"), asked: true, cold: true},
		"a checkpoint that is not read": {err: unreadable, asked: true},
	} {
		w := newFakeAPI(t)
		w.checkpoint, w.checkpointErr, w.cold = c.checkpoint, c.err, c.cold
		if !c.noWarmUp {
			w.warmUp = &agents.WarmUp{Command: []string{"true"}}
		}
		s, err := w.begin().Create(t.Context(), c.asked)
		if c.err != nil {
			if !errors.Is(err, c.err) || len(w.written) != 0 {
				t.Errorf("%s: Create = %v, %v, and %d writes; want the error alone", name, s, err, len(w.written))
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		restore := w.written[0].Spec.Barchan != nil && w.written[0].Spec.Barchan.Restore != nil
		if restore != c.restores || restore && w.written[0].Spec.Barchan.Restore.CheckpointName != c.checkpoint.Name {
			t.Errorf("%s: the sandbox is %+v", name, w.written[0].Spec.Barchan)
		}
	}
}

// TestWaitForTheQuota: what an owner waited for before is added, and a claim that waited for nothing notes nothing.
func TestWaitForTheQuota(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeAPI(t)
		first := w.begin()
		s, err := first.Create(t.Context(), true)
		if err != nil || s.Annotations[pool.AnnotationClaimWaits] != "" {
			t.Fatalf("Create = %v, %v", s, err)
		}
		x := w.begin()
		x.Waited(pool.Waits{Quota: time.Second, Member: time.Millisecond})
		if err := x.Resolve(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(2*time.Second, func() {
			w.roll("r2")
			first.Release()
		})
		if err := x.Await(t.Context(), time.Minute); err != nil {
			t.Fatal(err)
		}
		if s, err = x.Create(t.Context(), true); err != nil || pool.WaitsOf(s) != (pool.Waits{Quota: 3 * time.Second, Member: time.Millisecond}) {
			t.Errorf("Create = %v, %v; it notes %+v", s, err, pool.WaitsOf(s))
		}
		if pool.RevisionOf(s) != "r2" {
			t.Errorf("the sandbox is of %s, which the template was before the wait; want r2", pool.RevisionOf(s))
		}
	})
}

// A cold start after a failed write of a member is of the template as it is after that write, even if the template was read just
// before it, after a wait.
func TestColdStartAfterAFailedWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeAPI(t)
		coming := w.member("m", "r1", false)
		x := w.begin()
		time.AfterFunc(time.Second, func() {
			w.mu.Lock()
			w.fails = errors.New("the disk is full")
			w.mu.Unlock()
			ready := w.member("ignored", "none", true).DeepCopy()
			ready.Name, ready.UID, ready.Labels = coming.Name, coming.UID, coming.Labels
			w.picker.Observe(coming, ready)
		})
		if s, err := x.TakeWarm(t.Context(), warmPool); err == nil || !x.Wrote() {
			t.Fatalf("TakeWarm = %v, %v; want the error of a write", s, err)
		}
		w.fails = nil
		w.roll("r2")
		if s, err := x.Create(t.Context(), true); err != nil || pool.RevisionOf(s) != "r2" {
			t.Errorf("Create = %v, %v; want one of r2", s, err)
		}
	})
}

func TestOwnersRefusal(t *testing.T) {
	w := newFakeAPI(t)
	w.member("m", "r1", true)
	w.gone = true
	for name, do := range map[string]func(*Claim) error{
		"Resolve":  func(x *Claim) error { return x.Resolve(t.Context()) },
		"TakeWarm": func(x *Claim) error { _, err := x.TakeWarm(t.Context(), warmPool); return err },
		"Create":   func(x *Claim) error { _, err := x.Create(t.Context(), true); return err },
	} {
		if err := do(w.begin()); !errors.Is(err, errs.ErrNotFound) || err.Error()[:11] != "no template" {
			t.Errorf("%s = %v, want the owner's error", name, err)
		}
	}
	if use, _ := w.quotas.Used(namespace); use.Sandboxes != 0 || w.picker.Ready(warmPool, template, "r1") != 1 {
		t.Error("a refused claim holds quota or a member")
	}
}
