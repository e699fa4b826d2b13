package spawn

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// agentThreads is how many threads more than root's programs the agent may have.
const agentThreads = 64

// Limit bounds the processes and threads of each user; zero sets no limit. gVisor counts them per
// user and fails with EAGAIN at the limit, for root too without CAP_SYS_RESOURCE and CAP_SYS_ADMIN.
// A checkpoint contains the limit.
//
// The agent is root too, and exits with its sandbox if it cannot start a thread. So root's programs
// get a lower limit than the agent.
func (r *Reaper) Limit(processes uint64) error {
	if processes == 0 {
		return nil
	}
	if err := unix.Setrlimit(unix.RLIMIT_NPROC, &unix.Rlimit{Cur: processes, Max: processes}); err != nil {
		return fmt.Errorf("limit processes to %d: %w", processes, err)
	}
	r.reserve = min(agentThreads, processes/4)
	return nil
}

// keepReserve lowers the limit of a program of root, which may have exited already.
func (r *Reaper) keepReserve(pid int) {
	var own unix.Rlimit
	if r.reserve == 0 || unix.Getrlimit(unix.RLIMIT_NPROC, &own) != nil {
		return
	}
	own.Cur -= r.reserve
	own.Max = own.Cur
	_ = unix.Prlimit(pid, unix.RLIMIT_NPROC, &own, nil)
}
