package picker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// ended is how a Pick ended.
type ended struct {
	n   int
	s   *agents.Sandbox
	err error
}

// queue starts picks one after the other; each is where it can get before the next starts.
func queue(ctx context.Context, p *Picker, n int, results chan<- ended) {
	for i := range n {
		go func() {
			s, err := p.Pick(ctx, Request{Pool: poolUID, Current: always("r"), Adopt: adoptAs(strconv.Itoa(i))})
			results <- ended{i, s, err}
		}()
		synctest.Wait()
	}
}

func expect(t *testing.T, results <-chan ended, n int, kind error) {
	t.Helper()
	select {
	case e := <-results:
		if e.n != n || !errors.Is(e.err, kind) || (e.err == nil) != (kind == nil) {
			t.Errorf("pick %d ended with %v, want pick %d with %v", e.n, e.err, n, kind)
		}
	default:
		t.Errorf("no pick has ended, want %d with %v", n, kind)
	}
}

func TestWaitersAreServedInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeAPI()
		p := newPicker(t, w)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		a, b, c := w.member("r"), w.member("r"), w.member("r")
		w.deliver(p)
		results := make(chan ended, 9)
		queue(ctx, p, 4, results)
		expect(t, results, 3, ErrNone) // three being created, the fourth starts cold
		w.edit(b, setReady)
		w.deliver(p)
		synctest.Wait()
		expect(t, results, 0, nil)
		// Another claim takes the next first: its waiter keeps its turn, the last goes without.
		w.edit(a, setReady)
		w.mu.Lock()
		e := w.pending[a][0]
		w.mu.Unlock()
		w.edit(a, setTaken)
		p.Observe(e.from, e.to)
		synctest.Wait()
		expect(t, results, 2, ErrNone)
		w.edit(c, setReady)
		w.deliver(p)
		synctest.Wait()
		expect(t, results, 1, nil)
	})
}

func TestWaitersOfFailedMembers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFakeAPI()
		p := newPicker(t, w)
		ctx, cancel := context.WithCancel(t.Context())
		members := []types.UID{w.member("r"), w.member("r"), w.member("r")}
		w.deliver(p)
		results := make(chan ended, 9)
		queue(ctx, p, 3, results)
		w.edit(members[0], setFinished)
		w.deliver(p)
		synctest.Wait()
		expect(t, results, 2, ErrNone)
		w.remove(members[1])
		w.deliver(p)
		synctest.Wait()
		expect(t, results, 1, ErrNone)
		cancel()
		synctest.Wait()
		expect(t, results, 0, errs.ErrTimeout)
	})
}

// No claim waits for a member whose start is not allowed yet, or before its image can be had.
func TestWaitersOfMembersThatAreHeldUp(t *testing.T) {
	for _, reason := range []string{sandbox.ReasonSecrets, sandbox.ReasonImage} {
		synctest.Test(t, func(t *testing.T) {
			w := newFakeAPI()
			p := newPicker(t, w)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			m := w.member("r")
			w.deliver(p)
			results := make(chan ended, 9)
			queue(ctx, p, 1, results)
			w.edit(m, func(s *agents.Sandbox) {
				meta.SetStatusCondition(&s.Status.Conditions, metav1.Condition{Type: agents.ConditionReady, Status: metav1.ConditionFalse, Reason: reason})
			})
			w.deliver(p)
			synctest.Wait()
			expect(t, results, 0, ErrNone)
			w.edit(m, setReady)
			w.deliver(p)
			queue(ctx, p, 1, results)
			expect(t, results, 0, nil)
		})
	}
}

