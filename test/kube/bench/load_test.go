package bench

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"

	"github.com/barchan-dev/barchan/internal/client/restclient"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubeinstall"
)

const (
	// atOnce is how many clients claim at the same time.
	atOnce = 20
	// patience bounds each wait, of a whole pool too.
	patience = 5 * time.Minute
	// quiet is how long nothing is written when a side has settled.
	quiet = 2 * time.Second
	// template is that of all pools.
	template = "base"
	poolName = "pool"
)

var extensions = schema.GroupVersion{Group: "extensions.agents.x-k8s.io", Version: "v1beta1"}

// load is the client of a turn.
type load struct {
	*testing.B
	cluster *kubecluster.Cluster
	dynamic dynamic.Interface
	next    int // numbers claims
}

func newLoad(b *testing.B, c *kubecluster.Cluster) *load {
	d, err := dynamic.NewForConfig(c.REST)
	must(b, err)
	return &load{B: b, cluster: c, dynamic: d}
}

func (l *load) kind(resource string) dynamic.ResourceInterface {
	return l.dynamic.Resource(extensions.WithResource(resource)).Namespace("default")
}

func object(kind, name string, spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": extensions.String(), "kind": kind, "metadata": map[string]any{"name": name}, "spec": spec,
	}}
}

func (l *load) create(ctx context.Context, resource string, o *unstructured.Unstructured) error {
	_, err := l.kind(resource).Create(ctx, o, metav1.CreateOptions{})
	return err
}

// warmUp creates the template, and has the controllers serve one claim, so that no figure contains their start.
func (l *load) warmUp() {
	must(l, l.create(l.Context(), "sandboxtemplates", object("SandboxTemplate", template, map[string]any{
		"podTemplate": map[string]any{"spec": map[string]any{
			"containers": []any{map[string]any{"name": "main", "image": "barchan.test/pod:1"}},
		}},
	})))
	l.fill(1)
	l.claim(1, 1)
	l.settle()
	l.await("sandboxwarmpools", func(e watch.Event) bool { return e.Type == watch.Deleted }, func() error {
		return l.kind("sandboxwarmpools").Delete(l.Context(), poolName, metav1.DeleteOptions{})
	})
	l.settle()
}

// fill creates the pool and returns the seconds until it reports that all of its members are ready.
func (l *load) fill(size int) float64 {
	var began time.Time
	l.await("sandboxwarmpools", full(size), func() error {
		began = time.Now()
		return l.create(l.Context(), "sandboxwarmpools", object("SandboxWarmPool", poolName, map[string]any{
			"replicas": int64(size), "sandboxTemplateRef": map[string]any{"name": template},
		}))
	})
	took := time.Since(began).Seconds()
	l.settle()
	return took
}

func full(size int) func(watch.Event) bool {
	return func(e watch.Event) bool {
		o, ok := e.Object.(*unstructured.Unstructured)
		if !ok {
			return false
		}
		ready, _, err := unstructured.NestedInt64(o.Object, "status", "readyReplicas")
		return err == nil && ready >= int64(size)
	}
}

// await watches a kind from before it calls begin until an event is what the caller waits for.
func (l *load) await(resource string, is func(watch.Event) bool, begin func() error) {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), patience)
	defer cancel()
	w, err := l.kind(resource).Watch(ctx, metav1.ListOptions{})
	must(l, err)
	defer w.Stop()
	must(l, begin())
	for e := range w.ResultChan() {
		if is(e) {
			return
		}
	}
	l.Fatalf("watch of %s ended before the awaited event: %v", resource, ctx.Err())
}

// settle waits until the pool is full, and nothing is written any more.
func (l *load) settle() {
	l.Helper()
	tick := time.NewTicker(quiet)
	defer tick.Stop()
	last := -1.0
	for end := time.Now().Add(patience); ; <-tick.C {
		now := l.writes().total()
		if now == last {
			return
		}
		if time.Now().After(end) {
			l.Fatalf("still written to after %v", patience)
		}
		last = now
	}
}

// claimed is the result of claims.
type claimed struct {
	millis []float64 // of each, from its creation until the client sees that it is ready
	took   time.Duration
}

// claim creates claims from some clients, each of which waits until its claim is ready before it creates the next.
func (l *load) claim(n, clients int) claimed {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), patience)
	defer cancel()
	w, err := l.kind("sandboxclaims").Watch(ctx, metav1.ListOptions{})
	must(l, err)
	defer w.Stop()
	seen := &sightings{at: map[string]chan time.Time{}}
	go seen.watch(w)
	result := claimed{millis: make([]float64, n)}
	var group errgroup.Group
	group.SetLimit(clients)
	began, first := time.Now(), l.next
	l.next += n
	for i := range n {
		group.Go(func() error {
			name := fmt.Sprintf("claim-%d", first+i)
			ready := seen.of(name)
			began := time.Now()
			if err := l.create(ctx, "sandboxclaims", object("SandboxClaim", name, map[string]any{"warmPoolRef": map[string]any{"name": poolName}})); err != nil {
				return err
			}
			select {
			case at := <-ready:
				result.millis[i] = float64(at.Sub(began)) / float64(time.Millisecond)
				return nil
			case <-ctx.Done():
				return fmt.Errorf("%s is not ready within %v", name, patience)
			}
		})
	}
	must(l, group.Wait())
	result.took = time.Since(began)
	return result
}

// sightings notes when a watch showed that claims are ready.
type sightings struct {
	mu sync.Mutex
	at map[string]chan time.Time // +checklocks:mu
}

func (s *sightings) of(name string) chan time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at[name] == nil {
		s.at[name] = make(chan time.Time, 1)
	}
	return s.at[name]
}

func (s *sightings) watch(w watch.Interface) {
	for e := range w.ResultChan() {
		now := time.Now()
		if o, ok := e.Object.(*unstructured.Unstructured); ok && isReady(o) {
			select {
			case s.of(o.GetName()) <- now:
			default: // it was ready before
			}
		}
	}
}

func isReady(o *unstructured.Unstructured) bool {
	conditions, _, err := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range conditions {
		if c, ok := c.(map[string]any); ok && c["type"] == "Ready" && c["status"] == "True" {
			return err == nil
		}
	}
	return false
}

// e2b creates sandboxes by the E2B API, one after another, and returns how long each took, in milliseconds.
func (l *load) e2b(n int) (millis []float64) {
	transport := &http.Transport{DialContext: l.cluster.Dial}
	defer transport.CloseIdleConnections()
	c, err := restclient.New(restclient.Config{URL: "http://" + kubeinstall.APIAddress, Key: kubeinstall.APIKey, HTTP: &http.Client{Transport: transport}, UserAgent: "bench"})
	must(l, err)
	for range n {
		began := time.Now()
		_, err := c.Create(l.Context(), restclient.NewSandbox{TemplateID: template, Timeout: 3600})
		must(l, err)
		millis = append(millis, float64(time.Since(began))/float64(time.Millisecond))
	}
	return millis
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
