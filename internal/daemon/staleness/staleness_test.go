package staleness

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/testkit/embedded"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestProofRules: a table is trusted from the time of the newest probe that its watch has delivered; a
// watch that delivers none is restarted with backoff.
func TestProofRules(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var until time.Time
		renewals := 0
		latest, passed := 10, 10
		var silent error
		p := &watchProber{
			log: telemetry.Discard(), stale: staleAfter, patience: 3 * time.Second, proved: time.Now(), renewed: time.Now(),
			latest: func(context.Context) (string, error) { return fmt.Sprint(latest), silent },
			passed: func(context.Context) (string, error) { return fmt.Sprint(passed), nil },
			trust:  func(at time.Time) { until = at },
			renew:  func() { renewals++ },
		}
		began := time.Now()
		turn := func(n int) {
			for range n {
				time.Sleep(2 * time.Second)
				p.probe(t.Context())
			}
		}
		turn(4)
		if want := began.Add(6*time.Second + staleAfter); !until.Equal(want) { // probed one interval ago
			t.Errorf("an idle server: trusted for %s after the start, want %s", until.Sub(began), want.Sub(began))
		}
		renewals = 0
		stalled := time.Now()
		latest = 11 // the watch does not bring it
		turn(30)
		if !time.Now().After(until) || until.After(stalled.Add(staleAfter)) {
			t.Errorf("a stalled watch is trusted until %s after it stalled", until.Sub(stalled))
		}
		if renewals < 2 || renewals > 3 {
			t.Errorf("a stalled watch was restarted %d times in a minute", renewals)
		}
		if len(p.queried) > proofShare {
			t.Errorf("%d questions are kept", len(p.queried))
		}
		passed = 11
		turn(2)
		if !time.Now().Before(until) {
			t.Error("a watch that recovered is not trusted again")
		}
		silent = errors.New("away")
		turn(21)
		if time.Now().Before(until) {
			t.Error("a silent server is still trusted")
		}
	})
}

// TestProofOverHTTP proves a replica's watch by a real API server on which only objects of another kind
// are written, so that only bookmarks show its progress; then the watch stalls beside a server that
// responds, and recovers.
func TestProofOverHTTP(t *testing.T) {
	api := embedded.Listen(t, "127.0.0.1:0")
	const stale = 12 * time.Second
	started, watches := time.Now(), NewShortWatches(stale)
	var stall atomic.Bool
	cfg := throughProxy(t, api.RESTConfig(apiserver.UserController), api.Addr().String(), &stall)
	cfg.Wrap(watches.Wrap)
	objects, err := cache.New(t.Context(), cache.Config{REST: cfg})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() { _ = objects.Run(ctx) })
	if err := objects.WaitSynced(t.Context()); err != nil {
		t.Fatal(err)
	}
	recorder := newTrustRecorder(stale)
	gate, err := health.NewGate(telemetry.Discard(), nil)
	if err != nil {
		t.Fatal(err)
	}
	running.Go(func() {
		_ = Run(ctx, Config{
			Log: telemetry.Discard(), Stale: stale, Began: started, Live: objects.Live(), Watches: watches, Trust: recorder.record, Gate: gate,
			Passed: func(ctx context.Context) (string, error) { return cache.Passed[*agents.Sandbox](ctx, objects) },
		})
	})
	n := 0
	follow := func(what string, enough func(until time.Time) bool) {
		t.Helper()
		eventually.True(t, what, func() bool {
			if enough(<-recorder.newest) {
				return true
			}
			n++
			o := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("other-%d", n)}}
			o.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "sandbox", Image: "base:1"}}
			if err := objects.Live().Create(t.Context(), o); err != nil {
				t.Fatal(err)
			}
			return false
		})
	}
	began := time.Now()
	follow("a watch with bookmarks only", func(until time.Time) bool { return until.After(began.Add(2 * stale)) })
	if recorder.lapsed.Load() {
		t.Error("it was not trusted for a while")
	}
	stall.Store(true)
	follow("a watch that brings nothing", func(until time.Time) bool { return time.Now().After(until) })
	stall.Store(false)
	follow("a watch that recovered", func(until time.Time) bool { return time.Now().Before(until) })
}

// trustRecorder receives until when a watch may be trusted; it does not block.
type trustRecorder struct {
	stale  time.Duration
	newest chan time.Time
	// lapsed is set if trust ended once on a machine that had not stalled before.
	lapsed atomic.Bool
	// Only the sender uses these.
	last, still time.Time
}

func newTrustRecorder(stale time.Duration) *trustRecorder {
	return &trustRecorder{stale: stale, newest: make(chan time.Time, 1), last: time.Now()}
}

func (h *trustRecorder) record(until time.Time) {
	now := time.Now()
	if now.Sub(h.last) > h.stale/4 { // many intervals were skipped
		h.still = now
	}
	if h.last = now; now.After(until) && now.Sub(h.still) > h.stale {
		h.lapsed.Store(true)
	}
	select {
	case <-h.newest:
	default:
	}
	h.newest <- until // does not block: there is no other sender
}

// throughProxy reaches an API server through one that, while stall is set, sends nothing on watches
// and passes on everything else.
func throughProxy(t *testing.T, cfg *rest.Config, addr string, stall *atomic.Bool) *rest.Config {
	t.Helper()
	through, err := rest.TransportFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "https", Host: addr})
	proxy.Transport, proxy.FlushInterval = through, -1
	proxy.ErrorLog = nil
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if stall.Load() && r.URL.Query().Get("watch") != "" {
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(func() { front.CloseClientConnections(); front.Close() })
	return &rest.Config{Host: front.URL, QPS: -1}
}
