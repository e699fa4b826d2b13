package picker

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

// try is one Pick under way, and its state in the model.
type try struct {
	n         int
	revisions map[string]bool // that were current since it began
	revision  string          // the revision that it last received
	was       string          // that before this step
	woken     bool            // its wait ended in this step
	cancel    context.CancelFunc
	cancelled bool
	done      bool
	s         *agents.Sandbox
	err       error
}

// model drives a picker over a fakeAPI, one step after the other, and knows what must hold.
type model struct {
	t       *testing.T
	r       *rand.Rand
	w       *fakeAPI
	p       *Picker
	current string
	tries   []*try
	owner   map[types.UID]int
	orphans map[types.UID]int
	log     []string
}

const modelSteps = 250

// Any interleaving of events, picks, conflicts, lost answers, deletions and revisions: no
// sandbox has two owners, none is stale, none is lost, and claims are served in order.
// BARCHAN_SEED repeats one run.
func TestModel(t *testing.T) {
	first, runs := rand.Uint64()>>1, uint64(150)
	if s := os.Getenv("BARCHAN_SEED"); s != "" {
		first, _ = strconv.ParseUint(s, 10, 64)
		runs = 1
	}
	for seed := first; seed < first+runs && !t.Failed(); seed++ {
		synctest.Test(t, func(t *testing.T) {
			m := &model{t: t, r: rand.New(rand.NewPCG(seed, 0)), w: newFakeAPI(), current: "r0", owner: map[types.UID]int{}, orphans: map[types.UID]int{}}
			m.p = newPicker(t, m.w)
			m.run()
			if t.Failed() {
				t.Logf("BARCHAN_SEED=%d\n%v", seed, m.log[max(0, len(m.log)-40):])
			}
		})
	}
}

func (m *model) run() {
	defer func() {
		for _, x := range m.tries {
			x.cancel()
		}
		synctest.Wait()
	}()
	for range modelSteps {
		if m.step(m.act); m.t.Failed() {
			return
		}
	}
	m.settle()
}

// step does something, lets all come to rest, and checks what must hold at any time.
func (m *model) step(do func()) {
	var waiting []*try
	for _, x := range m.tries {
		if !x.done {
			waiting = append(waiting, x)
			x.was, x.woken = x.revision, false
		}
	}
	do()
	synctest.Wait()
	for _, x := range m.tries {
		if x.done && x.revisions != nil {
			m.resolveWrite(x)
			x.revisions = nil
		}
	}
	m.checkOrder(waiting)
}

// checkOrder: of those claim waited, in this order, none overtook another.
func (m *model) checkOrder(waiting []*try) {
	for i, early := range waiting {
		for _, lately := range waiting[i+1:] {
			switch {
			case early.was != lately.was || early.cancelled || lately.cancelled:
			case lately.done && lately.err == nil && lately.revision == lately.was && !early.woken:
				m.t.Errorf("pick %d was served before %d", lately.n, early.n)
			case early.done && errors.Is(early.err, ErrNone) && early.revision == early.was && !lately.woken:
				m.t.Errorf("pick %d was sent away before %d", early.n, lately.n)
			}
		}
	}
}

// judge checks how a pick has ended.
func (m *model) resolveWrite(x *try) {
	if x.err != nil {
		if x.s != nil || !errors.Is(x.err, ErrNone) && !errors.Is(x.err, errs.ErrTimeout) && !errors.Is(x.err, errs.ErrUnavailable) {
			m.t.Errorf("pick %d = %v, %v", x.n, x.s, x.err)
		}
		return
	}
	uid := x.s.UID
	if other, taken := m.owner[uid]; taken {
		m.t.Errorf("%s belongs to picks %d and %d", uid, other, x.n)
	}
	m.owner[uid] = x.n
	if !x.revisions[pool.RevisionOf(x.s)] {
		m.t.Errorf("pick %d got the stale %s of %s", x.n, uid, pool.RevisionOf(x.s))
	}
	if claim := m.writer(uid); claim != strconv.Itoa(x.n) && m.w.objects[uid] != nil {
		m.t.Errorf("pick %d got %s, which was written for %s", x.n, uid, claim)
	}
}

func (m *model) writer(uid types.UID) string {
	if s := m.w.objects[uid]; s != nil {
		return s.Annotations[claimant]
	}
	return ""
}

func (m *model) note(format string, args ...any) { m.log = append(m.log, fmt.Sprintf(format, args...)) }

// act does one thing by chance.
func (m *model) act() {
	var uids []types.UID
	for uid := range m.w.objects {
		uids = append(uids, uid)
	}
	slices.Sort(uids)
	switch n := m.r.IntN(100); {
	case n < 15:
		m.note("new %s of %s", m.w.member(m.current), m.current)
	case n < 40 && len(uids) > 0:
		m.edit(uids[m.r.IntN(len(uids))])
	case n < 42 && len(uids) > 0:
		uid := uids[m.r.IntN(len(uids))]
		m.note("remove %s", uid)
		m.w.remove(uid)
	case n < 65:
		m.event()
	case n < 85:
		m.pick()
	case n < 88 && len(m.tries) > 0:
		x := m.tries[m.r.IntN(len(m.tries))]
		m.note("cancel %d", x.n)
		x.cancelled = true
		x.cancel()
	case n < 90:
		m.roll("r" + strconv.Itoa(m.r.IntN(3)))
	case n < 94:
		m.w.fate = fate(1 + m.r.IntN(4))
		m.note("fate %d", m.w.fate)
	case n < 96:
		m.note("late writes arrive")
		m.w.arrive()
	default:
		m.note("deliver all")
		m.w.deliver(m.p)
	}
}

