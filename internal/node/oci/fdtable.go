package oci

import (
	"os"
	"os/exec"
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
type starter struct{ runc.ProcessMonitor }

// useStarter has all runtimes of this process use a starter.
var useStarter = sync.OnceFunc(func() { runc.Monitor = starter{runc.Monitor} })

// StartLocked starts a command. Those with a Console start a sandbox: they have lastDescriptor, and pass it on to no process.
func (s starter) StartLocked(cmd *exec.Cmd) (chan runc.Exit, error) {
	if null, ok := cmd.Stdin.(*os.File); ok {
		cmd.ExtraFiles = make([]*os.File, lastDescriptor-2) // the first is 3; those that are nil are closed
		cmd.ExtraFiles[len(cmd.ExtraFiles)-1] = null
	}
	return s.ProcessMonitor.StartLocked(cmd)
}
