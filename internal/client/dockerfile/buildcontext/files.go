package buildcontext

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Files are those of one COPY. They are read anew by each call, from the context.
type Files struct {
	root *os.Root
	// Source and Dest are the arguments of the COPY.
	Source, Dest string
	entries      []entry
	sum          string
}

// Count returns the number of files, links and directories.
func (f *Files) Count() int { return len(f.entries) }

// Hash returns the SHA-256, in hex, over the paths of the instruction and the names, modes, sizes, contents and links of
// the files; not over their times and owners.
func (f *Files) Hash() (string, error) {
	if f.sum == "" {
		sum, err := f.read(nil)
		if err != nil {
			return "", err
		}
		f.sum = sum
	}
	return f.sum, nil
}

// Archive writes the files as a gzipped tar. It fails if they are not those that Hash has read.
func (f *Files) Archive(w io.Writer) error {
	zip := gzip.NewWriter(w)
	out := tar.NewWriter(zip)
	sum, err := f.read(out)
	if err == nil && f.sum != "" && sum != f.sum {
		err = fmt.Errorf("read %s: its files have changed; build again: %w", f.Source, errs.ErrConflict)
	}
	if err == nil {
		err = out.Close()
	}
	if err == nil {
		err = zip.Close()
	}
	return err
}

// read hashes the files, and writes them to an archive if there is one.
func (f *Files) read(out *tar.Writer) (string, error) {
	sum := sha256.New()
	fields(sum, "COPY", f.Source, f.Dest)
	for i := range f.entries {
		e := &f.entries[i]
		if err := f.readOne(e, sum, out); err != nil {
			return "", fmt.Errorf("read %s: %w", e.file, err)
		}
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// fields hashes texts so that others do not give the same hash.
func fields(sum hash.Hash, texts ...string) {
	for _, text := range texts {
		_, _ = sum.Write(binary.BigEndian.AppendUint64(nil, uint64(len(text)))) // a hash does not fail
		_, _ = io.WriteString(sum, text)
	}
}

func (f *Files) readOne(e *entry, sum hash.Hash, out *tar.Writer) error {
	// Format GNU has long names and all characters, and the tar of BusyBox reads it too.
	h := &tar.Header{Name: e.name, Mode: int64(e.mode.Perm()), Size: e.size, ModTime: e.time.Truncate(time.Second), Format: tar.FormatGNU}
	switch {
	case e.mode.IsDir():
		h.Typeflag, h.Name = tar.TypeDir, e.name+"/"
	case e.mode&fs.ModeSymlink != 0:
		h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, e.link, 0o777
	default:
		h.Typeflag = tar.TypeReg
	}
	for bit, mode := range map[fs.FileMode]int64{fs.ModeSetuid: 0o4000, fs.ModeSetgid: 0o2000, fs.ModeSticky: 0o1000} {
		if e.mode&bit != 0 {
			h.Mode |= mode
		}
	}
	fields(sum, h.Name, fmt.Sprintf("%c %o %d", h.Typeflag, h.Mode, e.size), e.link)
	var into io.Writer = sum
	if out != nil {
		if err := out.WriteHeader(h); err != nil {
			return err
		}
		into = io.MultiWriter(sum, out)
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	if e.inline {
		_, err := into.Write(e.data)
		return err
	}
	in, err := f.root.Open(e.file)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	info, err := in.Stat()
	if err == nil && info.Size() == e.size {
		_, err = io.CopyN(into, in, e.size)
	} else if err == nil {
		err = io.ErrUnexpectedEOF
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("its size has changed; build again: %w", errs.ErrConflict)
	}
	return err
}
