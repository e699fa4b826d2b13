package hostcheck

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

const (
	// reserveFile takes space that is released when the disk is full, so that the server can still start, and write what ends
	// sandboxes.
	reserveFile = "reserve"
	reserveMost = 128 << 20 // bytes, where that is not a larger part of the disk than reservePart
	reservePart = 16
	// bootSpace is what must be free to start: etcd takes 64 MiB for its log ahead.
	bootSpace = 80 << 20
)

// parseMemory reads /proc/meminfo.
func parseMemory(text string) (free, total int64, err error) {
	for line := range strings.Lines(text) {
		var into *int64
		key, value, _ := strings.Cut(line, ":")
		switch key {
		case "MemAvailable":
			into = &free
		case "MemTotal":
			into = &total
		default:
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		if err != nil {
			return 0, 0, errs.Public(fmt.Errorf("/proc/meminfo: %s: %w", key, err), "it cannot be looked at")
		}
		*into = kib << 10
	}
	if total == 0 {
		return 0, 0, errs.Public(errors.New("/proc/meminfo has no MemTotal"), "it cannot be looked at")
	}
	return free, total, nil
}

// keepReserve allocates the reserve if there is much free space, and removes it if there is hardly any.
func keepReserve(dir string) error {
	d, err := diskOf(dir)
	if err != nil {
		return err
	}
	path, size := filepath.Join(dir, reserveFile), min(reserveMost, d.total/reservePart)
	switch {
	case d.free < size/4:
		return durable.Remove(path)
	case d.free > 4*size:
		return durable.Reserve(path, size)
	}
	return nil
}

// dropReserve removes the reserve if its space is needed to start.
func dropReserve(dir string) error {
	d, err := diskOf(dir)
	if err != nil || d.free >= bootSpace {
		return err
	}
	return durable.Remove(filepath.Join(dir, reserveFile))
}

// Startable reports why a server cannot start in a data directory, if it cannot.
func Startable(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	if err := dropReserve(dir); err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	now, err := diskOf(dir)
	if err != nil {
		return err
	}
	if now.free < bootSpace {
		return errs.Public(unix.ENOSPC, fmt.Sprintf("%s: its disk has %d MiB free, and %d MiB are needed to start; free some", dir, now.free>>20, bootSpace>>20))
	}
	if err := durable.CheckWrites(dir); err != nil {
		text, _ := errs.PublicMessage(WriteFault(err))
		return errs.Public(err, fmt.Sprintf("%s: %s; correct that, then start the server", dir, text))
	}
	return nil
}
