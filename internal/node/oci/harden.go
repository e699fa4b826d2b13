package oci

import (
	"slices"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// harden restricts a process's access to the host's kernel where it shares it.
func harden(l *specs.Linux) {
	l.MaskedPaths = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug",
		"/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware", "/sys/fs/cgroup",
	}
	l.ReadonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
	l.Seccomp = seccomp()
}

// deniedSyscalls are denied to sandboxes without a kernel of their own: they load code into the
// kernel, change the host's clock, mounts, namespaces, swap or keys, inspect other processes, or
// have often allowed container escapes.
var deniedSyscalls = []string{
	"acct", "add_key", "bpf", "clock_adjtime", "clock_adjtime64", "clock_settime", "clock_settime64", "create_module", "delete_module",
	"fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "get_kernel_syms", "init_module", "io_uring_enter",
	"io_uring_register", "io_uring_setup", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl", "lookup_dcookie",
	"lsm_set_self_attr", "mbind", "migrate_pages", "mount", "mount_setattr", "move_mount", "move_pages", "nfsservctl",
	"open_by_handle_at", "open_tree", "open_tree_attr", "perf_event_open", "pidfd_getfd", "pivot_root", "process_madvise",
	"process_vm_readv", "process_vm_writev", "query_module", "quotactl", "quotactl_fd", "reboot", "request_key", "set_mempolicy",
	"set_mempolicy_home_node", "setns", "settimeofday", "stime", "swapoff", "swapon", "_sysctl", "sysfs", "syslog", "umount",
	"umount2", "unshare", "uselib", "userfaultfd", "ustat", "vhangup", "vm86", "vm86old",
}

// newNamespace are the flags of clone that create namespaces.
var newNamespace = []uint64{
	unix.CLONE_NEWNS, unix.CLONE_NEWUTS, unix.CLONE_NEWIPC, unix.CLONE_NEWUSER, unix.CLONE_NEWPID, unix.CLONE_NEWNET, unix.CLONE_NEWCGROUP,
}

// deniedSockets are families that no network namespace holds: AF_VSOCK leads to the hypervisor of this machine, AF_ALG to
// the cryptography of its kernel.
var deniedSockets = []uint64{unix.AF_VSOCK, unix.AF_ALG}

// seccomp denies the system calls, in all ABIs, and allows the rest. The class runc trades
// isolation for speed; untrusted code belongs into gVisor.
func seccomp() *specs.LinuxSeccomp {
	refused, unknown := uint(unix.EPERM), uint(unix.ENOSYS)
	filter := &specs.LinuxSeccomp{
		DefaultAction: specs.ActAllow,
		Architectures: []specs.Arch{specs.ArchX86_64, specs.ArchX86, specs.ArchX32, specs.ArchAARCH64, specs.ArchARM},
		Syscalls: []specs.LinuxSyscall{
			{Names: slices.Clone(deniedSyscalls), Action: specs.ActErrno, ErrnoRet: &refused},
			// A filter cannot read its flags; programs fall back to clone.
			{Names: []string{"clone3"}, Action: specs.ActErrno, ErrnoRet: &unknown},
		},
	}
	// The conditions of a rule are joined by "and", so each flag has its own rule. The signal in
	// the low byte of the argument has no bit of a namespace flag.
	for _, flag := range newNamespace {
		filter.Syscalls = append(filter.Syscalls, specs.LinuxSyscall{
			Names: []string{"clone"}, Action: specs.ActErrno, ErrnoRet: &refused,
			Args: []specs.LinuxSeccompArg{{Index: 0, Value: flag, ValueTwo: flag, Op: specs.OpMaskedEqual}},
		})
	}
	for _, family := range deniedSockets {
		filter.Syscalls = append(filter.Syscalls, specs.LinuxSyscall{
			Names: []string{"socket"}, Action: specs.ActErrno, ErrnoRet: &refused,
			Args: []specs.LinuxSeccompArg{{Index: 0, Value: family, Op: specs.OpEqualTo}},
		})
	}
	return filter
}
