package oci

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
)

func sandboxOf(class Class) Sandbox {
	return Sandbox{
		Class: class, Hostname: "desk", Rootfs: "/r", NetnsPath: "/n", AgentDir: "/a", CgroupsPath: "/p/c", Env: []string{"PATH=/bin"},
		Mounts: []Mount{{Source: "/host/v", Target: "/v", ReadOnly: true}, {Target: "/m", SizeLimit: 5 << 20}, {Target: "/half"}},
		Limits: Limits{MilliCPU: 1500, Memory: 512 << 20, Pids: 100},
	}
}

func TestSpecIsolates(t *testing.T) {
	for _, class := range []Class{GVisor, Runc} {
		s := Spec(sandboxOf(class))
		for _, capability := range s.Process.Capabilities.Bounding {
			if slices.Contains([]string{"CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_SYS_PTRACE", "CAP_NET_RAW", "CAP_SYS_MODULE", "CAP_BPF"}, capability) {
				t.Errorf("%s: capability %s by default", class, capability)
			}
		}
		if len(s.Process.Capabilities.Ambient)+len(s.Process.Capabilities.Inheritable) > 0 {
			t.Errorf("%s: capabilities outlive a change of user", class)
		}
		for _, kind := range []specs.LinuxNamespaceType{specs.PIDNamespace, specs.IPCNamespace, specs.UTSNamespace, specs.MountNamespace, specs.NetworkNamespace} {
			if !slices.ContainsFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == kind }) {
				t.Errorf("%s: shares the host's namespace %s", class, kind)
			}
		}
		bounded(t, s.Linux.Resources, map[Class]int64{GVisor: 4*100 + 256, Runc: 100}[class])
		agent := s.Mounts[slices.IndexFunc(s.Mounts, func(m specs.Mount) bool { return m.Destination == AgentDir })]
		if !slices.Contains(agent.Options, "ro") {
			t.Errorf("%s: the agent can be written", class)
		}
	}
	if s := Spec(sandboxOf(Runc)); s.Linux.Seccomp == nil || len(s.Linux.MaskedPaths) == 0 || len(s.Linux.ReadonlyPaths) == 0 {
		t.Error("runc is not hardened")
	}
}

// A sandbox with a low limit starts with a processor. A limit that is higher holds from the start.
func TestCPUOfStarts(t *testing.T) {
	for milli, quota := range map[int64]int64{1: 100_000, 250: 100_000, 1000: 100_000, 1500: 150_000} {
		s := sandboxOf(GVisor)
		s.Limits.MilliCPU = milli
		if got := *Spec(s).Linux.Resources.CPU.Quota; got != quota {
			t.Errorf("%d thousandths of a processor: a start has %d of 100,000 us, want %d", milli, got, quota)
		}
	}
}

func bounded(t *testing.T, r *specs.LinuxResources, pids int64) {
	t.Helper()
	if *r.Memory.Limit != 512<<20 || *r.Pids.Limit != pids || *r.CPU.Quota != 150_000 || *r.CPU.Period != 100_000 {
		t.Errorf("resources %+v", r)
	}
	if cgroups.CanLimitSwap() && *r.Memory.Swap != 512<<20 {
		t.Errorf("swap is not off")
	}
}

func TestSpecMountsVolumes(t *testing.T) {
	options := map[string][]string{}
	for _, m := range Spec(sandboxOf(GVisor)).Mounts {
		options[m.Destination] = append(m.Options, m.Type)
	}
	for target, want := range map[string]string{"/v": "ro", "/m": "size=5242880", "/half": "size=268435456"} {
		if !slices.Contains(options[target], want) {
			t.Errorf("%s has %v, want %s", target, options[target], want)
		}
	}
}

func TestWriteBundle(t *testing.T) {
	dir := t.TempDir()
	if err := WriteBundle(dir, Spec(sandboxOf(Runc))); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	var back specs.Spec
	if err != nil || json.Unmarshal(b, &back) != nil || back.Hostname != "desk" {
		t.Errorf("bundle has %q, %v", b, err)
	}
}

// Programs may write a line in pieces.
func TestConsoleHas(t *testing.T) {
	c, err := NewConsole()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	for i, piece := range []string{"warning\nagent s", "erves\n"} {
		if c.Has("agent serves") {
			t.Errorf("%q has the text", c.Text())
		}
		if _, err := c.out.WriteString(piece); err != nil {
			t.Fatal(i, err)
		}
	}
	if !c.Has("agent serves") {
		t.Errorf("%q has no text", c.Text())
	}
}

// Output beyond the console's size is refused.
func TestConsoleIsBounded(t *testing.T) {
	c, err := NewConsole()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.out.WriteString("hello\n"); err != nil || c.Text() != "hello" {
		t.Errorf("text %q, %v", c.Text(), err)
	}
	var failed error
	for range 2 * consoleSize / 1024 {
		if _, err := c.out.WriteString(strings.Repeat("x", 1024)); err != nil {
			failed = err
			break
		}
	}
	if !errors.Is(failed, unix.EPERM) {
		t.Errorf("unlimited writes: %v, want an error", failed)
	}
	if len(c.Text()) > consoleSize {
		t.Errorf("console has %d bytes", len(c.Text()))
	}
}

func TestNewRefuses(t *testing.T) {
	for name, cfg := range map[string]Config{
		"unknown class":  {Class: "kata", Binary: "true", Root: "/r"},
		"relative root":  {Class: Runc, Binary: "true", Root: "r"},
		"missing binary": {Class: Runc, Binary: "/none", Root: "/r"},
	} {
		if _, err := New(cfg); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestListAndStateWithoutContainers(t *testing.T) {
	for _, class := range []Class{GVisor, Runc} {
		r, err := New(Config{Class: class, Binary: "true", Root: filepath.Join(t.TempDir(), "root")})
		if err != nil {
			t.Fatal(err)
		}
		if ids, err := r.List(); err != nil || len(ids) != 0 {
			t.Errorf("%s: %v, %v", class, ids, err)
		}
		if s, err := r.State(t.Context(), "none"); err != nil || s != Absent {
			t.Errorf("%s: %s, %v", class, s, err)
		}
		if err := r.Remove(t.Context(), "none", "/barchan-test-none/none"); err != nil {
			t.Errorf("%s: %v", class, err)
		}
		if err := r.Destroy(); err != nil {
			t.Errorf("%s: %v", class, err)
		}
	}
}

// The list of denied system calls is sorted by hand where possible, without duplicates.
func TestDeniedSyscallsAreUnique(t *testing.T) {
	sorted := slices.Clone(deniedSyscalls)
	slices.Sort(sorted)
	if len(slices.Compact(sorted)) != len(deniedSyscalls) {
		t.Error("a system call is listed twice")
	}
}
