// Package checkpointsuite tests the controllers of checkpoints, of warm-ups and of sandboxes that start
// from them against any API server, with a node that keeps data in memory and marks sandboxes ready. It does not
// construct the controllers: the caller passes a constructor.
package checkpointsuite

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
	"github.com/barchan-dev/barchan/internal/testkit/watched"
)

// Tuning are a test's settings of the controllers; zero values keep the defaults.
type Tuning struct {
	SweepEvery, ImportPatience time.Duration
	// ColdAfter is how long a pool waits for a warm-up.
	ColdAfter time.Duration
}

// Config is what a suite tests.
type Config struct {
	// REST connects to an API server that serves our kinds, with all permissions.
	REST *rest.Config
	// Start runs a cache and the controllers of checkpoints, warm-ups and pools over it, and returns once
	// they run. The function that it returns ends them and waits until they have.
	Start func(t *testing.T, node *Node, tuning Tuning) (stop func())
	// StartSandboxes does so with a cache and the controller of sandboxes; forkSecrets is its setting.
	StartSandboxes func(t *testing.T, machine *Machine, forkSecrets bool) (stop func())
}

// Run runs the suite.
func Run(t *testing.T, cfg Config) {
	t.Helper()
	for _, test := range []struct {
		name string
		run  func(*testing.T, Config)
	}{
		{"Running", running},
		{"SleepsFirst", sleepsFirst},
		{"WaitsForTheStart", waitsForTheStart},
		{"FailsForGood", failsForGood},
		{"TriesAgain", triesAgain},
		{"AnotherOfTheName", anotherOfTheName},
		{"Secrets", secrets},
		{"OriginsWithSecrets", originsWithSecrets},
		{"RunsOut", runsOut},
		{"InUse", inUse},
		{"Lost", lost},
		{"Sweep", sweep},
		{"RestartInTheMiddle", restartInTheMiddle},
		{"Import", imports},
		{"InterruptedImport", interruptedImport},
		{"FilesOnly", filesOnly},
		{"WarmUp", warmUp},
		{"WarmUpFails", warmUpFails},
		{"WarmUpTakesTooLong", warmUpLate},
		{"WarmUpChanges", warmUpChanges},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, cfg) })
	}
}

// fixture is one namespace with a node that is none.
type fixture struct {
	t         *testing.T
	cfg       Config
	client    client.WithWatch
	namespace string
	node      *Node

	bell *watched.Bell

	mu     sync.Mutex
	frozen map[string]bool // sandboxes that the node leaves alone; +checklocks:mu
	noNode bool            // it leaves all alone; +checklocks:mu
	seeds  map[string]bool // names of seeds that ever were; +checklocks:mu
	// messages are those of each checkpoint's condition so far, by name.
	messages map[string][]string // +checklocks:mu
}

func newFixture(t *testing.T, cfg Config, tuning Tuning) *fixture {
	t.Helper()
	w := idleWorld(t, cfg)
	w.start(tuning)
	return w
}

// idleWorld has no controllers yet.
func idleWorld(t *testing.T, cfg Config) *fixture {
	t.Helper()
	c := watched.Client(t, cfg.REST)
	w := &fixture{t: t, cfg: cfg, client: c, node: NewNode(), bell: watched.NewBell(), frozen: map[string]bool{}, seeds: map[string]bool{}, messages: map[string][]string{}}
	w.node.ring = w.bell.Ring
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "checkpoints-"}}
	if err := c.Create(t.Context(), ns); err != nil {
		t.Fatal(err)
	}
	w.namespace = ns.Name
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for _, list := range []client.ObjectList{&agents.SandboxList{}, &barchan.CheckpointList{}, &extensions.SandboxWarmPoolList{}} {
		running.Go(func() { watched.Follow(ctx, t, c, ns.Name, list, w.saw) })
	}
	t.Cleanup(func() { cancel(); running.Wait() })
	return w
}

// start runs the controllers until the test ends, or stop is called.
func (w *fixture) start(tuning Tuning) (stop func()) {
	w.t.Helper()
	stop = sync.OnceFunc(w.cfg.Start(w.t, w.node, tuning))
	w.t.Cleanup(stop)
	return stop
}

// seedFails has the warm-up of a seed fail.
const seedFails = "fails"

func (w *fixture) saw(ctx context.Context, e watch.Event) {
	defer w.bell.Ring()
	if c, ok := e.Object.(*barchan.Checkpoint); ok {
		w.mu.Lock()
		w.messages[c.Name] = append(w.messages[c.Name], messageOf(c))
		w.mu.Unlock()
	}
	s, ok := e.Object.(*agents.Sandbox)
	if !ok || e.Type == watch.Deleted {
		return
	}
	w.mu.Lock()
	frozen, noNode := w.frozen[s.Name], w.noNode
	if isSeed(s) {
		w.seeds[string(s.UID)] = true
	}
	w.mu.Unlock()
	if noNode || (frozen && s.DeletionTimestamp == nil) {
		return
	}
	if isSeed(s) && s.Spec.Barchan.WarmUp.Command[0] == seedFails && s.DeletionTimestamp == nil {
		w.refuseSeed(ctx, s)
		return
	}
	err := fakecluster.Reconcile(ctx, w.client, s)
	if err != nil && !apierrors.IsConflict(err) && ctx.Err() == nil { // a conflict is followed by its event
		w.t.Errorf("stand in for the node of %s: %v", s.Name, err)
	}
}

