package oci

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync"

	"github.com/containerd/go-runc"
)

// lastDescriptor is a descriptor that a runtime has open, beside all that it uses. The kernel makes the table of descriptors of a
// process as large as the greatest one that its parent has open. So the sentry begins with a table of 256, in which it puts its
// output at 253 to 255. To enlarge that of a process with several threads, the kernel waits for a grace period of RCU on all
// processors: 7 to 16 ms, or up to 2 with /sys/kernel/rcu_expedited. Upstream's releases start the sentry by a program in C for this
// (google/gvisor#14056), which the Go module does not have.
const lastDescriptor = 252

// starter starts the commands of runtimes. Its methods are those of go-runc's monitor otherwise.
type starter struct {
	runc.ProcessMonitor
	// last is what lastDescriptor is.
	last func() (*os.File, error)
}

// useStarter has all runtimes of this process use a starter.
var useStarter = sync.OnceFunc(func() {
	runc.Monitor = starter{runc.Monitor, sync.OnceValues(func() (*os.File, error) { return os.Open(os.DevNull) })}
})

// StartLocked starts a command. Those that start a sandbox have lastDescriptor, and pass it on to no process.
func (s starter) StartLocked(cmd *exec.Cmd) (chan runc.Exit, error) {
	if slices.Contains(cmd.Args, "run") || slices.Contains(cmd.Args, "restore") {
		last, err := s.last()
		if err != nil {
			return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
		}
		cmd.ExtraFiles = make([]*os.File, lastDescriptor-2) // the first is 3; those that are nil are closed
		cmd.ExtraFiles[len(cmd.ExtraFiles)-1] = last
	}
	return s.ProcessMonitor.StartLocked(cmd)
}
