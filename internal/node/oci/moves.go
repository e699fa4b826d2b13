package oci

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// moveEvery is shorter than the kernel remembers that processes are being moved.
const moveEvery = 5 * time.Millisecond

// moving is full while somebody keeps moves quick.
var moving = make(chan struct{}, 1)

// withQuickMoves calls f, which has a runtime move processes between cgroups of version 1.
//
// The first move after a while waits until all processors have noticed that there are moves again,
// 10 to 30 milliseconds; those that follow soon do not. runsc moves itself before it starts a sandbox and
// back afterwards, too late to profit from the first time. So our own process is moved meanwhile,
// to where it is already, again and again: that costs nothing and changes nothing. Whoever finds
// somebody else at it leaves it at that. What fails here only is not quick.
func withQuickMoves(f func()) {
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
			if _, err := procs.WriteString("0"); err != nil { // whoever writes
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

// ownCgroup is the file that lists our own cgroup's processes, in the hierarchy that sandboxes are
// frozen in. With version 2 processes are started where they belong, and there is none.
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
			return filepath.Join(cgroupRoot, "freezer", rest, "cgroup.procs")
		}
	}
	return ""
}
