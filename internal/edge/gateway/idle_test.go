package gateway

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/edge/gateway/traffic"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// pauser pauses boxes, and reports which.
type pauser struct {
	boxes map[string]*box
	done  chan string
	// during runs before a sandbox is paused; its error fails that.
	during func(name string) error
}

func (s *pauser) PauseIdle(_ context.Context, _, id string) error {
	b := s.boxes[id]
	if s.during != nil {
		if err := s.during(b.Name); err != nil {
			s.done <- "failed " + b.Name
			return err
		}
	}
	b.sleep()
	b.apply()
	s.done <- "paused " + b.Name
	return nil
}

func (s *pauser) Kill(_ context.Context, _, id string) error {
	s.boxes[id].kill()
	s.done <- "killed " + s.boxes[id].Name
	return nil
}

// idlers runs idle policies over boxes that get one, until the test ends.
func (w *fixture) idlers(t *testing.T, s *pauser, boxes ...*box) {
	t.Helper()
	s.boxes, s.done = map[string]*box{}, make(chan string, 100)
	for _, b := range boxes {
		s.boxes[string(b.id)] = b
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = w.gateway.WatchIdle(ctx, s) })
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
}

// often has idle policies looked at all the time.
func often(c *Config) { c.idleInterval = 10 * time.Millisecond }

func idling(action agents.TimeoutAction) func(*agents.Sandbox) {
	return func(s *agents.Sandbox) {
		s.Spec.Barchan.Idle = &agents.IdlePolicy{AfterSeconds: 1, Action: action}
		s.Spec.Barchan.Wake = &agents.WakePolicy{OnTraffic: true}
	}
}

// TestIdlePolicy: what has no traffic is paused or removed; what has an open stream or WebSocket
// is not, until that ends.
func TestIdlePolicy(t *testing.T) {
	finish := make(chan struct{})
	w := newFixture(t, often)
	port := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "first\n")
		_ = http.NewResponseController(w).Flush()
		<-finish
	})
	quiet, busy := w.box("quiet", idling(agents.TimeoutPause)), w.box("busy", idling(agents.TimeoutPause))
	doomed, free := w.box("doomed", idling(agents.TimeoutShutdown)), w.box("free")
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, busy.url(port, "/"), nil)
	res, err := w.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if _, err := bufio.NewReader(res.Body).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	s := &pauser{}
	w.idlers(t, s, quiet, busy, doomed, free)
	got := map[string]bool{<-s.done: true, <-s.done: true}
	if !got["paused quiet"] || !got["killed doomed"] {
		t.Errorf("done: %v", got)
	}
	if _, open := w.trafficOf(busy).Idle(); !open {
		t.Error("an open stream does not count as traffic")
	}
	close(finish)
	if end := <-s.done; end != "paused busy" {
		t.Errorf("then %s", end)
	}
	if last, open := w.trafficOf(free).Idle(); last == 0 || open {
		t.Errorf("a sandbox without policy has last traffic %v, busy %v", last, open)
	}
	if w.trafficOf(quiet) != nil {
		t.Error("a paused sandbox has a counter of traffic")
	}
}

// TestRequestMeetsIdlePause has a request come while its sandbox is put to sleep: it must not be
// lost, whether that succeeds or not.
func TestRequestMeetsIdlePause(t *testing.T) {
	for name, fails := range map[string]error{"paused": nil, "failed": errs.ErrUnavailable} {
		t.Run(name, func(t *testing.T) {
			k := &waker{release: make(chan struct{})}
			close(k.release)
			w := newFixture(t, often, func(c *Config) { c.Waker = k })
			port := backend(t, hello)
			b := w.box("a", idling(agents.TimeoutPause))
			k.do = func() error { b.run("10.9.0.2"); b.apply(); return nil }
			status := make(chan int, 1)
			var once atomic.Bool
			before, come := make(chan int, 1), make(chan struct{})
			s := &pauser{during: func(string) error {
				if !once.CompareAndSwap(false, true) {
					return errors.New("once is enough")
				}
				before <- w.flying()
				go func() { status <- w.statusOf(w.client, b.url(port, "/")) }()
				<-come
				return fails
			}}
			w.idlers(t, s, b)
			func() {
				defer close(come)
				others := <-before
				eventually.True(t, "the request has come", func() bool { return w.flying() > others })
			}()
			if got := <-s.done; got != name+" a" {
				t.Errorf("got %s", got)
			}
			if got := <-status; got != http.StatusOK {
				t.Errorf("the request got %d", got)
			}
			if woken := k.calls.Load(); (woken == 1) != (fails == nil) {
				t.Errorf("woken %d times", woken)
			}
		})
	}
}

func (w *fixture) trafficOf(b *box) *traffic.Counter { return w.gateway.trafficOf(b.id) }
