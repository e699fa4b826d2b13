package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// directory is the working directory of this kind; others may run beside it.
var directory string

func makeFile(name, content string) (*os.File, error) {
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return nil, err
	}
	f, err := os.Create(filepath.Join(directory, name))
	if err != nil {
		return nil, err
	}
	_, err = f.WriteString(content)
	return f, err
}

// appends checks what a file has, and writes more to it.
func appends(f *os.File, content string) func() error {
	return func() error {
		b, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<30))
		if err != nil || string(b) != content {
			return fmt.Errorf("%d bytes of %d: %v", len(b), len(content), err) //nolint:errorlint // there may be none
		}
		content += "more"
		_, err = f.WriteString("more")
		return err
	}
}

// deletedFile is open and has no name any more.
func deletedFile() (func() error, error) {
	text := strings.Repeat("deleted ", 10_000)
	f, err := makeFile("deleted", text)
	if err != nil {
		return nil, err
	}
	return appends(f, text), os.Remove(f.Name())
}

// renamedFile is open under a name that is another's now.
func renamedFile() (func() error, error) {
	f, err := makeFile("first", "one")
	if err != nil {
		return nil, err
	}
	if err := os.Rename(f.Name(), f.Name()+".moved"); err != nil {
		return nil, err
	}
	other, err := makeFile("first", "two")
	if err != nil {
		return nil, err
	}
	return all(appends(f, "one"), appends(other, "two")), nil
}

// sharedMapping is a file that is mapped and written through the mapping.
func sharedMapping() (func() error, error) {
	const size = 1 << 20
	f, err := makeFile("mapped", strings.Repeat("-", size))
	if err != nil {
		return nil, err
	}
	data, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	n := byte('a')
	data[size/2] = n
	return func() error {
		b := make([]byte, 1)
		_, err := f.ReadAt(b, size/2)
		if err != nil || b[0] != n || data[size/2] != n {
			return fmt.Errorf("the file has %q, memory %q, want %q: %v", b[0], data[size/2], n, err) //nolint:errorlint // there may be none
		}
		n++
		data[size/2] = n
		return nil
	}, nil
}

// fileLocks are held on files.
func fileLocks() (func() error, error) {
	f, err := makeFile("locked", "x")
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, err
	}
	return func() error {
		other, err := os.Open(f.Name())
		if err != nil {
			return err
		}
		defer func() { _ = other.Close() }()
		if err := unix.Flock(int(other.Fd()), unix.LOCK_EX|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("another gets the lock: %v", err) //nolint:errorlint // there may be none
		}
		return nil
	}, nil
}

// deletedDirectory is the working directory, and gone.
func deletedDirectory() (func() error, error) {
	if err := os.MkdirAll(directory+"/gone", 0o700); err != nil {
		return nil, err
	}
	if err := os.Chdir(directory + "/gone"); err != nil {
		return nil, err
	}
	return func() error {
		if _, err := os.Stat("."); err != nil {
			return err
		}
		_, err := os.Stat("/proc/self/cwd/")
		return err
	}, os.Remove(directory + "/gone")
}

// watchedDirectory reports changes of its files.
func watchedDirectory() (func() error, error) {
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return nil, err
	}
	fd, err := unix.InotifyInit1(0)
	if err != nil {
		return nil, err
	}
	if _, err := unix.InotifyAddWatch(fd, directory, unix.IN_CREATE); err != nil {
		return nil, err
	}
	n := 0
	change := func() error {
		n++
		f, err := makeFile(fmt.Sprintf("new-%d", n), "x")
		if err != nil {
			return err
		}
		return f.Close()
	}
	awaitEvent := func() error {
		b := make([]byte, 4096)
		return within("event", func() error {
			got, err := unix.Read(fd, b)
			if err == nil && !bytes.Contains(b[:max(got, 0)], fmt.Appendf(nil, "new-%d", n)) {
				err = fmt.Errorf("no event of new-%d", n)
			}
			return err
		})
	}
	return func() error { // an old event, a new one, and one left in the queue
		for range 2 {
			if err := errors.Join(awaitEvent(), change()); err != nil {
				return err
			}
		}
		return nil
	}, change()
}

// pipes have something in them, and one is full with a writer that waits.
func pipes() (func() error, error) {
	get, put, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	there, err := inFlight("pipe", put, get)
	if err != nil {
		return nil, err
	}
	var full [2]int
	if err := unix.Pipe(full[:]); err != nil {
		return nil, err
	}
	var written atomic.Int64
	threadOf(func() {
		block := make([]byte, 4096)
		for {
			for i := range block {
				block[i] = byte(written.Load() / 4096)
			}
			if n, err := unix.Write(full[1], block); err == nil {
				written.Add(int64(n))
			}
		}
	})
	if err := await("the pipe is full", func() bool { return written.Load() >= 65536 }); err != nil {
		return nil, err
	}
	read, from := int64(0), os.NewFile(uintptr(full[0]), "full")
	return all(there, func() error {
		b := make([]byte, 4096)
		for range 32 {
			n, err := io.ReadFull(from, b)
			if err != nil || b[0] != byte(read/4096) || b[n-1] != b[0] {
				return fmt.Errorf("after %d bytes %d came: %v", read, b[0], err) //nolint:errorlint // there may be none
			}
			read += int64(n)
		}
		return nil
	}), nil
}

// namedPipe is a pipe with a name.
func namedPipe() (func() error, error) {
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return nil, err
	}
	path := directory + "/fifo"
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	return inFlight("fifo", f, f)
}

// deletedProgram keeps running although its file is deleted.
func deletedProgram() (func() error, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	content, err := os.ReadFile(self)
	if err != nil {
		return nil, err
	}
	return func() error {
		// Pages of the program that were never touched come from the file.
		b, err := os.ReadFile("/proc/self/exe")
		if err != nil || !bytes.Equal(b, content) {
			return fmt.Errorf("it has %d bytes of %d: %v", len(b), len(content), err) //nolint:errorlint // there may be none
		}
		return nil
	}, os.Remove(self)
}
