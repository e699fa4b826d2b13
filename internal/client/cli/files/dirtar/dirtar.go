// Package dirtar writes the content of a directory as a tar, and unpacks such a tar from a sandbox, which is not trusted. It leaves out what
// is neither a file, a directory nor a symbolic link. It knows no sandbox and no progress.
package dirtar

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"time"
)

// Events receive what happens. Both are required.
type Events struct {
	// Entry is called before each entry is copied.
	Entry func(name string)
	// Skip is called for each that is left out, with the reason.
	Skip func(name, why string)
}

// Uncopied returns why a file of that mode is not copied; empty: it is.
func Uncopied(mode fs.FileMode) string {
	switch {
	case mode.IsRegular(), mode.IsDir(), mode&fs.ModeSymlink != 0:
		return ""
	case mode&fs.ModeNamedPipe != 0:
		return "FIFOs are not copied"
	case mode&fs.ModeSocket != 0:
		return "sockets are not copied"
	}
	return "devices are not copied"
}

// Pack writes a directory's content as a tar. Sockets, devices and FIFOs are left out. Owners are
// omitted: files get the unpacking user.
func Pack(w io.Writer, dir string, on Events) error {
	tw := tar.NewWriter(w)
	root, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return err
	}
	err = filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		return packEntry(tw, file, name, entry, on)
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func packEntry(tw *tar.Writer, file, name string, entry fs.DirEntry, on Events) error {
	info, err := entry.Info()
	if err != nil {
		return err
	}
	if why := Uncopied(info.Mode()); why != "" {
		on.Skip(file, why)
		return nil
	}
	link := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		if link, err = os.Readlink(file); err != nil {
			return err
		}
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h.Name = filepath.ToSlash(name)
	h.Uid, h.Gid, h.Uname, h.Gname = 0, 0, "", ""
	h.Mode &= int64(fs.ModePerm)
	h.Format, h.AccessTime, h.ChangeTime = tar.FormatPAX, time.Time{}, time.Time{} // PAX has fractions of a second
	on.Entry(h.Name)
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return nil
	}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if _, err := io.CopyN(tw, f, info.Size()); err != nil {
		return fmt.Errorf("read %s, which changes while it is copied: %w", file, err)
	}
	return nil
}

// Unpack creates dir and unpacks a tar in it. The tar is untrusted: nothing outside dir is touched,
// for all names and links, nothing becomes setuid, and no device is created.
func Unpack(r io.Reader, dir string, on Events) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	tr := tar.NewReader(r)
	var dirs []*tar.Header
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read the sandbox's tar: %w", err)
		}
		name := path.Clean(h.Name)
		if h.Typeflag == tar.TypeDir {
			dirs = append(dirs, h)
		}
		if name == "." {
			continue
		}
		on.Entry(name)
		if err := unpackEntry(root, tr, h, name, on); err != nil {
			return fmt.Errorf("unpack %s: %w", name, err)
		}
	}
	// Last, because their modes may forbid new entries and new entries change their times.
	for _, h := range slices.Backward(dirs) {
		if err := finish(root, h, path.Clean(h.Name)); err != nil {
			return fmt.Errorf("unpack %s: %w", h.Name, err)
		}
	}
	// Padding follows the end; the sender blocks until it is read.
	_, err = io.Copy(io.Discard, r)
	return err
}

// finish sets a file's or directory's mode and time to those in the sandbox.
func finish(root *os.Root, h *tar.Header, name string) error {
	return errors.Join(root.Chtimes(name, time.Time{}, h.ModTime), root.Chmod(name, fs.FileMode(h.Mode)&fs.ModePerm))
}

func unpackEntry(root *os.Root, tr *tar.Reader, h *tar.Header, name string, on Events) error {
	if parent := path.Dir(name); parent != "." {
		if err := root.MkdirAll(parent, 0o755); err != nil {
			return err
		}
	}
	if h.Typeflag != tar.TypeDir {
		// An old file or link of the name is replaced, never written through.
		if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return root.MkdirAll(name, 0o700)
	case tar.TypeReg:
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, tr)
		return errors.Join(err, f.Close(), finish(root, h, name))
	case tar.TypeSymlink:
		return root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		return root.Link(path.Clean(h.Linkname), name)
	default:
		on.Skip(name, Uncopied(h.FileInfo().Mode()))
		return nil
	}
}
