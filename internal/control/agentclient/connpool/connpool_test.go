package connpool

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// fixture is a pool in a bubble of synctest, and the connections that it has opened.
type fixture struct {
	*Pool
	t *testing.T

	mu     sync.Mutex
	conns  map[sandbox.ID][]*fakeConn // +checklocks:mu
	opened []sandbox.ID               // that Opened was called for; +checklocks:mu
	// hold, if set, is what Open and Ask wait for; fail is what they return.
	hold chan struct{} // +checklocks:mu
	fail error         // +checklocks:mu
}

// fakeConn notes that it was closed.
type fakeConn struct {
	net.Conn
	mu     sync.Mutex
	closed int // +checklocks:mu
}

func (c *fakeConn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed++
	return nil
}

func (c *fakeConn) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed > 0
}

// inBubble runs a test of a pool that runs, and requires that all connections but those that were taken are closed at the end.
func inBubble(t *testing.T, test func(f *fixture)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := &fixture{t: t, conns: map[sandbox.ID][]*fakeConn{}}
		f.Pool = New(Config{
			Open: func(ctx context.Context, s *agents.Sandbox) (net.Conn, error) {
				if err := f.answer(ctx); err != nil {
					return nil, err
				}
				conn := &fakeConn{}
				f.mu.Lock()
				defer f.mu.Unlock()
				f.conns[idOf(s)] = append(f.conns[idOf(s)], conn)
				return conn, nil
			},
			Ask: func(ctx context.Context, _ net.Conn, _ *agents.Sandbox) error { return f.answer(ctx) },
			Opened: func(_ context.Context, s *agents.Sandbox) {
				f.mu.Lock()
				defer f.mu.Unlock()
				f.opened = append(f.opened, idOf(s))
			},
		})
		ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
		var running sync.WaitGroup
		running.Go(func() { _ = f.Run(ctx) })
		synctest.Wait()
		test(f)
		cancel()
		running.Wait()
		f.mu.Lock()
		defer f.mu.Unlock()
		for id, conns := range f.conns {
			for i, c := range conns {
				if !c.isClosed() {
					t.Errorf("connection %d of %s is open at the end", i, id)
				}
			}
		}
	})
}

func (f *fixture) answer(ctx context.Context) error {
	f.mu.Lock()
	hold, fail := f.hold, f.fail
	f.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return fail
}

// set changes what Open and Ask do from now on.
func (f *fixture) set(hold chan struct{}, fail error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hold, f.fail = hold, fail
}

// observe shows a change, and waits until nothing more happens.
func (f *fixture) observe(older, newer *agents.Sandbox) {
	f.Observe(older, newer)
	synctest.Wait()
}

// of returns the connections that were opened to a sandbox.
func (f *fixture) of(s *agents.Sandbox) []*fakeConn {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.conns[idOf(s)]
}

// has requires a kept connection, or none, and leaves it there.
func (f *fixture) has(s *agents.Sandbox, want bool, when string) {
	f.t.Helper()
	f.Pool.mu.Lock()
	defer f.Pool.mu.Unlock()
	if has := f.Pool.conns[idOf(s)].conn != nil; has != want {
		f.t.Errorf("%s: a connection of %s is kept: %v", when, s.Name, has)
	}
}

func idOf(s *agents.Sandbox) sandbox.ID { return sandbox.IDOf(s.UID) }

func spare(uid string) *agents.Sandbox {
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: uid, UID: types.UID(uid), Labels: map[string]string{agents.LabelWarmPoolSandbox: "p"}}}
	s.Status.PodIPs = []string{"192.0.2.1"}
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}}
	return s
}

// TestOneConnection: a member gets one connection, however often it is shown, which is given away once.
func TestOneConnection(t *testing.T) {
	inBubble(t, func(f *fixture) {
		s, claimed, unready, nowhere := spare("a"), spare("b"), spare("c"), spare("d")
		claimed.Labels, unready.Status.Conditions, nowhere.Status.PodIPs = nil, nil, nil
		f.observe(nil, s)
		f.observe(s, s)
		for _, x := range []*agents.Sandbox{claimed, unready, nowhere} {
			f.observe(nil, x)
			if len(f.of(x)) != 0 {
				t.Errorf("%s, which is no ready member, got a connection", x.Name)
			}
		}
		if len(f.of(s)) != 1 || len(f.opened) != 1 {
			t.Fatalf("%d connections were opened, %d announced, want one", len(f.of(s)), len(f.opened))
		}
		conn := f.Take(idOf(s))
		if conn != f.of(s)[0] || f.of(s)[0].isClosed() {
			t.Fatalf("Take = %v, want the open connection", conn)
		}
		if again := f.Take(idOf(s)); again != nil {
			t.Error("it was given away twice")
		}
		_ = conn.Close()
	})
}

