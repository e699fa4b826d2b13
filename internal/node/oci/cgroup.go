package oci

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const cgroupRoot = "/sys/fs/cgroup"

// Usage is what a sandbox uses of the machine, its runtime included.
type Usage struct {
	// CPU is nanoseconds of processor time since the start.
	CPU uint64
	// Memory is bytes in use without the page cache that could be dropped; MemoryLimit bounds it.
	Memory, MemoryCache, MemoryLimit uint64
	// Pids counts processes and threads.
	Pids uint64
}

// unified reports whether the machine has cgroup version 2 alone.
var unified = sync.OnceValue(func() bool {
	var st unix.Statfs_t
	return unix.Statfs(cgroupRoot, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
})

// CanLimitSwap reports whether the kernel accounts for swap.
var CanLimitSwap = sync.OnceValue(func() bool {
	if unified() {
		return true
	}
	_, err := os.Stat(filepath.Join(cgroupRoot, "memory/memory.memsw.limit_in_bytes"))
	return err == nil
})

// ReadUsage reads a sandbox's usage from its cgroups.
func ReadUsage(cgroupsPath string) (u Usage, err error) {
	if unified() {
		return readUnified(filepath.Join(cgroupRoot, cgroupsPath))
	}
	path := func(controller, file string) string { return filepath.Join(cgroupRoot, controller, cgroupsPath, file) }
	if u.CPU, err = readNumber(path("cpuacct", "cpuacct.usage")); err != nil {
		return Usage{}, err
	}
	if u.Memory, err = readNumber(path("memory", "memory.usage_in_bytes")); err != nil {
		return Usage{}, err
	}
	if u.MemoryLimit, err = readNumber(path("memory", "memory.limit_in_bytes")); err != nil {
		return Usage{}, err
	}
	if u.Pids, err = readNumber(path("pids", "pids.current")); err != nil {
		return Usage{}, err
	}
	stat, err := readTable(path("memory", "memory.stat"))
	if err != nil {
		return Usage{}, err
	}
	return u.withoutCache(stat["total_inactive_file"]), nil
}

func readUnified(dir string) (u Usage, err error) {
	stat, err := readTable(filepath.Join(dir, "cpu.stat"))
	if err != nil {
		return Usage{}, err
	}
	u.CPU = stat["usage_usec"] * 1000
	for file, into := range map[string]*uint64{"memory.current": &u.Memory, "memory.max": &u.MemoryLimit, "pids.current": &u.Pids} {
		if *into, err = readNumber(filepath.Join(dir, file)); err != nil {
			return Usage{}, err
		}
	}
	if stat, err = readTable(filepath.Join(dir, "memory.stat")); err != nil {
		return Usage{}, err
	}
	return u.withoutCache(stat["inactive_file"]), nil
}

func (u Usage) withoutCache(cache uint64) Usage {
	u.MemoryCache = min(cache, u.Memory)
	u.Memory -= u.MemoryCache
	return u
}

func readNumber(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("read usage: %w", err)
	}
	text := string(bytes.TrimSpace(b))
	if text == "max" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read usage %s: %w", path, err)
	}
	return n, nil
}

func readTable(path string) (map[string]uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read usage: %w", err)
	}
	table := map[string]uint64{}
	lines := bufio.NewScanner(bytes.NewReader(b))
	for lines.Scan() {
		key, value, _ := strings.Cut(lines.Text(), " ")
		if n, err := strconv.ParseUint(value, 10, 64); err == nil {
			table[key] = n
		}
	}
	return table, nil
}

// cgroupDirs are all directories of a path, one per hierarchy.
func cgroupDirs(cgroupsPath string) ([]string, error) {
	found, err := filepath.Glob(filepath.Join(cgroupRoot, "*", cgroupsPath))
	if err != nil {
		return nil, fmt.Errorf("find cgroups of %s: %w", cgroupsPath, err)
	}
	if dir := filepath.Join(cgroupRoot, cgroupsPath); unified() {
		if _, err := os.Stat(dir); err == nil {
			found = []string{dir}
		} else {
			found = nil
		}
	}
	return found, nil
}

// Occupied reports whether a process is in a path or below it, in any hierarchy. A path that is
// not there has none.
func Occupied(cgroupsPath string) (bool, error) {
	pids, err := processes(cgroupsPath)
	return len(pids) > 0, err
}

