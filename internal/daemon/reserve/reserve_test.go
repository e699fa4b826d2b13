package reserve

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// files makes what the kernel has in a directory of cgroups.
func files(t *testing.T, paths ...string) {
	t.Helper()
	for _, path := range paths {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestJoinV2 has the files of version 2, which the machines of the tests need not have.
func TestJoinV2(t *testing.T) {
	t.Parallel()
	at := t.TempDir()
	in := func(name string) string { return filepath.Join(at, name) }
	files(t, in("cgroup.subtree_control"), in("b-server/cgroup.subtree_control"), in("b-server/cpu.weight"), in("b-server/memory.min"),
		in("b-server/node/cpu.weight"), in("b-server/node/memory.min"), in("b-server/node/cgroup.procs"))
	if err := joinV2(at, "/b", "node", 42); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		"cgroup.subtree_control": "+cpu +memory", "b-server/cgroup.subtree_control": "+cpu +memory", "b-server/cpu.weight": "800", "b-server/node/cpu.weight": "400",
		"b-server/memory.min": fmt.Sprint(2 * memory), "b-server/node/memory.min": fmt.Sprint(memory), "b-server/node/cgroup.procs": "42",
	} {
		if b, err := os.ReadFile(in(file)); err != nil || string(b) != want {
			t.Errorf("%s has %q, %v; want %s", file, b, err, want)
		}
	}
	if err := joinV2(at, "/b", "other", 42); err == nil {
		t.Error("files that are not there are written")
	}
}

// TestJoin moves a process on this machine.
func TestJoin(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: cgroups are made by root")
	}
	name := "/reserve-test-" + strconv.Itoa(os.Getpid())
	cmd := exec.CommandContext(t.Context(), "sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	removed := func() {
		t.Helper()
		for _, dir := range []string{root + "/memory" + name, root + name} { // the sandboxes', which the node removes
			_ = os.Remove(dir)
		}
		if err := Remove(name); err != nil {
			t.Error(err)
		}
	}
	defer removed()
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	if err := Join(name, "node", cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", cmd.Process.Pid))
	if err != nil || !strings.Contains(string(b), Parent(name)+"/node\n") {
		t.Errorf("the process is in\n%s%v", b, err)
	}
	if err := Remove(name); err != nil {
		t.Errorf("with a process in it: %v", err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	removed()
	if left, _ := filepath.Glob(root + "/*" + Parent(name)); len(left) > 0 {
		t.Errorf("%v are left", left)
	}
}
