package cli

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"github.com/barchan-dev/barchan/internal/adminclient"
)

// packDir writes a directory's content as a tar. Sockets, devices and pipes
// are left out. Owners are not told: files become the unpacking user's.
func packDir(w io.Writer, dir string, p *progress) error {
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
		if err != nil || name == "." {
			return err
		}
		return packEntry(tw, file, name, entry, p)
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func packEntry(tw *tar.Writer, file, name string, entry fs.DirEntry, p *progress) error {
	info, err := entry.Info()
	if err != nil {
		return err
	}
	link := ""
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		if link, err = os.Readlink(file); err != nil {
			return err
		}
	case !info.Mode().IsRegular() && !info.IsDir():
		return nil
	}
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h.Name = filepath.ToSlash(name)
	h.Uid, h.Gid, h.Uname, h.Gname = 0, 0, "", ""
	h.Mode &= int64(fs.ModePerm)
	p.event(adminclient.Event{Step: "send", Message: h.Name})
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

// unpackDir makes dir and unpacks a tar in it. The tar is a stranger's: nothing
// outside dir is touched, whatever names and links it has, nothing becomes
// setuid, and no device is made.
func unpackDir(r io.Reader, dir string, p *progress) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			// What follows the end is padding; the sender waits until it is read.
			_, err = io.Copy(io.Discard, r)
			return err
		}
		if err != nil {
			return fmt.Errorf("read the sandbox's tar: %w", err)
		}
		name := path.Clean(h.Name)
		if name == "." {
			continue
		}
		p.event(adminclient.Event{Step: "receive", Message: name})
		if err := unpackEntry(root, tr, h, name); err != nil {
			return fmt.Errorf("unpack %s: %w", name, err)
		}
	}
}

func unpackEntry(root *os.Root, tr *tar.Reader, h *tar.Header, name string) error {
	mode := fs.FileMode(h.Mode) & fs.ModePerm
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
		return root.MkdirAll(name, mode|0o700)
	case tar.TypeReg:
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, tr)
		return errors.Join(err, f.Chmod(mode), f.Close())
	case tar.TypeSymlink:
		return root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		return root.Link(path.Clean(h.Linkname), name)
	default:
		return nil // devices and pipes
	}
}
