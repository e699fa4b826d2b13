package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

const (
	gatewayConns = 50
	// gatewayRate is how many requests a second the connections make together where latency is
	// measured: far from what any of the proxies can do, so that no queue is measured.
	gatewayRate = 1000
	largeBody   = 256 << 20

	addedP50Bar, addedP99Bar = 0.3, 2.0 // ms over direct
	requestsBar              = 0.7      // of haproxy's
	largeBar                 = 0.8      // of haproxy's
	idleConnBar              = 20.0     // KiB
	lookupBar                = 200.0    // ns
)

// measureGateway stands the gateway beside nginx and haproxy, before the same backend, in rounds
// of one after the other: each figure is a median of what the rounds gave.
func measureGateway(ctx context.Context, b *bench) error {
	f, err := newLineup(ctx, b.dir)
	if err != nil {
		return err
	}
	defer f.close()
	b.logf("gateway: %s", f.versions(ctx))
	for _, measure := range []func(context.Context, *bench, *lineup) error{gatewayLatency, gatewayRequests, gatewayLarge, gatewayIdle} {
		if err := measure(ctx, b, f); err != nil {
			return err
		}
	}
	return gatewayLookup(b)
}

// gatewayLatency makes requests at a fixed rate, and takes what each proxy adds to the latency of
// the same round without one.
func gatewayLatency(ctx context.Context, b *bench, f *lineup) error {
	p50, p99 := map[string]samples{}, map[string]samples{}
	for range b.rounds(10) {
		for _, w := range f.ways {
			took, err := w.paced(ctx, gatewayConns, gatewayRate, 2*gatewayRate)
			if err != nil {
				return fmt.Errorf("latency of %s: %w", w.name, err)
			}
			p50[w.name] = append(p50[w.name], took.at(0.5))
			p99[w.name] = append(p99[w.name], took.at(0.99))
		}
	}
	name := fmt.Sprintf("%d connections, %d requests/s", gatewayConns, gatewayRate)
	b.report.add("gateway", "latency p50, direct, "+name, "ms", p50["direct"])
	b.report.add("gateway", "latency p99, direct, "+name, "ms", p99["direct"])
	for _, w := range f.ways[1:] {
		added50, added99 := minus(p50[w.name], p50["direct"]), minus(p99[w.name], p99["direct"])
		x := b.report.add("gateway", "added to p50, "+w.name, "ms", added50)
		y := b.report.add("gateway", "added to p99, "+w.name, "ms", added99)
		if w.name == "barchan" {
			x.atMost(addedP50Bar)
			y.atMost(addedP99Bar)
		}
	}
	return nil
}

func minus(a, b samples) samples {
	var out samples
	for i := range a {
		out = append(out, a[i]-b[i])
	}
	return out
}

// over divides round by round.
func over(a, b samples) samples {
	var out samples
	for i := range a {
		out = append(out, a[i]/b[i])
	}
	return out
}

// gatewayRequests has wrk send requests as fast as it can on kept connections.
func gatewayRequests(ctx context.Context, b *bench, f *lineup) error {
	rates := map[string]samples{}
	for range b.rounds(10) {
		for _, w := range f.ways {
			n, err := w.wrk(ctx, gatewayConns, 2*time.Second)
			if err != nil {
				return fmt.Errorf("requests of %s: %w", w.name, err)
			}
			rates[w.name] = append(rates[w.name], n)
		}
	}
	for _, w := range f.ways {
		b.report.add("gateway", "small requests, "+w.name, "req/s", rates[w.name])
	}
	b.report.add("gateway", "small requests, barchan over haproxy", "", over(rates["barchan"], rates["haproxy"])).atLeast(requestsBar)
	return nil
}

func gatewayLarge(ctx context.Context, b *bench, f *lineup) error {
	rates := map[string]samples{}
	for range b.rounds(10) {
		for _, w := range f.ways {
			took, err := w.download(ctx, "/large", largeBody)
			if err != nil {
				return fmt.Errorf("large body of %s: %w", w.name, err)
			}
			rates[w.name] = append(rates[w.name], largeBody/1e6/took.Seconds())
		}
	}
	for _, w := range f.ways {
		b.report.add("gateway", "body of 256 MiB, "+w.name, "MB/s", rates[w.name])
	}
	b.report.add("gateway", "body of 256 MiB, barchan over haproxy", "", over(rates["barchan"], rates["haproxy"])).atLeast(largeBar)
	return nil
}

// gatewayIdle keeps connections open that have made a request each.
func gatewayIdle(ctx context.Context, b *bench, f *lineup) error {
	const conns = 2000
	for _, w := range f.ways[1:] {
		each, err := w.idleMemory(ctx, conns)
		if err != nil {
			return fmt.Errorf("idle connections of %s: %w", w.name, err)
		}
		x := b.report.one("gateway", fmt.Sprintf("memory of each of %d idle connections, %s", conns, w.name), "KiB", each)
		if w.name == "barchan" {
			x.atMost(idleConnBar)
		}
	}
	return nil
}

// gatewayLookup looks sandboxes up, at random, among many.
func gatewayLookup(b *bench) error {
	const routes, lookups = 100_000, 1_000_000
	table := route.NewTable()
	ids := make([]sandbox.ID, routes)
	for i := range ids {
		ids[i] = applyRoute(table, "box-"+strconv.Itoa(i), i+1)
	}
	var all samples
	for range b.rounds(20) {
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
	b.report.add("gateway", "lookup among 100,000 routes", "ns", all).atMost(lookupBar)
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

// exitOnEnd ends this process when its parent closes its standard input.
func exitOnEnd() {
	_, _ = os.Stdin.Read(make([]byte, 1))
}
