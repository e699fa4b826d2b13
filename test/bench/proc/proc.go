package proc

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

// Where lists the processes of the machine whose file of this name, such as "cmdline", has what is looked for.
func Where(file string, fits func(text string) bool) (pids []int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		text, err := read(pid, file)
		if err != nil {
			return nil, fmt.Errorf("read %s of process %d: %w", file, pid, err)
		}
		if fits(text) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// read reads a file of a process; one that has ended has no text.
func read(pid int, name string) (string, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), name))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return "", nil
	}
	return string(b), err
}

// InCgroup lists those in the cgroups below a path, in any hierarchy.
func InCgroup(cgroup string) ([]int, error) {
	return Where("cgroup", func(text string) bool { return strings.Contains(text, ":"+cgroup+"/") })
}

// With finds the process of a program by one of its arguments.
func With(program, argument string) (int, error) {
	pids, err := Where("cmdline", func(text string) bool {
		args := strings.Split(text, "\x00")
		return filepath.Base(args[0]) == program && slices.Contains(args, argument)
	})
	if err == nil && len(pids) == 0 {
		err = fmt.Errorf("no %s runs with %s", program, argument)
	}
	if err != nil {
		return 0, err
	}
	return pids[0], nil
}

// Field returns the value of a line of the form "Name:  value".
func Field(text, name string) string {
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// RSS returns the resident set of a process, in MiB.
func RSS(pid int) (float64, error) {
	text, err := read(pid, "status")
	if err != nil {
		return 0, fmt.Errorf("read status of process %d: %w", pid, err)
	}
	return mib(Field(text, "VmRSS"))
}

// Available returns the memory that programs of this machine can still get, in MiB.
func Available() (float64, error) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("read memory: %w", err)
	}
	return mib(Field(string(text), "MemAvailable"))
}

func mib(text string) (float64, error) {
	kib, err := strconv.ParseFloat(strings.TrimSuffix(text, " kB"), 64)
	if err != nil {
		return 0, fmt.Errorf("read size %q: %w", text, err)
	}
	return kib / 1024, nil
}

// PSS returns the proportional memory of processes, in MiB. Processes that share one address
// space, as those of gVisor's platform do, count once: the kernel reports each as if it were
// the only one there.
func PSS(pids []int) (float64, error) {
	sum := 0.0
	seen := map[string][]int{} // by what the kernel reports, to compare few
	for _, pid := range pids {
		text, err := read(pid, "smaps_rollup")
		if err != nil {
			return 0, fmt.Errorf("read memory of process %d: %w", pid, err)
		}
		if Field(text, "Pss") == "" {
			continue // it has ended, or has no memory of its own any more
		}
		parent, err := read(pid, "cgroup")
		if err != nil {
			return 0, fmt.Errorf("read cgroup of process %d: %w", pid, err)
		}
		if shares(pid, seen[parent]) {
			continue
		}
		seen[parent] = append(seen[parent], pid)
		size, err := mib(Field(text, "Pss"))
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

// CPU returns the time that processes have had of a processor, in seconds.
func CPU(pids []int) float64 {
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
