package cgroups

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// moveEvery is shorter than the time that the kernel keeps moves fast.
const moveEvery = 5 * time.Millisecond

// moving is full while a caller keeps moves quick.
var moving = make(chan struct{}, 1)

// WithQuickMoves calls f, in which a runtime moves processes between cgroups of version 1.
//
// The first move in a while waits 10 to 30 ms for an RCU grace period on all processors; moves soon
// after it do not. runsc moves itself before and after it starts a sandbox, too far apart to
// profit. So this process moves itself to its own cgroup repeatedly meanwhile, which changes
// nothing. Concurrent callers share one mover; a failure only costs time.
func WithQuickMoves(f func()) {
	path := ownCgroup()
	if path == "" {
		f()
		return
	}
	select {
	case moving <- struct{}{}:
		defer func() { <-moving }()
	default:
		f()
		return
	}
	var mover sync.WaitGroup
	defer mover.Wait()
	done := make(chan struct{})
	defer close(done)
	mover.Go(func() {
		procs, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return
		}
		defer func() { _ = procs.Close() }()
		tick := time.NewTicker(moveEvery)
		defer tick.Stop()
		for {
			if _, err := procs.WriteString("0"); err != nil { // 0 is the writer
				return
			}
			select {
			case <-done:
				return
			case <-tick.C:
			}
		}
	})
	f()
}

// ownCgroup is the process list of our own cgroup in the freezer hierarchy. It is empty with version
// 2, where processes start in their cgroup.
func ownCgroup() string {
	if unified() {
		return ""
	}
	b, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(bytes.TrimSpace(b))) {
		if _, rest, ok := strings.Cut(strings.TrimSpace(line), ":freezer:"); ok {
			return filepath.Join(root, "freezer", rest, "cgroup.procs")
		}
	}
	return ""
}
