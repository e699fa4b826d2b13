package oci

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
)

// AgentDir is where the agent's directory is inside a sandbox; AgentPath is the program.
const (
	AgentDir  = "/.barchan"
	AgentPath = AgentDir + "/agent"
)

// Limits bound a sandbox's use of the host.
type Limits struct {
	// MilliCPU is thousandths of a processor.
	MilliCPU int64
	// CPUShares is the weight under contention, in millis; zero means MilliCPU.
	CPUShares int64
	// Memory is bytes, including the runtime's own. Swap is off.
	Memory int64
	// Pids is the number of processes and threads. For gVisor the agent applies it per user within
	// the sandbox; the host's limit is [hostPids].
	Pids int64
}

// Mount is one directory or file of the host, or memory, in a sandbox.
type Mount struct {
	// Source is a path of the host; empty means memory.
	Source, Target string
	ReadOnly       bool
	// SizeLimit of memory in bytes; zero means half of the sandbox's.
	SizeLimit int64
	// Shared is the name of memory that several containers mount.
	Shared string
}

// Security restricts the privileges of a sandbox's processes.
type Security struct {
	// NoNewPrivileges disables setuid programs such as sudo.
	NoNewPrivileges bool
	// Capabilities are the bounding set, with the prefix CAP_; nil means DefaultCapabilities.
	Capabilities []string
	// ReadOnlyRoot forbids writes to the root filesystem.
	ReadOnlyRoot bool
}

// Sandbox is the input of a specification.
type Sandbox struct {
	Class    Class
	Hostname string
	// Rootfs, NetnsPath and AgentDir are paths of the host.
	Rootfs, NetnsPath, AgentDir string
	CgroupsPath                 string
	Env                         []string
	Mounts                      []Mount
	Limits                      Limits
	Security                    Security
	Annotations                 map[string]string
	// Container joins the specification to others of one sandbox; the zero value is a sandbox of one container.
	Container Container
}

// Container is the place of a container in a sandbox of several.
type Container struct {
	// Name is the container's; Sandbox is the ID of the sandbox whose kernel it joins, empty for the first container,
	// which brings the kernel.
	Name, Sandbox string
	// Shared is the memory that several containers mount, by [Mount.Shared], with its limits. The first container has it, too.
	Shared []Mount
}

// annotations tell runsc which containers are of one sandbox, as containerd's CRI does.
func (c Container) annotations(memory int64) map[string]string {
	if c.Name == "" {
		return nil
	}
	all := map[string]string{"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.container-name": c.Name}
	if c.Sandbox != "" {
		all["io.kubernetes.cri.container-type"], all["io.kubernetes.cri.sandbox-id"] = "container", c.Sandbox
	}
	for i, m := range c.Shared {
		hint := fmt.Sprintf("dev.gvisor.spec.mount.shared-%d.", i)
		all[hint+"source"], all[hint+"type"], all[hint+"share"] = sharedSource(m.Shared), "tmpfs", "pod"
		all[hint+"options"] = strings.Join(m.memoryOptions(memory), ",")
	}
	return all
}

// memoryOptions are those of a mount of memory, of a sandbox with as much memory in bytes.
func (m Mount) memoryOptions(memory int64) []string {
	return []string{"nosuid", "nodev", "mode=1777", fmt.Sprintf("size=%d", cmp.Or(m.SizeLimit, memory/2))}
}

// sharedSource identifies a volume in memory among the mounts of a sandbox.
func sharedSource(name string) string { return "/barchan-shared/" + name }

// ContainerID is the runtime's ID of a container beside the first. It does not begin with the sandbox's ID, because runsc
// takes a prefix for the whole.
func ContainerID(sandbox, name string) string { return name + "." + sandbox }

// SandboxOf is the ID of the sandbox of a container, whose ID may be that of the first one.
func SandboxOf(container string) string { return container[strings.LastIndexByte(container, '.')+1:] }

// DefaultCapabilities are the capabilities of a sandbox's root within it.
func DefaultCapabilities() []string {
	return []string{
		"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
		"CAP_NET_BIND_SERVICE", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
	}
}

// Spec returns the OCI specification of a sandbox whose first process is the agent, as root.
func Spec(s Sandbox) *specs.Spec {
	capabilities := s.Security.Capabilities
	if capabilities == nil {
		capabilities = DefaultCapabilities()
	}
	spec := &specs.Spec{
		Version:  "1.0.2",
		Hostname: s.Hostname,
		Root:     &specs.Root{Path: s.Rootfs, Readonly: s.Security.ReadOnlyRoot},
		Process: &specs.Process{
			Args: []string{AgentPath}, Cwd: "/", Env: s.Env,
			NoNewPrivileges: s.Security.NoNewPrivileges,
			Capabilities: &specs.LinuxCapabilities{
				Bounding: capabilities, Effective: capabilities, Permitted: capabilities,
			},
			Rlimits: []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: openFiles(), Soft: openFiles()}},
		},
		Mounts:      append(systemMounts(s), volumeMounts(s)...),
		Annotations: annotations(s),
		Linux: &specs.Linux{
			CgroupsPath: s.CgroupsPath, // none beside the first container, whose cgroup is the sandbox's
			Resources:   resources(s.Class, s.Limits),
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace},
				{Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace},
				{Type: specs.MountNamespace},
				{Type: specs.NetworkNamespace, Path: s.NetnsPath},
			},
		},
	}
	if s.Class == Runc {
		harden(spec.Linux)
	}
	return spec
}

