package gateway

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

const (
	conns = 50
	// rate is how many requests a second the connections make together where latency is
	// measured: far from what any of the proxies can do, so that no queue is measured.
	rate      = 1000
	largeBody = 256 << 20

	addedP50Bar, addedP99Bar = 0.3, 2.0 // ms over direct
	requestsBar              = 0.7      // of haproxy's
	largeBar                 = 0.8      // of haproxy's
	routerBar                = 5.0      // of agent-sandbox's
	idleConnBar              = 20.0     // KiB
	lookupBar                = 200.0    // ns
)

// Proxies stands the gateway beside nginx and haproxy, before the same backend, in rounds
// of one after the other: each figure is a median of what the rounds gave.
func Proxies(ctx context.Context, b *harness.Bench) error {
	f, err := newLineup(ctx, b.Dir)
	if err != nil {
		return err
	}
	defer f.close()
	b.Logf("gateway: %s", f.versions(ctx))
	for _, measure := range []func(context.Context, *harness.Bench, *lineup) error{latency, requests, large, idleMemory} {
		if err := measure(ctx, b, f); err != nil {
			return err
		}
	}
	return lookup(b)
}

// latency makes requests at a fixed rate, and takes what each proxy adds to the latency of
// the same round without one.
func latency(ctx context.Context, b *harness.Bench, f *lineup) error {
	p50, p99 := map[string]report.Samples{}, map[string]report.Samples{}
	for range b.Rounds(10) {
		for _, w := range f.ways {
			took, err := w.paced(ctx, conns, rate, 2*rate)
			if err != nil {
				return fmt.Errorf("latency of %s: %w", w.name, err)
			}
			p50[w.name] = append(p50[w.name], took.At(0.5))
			p99[w.name] = append(p99[w.name], took.At(0.99))
		}
	}
	name := fmt.Sprintf("%d connections, %d requests/s", conns, rate)
	b.Report.Add("gateway", "latency p50, direct, "+name, "ms", p50["direct"])
	b.Report.Add("gateway", "latency p99, direct, "+name, "ms", p99["direct"])
	for _, w := range f.ways[1:] {
		added50, added99 := minus(p50[w.name], p50["direct"]), minus(p99[w.name], p99["direct"])
		x := b.Report.Add("gateway", "added to p50, "+w.name, "ms", added50)
		y := b.Report.Add("gateway", "added to p99, "+w.name, "ms", added99)
		if w.name == "barchan" {
			x.AtMost(addedP50Bar)
			y.AtMost(addedP99Bar)
		}
	}
	return nil
}

func minus(a, b report.Samples) report.Samples {
	var out report.Samples
	for i := range a {
		out = append(out, a[i]-b[i])
	}
	return out
}

// over divides round by round.
func over(a, b report.Samples) report.Samples {
	var out report.Samples
	for i := range a {
		out = append(out, a[i]/b[i])
	}
	return out
}

// requests has wrk send requests as fast as it can on kept connections.
func requests(ctx context.Context, b *harness.Bench, f *lineup) error {
	rates := map[string]report.Samples{}
	for range b.Rounds(10) {
		for _, w := range f.ways {
			n, err := w.wrk(ctx, conns, 2*time.Second)
			if err != nil {
				return fmt.Errorf("requests of %s: %w", w.name, err)
			}
			rates[w.name] = append(rates[w.name], n)
		}
	}
	for _, w := range f.ways {
		b.Report.Add("gateway", "small requests, "+w.name, "req/s", rates[w.name])
	}
	b.Report.Add("gateway", "small requests, barchan over haproxy", "", over(rates["barchan"], rates["haproxy"])).AtLeast(requestsBar)
	if len(rates[router]) > 0 {
		b.Report.Add("gateway", "small requests, barchan over "+router, "", over(rates["barchan"], rates[router])).AtLeast(routerBar)
	}
	return nil
}

// large has each way carry a body of 256 MiB.
func large(ctx context.Context, b *harness.Bench, f *lineup) error {
	rates := map[string]report.Samples{}
	for range b.Rounds(10) {
		for _, w := range f.ways {
			took, err := w.download(ctx, "/large", largeBody)
			if err != nil {
				return fmt.Errorf("large body of %s: %w", w.name, err)
			}
			rates[w.name] = append(rates[w.name], largeBody/1e6/took.Seconds())
		}
	}
	for _, w := range f.ways {
		b.Report.Add("gateway", "body of 256 MiB, "+w.name, "MB/s", rates[w.name])
	}
	b.Report.Add("gateway", "body of 256 MiB, barchan over haproxy", "", over(rates["barchan"], rates["haproxy"])).AtLeast(largeBar)
	return nil
}

// idleMemory keeps connections open that have made a request each.
func idleMemory(ctx context.Context, b *harness.Bench, f *lineup) error {
	const idle = 2000
	for _, w := range f.ways[1:] {
		each, err := w.idleMemory(ctx, idle)
		if err != nil {
			return fmt.Errorf("idle connections of %s: %w", w.name, err)
		}
		x := b.Report.One("gateway", fmt.Sprintf("memory of each of %d idle connections, %s", idle, w.name), "KiB", each)
		if w.name == "barchan" {
			x.AtMost(idleConnBar)
		}
	}
	return nil
}

// lookup looks sandboxes up, at random, among many.
func lookup(b *harness.Bench) error {
	const routes, lookups = 100_000, 1_000_000
	table := route.NewTable()
	ids := make([]sandbox.ID, routes)
	for i := range ids {
		ids[i] = applyRoute(table, "box-"+strconv.Itoa(i), i+1)
	}
	var all report.Samples
	for range b.Rounds(20) {
		order := make([]sandbox.ID, lookups/10)
		for i := range order {
			order[i] = ids[rand.IntN(routes)] //nolint:gosec // an order, not a secret
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		began := time.Now()
		for _, id := range order {
			if _, ok := table.Lookup(id); !ok {
				return fmt.Errorf("route of %s is lost", id)
			}
		}
		took := time.Since(began)
		runtime.ReadMemStats(&after)
		if n := after.Mallocs - before.Mallocs; n > lookups/1000 {
			return fmt.Errorf("%d lookups made %d allocations", len(order), n)
		}
		all = append(all, float64(took.Nanoseconds())/float64(len(order)))
	}
	b.Report.Add("gateway", "lookup among 100,000 routes", "ns", all).AtMost(lookupBar)
	return nil
}

// applyRoute makes a running sandbox with an address of loopback known to a table.
func applyRoute(table *route.Table, name string, version int) sandbox.ID {
	started := metav1.Now()
	s := &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-of-" + name), ResourceVersion: strconv.Itoa(version)}}
	s.Status.PodIPs = []string{"127.0.0.1"}
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue}}
	s.Status.Barchan = &agents.BarchanStatus{StartedAt: &started}
	table.Apply(s)
	return sandbox.IDOf(s.UID)
}