func TestSpreadOverNodes(t *testing.T) {
	w := newFakeAPI()
	p := newPicker(t, w)
	for i := range 9 {
		uid := w.member("r")
		w.edit(uid, func(s *agents.Sandbox) {
			setReady(s)
			s.Status.NodeName = []string{"a", "b", "a", "c", "a", "a", "b", "b", "a"}[i]
		})
	}
	w.deliver(p)
	var order []string
	for i := range 9 {
		s, err := p.Pick(t.Context(), Request{Pool: poolUID, Current: always("r"), Adopt: adoptAs("x")})
		if err != nil {
			t.Fatal(err)
		}
		if more := !p.LastWarmClaim().IsZero(); more != (i < 8) {
			t.Errorf("after pick %d of 9 there are more: %v", i+1, more)
		}
		order = append(order, s.Status.NodeName+s.Name[1:])
	}
	// a has 5, b 3, c 1: the fullest first, of equals the longest ready.
	if want := []string{"a1", "a3", "b2", "a5", "c4", "a6", "b7", "b8", "a9"}; !sameSpread(order) {
		t.Errorf("order %v, such as %v", order, want)
	}
}

// TestClaimOfAnotherProcess: a claim that this process sees only in an event delays refills too.
func TestClaimOfAnotherProcess(t *testing.T) {
	w := newFakeAPI()
	p, other := newPicker(t, w), newPicker(t, w)
	for range 2 {
		w.edit(w.member("r"), setReady)
	}
	w.deliver(p, other)
	for i, more := range []bool{true, false} {
		if _, err := other.Pick(t.Context(), Request{Pool: poolUID, Current: always("r"), Adopt: adoptAs("x")}); err != nil {
			t.Fatal(err)
		}
		w.deliver(p, other)
		if got := !p.LastWarmClaim().IsZero(); got != more {
			t.Errorf("after claim %d of 2 there are more: %v", i+1, got)
		}
	}
}

// sameSpread reports whether each pick took from a fullest node, in order within the node.
func sameSpread(order []string) bool {
	left := map[byte]int{'a': 5, 'b': 3, 'c': 1}
	last := map[byte]string{}
	for _, o := range order {
		for _, n := range left {
			if left[o[0]] < n {
				return false
			}
		}
		if o < last[o[0]] {
			return false
		}
		left[o[0]]--
		last[o[0]] = o
	}
	return true
}

// The answer to a write was lost: the caller gets the member, or the orphans report it.
func TestLostAnswers(t *testing.T) {
	for name, f := range map[string]fate{"read at once": lostAfter, "seen by its event": blind, "written later": late} {
		t.Run(name, func(t *testing.T) {
			w := newFakeAPI()
			w.edit(w.member("r"), setReady)
			p := newPicker(t, w)
			w.deliver(p)
			w.fate = f
			_, err := p.Pick(t.Context(), Request{Pool: poolUID, Current: always("r"), Adopt: adoptAs("x")})
			if f == blind && !errors.Is(err, errs.ErrUnavailable) || f != blind && err != nil {
				t.Errorf("Pick = %v", err)
			}
			w.arrive() // what was late comes second to the write that was made again
			w.deliver(p)
			if orphans, want := drain(p), f == blind; (len(orphans) == 1) != want {
				t.Errorf("orphans %v", orphans)
			}
		})
	}
}

// leaving is a writer whose caller goes while the write is on its way.
type leaving struct {
	*fakeAPI
	cancel context.CancelFunc
}

func (l leaving) Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error {
	_ = l.fakeAPI.Update(ctx, obj, opts...)
	l.cancel()
	return ctx.Err()
}

func TestCallerLeaves(t *testing.T) {
	w := newFakeAPI()
	w.edit(w.member("r"), setReady)
	ctx, cancel := context.WithCancel(t.Context())
	p := newPicker(t, leaving{w, cancel})
	w.deliver(p)
	_, err := p.Pick(ctx, Request{Pool: poolUID, Current: always("r"), Adopt: adoptAs("x")})
	orphans := drain(p)
	if !errors.Is(err, errs.ErrTimeout) || len(orphans) != 1 || orphans[0].Annotations[claimant] != "x" {
		t.Errorf("Pick = %v, orphans %v", err, orphans)
	}
	w.deliver(p)
	orphans = append(orphans, drain(p)...)
	if members, _ := remembers(p); len(orphans) != 1 || members != 0 {
		t.Errorf("orphans %v, %d members", orphans, members)
	}
}

