package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

// processes lists all of the machine.
func processes() ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// procFile reads a file of a process; one that has ended has no text.
func procFile(pid int, name string) (string, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), name))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return "", nil
	}
	return string(b), err
}

// processesIn lists those in the cgroups below a path, in any hierarchy.
func processesIn(cgroup string) ([]int, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	var in []int
	for _, pid := range all {
		text, err := procFile(pid, "cgroup")
		if err != nil {
			return nil, fmt.Errorf("read cgroup of process %d: %w", pid, err)
		}
		if strings.Contains(text, ":"+cgroup+"/") {
			in = append(in, pid)
		}
	}
	if len(in) == 0 {
		return nil, fmt.Errorf("no process is in the cgroup %s", cgroup)
	}
	return in, nil
}

// processWith finds the process of a program by one of its arguments.
func processWith(program, argument string) (int, error) {
	all, err := processes()
	if err != nil {
		return 0, err
	}
	for _, pid := range all {
		text, err := procFile(pid, "cmdline")
		if err != nil {
			return 0, fmt.Errorf("read command line of process %d: %w", pid, err)
		}
		args := strings.Split(text, "\x00")
		if filepath.Base(args[0]) == program && slices.Contains(args, argument) {
			return pid, nil
		}
	}
	return 0, fmt.Errorf("no %s runs with %s", program, argument)
}

// field is a value of the form "Name:  value".
func field(text, name string) string {
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, ":"); ok && key == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// residentMiB reads the resident set of a process from /proc/PID/status.
func residentMiB(pid int) (float64, error) {
	text, err := procFile(pid, "status")
	if err != nil {
		return 0, fmt.Errorf("read status of process %d: %w", pid, err)
	}
	return mib(field(text, "VmRSS"))
}

func mib(text string) (float64, error) {
	kib, err := strconv.ParseFloat(strings.TrimSuffix(text, " kB"), 64)
	if err != nil {
		return 0, fmt.Errorf("read size %q: %w", text, err)
	}
	return kib / 1024, nil
}

// pssOf sums the proportional memory of processes, in MiB. Processes that share one address
// space, as those of gVisor's platform do, count once: the kernel reports each as if it were
// the only one there.
func pssOf(pids []int) (float64, error) {
	sum := 0.0
	seen := map[string][]int{} // by what the kernel reports, to compare few
	for _, pid := range pids {
		text, err := procFile(pid, "smaps_rollup")
		if err != nil {
			return 0, fmt.Errorf("read memory of process %d: %w", pid, err)
		}
		if field(text, "Pss") == "" {
			continue // it has ended, or has no memory of its own any more
		}
		parent, err := procFile(pid, "cgroup")
		if err != nil {
			return 0, fmt.Errorf("read cgroup of process %d: %w", pid, err)
		}
		if shares(pid, seen[parent]) {
			continue
		}
		seen[parent] = append(seen[parent], pid)
		size, err := mib(field(text, "Pss"))
		if err != nil {
			return 0, err
		}
		sum += size
	}
	return sum, nil
}

// shares reports whether a process has the same address space as one of the others.
func shares(pid int, others []int) bool {
	const kcmpVM = 1
	for _, other := range others {
		order, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(pid), uintptr(other), kcmpVM, 0, 0, 0)
		if errno == 0 && order == 0 {
			return true
		}
	}
	return false
}

// cpuOf is the time that processes have had of a processor, in seconds.
func cpuOf(pids []int) float64 {
	sum := 0.0
	for _, pid := range pids {
		p, err := procfs.NewProc(pid)
		if err != nil {
			continue
		}
		if stat, err := p.Stat(); err == nil {
			sum += stat.CPUTime()
		}
	}
	return sum
}
