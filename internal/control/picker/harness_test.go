package picker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

const poolUID types.UID = "pool"

// claimant names the pick that wrote a sandbox.
const claimant = "test/claimant"

// fate is what becomes of the next write.
type fate int

const (
	sound      fate = iota
	lostBefore      // an error, and nothing is written
	lostAfter       // written, and an error
	late            // an error, and written some time later
	blind           // written, an error, and the next read fails too
)

// change is an event that is not delivered yet.
type change struct{ from, to *agents.Sandbox }

// fakeAPI is an API server with one pool, as small as can be.
type fakeAPI struct {
	mu      sync.Mutex
	version int
	made    int
	objects map[types.UID]*agents.Sandbox
	pending map[types.UID][]change
	order   []types.UID // of pending
	fate    fate
	unread  bool // the next read fails
	delayed []*agents.Sandbox
}

func newFakeAPI() *fakeAPI {
	return &fakeAPI{objects: map[types.UID]*agents.Sandbox{}, pending: map[types.UID][]change{}}
}

// storeLocked writes an object, or with nil deletes it, and queues the event.
func (w *fakeAPI) store(uid types.UID, s *agents.Sandbox) {
	from := w.objects[uid]
	w.version++
	if s == nil {
		delete(w.objects, uid)
		from = from.DeepCopy()
		from.ResourceVersion = strconv.Itoa(w.version)
	} else {
		s = s.DeepCopy()
		s.ResourceVersion = strconv.Itoa(w.version)
		w.objects[uid] = s
	}
	if len(w.pending[uid]) == 0 {
		w.order = append(w.order, uid)
	}
	w.pending[uid] = append(w.pending[uid], change{from, s})
}

// member makes one of a revision, not ready, on one of three nodes.
func (w *fakeAPI) member(revision string) types.UID {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.made++
	name := fmt.Sprintf("m%d", w.made)
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name), Labels: map[string]string{
		agents.LabelWarmPoolSandbox: string(poolUID), agents.LabelTemplateHash: revision, agents.LabelLaunchType: agents.LaunchWarm,
	}}}
	s.Status.NodeName = fmt.Sprintf("node%d", w.made%3)
	w.store(s.UID, s)
	return s.UID
}

// edit changes an object that exists.
func (w *fakeAPI) edit(uid types.UID, do func(*agents.Sandbox)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s := w.objects[uid]; s != nil {
		s = s.DeepCopy()
		do(s)
		w.store(uid, s)
	}
}

func (w *fakeAPI) remove(uid types.UID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.objects[uid] != nil {
		w.store(uid, nil)
	}
}

func setReady(s *agents.Sandbox) {
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}}
	s.Status.PodIPs = []string{"10.0.0.1"}
}

func setUnready(s *agents.Sandbox) {
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionFalse}}
}

func setFinished(s *agents.Sandbox) {
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionFinished, Status: metav1.ConditionTrue}}
}

func setTerminating(s *agents.Sandbox) { s.DeletionTimestamp = new(metav1.Now()) }

func setTouched(s *agents.Sandbox) {
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations["touched"] += "x"
}

func setTaken(s *agents.Sandbox) { *s = *adoptAs("another claim")(s) }

var adoptions atomic.Int64

func adoptAs(owner string) func(*agents.Sandbox) *agents.Sandbox {
	return func(m *agents.Sandbox) *agents.Sandbox {
		s := pool.Adopt(m, nil)
		s.Annotations[claimant] = owner
		// In the tests' bubble, time stands still.
		s.Annotations[pool.AnnotationClaimedAt] = strconv.FormatInt(adoptions.Add(1), 10)
		return s
	}
}

var errLost = errors.New("connection lost")

func group404(name string) error {
	return apierrors.NewNotFound(schema.GroupResource{Resource: "sandboxes"}, name)
}

func (w *fakeAPI) Get(_ context.Context, k client.ObjectKey, obj client.Object, _ ...client.GetOption) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.unread {
		w.unread = false
		return errLost
	}
	s := w.objects[types.UID(k.Name)]
	if s == nil {
		return group404(k.Name)
	}
	s.DeepCopyInto(obj.(*agents.Sandbox))
	return nil
}

func (w *fakeAPI) Update(ctx context.Context, obj client.Object, _ ...client.UpdateOption) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	want := obj.(*agents.Sandbox)
	f := w.fate
	w.fate = sound
	switch f {
	case lostBefore:
		return errLost
	case late:
		w.delayed = append(w.delayed, want.DeepCopy())
		return errLost
	case lostAfter, blind:
		_ = w.write(want)
		w.unread = f == blind
		return errLost
	case sound:
	}
	return w.write(want)
}

func (w *fakeAPI) write(want *agents.Sandbox) error {
	switch have := w.objects[want.UID]; {
	case have == nil:
		return group404(want.Name)
	case have.ResourceVersion != want.ResourceVersion:
		return apierrors.NewConflict(schema.GroupResource{Resource: "sandboxes"}, want.Name, errors.New("changed"))
	}
	w.store(want.UID, want)
	w.objects[want.UID].DeepCopyInto(want)
	return nil
}

// arrive lets a write that was delayed take place, if it still can.
func (w *fakeAPI) arrive() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.delayed {
		_ = w.write(s)
	}
	w.delayed = nil
}

// deliver gives the picker all events that are pending, in order.
func (w *fakeAPI) deliver(to ...*Picker) {
	for {
		w.mu.Lock()
		if len(w.order) == 0 {
			w.mu.Unlock()
			return
		}
		uid := w.order[0]
		c := w.pending[uid][0]
		w.popLocked(uid)
		w.mu.Unlock()
		for _, p := range to {
			p.Observe(c.from, c.to)
		}
	}
}

// popLocked drops the first pending event of an object.
func (w *fakeAPI) popLocked(uid types.UID) {
	w.pending[uid] = w.pending[uid][1:]
	if len(w.pending[uid]) == 0 {
		delete(w.pending, uid)
		w.order = slices.DeleteFunc(w.order, func(o types.UID) bool { return o == uid })
	}
}

// count counts the objects for which a condition holds.
func (w *fakeAPI) count(is func(*agents.Sandbox) bool) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.objects {
		if is(s) {
			n++
		}
	}
	return n
}

func newPicker(t testing.TB, w Writer) *Picker {
	t.Helper()
	p, err := New(Config{Writer: w})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func always(revision string) func(context.Context) (string, error) {
	return func(context.Context) (string, error) { return revision, nil }
}

// remembers counts what a picker keeps.
func remembers(p *Picker) (members, groups int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.members), len(p.groups)
}
