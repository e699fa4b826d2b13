package cache

import (
	"context"
	"errors"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// server is an API server whose reads end when the test releases them.
type server struct {
	begun   chan context.Context
	answers chan error
}

func (s *server) get(ctx context.Context, _ types.NamespacedName) (*extensions.SandboxTemplate, error) {
	s.begun <- ctx
	select {
	case err := <-s.answers:
		return &extensions.SandboxTemplate{}, err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func newServer() (*Cache, *server) {
	s := &server{begun: make(chan context.Context, 100), answers: make(chan error)}
	return &Cache{fresh: newFresh(s.get)}, s
}

// size is how many templates are being read, and how many revisions are remembered.
func (f *fresh) size() [2]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return [2]int{len(f.queues), len(f.hashed)}
}

var key = types.NamespacedName{Namespace: "default", Name: "t"}

// current calls CurrentTemplate n times at once.
func current(ctx context.Context, c *Cache, n int) <-chan error {
	got := make(chan error, n)
	for range n {
		go func() {
			_, _, err := c.CurrentTemplate(ctx, key)
			got <- err
		}()
	}
	synctest.Wait()
	return got
}

func TestCallersShareReadsThatBeginAfterThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := newServer()
		first := current(t.Context(), c, 1)
		late := current(t.Context(), c, 100)
		if len(s.begun) != 1 {
			t.Fatalf("%d reads in flight for one template, want 1", len(s.begun))
		}
		s.answers <- nil
		synctest.Wait()
		if len(first) != 1 || len(late) != 0 {
			t.Fatalf("a read that began before the call answered %d callers", len(late))
		}
		s.answers <- nil
		synctest.Wait()
		if len(late) != 100 || len(s.begun) != 2 {
			t.Errorf("%d callers answered by %d reads, want 100 by 2", len(late), len(s.begun))
		}
		if c.fresh.size() != [2]int{0, 1} {
			t.Error("a queue or a hash is left")
		}
	})
}

func TestContextEndsOneWaitAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, s := newServer()
		first, cancelFirst := context.WithCancel(t.Context())
		next, cancelNext := context.WithCancel(t.Context())
		now, struck := current(first, c, 1), current(next, c, 1)
		for _, one := range []struct {
			cancel context.CancelFunc
			got    <-chan error
		}{{cancelNext, struck}, {cancelFirst, now}} {
			one.cancel()
			if err := <-one.got; !errors.Is(err, errs.ErrTimeout) || !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled = %v", err)
			}
			synctest.Wait()
		}
		if ctx := <-s.begun; ctx.Err() == nil || len(s.begun) != 0 {
			t.Error("reads without callers continue")
		}
		ctx, cancel := context.WithCancel(t.Context())
		_ = current(t.Context(), c, 1)
		given, kept := current(ctx, c, 1), current(t.Context(), c, 1)
		cancel()
		if err := <-given; !errors.Is(err, context.Canceled) {
			t.Errorf("the cancelled caller = %v", err)
		}
		s.answers <- nil
		s.answers <- nil
		if err := <-kept; err != nil {
			t.Errorf("the other caller = %v", err)
		}
		if got := <-current(ctx, c, 1); !errors.Is(got, context.Canceled) {
			t.Errorf("call with an ended context = %v", got)
		}
	})
}

func TestReadIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := newServer()
		begun := time.Now()
		if err := <-current(t.Context(), c, 1); !errors.Is(err, context.DeadlineExceeded) || time.Since(begun) != readTimeout {
			t.Errorf("read without an answer = %v after %v", err, time.Since(begun))
		}
	})
}

func TestStopEndsReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, _ := newServer()
		now, next := current(t.Context(), c, 1), current(t.Context(), c, 1)
		c.fresh.stop()
		for _, got := range []<-chan error{now, next, current(t.Context(), c, 1)} {
			if err := <-got; !errors.Is(err, ErrStopped) {
				t.Errorf("read of a cache that stops = %v", err)
			}
		}
	})
}

func TestRevisionIsRememberedByVersion(t *testing.T) {
	hashes := 0
	f := newFresh(nil)
	f.hash = func(t *extensions.SandboxTemplate) (string, []byte, error) {
		hashes++
		if t.Name == "bad" {
			return "", nil, errors.New("no")
		}
		return string(t.UID) + t.ResourceVersion, nil, nil
	}
	of := func(name, uid, version string) string {
		tm := &extensions.SandboxTemplate{}
		tm.Name, tm.UID, tm.ResourceVersion = name, types.UID(uid), version
		got, err := f.revision(types.NamespacedName{Name: name}, tm)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	for _, tt := range []struct {
		uid, version string
		hashes       int
	}{{"a", "1", 1}, {"a", "1", 1}, {"a", "2", 2}, {"b", "2", 3}, {"b", "2", 3}} {
		if got := of("x", tt.uid, tt.version); got != tt.uid+tt.version || hashes != tt.hashes {
			t.Errorf("%v: revision %s after %d hashes", tt, got, hashes)
		}
	}
	for i := range 2 * maxHashed {
		of(strconv.Itoa(i), "a", "1")
	}
	if n := f.size()[1]; n > maxHashed {
		t.Errorf("%d revisions are remembered, want at most %d", n, maxHashed)
	}
	bad := &extensions.SandboxTemplate{}
	bad.Name = "bad"
	_, err := f.revision(key, bad)
	if text, ok := errs.PublicMessage(err); !errors.Is(err, errs.ErrInvalid) || !ok || text[:5] != "spec:" {
		t.Errorf("template that cannot be hashed = %v", err)
	}
}
