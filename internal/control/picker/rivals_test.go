package picker

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

// race has three processes claim members while the events of all claims are late, and returns how many writes were refused.
func race(t *testing.T, identities ...string) (refused int) {
	t.Helper()
	w := newFakeAPI()
	all := make([]*Picker, len(identities))
	for i, identity := range identities {
		var err error
		if all[i], err = New(Config{Writer: w, Identity: identity}); err != nil {
			t.Fatal(err)
		}
	}
	for range 90 {
		w.edit(w.member("r"), setReady)
	}
	w.deliver(all...)
	claim := func(p *Picker) {
		req := Request{Pool: poolUID, Current: always("r"), Adopt: adoptAs(p.cfg.Identity)}
		s, err := p.Pick(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if by := s.Annotations[pool.AnnotationClaimedBy]; by != p.cfg.Identity {
			t.Errorf("claimed by %q, want %q", by, p.cfg.Identity)
		}
	}
	for _, p := range all { // from which the others learn of it
		claim(p)
		w.deliver(all...)
	}
	for range 10 {
		for _, p := range all {
			claim(p)
		}
	}
	w.deliver(all...)
	for _, p := range all {
		refused += int(testutil.ToFloat64(p.metrics.picks.WithLabelValues(resultConflict)))
	}
	for err := error(nil); !errors.Is(err, ErrNone); w.deliver(all...) { // one takes the rest, which others prefer
		if _, err = all[0].Pick(t.Context(), Request{Pool: poolUID, Current: always("r"), Adopt: adoptAs("rest")}); err != nil && !errors.Is(err, ErrNone) {
			t.Fatal(err)
		}
	}
	if n := all[0].Ready(poolUID, types.NamespacedName{}, "r"); n != 0 {
		t.Errorf("%d members are left that one process does not take", n)
	}
	return refused
}

func TestRivalsPreferDifferentMembers(t *testing.T) {
	if n := race(t, "a", "b", "c"); n > 0 {
		t.Errorf("%d writes were refused", n)
	}
	if n := race(t, "", "", ""); n == 0 {
		t.Error("no write was refused without preferences: the test shows nothing")
	}
}

// TestRivalsOfBefore: a new process learns from the first list which others claim.
func TestRivalsOfBefore(t *testing.T) {
	for name, tt := range map[string]struct {
		by   string
		ago  time.Duration
		want int
	}{"lately": {"b", time.Minute, 1}, "long ago": {"b", time.Hour, 0}, "by itself": {"a", time.Minute, 0}, "by none that is known": {"", time.Minute, 0}} {
		p, err := New(Config{Writer: newFakeAPI(), Identity: "a"})
		if err != nil {
			t.Fatal(err)
		}
		s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{UID: "x", ResourceVersion: "1", Annotations: map[string]string{
			pool.AnnotationClaimedBy: tt.by, pool.AnnotationClaimedAt: time.Now().Add(-tt.ago).UTC().Format(time.RFC3339Nano),
		}}}
		p.Observe(nil, s)
		p.mu.Lock()
		if len(p.rivals.seen) != tt.want {
			t.Errorf("claimed %s: rivals %v", name, p.rivals.seen)
		}
		p.mu.Unlock()
	}
}

// TestRivalRanks: processes agree on the order of each member, and each comes first for its share.
func TestRivalRanks(t *testing.T) {
	ids := []string{"a", "b", "c"}
	synctest.Test(t, func(t *testing.T) {
		first := map[string]int{}
		for i := range 3000 {
			var ranks []int
			for _, self := range ids {
				r := rivals{self: self, seen: map[string]time.Time{}}
				for _, other := range ids {
					r.note(other, time.Now())
				}
				rank := r.rank(types.UID(fmt.Sprint("m", i)))
				if ranks = append(ranks, rank); rank == 0 {
					first[self]++
				}
			}
			if slices.Sort(ranks); !slices.Equal(ranks, []int{0, 1, 2}) {
				t.Fatalf("ranks of member %d: %v", i, ranks)
			}
		}
		for _, id := range ids {
			if first[id] < 900 || first[id] > 1100 {
				t.Errorf("%s prefers %d of 3000", id, first[id])
			}
		}
	})
}

// TestRivalsAreForgotten: a process that claims no more leaves all members to the others.
func TestRivalsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := rivals{self: "a", seen: map[string]time.Time{}}
		if !r.note("b", time.Now()) || r.note("b", time.Now()) || r.note("a", time.Now()) || r.note("", time.Now()) {
			t.Error("only b is new, and once")
		}
		if r.expire(time.Now()) {
			t.Error("b is forgotten at once")
		}
		time.Sleep(rivalTTL + time.Second)
		if !r.expire(time.Now()) || r.rank("m") != 0 {
			t.Error("b is not forgotten")
		}
	})
}
