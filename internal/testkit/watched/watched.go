// Package watched has what the suites share that learn by events what becomes of objects on an API
// server.
package watched

import (
	"context"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// Client returns a client with our kinds in its scheme.
func Client(t testing.TB, cfg *rest.Config) client.WithWatch {
	t.Helper()
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, agents.AddToScheme, extensions.AddToScheme, barchan.AddToScheme} {
		if err := add(s); err != nil {
			t.Fatal(err)
		}
	}
	c, err := client.NewWithWatch(cfg, client.Options{Scheme: s})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Follow hands over all events of a kind in a namespace, which is empty at first, until ctx ends.
func Follow(ctx context.Context, t testing.TB, c client.WithWatch, namespace string, list client.ObjectList, saw func(context.Context, watch.Event)) {
	if err := c.List(ctx, list, client.InNamespace(namespace)); err != nil {
		if ctx.Err() == nil {
			t.Errorf("list: %v", err)
		}
		return
	}
	version := list.GetResourceVersion()
	for ctx.Err() == nil {
		events, err := c.Watch(ctx, list, client.InNamespace(namespace), &client.ListOptions{Raw: &metav1.ListOptions{ResourceVersion: version}})
		if err != nil {
			if ctx.Err() == nil {
				t.Errorf("watch: %v", err)
			}
			return
		}
		for e := range events.ResultChan() {
			if o, ok := e.Object.(client.Object); ok {
				version = o.GetResourceVersion()
			}
			saw(ctx, e)
		}
		events.Stop()
	}
}

// Bell notifies the goroutines that wait for a change. It is safe for concurrent use.
type Bell struct {
	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each ring; +checklocks:mu
}

// NewBell returns a bell that has not rung.
func NewBell() *Bell { return &Bell{changed: make(chan struct{})} }

// Ring announces a change.
func (b *Bell) Ring() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.changed)
	b.changed = make(chan struct{})
}

// Until waits until done returns true. It calls done at each change; done also describes the current state.
func (b *Bell) Until(t testing.TB, what string, done func() (bool, string)) {
	t.Helper()
	end := time.After(eventually.Patience)
	for {
		b.mu.Lock()
		changed := b.changed
		b.mu.Unlock()
		ok, is := done()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-end:
			t.Fatalf("still not so after %s: %s; it is: %s", eventually.Patience, what, is)
		}
	}
}
