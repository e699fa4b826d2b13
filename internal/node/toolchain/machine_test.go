package toolchain

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestThisMachine runs all checks for real. Where the suite runs real sandboxes, the required ones must pass.
func TestThisMachine(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root")
	}
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	taken := l.Addr().String()
	dir := t.TempDir()

	checks := CheckMachine(t.Context(), Options{
		DataDir: filepath.Join(dir, "not", "there"), MinDisk: 1, MinMemory: 1,
		Addresses: []string{"127.0.0.1:0", taken},
	})
	wantComplete(t, checks)
	failed := slices.DeleteFunc(slices.Clone(checks), func(c Check) bool { return c.OK || c.Optional })
	if len(failed) != 1 || failed[0].Name != "address "+taken || !strings.Contains(failed[0].Fix, "ss -ltnp") {
		t.Errorf("failed: %+v, want only the used address", failed)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("remaining: %v, %v", left, err)
	}
	links, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range links {
		if i.Name == "check0" {
			t.Error("a link remains in the host's namespace")
		}
	}
}

func wantComplete(t *testing.T, checks []Check) {
	t.Helper()
	seen := map[string]bool{}
	for _, c := range checks {
		t.Logf("%+v", c)
		seen[c.Name] = true
		if c.Detail == "" || c.OK == (c.Fix != "") {
			t.Errorf("%+v: a detail always, a fix if and only if it is not OK", c)
		}
	}
	for _, name := range []string{
		"root", "kernel", "cgroups", "overlayfs", "bridge", "veth", "nftables", "user namespaces", "disk", "memory",
	} {
		if !seen[name] {
			t.Errorf("no check of %s", name)
		}
	}
}

func TestChecksReportFailures(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root")
	}
	checks := CheckMachine(t.Context(), Options{DataDir: "/proc"})
	for _, c := range checks {
		if c.Name == "overlayfs" && c.OK {
			t.Error("an overlay on /proc works?")
		}
	}
	if err := inNamespaces(unix.CLONE_NEWNET, func() error { return addLink("nosuchkind") }); err == nil {
		t.Error("created a link of an unknown kind")
	}
}

func TestCgroups(t *testing.T) {
	tests := map[string]struct {
		mounts, controllers, want string
		ok                        bool
	}{
		"v2":            {"cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "cpuset cpu io memory pids\n", "version 2", true},
		"v2 incomplete": {"cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "cpu pids\n", "without memory", false},
		"v1": {
			"c /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\nc /sys/fs/cgroup/memory cgroup rw,memory 0 0\n" +
				"c /sys/fs/cgroup/pids cgroup rw,pids 0 0\nc /sys/fs/cgroup/freezer cgroup rw,freezer 0 0\n" +
				"c /sys/fs/cgroup/unified cgroup2 rw 0 0\n",
			"", "version 1", true,
		},
		"none": {"proc /proc proc rw 0 0\n", "", "no cgroups", false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			put(t, root, "proc/self/mounts", tt.mounts)
			put(t, root, "sys/fs/cgroup/cgroup.controllers", tt.controllers)
			if c := checkCgroups(root); c.OK != tt.ok || !strings.Contains(c.Detail, tt.want) {
				t.Errorf("%+v, want %v with %q", c, tt.ok, tt.want)
			}
		})
	}
}

func TestLimitsAndMemory(t *testing.T) {
	root := t.TempDir()
	put(t, root, "proc/sys/fs/inotify/max_user_instances", "128\n")
	put(t, root, "proc/meminfo", "MemTotal: 4000000 kB\nMemAvailable:    2097152 kB\n")
	c := checkLimit(root, "inotify instances", "fs.inotify.max_user_instances", 512)
	if c.OK || !c.Optional || !strings.HasPrefix(c.Fix, "sysctl -w fs.inotify.max_user_instances=512") {
		t.Errorf("%+v", c)
	}
	if c := checkLimit(root, "inotify instances", "fs.inotify.max_user_instances", 128); !c.OK {
		t.Errorf("%+v", c)
	}
	if c := checkMemory(root, 2*gib); !c.OK || c.Detail != "2.0 GiB available" {
		t.Errorf("%+v", c)
	}
	if c := checkMemory(root, 2*gib+1); c.OK || c.Fix == "" {
		t.Errorf("%+v", c)
	}
	if c := checkDisk(root, 1<<62); c.OK || !strings.Contains(c.Detail, root) {
		t.Errorf("%+v", c)
	}
	if c := checkAddress(t.Context(), "192.0.2.1:1"); c.OK || !strings.Contains(c.Detail, "no such address") {
		t.Errorf("%+v", c)
	}
}

func put(t *testing.T, root, name, data string) {
	t.Helper()
	path := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
		t.Fatal(err)
	}
}