func annotations(s Sandbox) map[string]string {
	all := maps.Clone(s.Annotations)
	for name, value := range s.Container.annotations(s.Limits.Memory) {
		if all == nil {
			all = map[string]string{}
		}
		all[name] = value
	}
	return all
}

// openFiles is the limit of open files of a process: a mebi, or this process's maximum.
var openFiles = sync.OnceValue(func() uint64 {
	const most = 1 << 20
	var own unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &own); err != nil {
		return most
	}
	return min(most, own.Max)
})

// WriteBundle writes the specification and the files that it mounts into a bundle's directory.
func WriteBundle(dir string, spec *specs.Spec) error {
	b, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("encode specification: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600); err != nil {
		return fmt.Errorf("write specification: %w", err)
	}
	if slices.ContainsFunc(spec.Mounts, func(m specs.Mount) bool { return m.Source == bootIDName }) {
		return writeBootID(dir)
	}
	return nil
}

// systemMounts are the mounts that programs expect on Linux.
func systemMounts(s Sandbox) []specs.Mount {
	mounts := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{
			Destination: "/dev/shm", Type: "tmpfs", Source: "shm",
			Options: []string{"nosuid", "noexec", "nodev", "mode=1777", fmt.Sprintf("size=%d", s.Limits.Memory/2)},
		},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
	}
	if s.Class == GVisor { // gVisor adds the rest of /dev
		return append(mounts, specs.Mount{
			Destination: bootIDPath, Type: "bind", Source: bootIDName, Options: []string{"bind", "ro", "nosuid", "nodev", "noexec"},
		})
	}
	return append(mounts,
		specs.Mount{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		specs.Mount{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}})
}

// volumeMounts are the agent's directory and the template's volumes.
func volumeMounts(s Sandbox) []specs.Mount {
	mounts := []specs.Mount{{
		Destination: AgentDir, Type: "bind", Source: s.AgentDir, Options: []string{"bind", "ro", "nosuid", "nodev"},
	}}
	for _, m := range s.Mounts {
		if m.Source == "" {
			source := "tmpfs"
			if m.Shared != "" {
				source = sharedSource(m.Shared)
			}
			mounts = append(mounts, specs.Mount{
				Destination: m.Target, Type: "tmpfs", Source: source,
				Options: m.memoryOptions(s.Limits.Memory),
			})
			continue
		}
		options := []string{"rbind", "rprivate", "nosuid", "nodev", "rw"}
		if m.ReadOnly {
			options[len(options)-1] = "ro"
		}
		mounts = append(mounts, specs.Mount{Destination: m.Target, Type: "bind", Source: m.Source, Options: options})
	}
	return mounts
}

// hostPids is the host's limit for a gVisor sandbox with a limit of processes and threads per user.
// A single-threaded process takes two threads of systrap, and one of the sentry while it runs;
// gVisor itself needs some dozens. gVisor exits if the host refuses it a thread, so this limit is
// for a sandbox that evades the inner one, as its root can with many users.
func hostPids(within int64) int64 { return 4*within + 256 }

// Weight is the share of contended processors, in the unit of cpu.shares.
func (l Limits) Weight() uint64 { return uint64(max(2, cmp.Or(l.CPUShares, l.MilliCPU)*1024/1000)) }

// startMilliCPU is what a sandbox may use at least while its runtime starts it or saves its memory. gVisor's start needs about 0.1 s of a
// processor, which a limit of 100m would make a second.
const startMilliCPU = 1000

// starting is the CPU limit of a start, in thousandths of a processor.
func (l Limits) starting() int64 { return max(l.MilliCPU, startMilliCPU) }

// RaiseCPU lets a sandbox use a processor although its limit is lower, for work of the runtime while its programs do not run. A new one may,
// until LimitCPU.
func (l Limits) RaiseCPU(cgroup string) error { return l.setCPU(cgroup, l.starting()) }

// LimitCPU applies the CPU limit to a sandbox that was started, or that [Limits.RaiseCPU] has raised. A missing cgroup is no error.
func (l Limits) LimitCPU(cgroup string) error { return l.setCPU(cgroup, l.MilliCPU) }

func (l Limits) setCPU(cgroup string, milliCPU int64) error {
	if l.starting() == l.MilliCPU {
		return nil // it never has another limit
	}
	return cgroups.LimitCPU(cgroup, milliCPU)
}

func resources(c Class, l Limits) *specs.LinuxResources {
	weight, quota, period, pids := l.Weight(), cgroups.CPUQuota(l.starting()), uint64(cgroups.CPUPeriod), l.Pids
	if c == GVisor {
		pids = hostPids(pids)
	}
	r := &specs.LinuxResources{
		CPU:    &specs.LinuxCPU{Quota: &quota, Period: &period, Shares: &weight},
		Memory: &specs.LinuxMemory{Limit: &l.Memory},
		Pids:   &specs.LinuxPids{Limit: &pids},
		// The runtimes create devices in the sandbox's own /dev; no others are allowed.
		Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}},
	}
	if cgroups.CanLimitSwap() {
		r.Memory.Swap = &l.Memory // memory and swap together
	}
	return r
}
