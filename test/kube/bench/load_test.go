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
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubeinstall"
)

const (
	// atOnce is how many clients claim at the same time.
	atOnce = 20
	// patience bounds each wait, of a whole pool and of 10,000 sandboxes too.
	patience = 30 * time.Minute
	// quiet is how long nothing is written when a side has settled.
	quiet = 2 * time.Second
	// template is that of all pools.
	template = "base"
	poolName = "pool"
)

const extensionsGroup = "extensions.agents.x-k8s.io"

// load is the client of a turn.
type load struct {
	*testing.B
	cluster *kubecluster.Cluster
	dynamic dynamic.Interface
	version string // of the extension kinds
	next    int    // numbers claims
	// container is that of the template.
	container map[string]any
}

func newLoad(b *testing.B, c *kubecluster.Cluster, version string) *load {
	d, err := dynamic.NewForConfig(c.REST)
	must(b, err)
	return &load{B: b, cluster: c, dynamic: d, version: version, container: map[string]any{"name": "main", "image": "barchan.test/pod:1"}}
}

func (l *load) kind(resource string) dynamic.ResourceInterface {
	return l.dynamic.Resource(schema.GroupVersionResource{Group: extensionsGroup, Version: l.version, Resource: resource}).Namespace("default")
}

func (l *load) create(ctx context.Context, resource, kind, name string, spec map[string]any) error {
	_, err := l.kind(resource).Create(ctx, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": extensionsGroup + "/" + l.version, "kind": kind, "metadata": map[string]any{"name": name}, "spec": spec,
	}}, metav1.CreateOptions{})
	return err
}

// claimSpec asks for a member of the pool.
func (l *load) claimSpec() map[string]any {
	if l.version == "v1alpha1" {
		return map[string]any{"sandboxTemplateRef": map[string]any{"name": template}, "warmpool": poolName}
	}
	return map[string]any{"warmPoolRef": map[string]any{"name": poolName}}
}

// warmUp creates the template, and has the controllers serve one claim, so that no figure contains their start.
func (l *load) warmUp() {
	must(l, l.create(l.Context(), "sandboxtemplates", "SandboxTemplate", template, map[string]any{
		"podTemplate": map[string]any{"spec": map[string]any{
			"containers": []any{l.container},
		}},
	}))
	l.fill(1)
	_, err := l.claim(1, 1)
	must(l, err)
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
		return l.create(l.Context(), "sandboxwarmpools", "SandboxWarmPool", poolName, map[string]any{
			"replicas": int64(size), "sandboxTemplateRef": map[string]any{"name": template},
		})
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
	remove []func(context.Context) error // each claim
}

// add adds the claims of another time.
func (c *claimed) add(more claimed) {
	c.millis, c.took = append(c.millis, more.millis...), c.took+more.took
}

// rate is a second's claims.
func (c *claimed) rate() float64 { return float64(len(c.millis)) / c.took.Seconds() }

// claim creates claims from some clients, each of which waits until its claim is ready before it creates the next.
func (l *load) claim(n, clients int) (claimed, error) {
	ctx, cancel := context.WithTimeout(l.Context(), patience)
	defer cancel()
	w, err := l.watchClaims(ctx)
	if err != nil {
		return claimed{}, err
	}
	defer w.Stop()
	seen := &sightings{at: map[string]chan time.Time{}}
	go seen.watch(w)
	first := l.next
	l.next += n
	return each(n, clients, func(i int) (taken time.Duration, remove func(context.Context) error, err error) {
		name := fmt.Sprintf("claim-%d", first+i)
		ready := seen.of(name)
		began := time.Now()
		if err := l.create(ctx, "sandboxclaims", "SandboxClaim", name, l.claimSpec()); err != nil {
			return 0, nil, err
		}
		remove = func(ctx context.Context) error {
			return l.kind("sandboxclaims").Delete(ctx, name, metav1.DeleteOptions{})
		}
		select {
		case at := <-ready:
			return at.Sub(began), remove, nil
		case <-ctx.Done():
			return 0, nil, fmt.Errorf("%s is not ready within %v", name, patience)
		}
	})
}

// watchClaims watches from now on, without the thousands of claims that there may be, and again where the API server ends the watch of a
// client that reads too slowly.
func (l *load) watchClaims(ctx context.Context) (watch.Interface, error) {
	kind := l.kind("sandboxclaims")
	list, err := kind.List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return nil, err
	}
	return watchtools.NewRetryWatcherWithContext(ctx, list.GetResourceVersion(), &cache.ListWatch{WatchFuncWithContext: kind.Watch})
}

// each has clients claim n times.
func each(n, clients int, do func(i int) (taken time.Duration, remove func(context.Context) error, err error)) (claimed, error) {
	result := claimed{millis: make([]float64, n), remove: make([]func(context.Context) error, n)}
	var group errgroup.Group
	group.SetLimit(clients)
	began := time.Now()
	for i := range n {
		group.Go(func() error {
			taken, remove, err := do(i)
			result.millis[i], result.remove[i] = float64(taken)/float64(time.Millisecond), remove
			return err
		})
	}
	err := group.Wait()
	result.took = time.Since(began)
	return result, err
}

// remove removes what was claimed.
func (l *load) remove(all ...claimed) {
	l.Helper()
	var group errgroup.Group
	group.SetLimit(atOnce)
	for _, c := range all {
		for _, remove := range c.remove {
			group.Go(func() error { return remove(l.Context()) })
		}
	}
	must(l, group.Wait())
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

// e2b creates sandboxes by the E2B API of some replicas, from some clients, each of which waits for its sandbox before it
// creates the next.
func (l *load) e2b(n, clients int, addresses ...string) (claimed, error) {
	transport := &http.Transport{DialContext: l.cluster.Dial, MaxIdleConnsPerHost: clients}
	l.Cleanup(transport.CloseIdleConnections)
	apis := make([]*client.Client, len(addresses))
	for i, address := range addresses {
		var err error
		apis[i], err = client.New(client.Config{URL: "http://" + address, Key: kubeinstall.APIKey, HTTP: &http.Client{Transport: transport}, UserAgent: "bench"})
		if err != nil {
			return claimed{}, err
		}
	}
	ctx, cancel := context.WithTimeout(l.Context(), patience)
	defer cancel()
	return each(n, clients, func(i int) (taken time.Duration, remove func(context.Context) error, err error) {
		api, began := apis[i%len(apis)], time.Now()
		s, err := api.Create(ctx, client.CreateOptions{TemplateID: template, Timeout: 24 * time.Hour})
		return time.Since(began), func(ctx context.Context) error { return api.Kill(ctx, s.SandboxID) }, err
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
