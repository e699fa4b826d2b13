package warmpool_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/controllers/warmpool"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
)

// counted counts passes: each reads once what was claimed.
type counted struct {
	*cache.Cache
	passes atomic.Int64
}

func (c *counted) ClaimedFrom(ctx context.Context, pool types.UID) ([]*agents.Sandbox, error) {
	c.passes.Add(1)
	return c.Cache.ClaimedFrom(ctx, pool)
}

// BenchmarkFill fills a pool from empty, with a stand-in for the node, and empties it again. It
// reports how many passes that took, with and without waiting for more events.
func BenchmarkFill(b *testing.B) {
	for _, size := range []int32{100, 300} {
		for _, coalesce := range []time.Duration{-1, 20 * time.Millisecond} {
			b.Run(fmt.Sprintf("members=%d/coalesce=%s", size, max(coalesce, 0)), func(b *testing.B) { benchmarkFill(b, size, coalesce) })
		}
	}
}

func benchmarkFill(b *testing.B, size int32, coalesce time.Duration) {
	cfg := serve(b)
	c, passes := run(b, cfg, coalesce)
	if err := c.Create(b.Context(), fakecluster.Template("default", "t", "x")); err != nil {
		b.Fatal(err)
	}
	p := &extensions.SandboxWarmPool{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}}
	p.Spec.Replicas, p.Spec.SandboxTemplateRef.Name = new(int32), "t"
	if err := c.Create(b.Context(), p); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		for _, n := range []int32{size, 0} {
			patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, n))
			if err := c.Patch(b.Context(), p, patch); err != nil {
				b.Fatal(err)
			}
			await(b, c, p, n)
		}
	}
	b.ReportMetric(float64(passes.Load())/float64(b.N), "passes/op")
}

// run runs the controller and a node that is none.
func run(b *testing.B, cfg *rest.Config, coalesce time.Duration) (client.WithWatch, *atomic.Int64) {
	b.Helper()
	held, err := cache.New(b.Context(), cache.Config{REST: cfg})
	if err != nil {
		b.Fatal(err)
	}
	objects := &counted{Cache: held}
	controller, err := warmpool.New(warmpool.Config{Log: telemetry.Discard(), Client: held.Live(), Cache: held.Informers(), Objects: objects, Coalesce: coalesce})
	if err != nil {
		b.Fatal(err)
	}
	c, err := client.NewWithWatch(cfg, client.Options{Scheme: held.Live().Scheme()})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	var running sync.WaitGroup
	b.Cleanup(func() { cancel(); running.Wait() })
	running.Go(func() { standInForNode(ctx, b, c) })
	for _, f := range []func(context.Context) error{held.Run, controller.Start} {
		running.Go(func() {
			if err := f(ctx); err != nil {
				b.Error(err)
			}
		})
	}
	if err := held.WaitSynced(b.Context()); err != nil {
		b.Fatal(err)
	}
	return c, &objects.passes
}

// standInForNode marks sandboxes ready. The API server ends the watches of whom it finds slow.
func standInForNode(ctx context.Context, b *testing.B, c client.WithWatch) {
	for ctx.Err() == nil {
		var list agents.SandboxList
		events, err := c.Watch(ctx, &list, client.InNamespace("default"))
		if err == nil {
			err = c.List(ctx, &list, client.InNamespace("default"))
		}
		if err != nil {
			if ctx.Err() == nil {
				b.Error(err)
			}
			return
		}
		for i := range list.Items {
			_ = fakecluster.Reconcile(ctx, c, &list.Items[i]) // a conflict is followed by its event
		}
		for e := range events.ResultChan() {
			if s, ok := e.Object.(*agents.Sandbox); ok && e.Type != watch.Deleted {
				_ = fakecluster.Reconcile(ctx, c, s)
			}
		}
	}
}

// await waits until a pool reports that it is complete.
func await(b *testing.B, c client.WithWatch, p *extensions.SandboxWarmPool, n int32) {
	b.Helper()
	events, err := c.Watch(b.Context(), &extensions.SandboxWarmPoolList{}, client.InNamespace(p.Namespace))
	if err != nil {
		b.Fatal(err)
	}
	defer events.Stop()
	for e := range events.ResultChan() {
		p, ok := e.Object.(*extensions.SandboxWarmPool)
		if !ok || p.Status.Barchan == nil || p.Status.ObservedGeneration != p.Generation {
			continue
		}
		settled := false
		for _, c := range p.Status.Conditions {
			settled = settled || (c.Type == extensions.PoolProgressing && c.Status == metav1.ConditionFalse)
		}
		if settled && p.Status.Barchan.CurrentReadyReplicas == n && p.Status.Barchan.DesiredReplicas == n {
			return
		}
	}
	b.Fatal("the watch ended")
}
