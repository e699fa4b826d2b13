package picker

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// writes counts the updates of a fakeAPI.
type writes struct {
	*fakeAPI
	n int
}

func (w *writes) Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error {
	w.n++
	return w.fakeAPI.Update(ctx, obj, opts...)
}

// reserve leases the only ready member.
func reserve(ctx context.Context, t *testing.T, p *Picker) *Lease {
	t.Helper()
	l, err := p.Begin(poolUID, types.NamespacedName{}).Reserve(ctx, "r")
	if err != nil {
		t.Fatal(err)
	}
	if p.Ready(poolUID, types.NamespacedName{}, "r") != 0 {
		t.Fatal("a leased member is ready for others")
	}
	return l
}

func oneReady(t *testing.T) (*writes, *Picker, types.UID) {
	t.Helper()
	w := &writes{fakeAPI: newFakeAPI()}
	p := newPicker(t, w)
	uid := w.member("r")
	w.edit(uid, setReady)
	w.deliver(p)
	return w, p, uid
}

func TestLeaseEndsWithoutCommit(t *testing.T) {
	for name, end := range map[string]func(*Lease, context.CancelFunc){
		"released":         func(l *Lease, _ context.CancelFunc) { l.Release(); l.Release() },
		"context canceled": func(_ *Lease, cancel context.CancelFunc) { cancel() },
		"lease timed out":  func(*Lease, context.CancelFunc) { time.Sleep(leaseTimeout) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, p, _ := oneReady(t)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				l := reserve(ctx, t, p)
				want := adoptAs("x")(l.Sandbox())
				end(l, cancel)
				synctest.Wait()
				if p.Ready(poolUID, types.NamespacedName{}, "r") != 1 {
					t.Error("the member did not return to its queue")
				}
				if l.Sandbox() != nil {
					t.Error("an ended lease returned its member")
				}
				kind := ErrLost
				if ctx.Err() != nil {
					kind = errs.ErrTimeout
				}
				if _, err := l.Commit(ctx, want); !errors.Is(err, kind) || w.n != 0 {
					t.Errorf("Commit of an ended lease = %v, with %d writes", err, w.n)
				}
				if p.Ready(poolUID, types.NamespacedName{}, "r") != 1 {
					t.Error("Commit of an ended lease moved the member")
				}
			})
		})
	}
}

// The last check before the write: an event may change a member that is leased already.
func TestCommitChecksTheMember(t *testing.T) {
	for name, change := range map[string]func(*agents.Sandbox){
		"other revision": func(s *agents.Sandbox) { s.Labels[agents.LabelTemplateHash] = "other" },
		"terminating":    setTerminating,
		"not ready":      setUnready,
		"claimed":        setTaken,
		"deleted":        nil,
	} {
		t.Run(name, func(t *testing.T) {
			w, p, uid := oneReady(t)
			l := reserve(t.Context(), t, p)
			want := adoptAs("x")(l.Sandbox())
			if change == nil {
				w.remove(uid)
			} else {
				w.edit(uid, change)
			}
			w.deliver(p)
			if s, err := l.Commit(t.Context(), want); !errors.Is(err, ErrLost) || s != nil || w.n != 0 {
				t.Errorf("Commit = %v, %v, with %d writes; want ErrLost without a write", s, err, w.n)
			}
		})
	}
}

// A lease on a member that ended passes nothing on.
func TestLeaseOfAnEndedMember(t *testing.T) {
	w, p, uid := oneReady(t)
	l := reserve(t.Context(), t, p)
	w.remove(uid)
	w.deliver(p)
	if l.Sandbox() != nil {
		t.Error("a deleted member was returned")
	}
	l.Release()
	if members, groups := remembers(p); members+groups != 0 {
		t.Errorf("%d members and %d groups are left", members, groups)
	}
}