func TestRefusals(t *testing.T) {
	w := newFakeAPI()
	w.edit(w.member("r"), setReady)
	p := newPicker(t, w)
	w.deliver(p)
	ok := Request{Pool: poolUID, Current: always("r"), Adopt: adoptAs("x")}
	broken := errors.New("broken")
	for name, tt := range map[string]struct {
		spoil func(*Request)
		want  error
	}{
		"no pool":     {func(r *Request) { r.Pool = "" }, errs.ErrInvalid},
		"no adopt":    {func(r *Request) { r.Adopt = nil }, errs.ErrInvalid},
		"no revision": {func(r *Request) { r.Current = always("") }, errs.ErrInvalid},
		"stays":       {func(r *Request) { r.Adopt = func(m *agents.Sandbox) *agents.Sandbox { return m } }, errs.ErrInvalid},
		"current":     {func(r *Request) { r.Current = func(context.Context) (string, error) { return "", broken } }, broken},
		"other":       {func(r *Request) { r.Current = always("other") }, ErrNone},
		"template":    {func(r *Request) { r.Template.Name = "other" }, ErrNone},
	} {
		req := ok
		tt.spoil(&req)
		if s, err := p.Pick(t.Context(), req); !errors.Is(err, tt.want) || s != nil {
			t.Errorf("%s: Pick = %v, %v", name, s, err)
		}
	}
	if p.Ready(poolUID, types.NamespacedName{}, "r") != 1 {
		t.Error("a refused request cost a member")
	}
	if _, err := New(Config{}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("New of nothing = %v", err)
	}
}

// Many at once, with members that come, change and go under them.
func TestConcurrentPicks(t *testing.T) {
	w := newFakeAPI()
	p := newPicker(t, w)
	var feeding, picking sync.WaitGroup
	stop := make(chan struct{})
	feeding.Go(func() {
		for {
			w.deliver(p)
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	feeding.Go(func() {
		for i := range 1000 {
			uid := w.member("r")
			w.edit(uid, setReady)
			switch rand.IntN(5) {
			case 0:
				w.edit(uid, setTouched)
			case 1:
				w.remove(types.UID(fmt.Sprintf("m%d", rand.IntN(i+1))))
			}
		}
	})
	var mu sync.Mutex
	owner := map[types.UID]int{}
	for i := range 32 {
		picking.Go(func() {
			for range 50 {
				s, err := p.Pick(t.Context(), Request{Pool: poolUID, Current: always("r"), Adopt: adoptAs(strconv.Itoa(i))})
				if errors.Is(err, ErrNone) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if other, taken := owner[s.UID]; taken {
					t.Errorf("%s belongs to %d and %d", s.UID, other, i)
				}
				owner[s.UID] = i
				mu.Unlock()
			}
		})
	}
	picking.Wait()
	close(stop)
	feeding.Wait()
	w.deliver(p)
	if spare := w.count(pool.Spare); p.Ready(poolUID, types.NamespacedName{}, "r") != spare {
		t.Errorf("%d are ready, want %d", p.Ready(poolUID, types.NamespacedName{}, "r"), spare)
	}
}

// nothing is a writer that does nothing.
type nothing struct{}

func (nothing) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return nil
}

func (nothing) Update(context.Context, client.Object, ...client.UpdateOption) error { return nil }

// One operation is a pick, its event, and a new member in its place.
func BenchmarkPick(b *testing.B) {
	for _, n := range []int{10, 1000, 10_000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			p := newPicker(b, nothing{})
			made := 0
			member := func() *agents.Sandbox {
				made++
				s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: "m", UID: types.UID(strconv.Itoa(made)), ResourceVersion: strconv.Itoa(made), Labels: map[string]string{
					agents.LabelWarmPoolSandbox: string(poolUID), agents.LabelTemplateHash: "r",
				}}}
				s.Status.NodeName = "node" + strconv.Itoa(made%16)
				setReady(s)
				return s
			}
			for range n {
				p.Observe(nil, member())
			}
			req := Request{Pool: poolUID, Current: always("r"), Adopt: func(m *agents.Sandbox) *agents.Sandbox { return pool.Adopt(m, nil) }}
			ctx := b.Context()
			b.ReportAllocs()
			for b.Loop() {
				s, err := p.Pick(ctx, req)
				if err != nil {
					b.Fatal(err)
				}
				p.Observe(nil, s)
				p.Observe(nil, member())
			}
		})
	}
}

