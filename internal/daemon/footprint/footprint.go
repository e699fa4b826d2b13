// Package footprint decides how much memory a process has for its speed. A start may have more garbage than Go would leave it (DelayGC).
// Later, whenever the process rests, what it no longer needs is returned to the kernel (Run): garbage, which would otherwise stay
// resident until the next collection, minutes later, and the parts of the program that only the start has read.
//
// Between the two it changes neither the pace of Go's garbage collector nor anything else.
package footprint

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	// interval is how long the process must rest.
	interval = 2 * time.Second
	// restBytes is what a process may allocate in that time and still rests.
	restBytes = 2 << 20
	// A release costs a collection, so it must promise more than slackBytes, and more than a part of the heap.
	slackBytes, slackPart = 8 << 20, 8
)

// Run releases memory until ctx is done. It is for a process that has started.
func Run(ctx context.Context, log *slog.Logger) {
	m := &monitor{}
	for lifecycle.Sleep(ctx, interval) {
		now := readHeap()
		if !m.due(now) {
			continue
		}
		first := m.floor == 0
		debug.FreeOSMemory()
		if first {
			if err := unmapProgram(); err != nil {
				log.DebugContext(ctx, "pages of the program stay mapped", telemetry.Error, err)
			}
		}
		m.floor = readHeap().resident
	}
}

// heap is the state of Go's heap, in bytes.
type heap struct {
	allocated uint64 // ever
	resident  uint64 // of objects, free ones among them, and of what was not returned to the kernel
}

func readHeap() heap {
	s := []metrics.Sample{
		{Name: "/gc/heap/allocs:bytes"}, {Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/unused:bytes"}, {Name: "/memory/classes/heap/free:bytes"},
	}
	metrics.Read(s)
	return heap{allocated: s[0].Value.Uint64(), resident: s[1].Value.Uint64() + s[2].Value.Uint64() + s[3].Value.Uint64()}
}

// monitor decides when a release is worth its cost.
type monitor struct {
	floor     uint64 // resident after the last release, or less; zero before the first
	allocated uint64 // at the last look
}

// due reports whether the process rests and a release would return much.
func (m *monitor) due(now heap) bool {
	rests := m.allocated != 0 && now.allocated-m.allocated <= restBytes
	m.allocated = now.allocated
	m.floor = min(m.floor, now.resident)
	return rests && now.resident-m.floor > max(slackBytes, m.floor/slackPart)
}

// unmapProgram takes the pages of the program's file out of this process. They stay in the page cache: one that is used again is
// mapped again, without the disk. The kernel maps 64 KiB around each address that is used, so that a start, which uses a bit
// everywhere, leaves most of the file mapped. Where the page cache has huge pages it maps 2 MiB; that is left to the code, which runs
// faster so. The tables beside it are read here and there.
func unmapProgram() error {
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return err
	}
	defer func() { _ = maps.Close() }()
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		span, rest, _ := strings.Cut(lines.Text(), " ")
		if !strings.HasSuffix(rest, " "+program) || rest[1] == 'w' { // its variables are copies of pages, not in the file
			continue
		}
		var from, to uintptr
		if _, err := fmt.Sscanf(span, "%x-%x", &from, &to); err != nil {
			return fmt.Errorf("read a mapping of the program: %w", err)
		}
		if rest[2] != 'x' {
			_ = madvise(from, to, unix.MADV_NOHUGEPAGE) // a kernel may have none
		}
		if err := madvise(from, to, unix.MADV_DONTNEED); err != nil {
			return fmt.Errorf("unmap pages of the program: %w", err)
		}
	}
	return lines.Err()
}

func madvise(from, to uintptr, advice uintptr) error {
	if _, _, errno := unix.Syscall(unix.SYS_MADVISE, from, to-from, advice); errno != 0 {
		return errno
	}
	return nil
}
