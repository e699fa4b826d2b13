package footprint

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"

	"golang.org/x/sys/unix"
)

const (
	// A process may have as much garbage as live objects, as Go has it, or maxGarbage if that is more, but not more than a part of the
	// machine's memory.
	maxGarbage  = 256 << 20
	garbagePart = 32
	// minHeap is the heap below which Go does not collect, for 100 % of garbage.
	minHeap = 4 << 20
)

// Pace has garbage collected less often while there are few live objects: a collection costs as much as there is of them, and delays
// all requests, whether there was much garbage or little. It changes nothing if the environment has GOGC. It is called once, when a
// process starts.
func Pace() {
	garbage := allowance()
	if os.Getenv("GOGC") != "" || garbage == 0 {
		return
	}
	debug.SetGCPercent(percent(minHeap, garbage))
	afterCollection(func() { debug.SetGCPercent(percent(liveBytes(), garbage)) })
}

// allowance is how many bytes of garbage a process may have on this machine, however few objects live.
func allowance() uint64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return min(maxGarbage, uint64(info.Totalram)*uint64(info.Unit)/garbagePart)
}

// percent is the garbage that may be, in percent of the bytes that live.
func percent(live, garbage uint64) int { return int(max(100, 100*garbage/max(live, minHeap))) }

// liveBytes are those that the last collection found.
func liveBytes() uint64 {
	s := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// afterCollection calls f after each collection of garbage, in a goroutine of the runtime.
func afterCollection(f func()) {
	type garbage struct{ _ *int } // with a pointer, or small objects share its memory and keep it alive
	runtime.AddCleanup(&garbage{}, func(f func()) {
		f()
		afterCollection(f)
	}, f)
}
