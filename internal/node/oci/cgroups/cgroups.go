// Package cgroups reads, empties and removes sandboxes' cgroups, of version 1 and 2, and changes what they may use of the
// processors. The runtimes create them, with their limits. Paths are relative to the mount point.
//
// It has no locks; moving is a semaphore that callers never wait for.
package cgroups

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
)

const root = "/sys/fs/cgroup"

// Usage is a sandbox's use of the host, including its runtime.
type Usage struct {
	// CPU is nanoseconds of processor time since the start.
	CPU uint64
	// Memory is bytes in use without reclaimable page cache.
	Memory, MemoryCache uint64
	// Pids counts processes and threads.
	Pids uint64
}

// unified reports whether the host has cgroup version 2 only.
var unified = sync.OnceValue(func() bool {
	var st unix.Statfs_t
	return unix.Statfs(root, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
})

// CanLimitSwap reports whether the kernel accounts for swap.
var CanLimitSwap = sync.OnceValue(func() bool {
	if unified() {
		return true
	}
	_, err := os.Stat(filepath.Join(root, "memory/memory.memsw.limit_in_bytes"))
	return err == nil
})

// controllerDir is the directory of a path for a controller, which has a hierarchy of its own in version 1.
func controllerDir(controller, cgroupsPath string) string {
	if unified() {
		return filepath.Join(root, cgroupsPath)
	}
	return filepath.Join(root, controller, cgroupsPath)
}

// ReadUsage reads a sandbox's usage from its cgroups.
func ReadUsage(cgroupsPath string) (u Usage, err error) {
	if unified() {
		return readUnified(cgroupsPath)
	}
	path := func(controller, file string) string { return filepath.Join(root, controller, cgroupsPath, file) }
	if u.CPU, err = readCPU(cgroupsPath); err != nil {
		return Usage{}, err
	}
	if u.Memory, err = readNumber(path("memory", "memory.usage_in_bytes")); err != nil {
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

func readUnified(cgroupsPath string) (u Usage, err error) {
	dir := filepath.Join(root, cgroupsPath)
	if u.CPU, err = readCPU(cgroupsPath); err != nil {
		return Usage{}, err
	}
	for file, into := range map[string]*uint64{"memory.current": &u.Memory, "pids.current": &u.Pids} {
		if *into, err = readNumber(filepath.Join(dir, file)); err != nil {
			return Usage{}, err
		}
	}
	stat, err := readTable(filepath.Join(dir, "memory.stat"))
	if err != nil {
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

// hierarchies are the directories where they are mounted.
var hierarchies = sync.OnceValues(func() (dirs []string, err error) {
	if unified() {
		return []string{root}, nil
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, fmt.Errorf("find cgroups: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() { // not the links of controllers that share a hierarchy
			dirs = append(dirs, filepath.Join(root, e.Name()))
		}
	}
	return dirs, nil
})

// walk calls f with the directories of a path and its children in all hierarchies, children first. A missing path has none. f may
// remove its directory.
func walk(cgroupsPath string, f func(dir string) error) error {
	roots, err := hierarchies()
	if err != nil {
		return err
	}
	var failures []error
	for _, root := range roots {
		failures = append(failures, walkDir(filepath.Join(root, cgroupsPath), f))
	}
	return errors.Join(failures...)
}

func walkDir(dir string, f func(dir string) error) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return ignoreMissing(err)
	}
	var failures []error
	if st.Nlink > 2 { // it has children
		entries, err := os.ReadDir(dir)
		failures = append(failures, ignoreMissing(err))
		for _, e := range entries {
			if e.IsDir() {
				failures = append(failures, walkDir(filepath.Join(dir, e.Name()), f))
			}
		}
	}
	return errors.Join(append(failures, ignoreMissing(f(dir)))...)
}

// HasProcesses reports whether a path or its children have a process, in any hierarchy. A missing
// path has none.
func HasProcesses(cgroupsPath string) (bool, error) {
	pids, err := Processes(cgroupsPath)
	return len(pids) > 0, err
}

// Processes lists the processes of a path and its children, in any hierarchy.
func Processes(cgroupsPath string) (pids []int, err error) {
	seen := map[int]bool{}
	err = walk(cgroupsPath, func(dir string) error {
		b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		for text := range strings.FieldsSeq(string(b)) {
			if pid, err := strconv.Atoi(text); err == nil && !seen[pid] {
				seen[pid], pids = true, append(pids, pid)
			}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list processes of %s: %w", cgroupsPath, err)
	}
	return pids, nil
}

// Thaw unfreezes the processes of a path: version 1 does not end a frozen process on SIGKILL.
func Thaw(cgroupsPath string) error {
	if unified() {
		return nil
	}
	err := os.WriteFile(filepath.Join(root, "freezer", cgroupsPath, "freezer.state"), []byte("THAWED"), 0o644)
	if ignoreMissing(err) != nil {
		return fmt.Errorf("thaw %s: %w", cgroupsPath, err)
	}
	return nil
}

// KillAll kills the processes of a path until it has none.
func KillAll(ctx context.Context, cgroupsPath string) error {
	return retry(ctx, func() (done bool, err error) {
		pids, err := Processes(cgroupsPath)
		if err != nil || len(pids) == 0 {
			return true, err
		}
		for _, pid := range pids {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return true, fmt.Errorf("kill process %d: %w", pid, err)
			}
		}
		awaitEnds(ctx, pids)
		return false, nil
	})
}

// awaitEnds waits until killed processes have ended, which takes a large one some hundred milliseconds. It gives up after a second:
// an ID may be that of another process meanwhile. It holds one descriptor at a time, since a sandbox may have thousands of processes.
func awaitEnds(ctx context.Context, pids []int) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // it has ended, or no descriptor is left: then it is listed again
		}
		const interval = 100 // milliseconds between checks of ctx
		for ended := 0; ended == 0 && ctx.Err() == nil; {
			ended, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, interval) //nolint:gosec // a descriptor
			if errors.Is(err, unix.EINTR) {
				ended = 0
			}
		}
		_ = unix.Close(fd)
	}
}

