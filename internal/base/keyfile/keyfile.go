// Package keyfile reads files of random keys, and makes them: the keys are there in raw bytes, one after the other. A file that others could
// read, or could have put there, is refused. It encrypts nothing.
package keyfile

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

const (
	mode = 0o600
	// maxSize bounds a file, in bytes.
	maxSize = 64 << 10
)

// File is a file of keys. Its user is that of the process, or root; it is readable for them alone. A file of another user than the process's may be
// readable for its group too, as a file of a Kubernetes Secret is.
type File struct {
	Path string
	// What names the keys in errors.
	What string
	// Size is that of one key, in bytes; Max is how many there may be, zero: any number.
	Size, Max int
	// AnyOwner lets the file belong to any user, whom the process then trusts.
	AnyOwner bool
}

// New returns a random key.
func (f File) New() []byte {
	key := make([]byte, f.Size)
	_, _ = rand.Read(key) // never fails
	return key
}

// Open returns the keys, of which there is one at least. A missing file is made with one key, and is durable when Open returns; its directory must exist.
func (f File) Open() ([][]byte, error) {
	keys, err := f.Read()
	if !errors.Is(err, fs.ErrNotExist) {
		return keys, err
	}
	if err := f.Write(f.New()); err != nil {
		return nil, err
	}
	return f.Read() // as the next start does: a file system without modes is refused at once
}

// Read returns the keys, of which there is one at least. A missing file is an fs.ErrNotExist; one that is refused is an errs.ErrInvalid.
func (f File) Read() ([][]byte, error) {
	in, err := os.OpenFile(f.Path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO would block
	if err != nil {
		return nil, fmt.Errorf("read the %s: %w", f.What, err)
	}
	defer func() { _ = in.Close() }()
	info, err := in.Stat()
	if err != nil {
		return nil, fmt.Errorf("read the %s: %w", f.What, err)
	}
	if err := f.check(info, uint32(os.Geteuid())); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(in, maxSize+1))
	if err != nil {
		return nil, fmt.Errorf("read the %s: %w", f.What, err)
	}
	if n := len(text) / f.Size; n == 0 || len(text)%f.Size != 0 || len(text) > maxSize || (f.Max > 0 && n > f.Max) {
		return nil, f.invalid("it has %d bytes, want %d for each key; restore it from a backup", len(text), f.Size)
	}
	return slices.Collect(slices.Chunk(text, f.Size)), nil
}

// Write replaces the keys, durably.
func (f File) Write(keys ...[]byte) error {
	if err := durable.WriteFile(f.Path, slices.Concat(keys...), mode); err != nil {
		return fmt.Errorf("write the %s: %w", f.What, err)
	}
	return nil
}

// check refuses a file that a user other than self or root could have written, or can read.
func (f File) check(info fs.FileInfo, self uint32) error {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.Mode().IsRegular() {
		return f.invalid("it is not a regular file")
	}
	allowed := fs.FileMode(mode)
	if st.Uid != self {
		allowed |= 0o040
		if st.Uid != 0 && !f.AnyOwner {
			return f.invalid("it belongs to user %d, want %d; run `chown %d %s`", st.Uid, self, self, f.Path)
		}
	}
	if got := info.Mode().Perm(); got&^allowed != 0 {
		return f.invalid("its mode is %04o, want %04o; run `chmod %04o %s`", got, allowed, allowed, f.Path)
	}
	return nil
}

func (f File) invalid(format string, args ...any) error {
	return fmt.Errorf("%s %s: %s: %w", f.What, f.Path, fmt.Sprintf(format, args...), errs.ErrInvalid)
}
