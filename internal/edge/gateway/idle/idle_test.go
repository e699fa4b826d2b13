package idle

import (
	"iter"
	"slices"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/traffic"
	"github.com/barchan-dev/barchan/internal/edge/route"
)

// Where memory is low, the time of an idle policy is short if its owner notices nothing of the pause.
func TestMemoryLow(t *testing.T) {
	const now = time.Hour
	wakes, long := route.Wake{OnTraffic: true}, route.Idle{After: 30 * time.Minute}
	counters := map[sandbox.ID]*traffic.Counter{}
	var routes []route.Route
	add := func(id sandbox.ID, idle time.Duration, r route.Route) {
		r.ID = id
		if r.State == "" {
			r.State = sandbox.Running
		}
		counters[id] = new(traffic.Counter)
		counters[id].Touch(now - idle)
		routes = append(routes, r)
	}
	add("used", time.Second, route.Route{Wake: wakes, Idle: long})
	add("idle", time.Minute, route.Route{Wake: wakes, Idle: long})
	add("idle for longer", 2*time.Minute, route.Route{Wake: wakes, Idle: long})
	add("over its time", 40*time.Minute, route.Route{Idle: long})
	add("without a policy", time.Minute, route.Route{Wake: wakes})
	add("not woken", time.Minute, route.Route{Idle: long})
	add("to be removed", time.Minute, route.Route{Wake: wakes, Idle: route.Idle{After: long.After, Shutdown: true}})
	add("of a shorter time", 5*time.Second, route.Route{Wake: wakes, Idle: route.Idle{After: 4 * time.Second}})
	add("paused", time.Minute, route.Route{Wake: wakes, Idle: long, State: sandbox.Paused})
	for name, c := range map[string]struct {
		low  func() bool
		want []sandbox.ID
	}{
		"low":         {func() bool { return true }, []sandbox.ID{"over its time", "idle for longer", "idle", "of a shorter time"}},
		"not low":     {func() bool { return false }, []sandbox.ID{"over its time", "of a shorter time"}},
		"not watched": {nil, []sandbox.ID{"over its time", "of a shorter time"}},
	} {
		p := Policy{
			MemoryLow: c.low, Clock: func() time.Duration { return now }, Routes: func() iter.Seq[route.Route] { return slices.Values(routes) },
			Traffic: func(id sandbox.ID) *traffic.Counter { return counters[id] },
		}
		var got []sandbox.ID
		for _, x := range p.idle() {
			got = append(got, x.route.ID)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("memory is %s: %q, want %q", name, got, c.want)
		}
	}
}
