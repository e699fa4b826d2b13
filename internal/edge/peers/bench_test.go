package peers

import (
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/edge/peers/push"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// BenchmarkPush is what a caller pays, by number of members: with sandboxes that wait already, and
// with new ones into full queues, which is the worst case.
func BenchmarkPush(b *testing.B) {
	const sandboxes = 1 << 14 // twice what a queue holds
	routes := make([]route.Route, sandboxes)
	for i := range routes {
		routes[i] = testRoute(i, "1")
	}
	for _, members := range []int{1, 4, 16} {
		for name, among := range map[string]int{"coalesced": 1024, "full": sandboxes} {
			b.Run(fmt.Sprintf("members=%d/%s", members, name), func(b *testing.B) {
				g := newGroup(b)
				cfg := g.config("r0", "127.0.0.1")
				cfg.OnRoutes = func(string, []push.Route) {}
				r, err := New(cfg)
				if err != nil {
					b.Fatal(err)
				}
				queues := make([]*push.Queue, members)
				for i := range queues {
					queues[i] = push.NewQueue(DefaultQueue)
				}
				r.queues.Store(&queues)
				version := 1
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					rt := routes[i%among]
					if i%among == 0 {
						version++
					}
					rt.ResourceVersion = strconv.Itoa(version)
					r.Push(rt)
				}
			})
		}
	}
}

// BenchmarkLatency is from Push to the other member's OnRoutes over loopback, one at a time with
// an idle sender, over real gossip and real TLS. What counts are p50 and p99: the rest has the
// pauses in it.
func BenchmarkLatency(b *testing.B) {
	for name, delay := range map[string]time.Duration{"delay=1ms": DefaultFlushDelay, "delay=none": -1} {
		b.Run(name, func(b *testing.B) {
			g := newGroup(b)
			arrived := make(chan struct{}, 1)
			to := g.config("to", "127.0.0.10")
			to.OnRoutes = func(_ string, batch []push.Route) {
				if slices.ContainsFunc(batch, func(r push.Route) bool { return r.Name == "s1" }) {
					arrived <- struct{}{}
				}
			}
			second := g.start(to)
			from := g.config("from", "127.0.0.11")
			from.KeyFile, from.Seeds, from.FlushDelay = to.KeyFile, []string{second.Self().Gossip.String()}, delay
			first := g.start(from)
			g.eventually(func() bool { return len(first.Members())+len(second.Members()) == 2 }, "joined")
			g.pushed(first, second, 2)
			var took []time.Duration
			for i := 0; b.Loop(); i++ {
				start := time.Now()
				first.Push(testRoute(1, strconv.Itoa(i+1)))
				<-arrived
				took = append(took, time.Since(start))
				time.Sleep(3 * time.Millisecond) // the sender is idle again, as it is for most events
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
		})
	}
}
