// Package usage measures a sandbox's use of CPU, memory and disk, and keeps the samples of the last hour.
//
// Sampler.mu and History.mu are leaves.
package usage

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/guest/agent/plainfile"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// ticksPerSecond is the kernel's unit of CPU time, USER_HZ: 100 on Linux.
const ticksPerSecond = 100

// Sampler measures resource usage. CPU usage covers the time since the last measurement.
type Sampler struct {
	mu sync.Mutex
	// seconds
	busy   float64   // +checklocks:mu
	at     time.Time // +checklocks:mu
	latest float64   // +checklocks:mu
}

// shortestSpan is the least time that CPU usage is measured over.
const shortestSpan = 200 * time.Millisecond

// NewSampler begins the first measurement.
func NewSampler() *Sampler {
	m := &Sampler{at: time.Now()}
	m.busy = cpuSeconds()
	return m
}

// Measure reads all values.
func (m *Sampler) Measure() (envd.Metrics, error) {
	now := time.Now()
	out := envd.Metrics{Timestamp: now.Unix(), CPUCount: runtime.NumCPU(), CPUUsedPct: m.cpu(now)}
	mem, err := meminfo()
	if err != nil {
		return envd.Metrics{}, err
	}
	out.MemTotal = mem["MemTotal"]
	out.MemCache = mem["Cached"]
	available, ok := mem["MemAvailable"]
	if !ok {
		available = mem["MemFree"]
	}
	out.MemUsed = out.MemTotal - min(available, out.MemTotal)
	var fs unix.Statfs_t
	if err := unix.Statfs("/", &fs); err != nil {
		return envd.Metrics{}, fmt.Errorf("measure disk: %w", err)
	}
	out.DiskTotal = fs.Blocks * uint64(fs.Bsize)
	out.DiskUsed = (fs.Blocks - min(fs.Bfree, fs.Blocks)) * uint64(fs.Bsize)
	return out, nil
}

// cpu is the percentage of one CPU's time, of all CPUs together, in use.
func (m *Sampler) cpu(now time.Time) float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	span := now.Sub(m.at)
	if span < shortestSpan {
		return m.latest
	}
	busy := cpuSeconds()
	m.latest = min(100, max(0, 100*(busy-m.busy)/span.Seconds()/float64(runtime.NumCPU()))) // busy is read a little later than now
	m.busy, m.at = busy, now
	return m.latest
}

// cpuSeconds is the CPU time used, by the kernel's count or, where it has none (gVisor), by that of the
// running processes.
func cpuSeconds() float64 {
	if b, err := plainfile.ReadFile("/proc/stat"); err == nil {
		line, _, _ := strings.Cut(string(b), "\n")
		var busy uint64
		for i, f := range strings.Fields(line) {
			n, err := strconv.ParseUint(f, 10, 64)
			// Fields 4 and 5 are idle and waiting; guests (9, 10) are in 1 and 2.
			if err == nil && i != 4 && i != 5 && i < 9 {
				busy += n
			}
		}
		if busy > 0 {
			return float64(busy) / ticksPerSecond
		}
	}
	return processSeconds()
}

func processSeconds() float64 {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0
	}
	var ticks uint64
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		b, err := plainfile.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue
		}
		// The name in parentheses may hold anything; utime and stime are the
		// 12th and 13th field after it.
		fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
		if len(fields) < 13 {
			continue
		}
		for _, f := range fields[11:13] {
			if n, err := strconv.ParseUint(string(f), 10, 64); err == nil {
				ticks += n
			}
		}
	}
	return float64(ticks) / ticksPerSecond
}

// meminfo reads the kernel's values, in bytes.
func meminfo() (map[string]uint64, error) {
	b, err := plainfile.ReadFile("/proc/meminfo")
	if err != nil {
		return nil, fmt.Errorf("measure memory: %w", err)
	}
	m := map[string]uint64{}
	for line := range strings.Lines(string(b)) {
		name, rest, ok := strings.Cut(line, ":")
		fields := strings.Fields(rest)
		if !ok || len(fields) == 0 {
			continue
		}
		if kb, err := strconv.ParseUint(fields[0], 10, 64); err == nil {
			m[name] = kb << 10
		}
	}
	return m, nil
}
