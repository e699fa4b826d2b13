package toolchain

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Check is one finding about the host.
type Check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
	// Fix is the remedy; it is empty if OK.
	Fix string `json:"fix,omitempty"`
	// Optional is set if a server runs without it, but worse.
	Optional bool `json:"optional,omitempty"`
}

// Options configure the checks. The zero value has defaults.
type Options struct {
	// DataDir is the directory of sandboxes; it need not exist. Default: /var/lib/barchan.
	DataDir string
	// Addresses are the listen addresses, as host:port. A running server holds its own: omit them then.
	Addresses []string
	// MinDisk and MinMemory are the required free bytes; default 5 GiB and 1 GiB.
	MinDisk, MinMemory uint64
}

const (
	gib           = 1 << 30
	minInstances  = 512
	minWatches    = 65536
	minKernel     = "5.4"
	cgroupRoot    = "/sys/fs/cgroup"
	defaultData   = "/var/lib/barchan"
	sysctlPersist = "; to keep it, put that in a file in /etc/sysctl.d"
)

// CheckMachine checks the kernel and the host, by trials where possible: it creates what sandboxes need in
// temporary namespaces. It needs root to be complete, and leaves nothing behind. The order is fixed.
func CheckMachine(ctx context.Context, opts Options) []Check {
	opts.DataDir = cmp.Or(opts.DataDir, defaultData)
	opts.MinDisk = cmp.Or(opts.MinDisk, 5*gib)
	opts.MinMemory = cmp.Or(opts.MinMemory, gib)
	checks := []Check{checkRoot(), checkKernel()}
	checks = append(checks, checkCgroups("/"))
	checks = append(checks, checkKernelParts(ctx, opts.DataDir)...)
	checks = append(checks,
		checkLimit("/", "inotify instances", "fs.inotify.max_user_instances", minInstances),
		checkLimit("/", "inotify watches", "fs.inotify.max_user_watches", minWatches),
		checkDisk(opts.DataDir, opts.MinDisk), checkMemory("/", opts.MinMemory))
	for _, a := range opts.Addresses {
		checks = append(checks, checkAddress(ctx, a))
	}
	return checks
}

func good(name, format string, args ...any) Check {
	return Check{Name: name, OK: true, Detail: fmt.Sprintf(format, args...)}
}

func bad(name, fix, format string, args ...any) Check {
	return Check{Name: name, Fix: fix, Detail: fmt.Sprintf(format, args...)}
}

func checkRoot() Check {
	const name = "root"
	if uid := os.Geteuid(); uid != 0 {
		return bad(name, "run it as root, or with sudo", "running as user %d", uid)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return bad(name, "run it on the host, not in a container", "capabilities cannot be read: %v", err)
	}
	for capability, number := range map[string]int{"CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN, "CAP_NET_ADMIN": unix.CAP_NET_ADMIN} {
		if data[number/32].Effective&(1<<(number%32)) == 0 {
			return bad(name, "run it on the host, or in a container with all privileges", "root lacks %s", capability)
		}
	}
	return good(name, "running as root")
}

func checkKernel() Check {
	const name = "kernel"
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return bad(name, "run it on Linux", "uname: %v", err)
	}
	release := string(u.Release[:bytes.IndexByte(u.Release[:], 0)])
	if !atLeast(release, []int{5, 4}) {
		return bad(name, "upgrade to Linux "+minKernel+" or newer", "Linux %s", release)
	}
	return good(name, "Linux %s", release)
}