// RemoveIdle removes a path as Remove does, and retries while the kernel holds it busy after its last
// process.
func RemoveIdle(ctx context.Context, cgroupsPath string) error {
	return retry(ctx, func() (done bool, err error) {
		err = Remove(cgroupsPath)
		return !errors.Is(err, unix.EBUSY), err
	})
}

// retry repeats try, at first after a millisecond, until done or the end of ctx.
func retry(ctx context.Context, try func() (done bool, err error)) error {
	for pause := time.Millisecond; ; pause = min(2*pause, 32*time.Millisecond) {
		done, err := try()
		if done {
			return err
		}
		if !lifecycle.Sleep(ctx, pause) {
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

// Remove removes a path and its empty children from all hierarchies. A missing path is success.
func Remove(cgroupsPath string) error {
	if err := walk(cgroupsPath, os.Remove); err != nil {
		return fmt.Errorf("remove cgroups of %s: %w", cgroupsPath, err)
	}
	return nil
}

// List names the children of a path, in any hierarchy.
func List(cgroupsPath string) (names []string, err error) {
	roots, err := hierarchies()
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, root := range roots {
		entries, err := os.ReadDir(filepath.Join(root, cgroupsPath))
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

// IsMissing reports whether an error is that of a cgroup that does not exist, or is being removed.
func IsMissing(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) }

func ignoreMissing(err error) error {
	if IsMissing(err) {
		return nil
	}
	return err
}

// WriteFile writes a file of a cgroup by its path. It creates none.
func WriteFile(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// OutOfPids reports whether a sandbox reached its limit of processes and threads.
func OutOfPids(cgroupsPath string) bool {
	table, err := readTable(filepath.Join(controllerDir("pids", cgroupsPath), "pids.events"))
	return err == nil && table["max"] > 0
}

// OutOfMemory reports whether the OOM killer ended a process of a sandbox.
func OutOfMemory(cgroupsPath string) bool {
	file := "memory.oom_control"
	if unified() {
		file = "memory.events"
	}
	table, err := readTable(filepath.Join(controllerDir("memory", cgroupsPath), file))
	return err == nil && table["oom_kill"] > 0
}