// processes lists the processes of a path and of what is below it, in any hierarchy.
func processes(cgroupsPath string) (pids []int, err error) {
	dirs, err := cgroupDirs(cgroupsPath)
	if err != nil {
		return nil, err
	}
	seen := map[int]bool{}
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.IsDir() {
				return ignoreMissing(err)
			}
			b, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
			for text := range strings.FieldsSeq(string(b)) {
				if pid, err := strconv.Atoi(text); err == nil && !seen[pid] {
					seen[pid], pids = true, append(pids, pid)
				}
			}
			return ignoreMissing(err)
		})
		if err != nil {
			return nil, fmt.Errorf("list processes of %s: %w", cgroupsPath, err)
		}
	}
	return pids, nil
}

// thaw lets the processes of a path go on, for version 1 frees no frozen process by killing it.
func thaw(cgroupsPath string) error {
	if unified() {
		return nil
	}
	err := os.WriteFile(filepath.Join(cgroupRoot, "freezer", cgroupsPath, "freezer.state"), []byte("THAWED"), 0o644)
	if ignoreMissing(err) != nil {
		return fmt.Errorf("thaw %s: %w", cgroupsPath, err)
	}
	return nil
}

// killAll kills the processes of a path until there are none.
func killAll(ctx context.Context, cgroupsPath string) error {
	return again(ctx, func() (done bool, err error) {
		pids, err := processes(cgroupsPath)
		if err != nil || len(pids) == 0 {
			return true, err
		}
		for _, pid := range pids {
			if err := unix.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return true, fmt.Errorf("kill process %d: %w", pid, err)
			}
		}
		return false, nil
	})
}

// removeCgroups removes the cgroups of a path, which the kernel holds busy for a moment after
// their last process.
func removeCgroups(ctx context.Context, cgroupsPath string) error {
	return again(ctx, func() (done bool, err error) {
		err = RemoveCgroups(cgroupsPath)
		return !errors.Is(err, unix.EBUSY), err
	})
}

// again tries something every few milliseconds until it is done or ctx ends.
func again(ctx context.Context, try func() (done bool, err error)) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		done, err := try()
		if done {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

// RemoveCgroups removes a path, and the empty cgroups below it, from all hierarchies. None is success.
func RemoveCgroups(cgroupsPath string) error {
	dirs, err := cgroupDirs(cgroupsPath)
	if err != nil {
		return err
	}
	var failures []error
	for _, dir := range dirs {
		var nested []string
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				nested = append(nested, path)
			}
			return ignoreMissing(err)
		})
		failures = append(failures, err)
		for _, dir := range slices.Backward(nested) {
			failures = append(failures, ignoreMissing(os.Remove(dir)))
		}
	}
	if err := errors.Join(failures...); err != nil {
		return fmt.Errorf("remove cgroups of %s: %w", cgroupsPath, err)
	}
	return nil
}

// Cgroups lists the names below a path, in any hierarchy.
func Cgroups(cgroupsPath string) (names []string, err error) {
	dirs, err := cgroupDirs(cgroupsPath)
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("list cgroups of %s: %w", cgroupsPath, err)
		}
		for _, e := range entries {
			if e.IsDir() && !seen[e.Name()] {
				seen[e.Name()], names = true, append(names, e.Name())
			}
		}
	}
	return names, nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// OutOfPids reports whether the kernel refused a sandbox a process or thread at its limit.
func OutOfPids(cgroupsPath string) bool {
	file := filepath.Join(cgroupRoot, "pids", cgroupsPath, "pids.events")
	if unified() {
		file = filepath.Join(cgroupRoot, cgroupsPath, "pids.events")
	}
	table, err := readTable(file)
	return err == nil && table["max"] > 0
}

// OutOfMemory reports whether the kernel killed a process of a sandbox for want of memory.
func OutOfMemory(cgroupsPath string) bool {
	file := filepath.Join(cgroupRoot, "memory", cgroupsPath, "memory.oom_control")
	if unified() {
		file = filepath.Join(cgroupRoot, cgroupsPath, "memory.events")
	}
	table, err := readTable(file)
	return err == nil && table["oom_kill"] > 0
}
