package assumecache

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

func object(uid, version string, deleting bool) *agents.Sandbox {
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: uid, UID: types.UID(uid), ResourceVersion: version}}
	if deleting {
		s.DeletionTimestamp = new(metav1.Now())
	}
	return s
}

func none(context.Context, types.NamespacedName) (*agents.Sandbox, error) {
	return nil, errs.ErrNotFound
}

func all(*agents.Sandbox) bool { return true }

// merged lists what a reader gets, as "uid@version".
func merged(c *Sandboxes, match func(*agents.Sandbox) bool, shown ...*agents.Sandbox) string {
	got := []string{}
	for _, s := range c.Merge(shown, match) {
		got = append(got, string(s.UID)+"@"+s.ResourceVersion)
	}
	slices.Sort(got)
	return fmt.Sprint(got)
}

func TestMerge(t *testing.T) {
	b := func(s *agents.Sandbox) bool { return s.UID == "b" }
	for name, tt := range map[string]struct {
		shown *agents.Sandbox
		match func(*agents.Sandbox) bool
		want  string
	}{
		"older":             {object("a", "4", false), all, "[a@5]"},
		"same version":      {object("a", "5", false), all, "[a@5]"},
		"newer":             {object("a", "6", false), all, "[a@6]"},
		"not shown":         {object("b", "9", false), all, "[a@5 b@9]"},
		"not matching":      {object("b", "9", false), b, "[b@9]"},
		"no longer matches": {object("a", "4", false), b, "[]"},
	} {
		c := New(none)
		c.Assume(t.Context(), object("a", "5", false))
		if got := merged(c, tt.match, tt.shown); got != tt.want {
			t.Errorf("%s: got %s, want %s", name, got, tt.want)
		}
	}
}

func TestDeletions(t *testing.T) {
	c := New(none)
	c.AssumeDeleted(object("a", "5", false))
	c.Assume(t.Context(), object("a", "6", false)) // a late response to an earlier write
	if got := merged(c, all, object("a", "5", false)); got != "[]" || !c.Deleted("a") || c.Find(all) != nil {
		t.Errorf("a deleted object is read as %s", got)
	}
	c.Observe(object("a", "5", false), object("a", "6", true))
	if got := merged(c, all, object("a", "6", true)); got != "[a@6]" || c.Deleted("a") {
		t.Errorf("a terminating object is read as %s", got)
	}
	c.Assume(t.Context(), object("b", "7", false))
	c.Observe(object("b", "7", false), nil)
	if got := merged(c, all); got != "[]" {
		t.Errorf("after its deletion was observed: %s", got)
	}
}

func TestEventsEndAssumptions(t *testing.T) {
	c := New(none)
	c.Assume(t.Context(), object("a", "5", false))
	c.Assume(t.Context(), object("a", "3", false))
	c.Observe(nil, object("a", "4", false))
	if s := c.Find(all); s == nil || s.ResourceVersion != "5" {
		t.Errorf("after an older event: %v", s)
	}
	if s := c.Latest(object("a", "4", false)); s.ResourceVersion != "5" {
		t.Errorf("latest is %s", s.ResourceVersion)
	}
	c.Observe(nil, object("a", "5", false))
	if s := c.Find(all); s != nil {
		t.Errorf("after its own event: %v", s)
	}
	c.Assume(t.Context(), object("a", "5", false))
	if s := c.Latest(object("a", "6", false)); s.ResourceVersion != "6" || c.Find(all) == nil {
		t.Errorf("latest is %s, or its event was not awaited", s.ResourceVersion)
	}
	c.Assume(t.Context(), object("a", "7", false))
	if c.Forget("a"); c.Find(all) != nil {
		t.Error("a forgotten object is assumed")
	}
}

func TestExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(none)
		c.Assume(t.Context(), object("a", "5", false))
		time.Sleep(expiry + time.Second)
		if got := merged(c, all); got != "[]" || c.Find(all) != nil || c.Latest(object("a", "4", false)).ResourceVersion != "4" {
			t.Errorf("an expired object is read as %s", got)
		}
		c.Assume(t.Context(), object("a", "5", false))
		time.Sleep(expiry + time.Second)
		c.Assume(t.Context(), object("b", "6", false))
		c.mu.Lock()
		defer c.mu.Unlock()
		if len(c.assumed) != 1 {
			t.Errorf("%d objects are kept", len(c.assumed))
		}
	})
}

// A reader's copy is its own.
func TestCopies(t *testing.T) {
	c := New(none)
	s := object("a", "5", false)
	c.Assume(t.Context(), s)
	s.Name = "changed"
	c.Find(all).Name = "changed"
	c.Merge(nil, all)[0].Name = "changed"
	if got := c.Find(all).Name; got != "a" {
		t.Errorf("the assumed object is named %s", got)
	}
}

// An event may come before the response to the write, and no other may follow.
func TestEventBeforeResponse(t *testing.T) {
	c := New(func(context.Context, types.NamespacedName) (*agents.Sandbox, error) {
		return object("a", "5", false), nil
	})
	if c.Assume(t.Context(), object("a", "5", false)); c.Find(all) != nil {
		t.Error("an object that the cache shows is assumed")
	}
	if c.Assume(t.Context(), object("a", "6", false)); c.Find(all) == nil {
		t.Error("a newer object is not assumed")
	}
}

// Has includes deletions: a list without the object's event has it still.
func TestHas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := New(none)
		other := func(s *agents.Sandbox) bool { return s.UID == "b" }
		if c.AssumeDeleted(object("a", "5", false)); !c.Has(all) || c.Has(other) {
			t.Error("a deletion is not assumed, or another")
		}
		if time.Sleep(expiry + time.Second); c.Has(all) {
			t.Error("an expired assumption")
		}
	})
}
