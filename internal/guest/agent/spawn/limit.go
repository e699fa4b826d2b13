package spawn

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// agentThreads is how many threads more than root's programs the agent may have.
const agentThreads = 64

// Limit bounds the processes and threads of each user, from the agent on; zero does not. gVisor
// counts them for a user and refuses one too many with EAGAIN. Root is no exception there without
// CAP_SYS_RESOURCE and CAP_SYS_ADMIN. The limit is part of a checkpoint.
//
// The agent is root too, and ends where it can start no thread, and its sandbox with it. So
// programs of root get less than the agent.
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

// keepReserve lowers the limit of a program of root. It may have ended already.
func (r *Reaper) keepReserve(pid int) {
	var own unix.Rlimit
	if r.reserve == 0 || unix.Getrlimit(unix.RLIMIT_NPROC, &own) != nil {
		return
	}
	own.Cur -= r.reserve
	own.Max = own.Cur
	_ = unix.Prlimit(pid, unix.RLIMIT_NPROC, &own, nil)
}