// edit changes an object as others do: its node, its pool, its users, another picker.
func (m *model) edit(uid types.UID) {
	edits := []func(*agents.Sandbox){setReady, setReady, setReady, setUnready, setFinished, setTerminating, setTouched, setTaken}
	i := m.r.IntN(len(edits))
	m.note("edit %d of %s", i, uid)
	if i < 7 || m.writer(uid) == "" {
		m.w.edit(uid, edits[i])
	}
}

// event delivers one: the next of its object, or one out of turn that comes again.
func (m *model) event() {
	if len(m.w.order) == 0 {
		return
	}
	uid := m.w.order[m.r.IntN(len(m.w.order))]
	events := m.w.pending[uid]
	i := 0
	if m.r.IntN(3) == 0 {
		i = m.r.IntN(len(events))
	}
	m.note("event %d of %s", i, uid)
	c := events[i]
	if i == 0 && m.r.IntN(4) > 0 {
		m.w.popLocked(uid)
	}
	m.p.Observe(c.from, c.to)
}

func (m *model) roll(revision string) {
	m.note("now %s", revision)
	m.current = revision
	for _, x := range m.tries {
		if !x.done {
			x.revisions[revision] = true
		}
	}
}

func (m *model) pick() *try {
	ctx, cancel := context.WithCancel(m.t.Context())
	x := &try{n: len(m.tries), revisions: map[string]bool{m.current: true}, cancel: cancel}
	m.tries = append(m.tries, x)
	m.note("pick %d", x.n)
	req := Request{Pool: poolUID, Adopt: adoptAs(strconv.Itoa(x.n)), Current: func(context.Context) (string, error) {
		x.revision, x.woken = m.current, true
		return m.current, nil
	}}
	go func() {
		x.s, x.err = m.p.Pick(ctx, req)
		x.done = true
	}()
	return x
}

// settle ends the faults, delivers everything, and checks that nothing is lost or left over.
func (m *model) settle() {
	m.w.fate, m.w.unread = sound, false
	m.step(m.w.arrive)
	for range 3 { // waiters act on what is delivered, which makes more events
		m.step(func() { m.w.deliver(m.p) })
	}
	m.checkWaiting()
	for _, x := range m.tries {
		x.cancelled = true
		m.step(x.cancel)
		if !x.done {
			m.t.Errorf("pick %d continues", x.n)
		}
	}
	for uid := range m.w.objects {
		if pool.MemberOf(m.w.objects[uid]) != "" {
			m.w.edit(uid, setReady)
		}
	}
	m.w.deliver(m.p)
	m.checkOrphans()
	for _, revision := range []string{"r0", "r1", "r2"} {
		m.drain(revision)
	}
	for uid := range m.w.objects {
		m.w.remove(uid)
	}
	m.w.deliver(m.p)
	if members, groups := remembers(m.p); members+groups != 0 {
		m.t.Errorf("kept of nothing: %d members, %d groups", members, groups)
	}
}

// drain takes all that is left of a revision.
func (m *model) drain(revision string) {
	m.roll(revision)
	spare := m.w.count(func(s *agents.Sandbox) bool { return pool.Spare(s) && pool.Fits(s, types.NamespacedName{}, revision) })
	if got := m.p.Ready(poolUID, types.NamespacedName{}, revision); got != spare {
		m.t.Errorf("%d are ready of %s, want %d", got, revision, spare)
	}
	for ; ; spare-- {
		var x *try
		m.step(func() { x = m.pick() })
		if !x.done || x.err != nil {
			if !errors.Is(x.err, ErrNone) || spare != 0 {
				m.t.Errorf("pick of %s = %v with %d left", revision, x.err, spare)
			}
			return
		}
	}
}

// checkWaiting: once all is known, a member is being created for each waiting pick.
func (m *model) checkWaiting() {
	waiting := map[string]int{}
	for _, x := range m.tries {
		if !x.done {
			waiting[x.revision]++
		}
	}
	for revision, n := range waiting {
		coming := m.w.count(func(s *agents.Sandbox) bool { return placeOf(s) == making && pool.RevisionOf(s) == revision })
		if n > coming || m.p.Ready(poolUID, types.NamespacedName{}, revision) > 0 {
			m.t.Errorf("%d wait for %d of %s, %d are ready", n, coming, revision, m.p.Ready(poolUID, types.NamespacedName{}, revision))
		}
	}
}

// checkOrphans: what was written for a pick is that pick's, or reported, once.
func (m *model) checkOrphans() {
	for _, s := range drain(m.p) {
		m.orphans[s.UID]++
	}
	for uid, s := range m.w.objects {
		n, err := strconv.Atoi(s.Annotations[claimant])
		if err != nil {
			continue
		}
		claim, owned := m.owner[uid]
		switch {
		case owned && (claim != n || m.orphans[uid] > 0):
			m.t.Errorf("%s was written for pick %d, returned by %d, reported %d times", uid, n, claim, m.orphans[uid])
		case !owned && m.orphans[uid] != 1:
			m.t.Errorf("%s was written for pick %d, which knows nothing, and reported %d times", uid, n, m.orphans[uid])
		}
	}
}
