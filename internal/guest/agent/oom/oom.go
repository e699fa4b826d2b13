// Package oom ends the processes that have the most memory, as the OOM killer of Linux would: the kernel of a gVisor sandbox
// has none. It does not decide when; the node does.
package oom

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	// gone bounds the wait for the end of what was killed, which pollEvery looks for.
	gone      = time.Second
	pollEvery = 2 * time.Millisecond
	// many kills within a time are those of a program that starts processes faster than they are killed.
	many, within = 3, 3 * time.Second
)

// Killer kills in one sandbox.
type Killer struct {
	// Proc is where the files of processes are. Signal sends a signal as kill(2) does.
	Proc   string
	Signal func(pid int, signal syscall.Signal) error

	mu sync.Mutex
	// +checklocks:mu
	last []time.Time
}

// Kill kills the process with the largest resident set, and returns when it is gone, or after a second. It spares the agents of
// all containers, which have this process's name, and PID 1. ok is false where no other process has memory.
//
// The third time in three seconds, or where the node has stopped all processes, it kills the session with the most: a command and what it
// started, so that nothing starts more in the meantime.
func (k *Killer) Kill() (killed envd.OOMKilled, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.last = append(k.last, time.Now())
	if n := len(k.last); n > many {
		k.last = slices.Delete(k.last, 0, n-many)
	}
	all := k.processes()
	if len(all) == 0 {
		return killed, false
	}
	most := slices.MaxFunc(all, func(a, b process) int { return int(a.bytes - b.bytes) })
	if most.stopped || len(k.last) == many && time.Since(k.last[0]) < within {
		return k.killSession()
	}
	k.end([]process{most})
	return envd.OOMKilled{PID: most.pid, Name: most.name, Bytes: most.bytes}, true
}

func (k *Killer) killSession() (killed envd.OOMKilled, ok bool) {
	_ = k.Signal(-1, syscall.SIGSTOP)
	defer func() { _ = k.Signal(-1, syscall.SIGCONT) }()
	sums, all := map[int]int64{}, k.processes()
	largest := 0
	for _, p := range all {
		if sums[p.session] += p.bytes; sums[p.session] > sums[largest] {
			largest = p.session
		}
	}
	for end := time.Now().Add(gone); time.Now().Before(end); all = k.processes() { // one look may not show what was being started
		members := slices.DeleteFunc(all, func(p process) bool { return p.session != largest })
		if len(members) == 0 {
			break
		}
		for _, p := range members {
			if killed.PID == 0 || p.pid == largest {
				killed.PID, killed.Name = p.pid, p.name
			}
		}
		killed.Others += len(members)
		k.endGroups(members)
		_ = k.Signal(-1, syscall.SIGSTOP)
	}
	killed.Bytes, killed.Others = sums[largest], max(0, killed.Others-1)
	return killed, killed.PID != 0
}

// endGroups kills the process groups of processes, each at once: in gVisor the end of one process continues what is stopped of an orphaned
// group.
func (k *Killer) endGroups(all []process) {
	var ended []int
	for _, p := range all {
		if p.group > 1 && p.group != syscall.Getpgrp() && !slices.Contains(ended, p.group) {
			_ = k.Signal(-p.group, syscall.SIGKILL)
			ended = append(ended, p.group)
		}
	}
	k.end(all)
}

// end kills processes, and waits until they have no memory.
func (k *Killer) end(all []process) {
	for _, p := range all {
		_ = k.Signal(p.pid, syscall.SIGKILL) // it may have ended meanwhile
	}
	end := time.Now().Add(gone)
	for _, p := range all {
		for k.residentSet(p.pid) > 0 && time.Now().Before(end) {
			time.Sleep(pollEvery)
		}
	}
}

type process struct {
	pid, group, session int
	stopped             bool
	name                string
	bytes               int64
}

// processes lists those that may be killed, and have memory.
func (k *Killer) processes() (all []process) {
	entries, err := os.ReadDir(k.Proc)
	if err != nil {
		return nil
	}
	own := nameOf("/proc/self")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == 1 || pid == os.Getpid() {
			continue
		}
		p := process{pid: pid, bytes: k.residentSet(pid)}
		if p.bytes == 0 {
			continue
		}
		dir := filepath.Join(k.Proc, e.Name())
		if p.name = nameOf(dir); p.name != own {
			p.readStat(dir)
			all = append(all, p)
		}
	}
	return all
}

// nameOf returns the name of a process, by its directory of /proc.
func nameOf(dir string) string {
	name, _ := os.ReadFile(filepath.Join(dir, "comm")) // it may have ended
	return string(bytes.TrimSpace(name))
}

// readStat reads the first, third and fourth field after the name; none for one that has ended. See proc_pid_stat(5).
func (p *process) readStat(dir string) {
	b, _ := os.ReadFile(filepath.Join(dir, "stat"))
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) < 4 {
		return
	}
	p.stopped = string(fields[0]) == "T"
	p.group, _ = strconv.Atoi(string(fields[2]))
	p.session, _ = strconv.Atoi(string(fields[3]))
}

// residentSet is in bytes; 0 for a process that has ended. See proc_pid_statm(5).
func (k *Killer) residentSet(pid int) int64 {
	b, err := os.ReadFile(filepath.Join(k.Proc, strconv.Itoa(pid), "statm"))
	fields := bytes.Fields(b)
	if err != nil || len(fields) < 2 {
		return 0
	}
	pages, err := strconv.ParseInt(string(fields[1]), 10, 64)
	if err != nil {
		return 0
	}
	return pages * int64(os.Getpagesize())
}
