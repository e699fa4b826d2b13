package main

import (
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// memory fills memory with what cannot be compressed; the variable MIB sets how much, in MiB.
func memory() (func() error, error) {
	const block = 1 << 20
	mib := 1024
	if text := os.Getenv("MIB"); text != "" {
		var err error
		if mib, err = strconv.Atoi(text); err != nil {
			return nil, err
		}
	}
	data, err := unix.Mmap(-1, 0, mib*block, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	table := crc32.MakeTable(crc32.Castagnoli)
	sums := make([]uint32, mib)
	var seed [32]byte
	source := rand.NewChaCha8(seed)
	fill := func(i int) {
		part := data[i*block : (i+1)*block]
		_, _ = source.Read(part)
		sums[i] = crc32.Checksum(part, table)
	}
	for i := range mib {
		fill(i)
	}
	return func() error {
		for i := range mib {
			if got := crc32.Checksum(data[i*block:(i+1)*block], table); got != sums[i] {
				return fmt.Errorf("MiB %d of %d changed", i, mib)
			}
		}
		fill(rand.IntN(mib)) //nolint:gosec // any will do
		return nil
	}, nil
}

// words are what the threads wait on.
var words [16]uint32

func futex(word *uint32, op int, value uint32) {
	// Errors are those of a wait that was not needed.
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), uintptr(op), uintptr(value), 0, 0, 0)
}

// threads hand a token on in a ring, each blocked in a futex until it has it.
func threads() (func() error, error) {
	const wait, wake = 0, 1
	var rounds atomic.Int64
	var ids [len(words)]atomic.Int64
	for i := range words {
		threadOf(func() {
			ids[i].Store(int64(unix.Gettid()))
			for {
				for atomic.LoadUint32(&words[i]) == 0 {
					futex(&words[i], wait, 0)
				}
				atomic.StoreUint32(&words[i], 0)
				if i == 0 {
					rounds.Add(1)
					time.Sleep(time.Millisecond)
				}
				next := &words[(i+1)%len(words)]
				atomic.StoreUint32(next, 1)
				futex(next, wake, 1)
			}
		})
	}
	atomic.StoreUint32(&words[0], 1)
	futex(&words[0], wake, 1)
	return func() error {
		for i := range ids {
			if _, err := os.Stat(filepath.Join("/proc/self/task", strconv.FormatInt(ids[i].Load(), 10))); err != nil {
				return fmt.Errorf("thread %d: %w", i, err)
			}
		}
		before := rounds.Load()
		return await("the token goes round", func() bool { return rounds.Load() > before+5 })
	}, nil
}

// sharedMemory is a segment of System V and a semaphore.
func sharedMemory() (func() error, error) {
	const size = 1 << 16
	id, err := unix.SysvShmGet(unix.IPC_PRIVATE, size, unix.IPC_CREAT|0o600)
	if err != nil {
		return nil, err
	}
	data, err := unix.SysvShmAttach(id, 0, 0)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile("/dev/shm/canary", []byte("posix"), 0o600); err != nil {
		return nil, err
	}
	data[size-1] = 42
	return func() error {
		again, err := unix.SysvShmAttach(id, 0, 0)
		if err != nil {
			return fmt.Errorf("attach: %w", err)
		}
		defer func() { _ = unix.SysvShmDetach(again) }()
		if data[size-1] != again[size-1] || again[size-1] != 42 {
			return fmt.Errorf("segment has %d and %d", data[size-1], again[size-1])
		}
		if b, err := os.ReadFile("/dev/shm/canary"); err != nil || string(b) != "posix" {
			return fmt.Errorf("/dev/shm has %q, %v", b, err) //nolint:errorlint // there may be none
		}
		return nil
	}, nil
}

// memoryFile is a file of memory alone.
func memoryFile() (func() error, error) {
	fd, err := unix.MemfdCreate("canary", 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "memfd")
	if _, err := f.WriteString("in memory"); err != nil {
		return nil, err
	}
	return func() error {
		b := make([]byte, 64)
		n, _ := f.ReadAt(b, 0)
		if string(b[:n]) != "in memory" {
			return fmt.Errorf("it has %q", b[:n])
		}
		return nil
	}, nil
}
