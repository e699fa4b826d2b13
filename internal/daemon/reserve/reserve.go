// Package reserve gives each process of a server a cgroup with a share of processors and memory, beside that of the sandboxes: under
// load the server comes first, and what it has in memory is reclaimed last.
//
// It limits nothing. Version 1 of cgroups can reserve no memory: there the sandboxes' own cgroup is reclaimed first instead, once it has
// more than the rest of the machine leaves it.
package reserve

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
)

const (
	root = "/sys/fs/cgroup"
	// suffix follows the name of the sandboxes' cgroup.
	suffix = "-server"

	// A process of the server has four times the processor time of all sandboxes together, whose share is the default, if it needs it.
	sharesV1 = 4 * 1024
	weightV2 = 4 * 100
	// memory is what each process keeps, in bytes: twice its need while the server is idle.
	memory = 192 << 20
	// emptied is how long a cgroup may be busy whose last process has ended.
	emptied = 2 * time.Second
)

// Parent is the cgroup of the server's processes, by that of the sandboxes.
func Parent(sandboxes string) string { return sandboxes + suffix }

// Join moves a process into a cgroup of a name, which is made, and reserves. What it starts later is there too.
func Join(sandboxes, name string, pid int) error {
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err != nil {
		return fmt.Errorf("reserve: %w", err)
	}
	join := joinV1
	if st.Type == unix.CGROUP2_SUPER_MAGIC {
		join = joinV2
	}
	if err := join(root, sandboxes, name, pid); err != nil {
		return fmt.Errorf("reserve for %s: %w", name, err)
	}
	return nil
}

func joinV1(root, sandboxes, name string, pid int) error {
	total, err := totalMemory()
	if err != nil {
		return err
	}
	cpu := filepath.Join(root, "cpu", Parent(sandboxes))
	mem := filepath.Join(root, "memory", Parent(sandboxes))
	rest := filepath.Join(root, "memory", sandboxes)
	if err := makeDirs(filepath.Join(cpu, name), filepath.Join(mem, name), rest); err != nil {
		return err
	}
	// The parent's share counts beside the sandboxes', each child's within it.
	return errors.Join(
		write(filepath.Join(cpu, "cpu.shares"), 2*sharesV1), write(filepath.Join(cpu, name, "cpu.shares"), sharesV1),
		write(filepath.Join(rest, "memory.soft_limit_in_bytes"), max(total-4*memory, total/2)),
		write(filepath.Join(cpu, name, "cgroup.procs"), int64(pid)), write(filepath.Join(mem, name, "cgroup.procs"), int64(pid)),
	)
}

func joinV2(root, sandboxes, name string, pid int) error {
	parent := filepath.Join(root, Parent(sandboxes))
	if err := makeDirs(filepath.Join(parent, name)); err != nil {
		return err
	}
	for _, dir := range []string{root, parent} {
		if err := cgroups.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), "+cpu +memory"); err != nil {
			return err
		}
	}
	return errors.Join(
		write(filepath.Join(parent, "cpu.weight"), 2*weightV2), write(filepath.Join(parent, name, "cpu.weight"), weightV2),
		write(filepath.Join(parent, "memory.min"), 2*memory), write(filepath.Join(parent, name, "memory.min"), memory),
		write(filepath.Join(parent, name, "cgroup.procs"), int64(pid)),
	)
}

func makeDirs(dirs ...string) error {
	var failures []error
	for _, dir := range dirs {
		failures = append(failures, os.MkdirAll(dir, 0o755)) //nolint:gosec // as all cgroups
	}
	return errors.Join(failures...)
}

func write(file string, n int64) error { return cgroups.WriteFile(file, strconv.FormatInt(n, 10)) }

// Remove removes the cgroups of the server. One with a process stays, without an error: a containerd that outlives the server may be in it.
func Remove(sandboxes string) error {
	var failures []error
	for _, pattern := range []string{"", "cpu", "memory"} {
		parent := filepath.Join(root, pattern, Parent(sandboxes))
		children, err := filepath.Glob(filepath.Join(parent, "*", "cgroup.procs"))
		failures = append(failures, err)
		for _, child := range children {
			failures = append(failures, removeIdle(filepath.Dir(child)))
		}
		failures = append(failures, removeIdle(parent))
	}
	return errors.Join(failures...)
}

// removeIdle waits a moment for the kernel, which holds a cgroup busy after its last process.
func removeIdle(dir string) error {
	err := os.Remove(dir)
	for began := time.Now(); errors.Is(err, syscall.EBUSY) && time.Since(began) < emptied; err = os.Remove(dir) {
		time.Sleep(10 * time.Millisecond)
	}
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.ENOTDIR) {
		return nil
	}
	return err
}

func totalMemory() (int64, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if text, ok := strings.CutPrefix(line, "MemTotal:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(text), "kB")), 10, 64)
			return kib << 10, err
		}
	}
	return 0, errors.New("/proc/meminfo has no MemTotal")
}
