package e2b_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/events"
)

// BenchmarkClaim claims from a pool over HTTP, by clients that keep their connections: all of
// the way but the node, for which the members are written as ready beforehand. Nothing refills.
func BenchmarkClaim(b *testing.B) {
	for _, clients := range []int{1, 16} {
		b.Run(fmt.Sprint(clients), func(b *testing.B) { benchmarkClaim(b, clients) })
	}
}

// BenchmarkList lists 10,000 running sandboxes over HTTP: one page of E2B's size, and all as `barchan ls` does.
func BenchmarkList(b *testing.B) {
	const sandboxes = 10_000
	s := newClaimServer(b)
	s.fill(b, sandboxes)
	var left atomic.Int64
	left.Store(sandboxes)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				if _, err := s.rest.Create(b.Context(), client.CreateOptions{TemplateID: "base", Timeout: time.Hour}); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	for name, limit := range map[string]int{"page": 100, "all": 0} {
		b.Run(name, func(b *testing.B) {
			want := cmp.Or(limit, sandboxes)
			for b.Loop() {
				if list, err := s.rest.List(b.Context(), client.ListOptions{Limit: limit}); err != nil || len(list) != want {
					b.Fatal(len(list), err)
				}
			}
		})
	}
}

func benchmarkClaim(b *testing.B, clients int) {
	s := newClaimServer(b)
	s.fill(b, max(b.N, 1000))
	took, ids := make([]time.Duration, b.N), make([]string, b.N)
	var next atomic.Int64
	var wg sync.WaitGroup
	b.ResetTimer()
	for range clients {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < b.N; i = int(next.Add(1)) - 1 {
				begin := time.Now()
				made, err := s.rest.Create(b.Context(), client.CreateOptions{TemplateID: "base", Timeout: 5 * time.Minute})
				if err != nil {
					b.Error(err)
					return
				}
				took[i], ids[i] = time.Since(begin), made.SandboxID
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	slices.Sort(ids)
	if len(slices.Compact(ids)) != b.N {
		b.Errorf("%d claims got %d sandboxes", b.N, len(slices.Compact(ids)))
	}
	slices.Sort(took)
	at := func(p float64) float64 { return float64(took[int(float64(len(took)-1)*p)].Microseconds()) }
	b.ReportMetric(at(0.5), "p50-µs")
	b.ReportMetric(at(0.99), "p99-µs")
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "ops/s")
}

// claimServer is a server without a node.
type claimServer struct {
	*controlPlane
	rest     *client.Client
	template *extensions.SandboxTemplate
	pool     *extensions.SandboxWarmPool
	revision string
}

func newClaimServer(b *testing.B) *claimServer {
	b.Helper()
	must := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	dir, err := os.MkdirTemp("", "claims-") //nolint:usetesting // on the disk that TMPDIR names
	must(err)
	b.Cleanup(func() { _ = os.RemoveAll(dir) })
	ctx, cancel := context.WithCancel(context.WithoutCancel(b.Context()))
	plane, stop, err := startControlPlane(ctx, apiserver.Config{DataDir: dir, Log: telemetry.Discard()})
	b.Cleanup(func() { cancel(); stop() })
	must(err)
	s := &claimServer{controlPlane: plane}
	store, err := events.Open(dir, 0) // on the disk of etcd, as in a server
	must(err)
	recorder, err := events.NewRecorder(events.Config{
		Store: store, Objects: s.objects, Log: telemetry.Discard(), Recorded: func() {}, SizeOf: func(*agents.Sandbox) events.Size { return events.Size{} },
		Gone: func(context.Context, string) (bool, error) { return false, nil },
	})
	must(err)
	if os.Getenv("BENCH_NO_EVENTS") == "" {
		_, err = cache.On(ctx, s.objects, recorder.Observe)
		must(err)
	}
	var wg sync.WaitGroup
	b.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() { _ = errors.Join(recorder.Run(ctx), store.Close()) })
	web := httptest.NewServer(s.web)
	b.Cleanup(web.Close)
	s.writeObjects(ctx, b, must)
	key := barchan.NewKeySecret()
	must(s.objects.Live().Create(ctx, &barchan.APIKey{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "bench"}, Spec: barchan.NewAPIKeySpec(key, "")}))
	s.rest, err = client.New(client.Config{URL: web.URL, Key: key, UserAgent: "bench", HTTP: &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 64, DialContext: (&net.Dialer{}).DialContext,
	}}})
	must(err)
	return s
}

func (s *claimServer) writeObjects(ctx context.Context, b *testing.B, must func(error)) {
	b.Helper()
	t := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "base"}}
	t.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "sandbox", Image: "base:1"}}
	must(s.objects.Live().Create(ctx, t))
	zero := int32(0)
	p := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "base"}}
	p.Spec.Replicas, p.Spec.SandboxTemplateRef.Name = &zero, "base"
	must(s.objects.Live().Create(ctx, p))
	revision, _, err := pool.Revision(t)
	must(err)
	s.template, s.pool, s.revision = t, p, revision
}

// fill writes ready members and returns when the picker has them.
func (s *claimServer) fill(b *testing.B, n int) {
	b.Helper()
	ctx := b.Context()
	var wg sync.WaitGroup
	var next atomic.Int64
	for range 8 {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(n); i = next.Add(1) {
				m := pool.NewMember(s.pool, s.template, s.revision)
				m.Name = fmt.Sprintf("m-%d", i)
				if err := s.objects.Live().Create(ctx, m); err != nil {
					b.Error(err)
					return
				}
				m.Status.PodIPs, m.Status.NodeName = []string{fmt.Sprintf("10.0.%d.%d", i/250, i%250+1)}, "n1"
				now := metav1.Now()
				m.Status.Barchan = &agents.BarchanStatus{ID: string(sandbox.IDOf(m.UID)), Phase: string(sandbox.Running), StartedAt: &now}
				m.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue, Reason: agents.ReasonDependenciesReady, LastTransitionTime: now}}
				if err := s.objects.Live().Status().Update(ctx, m); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	for s.picker.Ready(s.pool.UID, pool.TemplateOf(s.pool), s.revision) < n && !b.Failed() {
		time.Sleep(time.Millisecond)
	}
	key := types.NamespacedName{Namespace: "default", Name: "base"}
	if _, err := s.objects.Pool(ctx, key); err != nil {
		b.Fatal(err)
	}
}
