// Package plainfile reads and writes small files with the fewest system calls. Package os makes six to open a file, five of which find
// out whether it can be polled. Each costs a sandbox some ten microseconds, and a command waits for all of them.
//
// A file that blocks, such as a pipe without a writer, is an error or empty: nothing here waits for another program.
package plainfile

import (
	"bytes"
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// File is an open file. It is not safe for concurrent use.
type File struct {
	fd   int
	path string
}

// Open opens a file to read. The caller closes it. Errors are those of package os.
func Open(path string) (*File, error) { return open(path, unix.O_RDONLY) }

func open(path string, mode int) (*File, error) {
	fd, err := uninterrupted(func() (int, error) { return unix.Open(path, mode|unix.O_CLOEXEC|unix.O_NONBLOCK, 0) })
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return &File{fd, path}, nil
}

// uninterrupted repeats a system call that a signal has ended.
func uninterrupted(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// Read implements io.Reader.
func (f *File) Read(b []byte) (int, error) {
	n, err := uninterrupted(func() (int, error) { return unix.Read(f.fd, b) })
	switch {
	case err != nil:
		return 0, &os.PathError{Op: "read", Path: f.path, Err: err}
	case n == 0 && len(b) > 0:
		return 0, io.EOF
	}
	return n, nil
}

// Close implements io.Closer.
func (f *File) Close() error { return unix.Close(f.fd) }

// ReadFile returns what is in a file, of which most is some kilobytes.
func ReadFile(path string) (b []byte, err error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	var content bytes.Buffer
	content.Grow(4096)
	_, err = content.ReadFrom(f)
	return content.Bytes(), err
}

// Write writes to a file that exists, by one system call, as those of /proc require.
func Write(path string, b []byte) (err error) {
	f, err := open(path, unix.O_WRONLY)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	n, err := uninterrupted(func() (int, error) { return unix.Write(f.fd, b) })
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	if err != nil {
		return &os.PathError{Op: "write", Path: path, Err: err}
	}
	return nil
}
