package cgroups

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"k8s.io/utils/cpuset"
)

// idleFile is of Linux 5.15, in both versions. Written, it also replaces the cgroup's weight: with the least one, or with the default.
const idleFile = "cpu.idle"

// ReadCPU returns the processor time that a cgroup has used.
func ReadCPU(cgroupsPath string) (time.Duration, error) {
	n, err := readCPU(cgroupsPath)
	return time.Duration(n), err //nolint:gosec // 292 years
}

// readCPU is [ReadCPU] in nanoseconds.
func readCPU(cgroupsPath string) (uint64, error) {
	if unified() {
		stat, err := readTable(filepath.Join(root, cgroupsPath, "cpu.stat"))
		return stat["usage_usec"] * 1000, err
	}
	return readNumber(filepath.Join(root, "cpuacct", cgroupsPath, "cpuacct.usage"))
}

// LowestCPU reports whether a cgroup has the lowest priority. It has not where it is missing, or the kernel has no such priority.
func LowestCPU(cgroupsPath string) (bool, error) {
	b, err := os.ReadFile(filepath.Join(controllerDir("cpu", cgroupsPath), idleFile))
	return err == nil && bytes.Equal(bytes.TrimSpace(b), []byte("1")), ignoreMissing(err)
}

// SetLowestCPU gives a cgroup the lowest priority, or a weight again, in the unit of cpu.shares. Where the kernel has no such
// priority the error is that of a missing cgroup.
func SetLowestCPU(cgroupsPath string, lowest bool, weight uint64) error {
	write := func(file, value string) error {
		if err := WriteFile(filepath.Join(controllerDir("cpu", cgroupsPath), file), value); err != nil {
			return fmt.Errorf("priority of %s: %w", cgroupsPath, err)
		}
		return nil
	}
	if lowest {
		return write(idleFile, "1")
	}
	if err := write(idleFile, "0"); err != nil {
		return err
	}
	if unified() {
		return write("cpu.weight", strconv.FormatUint(weightOfShares(weight), 10))
	}
	return write("cpu.shares", strconv.FormatUint(weight, 10))
}

// CPUPeriod is the time in microseconds of which a cgroup with a CPU limit may use a part, its quota.
const CPUPeriod = 100_000

// CPUQuota is the part of [CPUPeriod] that a limit in thousandths of a processor allows: no less than the kernel's least, 1 ms.
func CPUQuota(milliCPU int64) int64 { return max(1000, milliCPU*CPUPeriod/1000) }

// LimitCPU has a cgroup use at most as many thousandths of a processor. A missing cgroup is no error.
func LimitCPU(cgroupsPath string, milliCPU int64) error {
	file, value := "cpu.cfs_quota_us", strconv.FormatInt(CPUQuota(milliCPU), 10)
	if unified() {
		file, value = "cpu.max", fmt.Sprintf("%s %d", value, CPUPeriod)
	}
	if err := ignoreMissing(WriteFile(filepath.Join(controllerDir("cpu", cgroupsPath), file), value)); err != nil {
		return fmt.Errorf("CPU limit of %s: %w", cgroupsPath, err)
	}
	return nil
}

const cpusFile = "cpuset.cpus"

// Processors returns the processors that the cgroup has which the one of that path is in.
func Processors(cgroupsPath string) (cpuset.CPUSet, error) {
	file := "cpuset.effective_cpus"
	if unified() {
		file = "cpuset.cpus.effective"
	}
	b, err := os.ReadFile(filepath.Join(filepath.Dir(controllerDir("cpuset", cgroupsPath)), file))
	if err != nil {
		return cpuset.CPUSet{}, fmt.Errorf("processors of %s: %w", cgroupsPath, err)
	}
	return cpuset.Parse(string(bytes.TrimSpace(b))) //nolint:wrapcheck // it names what it cannot parse
}

// SetProcessors has a cgroup, and all below it, run on these processors alone, among which those of its parent must be.
func SetProcessors(cgroupsPath string, cpus cpuset.CPUSet) error {
	if err := WriteFile(filepath.Join(controllerDir("cpuset", cgroupsPath), cpusFile), cpus.String()); err != nil {
		return fmt.Errorf("processors of %s: %w", cgroupsPath, err)
	}
	return nil
}

// weightOfShares converts cpu.shares to cpu.weight as the runtimes do: 2 to 262144 become 1 to 10000.
func weightOfShares(shares uint64) uint64 {
	return 1 + (min(max(shares, 2), 262144)-2)*9999/262142
}
