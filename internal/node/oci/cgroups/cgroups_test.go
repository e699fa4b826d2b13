package cgroups

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"
)

// newCgroup makes a cgroup with a child in the hierarchies of some controllers, as a sandbox has whose creation was interrupted.
func newCgroup(t *testing.T) (path string, dirs []string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root")
	}
	roots, err := hierarchies()
	must(t, err)
	path = fmt.Sprintf("/barchan-test-%d", os.Getpid())
	t.Cleanup(func() {
		if err := RemoveIdle(context.WithoutCancel(t.Context()), path); err != nil {
			t.Error(err)
		}
	})
	for _, root := range roots {
		if slices.Contains([]string{"pids", "freezer", "unified", "cgroup"}, filepath.Base(root)) {
			dir := filepath.Join(root, path, "child")
			must(t, os.MkdirAll(dir, 0o755))
			dirs = append(dirs, dir)
		}
	}
	return path, dirs
}

func startIn(t *testing.T, dir string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sleep", "3600")
	must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	must(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0o600))
	return cmd
}

func TestKillAll(t *testing.T) {
	path, dirs := newCgroup(t)
	var all []*exec.Cmd
	for _, dir := range dirs {
		all = append(all, startIn(t, dir), startIn(t, filepath.Dir(dir)))
	}
	for _, cmd := range all {
		go func() { _ = cmd.Wait() }()
	}
	pids, err := Processes(path)
	must(t, err)
	if len(pids) != len(all) {
		t.Fatalf("%d processes of %d: %v", len(pids), len(all), pids)
	}
	must(t, KillAll(t.Context(), path))
	if has, err := HasProcesses(path); has || err != nil {
		t.Fatalf("has processes: %v, %v", has, err)
	}
	must(t, RemoveIdle(t.Context(), path))
	for _, dir := range dirs {
		if _, err := os.Stat(filepath.Dir(dir)); !os.IsNotExist(err) {
			t.Errorf("%s: %v", filepath.Dir(dir), err)
		}
	}
	must(t, KillAll(t.Context(), path)) // a missing one
}

// A process that cannot end yet does not hold up its caller beyond the end of ctx.
func TestKillAllEnds(t *testing.T) {
	path, dirs := newCgroup(t)
	freezer := slices.IndexFunc(dirs, func(dir string) bool { return filepath.Base(filepath.Dir(filepath.Dir(dir))) == "freezer" })
	if freezer < 0 {
		t.Skip("SKIPPED: no freezer hierarchy of version 1 here")
	}
	cmd := startIn(t, filepath.Dir(dirs[freezer]))
	state := filepath.Join(filepath.Dir(dirs[freezer]), "freezer.state")
	must(t, os.WriteFile(state, []byte("FROZEN"), 0o600))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := KillAll(ctx, path); err == nil {
		t.Error("a frozen process has ended")
	}
	must(t, Thaw(path))
	_ = cmd.Wait()
}

// SetLowestCPU leaves the weight as it was.
func TestLowestCPU(t *testing.T) {
	if unified() {
		t.Skip("SKIPPED: sandboxes' tests have it")
	}
	path := fmt.Sprintf("/barchan-test-cpu-%d", os.Getpid())
	dir := filepath.Join(root, "cpu", path)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	t.Cleanup(func() { must(t, Remove(path)) })
	if _, err := os.Stat(filepath.Join(dir, idleFile)); err != nil {
		t.Skip("SKIPPED: the kernel has no lowest priority")
	}
	must(t, os.WriteFile(filepath.Join(dir, "cpu.shares"), []byte("2048"), 0o600))
	for _, lowest := range []bool{true, true, false, false} {
		must(t, SetLowestCPU(path, lowest, 2048))
		if got, err := LowestCPU(path); got != lowest || err != nil {
			t.Fatalf("lowest priority %v, %v; want %v", got, err, lowest)
		}
	}
	if n, err := readNumber(filepath.Join(dir, "cpu.shares")); n != 2048 || err != nil {
		t.Errorf("cpu.shares %d, %v", n, err)
	}
}

func TestLimitCPU(t *testing.T) {
	path := fmt.Sprintf("/barchan-test-quota-%d", os.Getpid())
	must(t, LimitCPU(path, 100)) // it has ended meanwhile
	if unified() {
		t.Skip("SKIPPED: sandboxes' tests have it")
	}
	dir := filepath.Join(root, "cpu", path)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skipf("SKIPPED: %v", err)
	}
	t.Cleanup(func() { must(t, Remove(path)) })
	for milliCPU, quota := range map[int64]uint64{1: 1000, 250: 25_000, 1000: 100_000, 2500: 250_000} {
		must(t, LimitCPU(path, milliCPU))
		if got, err := readNumber(filepath.Join(dir, "cpu.cfs_quota_us")); got != quota || err != nil {
			t.Errorf("%d thousandths of a processor are %d us of 100 ms, %v; want %d", milliCPU, got, err, quota)
		}
	}
}

func TestWeightOfShares(t *testing.T) {
	for shares, want := range map[uint64]uint64{0: 1, 2: 1, 1024: 39, 262144: 10000, 1 << 30: 10000} {
		if got := weightOfShares(shares); got != want {
			t.Errorf("cpu.shares %d are cpu.weight %d, want %d", shares, got, want)
		}
	}
}
