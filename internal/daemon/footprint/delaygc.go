package footprint

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"

	"golang.org/x/sys/unix"
)

const (
	// A start may have as much garbage as live objects, as Go has it, or maxGarbage if that is more and not more than a part of the
	// machine's memory.
	maxGarbage  = 256 << 20
	garbagePart = 32
	// minHeap is the heap below which Go does not collect, for 100 % of garbage.
	minHeap = 4 << 20
	// usualPercent is Go's default.
	usualPercent = 100
)

// DelayGC has garbage collected less often until the returned function is called, for a start that makes many objects which stay: a
// collection costs as much as there are of them, and there would be one each time that they double. It changes nothing if the
// environment has GOGC.
func DelayGC() (end func()) {
	garbage := allowance()
	if os.Getenv("GOGC") != "" || garbage == 0 {
		return func() {}
	}
	var mu sync.Mutex
	ended := false
	debug.SetGCPercent(percent(minHeap, garbage))
	afterCollection(func() (again bool) {
		mu.Lock()
		defer mu.Unlock()
		if !ended {
			debug.SetGCPercent(percent(liveBytes(), garbage))
		}
		return !ended
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		ended = true
		debug.SetGCPercent(usualPercent)
	}
}

// allowance is how many bytes of garbage a start may have on this machine, however few objects live.
func allowance() uint64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return min(maxGarbage, info.Totalram*uint64(info.Unit)/garbagePart)
}

// percent is the garbage that may be, in percent of the bytes that live.
func percent(live, garbage uint64) int { return int(max(usualPercent, 100*garbage/max(live, minHeap))) }

// liveBytes are those that the last collection found.
func liveBytes() uint64 {
	s := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// afterCollection calls f after each collection of garbage, in a goroutine of the runtime, as long as f returns true.
func afterCollection(f func() bool) {
	type garbage struct{ _ *int } // with a pointer, or small objects share its memory and keep it alive
	runtime.AddCleanup(&garbage{}, func(f func() bool) {
		if f() {
			afterCollection(f)
		}
	}, f)
}