// checkCgroups checks the controllers, of either version of cgroups.
func checkCgroups(root string) Check {
	const name = "cgroups"
	data, err := os.ReadFile(filepath.Join(root, "proc/self/mounts"))
	if err != nil {
		return bad(name, "mount /proc", "mounts cannot be read: %v", err)
	}
	version, have := 0, map[string]bool{}
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		switch {
		case len(f) < 4:
		case f[2] == "cgroup2" && f[1] == cgroupRoot:
			version = 2
			controllers, err := os.ReadFile(filepath.Join(root, cgroupRoot, "cgroup.controllers"))
			if err != nil {
				return bad(name, "mount cgroups at "+cgroupRoot, "controllers cannot be read: %v", err)
			}
			for c := range strings.FieldsSeq(string(controllers)) {
				have[c] = true
			}
			have["freezer"] = true // built into version 2
		case f[2] == "cgroup":
			version = 1
			for c := range strings.SplitSeq(f[3], ",") {
				have[c] = true
			}
		}
	}
	if version == 0 {
		return bad(name, "mount cgroups at "+cgroupRoot+", as systemd or cgroupfs-mount do", "no cgroups are mounted")
	}
	var lacking []string
	for _, c := range []string{"cpu", "memory", "pids", "freezer"} {
		if !have[c] {
			lacking = append(lacking, c)
		}
	}
	if len(lacking) > 0 {
		return bad(name, "enable them on the kernel's command line (cgroup_enable=memory) or mount them at "+cgroupRoot,
			"version %d without %s", version, strings.Join(lacking, ", "))
	}
	return good(name, "version %d with cpu, memory, pids, freezer", version)
}

// checkLimit compares a sysctl. A low value is optional to fix: it matters only with many watchers of files.
func checkLimit(root, name, sysctl string, least int) Check {
	data, err := os.ReadFile(filepath.Join(root, "proc/sys", strings.ReplaceAll(sysctl, ".", "/")))
	if err != nil {
		return bad(name, "use a kernel with inotify", "%s cannot be read: %v", sysctl, err)
	}
	have, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return bad(name, "use a kernel with inotify", "%s is not a number: %v", sysctl, err)
	}
	if have < least {
		c := bad(name, fmt.Sprintf("sysctl -w %s=%d%s", sysctl, least, sysctlPersist),
			"%s is %d, %d is better for many sandboxes", sysctl, have, least)
		c.Optional = true
		return c
	}
	return good(name, "%s is %d", sysctl, have)
}

func checkDisk(dir string, least uint64) Check {
	const name = "disk"
	dir = existing(dir)
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return bad(name, "use a data directory that can be read", "%s: %v", dir, err)
	}
	free := st.Bavail * uint64(st.Bsize)
	if free < least {
		return bad(name, "free space, or use a data directory on another disk", "%s free at %s, %s wanted", size(free), dir, size(least))
	}
	if st.Files > 0 && st.Ffree < 100_000 {
		return bad(name, "remove files, or use a data directory on another disk", "only %d inodes free at %s", st.Ffree, dir)
	}
	return good(name, "%s free at %s", size(free), dir)
}

func checkMemory(root string, least uint64) Check {
	const name = "memory"
	data, err := os.ReadFile(filepath.Join(root, "proc/meminfo"))
	if err != nil {
		return bad(name, "mount /proc", "meminfo cannot be read: %v", err)
	}
	for line := range strings.Lines(string(data)) {
		value, ok := strings.CutPrefix(line, "MemAvailable:")
		if !ok {
			continue
		}
		kib, err := strconv.ParseUint(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
		if err != nil {
			return bad(name, "use Linux", "MemAvailable is not a number: %v", err)
		}
		if free := kib << 10; free < least {
			return bad(name, "stop other programs, or add memory", "%s available, %s wanted", size(free), size(least))
		}
		return good(name, "%s available", size(kib<<10))
	}
	return bad(name, "use Linux", "meminfo has no MemAvailable")
}

func checkAddress(ctx context.Context, address string) Check {
	name := "address " + address
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		_, port, _ := net.SplitHostPort(address)
		return bad(name, "stop what listens there (`ss -ltnp sport = :"+port+"` lists it), or configure another address", "in use")
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return bad(name, "configure an address of this host", "no such address here")
	case err != nil:
		return bad(name, "configure another address", "%v", err)
	}
	if err := l.Close(); err != nil {
		return bad(name, "configure another address", "%v", err)
	}
	return good(name, "free")
}

// existing returns dir or the nearest directory above it that exists.
func existing(dir string) string {
	for {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

func size(bytes uint64) string {
	if bytes >= gib {
		return fmt.Sprintf("%.1f GiB", float64(bytes)/gib)
	}
	return fmt.Sprintf("%d MiB", bytes>>20)
}