// TestFailedOpening: it is not repeated until the member is shown again, and nothing is announced.
func TestFailedOpening(t *testing.T) {
	inBubble(t, func(f *fixture) {
		s := spare("a")
		f.set(nil, errors.New("refused"))
		f.observe(nil, s)
		f.has(s, false, "after a refusal")
		if len(f.opened) != 0 {
			t.Errorf("announced for %v", f.opened)
		}
		f.set(make(chan struct{}), nil)
		f.observe(s, s)
		time.Sleep(openTimeout + time.Millisecond)
		synctest.Wait()
		f.has(s, false, "after a silence")
		f.set(nil, nil)
		f.observe(s, s)
		f.has(s, true, "shown again")
	})
}

// TestLateConnection: one that is open only when nothing wants it any more is closed.
func TestLateConnection(t *testing.T) {
	inBubble(t, func(f *fixture) {
		s, hold := spare("a"), make(chan struct{})
		f.set(hold, nil)
		f.observe(nil, s)
		f.observe(s, nil)
		f.renew(time.Now())
		close(hold)
		synctest.Wait()
		f.has(s, false, "after it left")
		if conns := f.of(s); len(conns) != 1 || !conns[0].isClosed() {
			t.Errorf("of %d connections the late one is still open", len(conns))
		}
	})
}

// TestLaterConnection: the one that was kept first stays.
func TestLaterConnection(t *testing.T) {
	inBubble(t, func(f *fixture) {
		s, later := spare("a"), &fakeConn{}
		f.observe(nil, s)
		f.store(s, later, nil)
		if first := f.of(s)[0]; !later.isClosed() || first.isClosed() || f.Take(idOf(s)) != first {
			t.Error("the later connection was kept")
		}
		_ = f.of(s)[0].Close()
	})
}

// TestSparesOnly: a member that was claimed or left keeps its connection for the claim in progress, and until the next renewal. That of
// one that stays is replaced when it is old.
func TestSparesOnly(t *testing.T) {
	inBubble(t, func(f *fixture) {
		claimed, gone, stays := spare("a"), spare("b"), spare("c")
		for _, s := range []*agents.Sandbox{claimed, gone, stays} {
			f.observe(nil, s)
		}
		owned := claimed.DeepCopy()
		owned.Labels = nil
		f.observe(claimed, owned)
		f.observe(gone, nil)
		f.has(claimed, true, "during the claim")
		f.renew(time.Now())
		f.has(claimed, false, "after a renewal")
		f.has(gone, false, "after a renewal")
		f.has(stays, true, "after a renewal")
		time.Sleep(maxAge + maxAge/5)
		synctest.Wait()
		f.has(stays, true, "when the first was old")
		if conns := f.of(stays); len(conns) != 2 || !conns[0].isClosed() || conns[1].isClosed() {
			t.Errorf("%d connections, want the old one closed and another", len(conns))
		}
	})
}

// TestPut: what a claim has used is left for the first request, but not for long, and not beside another or at the end.
func TestPut(t *testing.T) {
	inBubble(t, func(f *fixture) {
		s, other := spare("a"), &fakeConn{}
		f.observe(nil, s)
		conn := f.Take(idOf(s))
		f.Put(s, conn)
		f.Put(s, other)
		if !other.isClosed() {
			t.Error("a second connection was kept")
		}
		f.has(s, true, "after the claim")
		f.renew(time.Now())
		f.has(s, false, "after a renewal")
		f.setRunning(false)
		late := &fakeConn{}
		f.Put(s, late)
		f.observe(nil, spare("b"))
		if !late.isClosed() || len(f.of(spare("b"))) != 0 {
			t.Error("a pool that does not run keeps connections")
		}
	})
}

