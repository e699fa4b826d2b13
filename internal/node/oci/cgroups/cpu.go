package cgroups

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// idleFile is of Linux 5.15, in both versions. Written, it also replaces the cgroup's weight: with the least one, or with the default.
const idleFile = "cpu.idle"

func cpuDir(cgroupsPath string) string {
	if unified() {
		return filepath.Join(root, cgroupsPath)
	}
	return filepath.Join(root, "cpu", cgroupsPath)
}

// ReadCPU returns the processor time that a cgroup has used. One that does not exist is an fs.ErrNotExist.
func ReadCPU(cgroupsPath string) (time.Duration, error) {
	if unified() {
		stat, err := readTable(filepath.Join(root, cgroupsPath, "cpu.stat"))
		return time.Duration(stat["usage_usec"]) * time.Microsecond, err //nolint:gosec // 292,000 years
	}
	n, err := readNumber(filepath.Join(root, "cpuacct", cgroupsPath, "cpuacct.usage"))
	return time.Duration(n), err //nolint:gosec // 292 years
}

// LowestCPU reports whether a cgroup has the lowest priority. It has not where the kernel knows none.
func LowestCPU(cgroupsPath string) (bool, error) {
	b, err := os.ReadFile(filepath.Join(cpuDir(cgroupsPath), idleFile))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && bytes.Equal(bytes.TrimSpace(b), []byte("1")), err
}

// SetLowestCPU gives a cgroup the lowest priority, or a weight again, in the unit of cpu.shares. Where the kernel knows no such
// priority, or the cgroup is gone, it is an fs.ErrNotExist.
func SetLowestCPU(cgroupsPath string, lowest bool, weight uint64) error {
	dir := cpuDir(cgroupsPath)
	write := func(file, value string) error {
		f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
		if err == nil {
			_, err = f.WriteString(value)
			err = errors.Join(err, f.Close())
		}
		if err != nil {
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

// weightOfShares converts cpu.shares to cpu.weight as the runtimes do: 2 to 262144 become 1 to 10000.
func weightOfShares(shares uint64) uint64 {
	return 1 + (min(max(shares, 2), 262144)-2)*9999/262142
}