func TestGraves(t *testing.T) {
	g := tombstones{set: map[types.UID]struct{}{}}
	var all []types.UID
	for i := range maxTombstones + 10 {
		all = append(all, types.UID(strconv.Itoa(i)))
		g.add(all[i])
		g.add(all[i])
	}
	if len(g.set) != maxTombstones || g.has(all[9]) || !slices.ContainsFunc(all[10:], g.has) || !g.has(all[10]) {
		t.Errorf("%d are remembered", len(g.set))
	}
}

func TestWhatIsGoneStaysGone(t *testing.T) {
	for name, end := range map[string]func(*fakeAPI, types.UID){
		"deleted":     func(w *fakeAPI, uid types.UID) { w.remove(uid) },
		"taken":       func(w *fakeAPI, uid types.UID) { w.edit(uid, setTaken) },
		"terminating": func(w *fakeAPI, uid types.UID) { w.edit(uid, setTerminating) },
	} {
		w := newFakeAPI()
		p := newPicker(t, w)
		uid := w.member("r")
		w.edit(uid, setReady)
		w.mu.Lock()
		early := w.pending[uid][1]
		w.mu.Unlock()
		end(w, uid)
		w.deliver(p)
		p.Observe(early.from, early.to)
		if members, _ := remembers(p); members != 0 || p.Ready(poolUID, types.NamespacedName{}, "r") != 0 {
			t.Errorf("%s: an event that comes late brings it back", name)
		}
	}
}

// The last member was written by another claim, and the event has not come: it is read.
func TestLastMemberIsReadAnew(t *testing.T) {
	for name, tt := range map[string]struct {
		edit func(*agents.Sandbox)
		want error
	}{
		"still spare": {setTouched, nil},
		"taken":       {setTaken, ErrNone},
		"terminating": {setTerminating, ErrNone},
		"stale":       {func(s *agents.Sandbox) { s.Labels[agents.LabelTemplateHash] = "other" }, ErrNone},
	} {
		w := newFakeAPI()
		p := newPicker(t, w)
		uid := w.member("r")
		w.edit(uid, setReady)
		w.deliver(p)
		w.edit(uid, tt.edit)
		if s, err := p.Pick(t.Context(), Request{Pool: poolUID, Current: always("r"), Adopt: adoptAs("x")}); !errors.Is(err, tt.want) || (s == nil) != (err != nil) {
			t.Errorf("%s: Pick = %v, %v", name, s, err)
		}
	}
}

// A claim that ends in the moment in which it is given a member passes it on.
func TestGivingUpPassesOn(t *testing.T) {
	for range 50 {
		synctest.Test(t, func(t *testing.T) {
			w := newFakeAPI()
			p := newPicker(t, w)
			uid := w.member("r")
			w.deliver(p)
			ctx, cancel := context.WithCancel(t.Context())
			results := make(chan ended, 1)
			queue(ctx, p, 1, results)
			w.edit(uid, setReady)
			p.mu.Lock() // both at once: neither continues before both are there
			go cancel()
			go w.deliver(p)
			<-ctx.Done()
			p.mu.Unlock()
			synctest.Wait()
			if e := <-results; e.err != nil && p.Ready(poolUID, types.NamespacedName{}, "r") != 1 {
				t.Errorf("%v, and the member is lost", e.err)
			}
		})
	}
}