func (w *fixture) refuseSeed(ctx context.Context, s *agents.Sandbox) {
	changed := meta.SetStatusCondition(&s.Status.Conditions, metav1.Condition{
		Type: agents.ConditionFinished, Status: metav1.ConditionTrue, Reason: agents.ReasonPodFailed, Message: "warmUp: it ended with 3",
	})
	if changed {
		if err := w.client.Status().Update(ctx, s); client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) && ctx.Err() == nil {
			w.t.Errorf("refuse %s: %v", s.Name, err)
		}
	}
}

func isSeed(s *agents.Sandbox) bool {
	return s.Labels[agents.LabelWarmPoolSandbox] == "warm-up" && s.Spec.Barchan != nil && s.Spec.Barchan.WarmUp != nil
}

// until waits until done returns true. It calls done at each event; done also describes the current state.
func (w *fixture) until(what string, done func() (bool, string)) {
	w.t.Helper()
	w.bell.Until(w.t, what, done)
}

func (w *fixture) create(o client.Object) {
	w.t.Helper()
	o.SetNamespace(w.namespace)
	if err := w.client.Create(w.t.Context(), o); err != nil {
		w.t.Fatal(err)
	}
}

// sandbox makes a sandbox. Only what is frozen waits for the node.
func (w *fixture) sandbox(name string, changes ...func(*agents.Sandbox)) *agents.Sandbox {
	w.t.Helper()
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{agents.NodeFinalizer}}}
	s.Spec.SandboxBlueprint = fakecluster.Template(w.namespace, "t", "x").Spec.SandboxBlueprint
	for _, change := range changes {
		change(s)
	}
	w.create(s)
	return s
}

// running makes a sandbox and returns it when it runs.
func (w *fixture) running(name string, changes ...func(*agents.Sandbox)) *agents.Sandbox {
	w.t.Helper()
	s := w.sandbox(name, changes...)
	w.until("sandbox "+name+" runs", func() (bool, string) {
		s = get(w, s)
		return meta.IsStatusConditionTrue(s.Status.Conditions, agents.ConditionReady), fmt.Sprint(s.Status)
	})
	return s
}

// checkpoint creates one of a sandbox.
func (w *fixture) checkpoint(name, of string, changes ...func(*barchan.Checkpoint)) *barchan.Checkpoint {
	w.t.Helper()
	c := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: barchan.CheckpointSpec{SandboxName: of, KeepRunning: true}}
	for _, change := range changes {
		change(c)
	}
	w.create(c)
	return c
}

// phase waits until a checkpoint is in a phase and its message contains the words.
func (w *fixture) phase(c *barchan.Checkpoint, phase barchan.CheckpointPhase, words string) *barchan.Checkpoint {
	w.t.Helper()
	var now *barchan.Checkpoint
	w.until(fmt.Sprintf("checkpoint %s is %s with message %q", c.Name, phase, words), func() (bool, string) {
		now = get(w, c)
		return now.Status.Phase == phase && strings.Contains(messageOf(now), words), fmt.Sprintf("%+v", now.Status)
	})
	return now
}

// awaitMessage waits until a checkpoint's message contains the words, in any phase.
func (w *fixture) awaitMessage(c *barchan.Checkpoint, words string) *barchan.Checkpoint {
	w.t.Helper()
	var now *barchan.Checkpoint
	w.until(fmt.Sprintf("checkpoint %s has message %q", c.Name, words), func() (bool, string) {
		now = get(w, c)
		return strings.Contains(messageOf(now), words), fmt.Sprintf("%+v", now.Status)
	})
	return now
}

// hadMessage waits until a checkpoint's message contains the words now or did before.
func (w *fixture) hadMessage(c *barchan.Checkpoint, words string) {
	w.t.Helper()
	w.until(fmt.Sprintf("checkpoint %s has or had message %q", c.Name, words), func() (bool, string) {
		w.mu.Lock()
		defer w.mu.Unlock()
		messages := w.messages[c.Name]
		return slices.ContainsFunc(messages, func(s string) bool { return strings.Contains(s, words) }), fmt.Sprintf("%q", messages)
	})
}

func messageOf(c *barchan.Checkpoint) string {
	if ready := meta.FindStatusCondition(c.Status.Conditions, barchan.ConditionReady); ready != nil {
		return ready.Message
	}
	return ""
}

// gone waits until an object is no more.
func (w *fixture) gone(o client.Object) {
	w.t.Helper()
	w.until(o.GetName()+" is gone", func() (bool, string) {
		err := w.client.Get(w.t.Context(), client.ObjectKeyFromObject(o), o)
		return apierrors.IsNotFound(err), fmt.Sprintf("%v, finalizers %v, %v", err, o.GetFinalizers(), o.GetDeletionTimestamp())
	})
}

func (w *fixture) delete(o client.Object) {
	w.t.Helper()
	if err := w.client.Delete(w.t.Context(), o); err != nil {
		w.t.Fatal(err)
	}
}

// get reads an object again.
func get[T client.Object](w *fixture, o T) T {
	w.t.Helper()
	now, _ := o.DeepCopyObject().(T)
	if err := w.client.Get(w.t.Context(), client.ObjectKeyFromObject(o), now); err != nil {
		w.t.Fatal(err)
	}
	return now
}

// change updates an object as often as it takes.
func change[T client.Object](w *fixture, o T, edit func(T)) T {
	w.t.Helper()
	for {
		now := get(w, o)
		edit(now)
		err := w.client.Update(w.t.Context(), now)
		if err == nil {
			return now
		}
		if !apierrors.IsConflict(err) {
			w.t.Fatal(err)
		}
	}
}

// freeze has the node leave a sandbox alone, until freeze(name, false).
func (w *fixture) freeze(name string, frozen bool) {
	w.mu.Lock()
	w.frozen[name] = frozen
	w.mu.Unlock()
}

func (w *fixture) seedsEver() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Sorted(maps.Keys(w.seeds))
}