// TestWake: an agent is asked once at a time, on its own connection, which Take does not return meanwhile.
func TestWake(t *testing.T) {
	inBubble(t, func(f *fixture) {
		s, hold := spare("a"), make(chan struct{})
		f.Wake(f.t.Context(), s) // nothing is kept for it
		f.AwaitWoken(f.t.Context(), idOf(s))
		f.observe(nil, s)
		f.set(hold, nil)
		f.Wake(f.t.Context(), s)
		f.Wake(f.t.Context(), s) // once is enough
		if f.Take(idOf(s)) != nil {
			t.Error("a connection was given away on which an agent is asked")
		}
		ctx, cancel := context.WithTimeout(f.t.Context(), time.Millisecond)
		defer cancel()
		begin := time.Now()
		f.AwaitWoken(ctx, idOf(s))
		if took := time.Since(begin); took != time.Millisecond {
			t.Errorf("waited %v, want until its context ended", took)
		}
		close(hold)
		f.AwaitWoken(f.t.Context(), idOf(s))
		f.has(s, true, "after the answer")
		f.AwaitWoken(f.t.Context(), idOf(s)) // nothing wakes it
	})
}

// TestWakeWithoutAnswer: the connection is closed, after a quarter of a second at most, and its claim opens another.
func TestWakeWithoutAnswer(t *testing.T) {
	inBubble(t, func(f *fixture) {
		s := spare("a")
		f.observe(nil, s)
		f.set(make(chan struct{}), nil)
		begin := time.Now()
		f.Wake(f.t.Context(), s)
		f.AwaitWoken(f.t.Context(), idOf(s))
		if took := time.Since(begin); took != wakeTimeout {
			t.Errorf("waited %v", took)
		}
		f.has(s, false, "without an answer")
		if !f.of(s)[0].isClosed() {
			t.Error("the connection is open")
		}
	})
}

// TestWakeOfAMemberThatLeaves: its connection does not stay because its agent was being woken.
func TestWakeOfAMemberThatLeaves(t *testing.T) {
	inBubble(t, func(f *fixture) {
		s := spare("a")
		f.observe(nil, s)
		f.Wake(f.t.Context(), s)
		f.observe(s, nil)
		f.AwaitWoken(f.t.Context(), idOf(s))
		f.renew(time.Now())
		f.has(s, false, "after it left")
	})
}

// TestManyMembers: what exceeds the limit gets no connection.
func TestManyMembers(t *testing.T) {
	inBubble(t, func(f *fixture) {
		f.set(make(chan struct{}), nil)
		for i := range maxOpen + openAtOnce + 1 {
			f.Observe(nil, spare(fmt.Sprint("x", i)))
		}
		synctest.Wait()
		f.Pool.mu.Lock()
		n := len(f.Pool.conns)
		f.Pool.mu.Unlock()
		if n != maxOpen {
			t.Errorf("%d are wanted, want %d", n, maxOpen)
		}
	})
}

// TestEnd: Run ends when what it began has ended, and leaves nothing open.
func TestEnd(t *testing.T) {
	for name, slow := range map[string]struct{ open, ask bool }{"opening": {open: true}, "waking": {ask: true}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				hold, conn, late := make(chan struct{}), &fakeConn{}, &fakeConn{}
				p := New(Config{
					Open: func(context.Context, *agents.Sandbox) (net.Conn, error) {
						if slow.open {
							<-hold
						}
						return conn, nil
					},
					Ask: func(context.Context, net.Conn, *agents.Sandbox) error {
						if slow.ask {
							<-hold
						}
						return nil
					},
					Opened: func(context.Context, *agents.Sandbox) {},
				})
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- p.Run(ctx) }()
				synctest.Wait()
				p.Observe(nil, spare("a"))
				synctest.Wait()
				p.Wake(ctx, spare("a"))
				cancel()
				synctest.Wait()
				if len(ended) != 0 {
					t.Error("it ended before what it began")
				}
				close(hold)
				synctest.Wait()
				if len(ended) != 1 || !conn.isClosed() {
					t.Errorf("ended: %v, the connection is closed: %v", len(ended) == 1, conn.isClosed())
				}
				if p.Put(spare("a"), late); !late.isClosed() {
					t.Error("a connection is kept after the end")
				}
			})
		})
	}
}
