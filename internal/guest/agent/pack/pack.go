// Package pack writes files of a sandbox as an archive, for a build that copies them into another sandbox. It needs no
// program of the image. It follows the links of the paths that it is given, as any program of the sandbox does, keeps all
// others, and stays in the file systems in which those paths are. It limits bytes and files, reads no device, and changes nothing.
package pack

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/moby/patternmatcher"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// buffer is the size of a write, in bytes.
const buffer = 256 << 10

// Run writes the archive of a request, a gzipped tar. One source that is a regular file is its only entry, by its name.
// Otherwise the first entry is "./", directories are there by their content, and files by their names. What cannot be copied
// is named in notes.
func Run(out, notes io.Writer, request string) error {
	var req envd.PackRequest
	if err := json.Unmarshal([]byte(request), &req); err != nil {
		return fmt.Errorf("read request: %w", err)
	}
	match, err := patternmatcher.New(req.Exclude)
	if err != nil {
		return fmt.Errorf("exclude: %w", err)
	}
	buffered := bufio.NewWriterSize(out, buffer)
	zip, err := gzip.NewWriterLevel(buffered, gzip.NoCompression) // the way is short
	if err != nil {
		return err
	}
	p := &packing{PackRequest: req, match: match, notes: notes, out: tar.NewWriter(zip), parents: map[string]bool{}}
	if err := p.all(); err != nil {
		return err
	}
	return errors.Join(p.out.Close(), zip.Close(), buffered.Flush())
}

type packing struct {
	envd.PackRequest
	match   *patternmatcher.PatternMatcher
	notes   io.Writer
	out     *tar.Writer
	parents map[string]bool // directories that Parents has written
	bytes   int64
	files   int
}

// source is a path, with the file that it leads to. Parents keeps the directories in kept, a part of path.
type source struct {
	path, kept, file string
	info             fs.FileInfo
}

func (p *packing) all() error {
	sources, err := p.sources()
	if err != nil {
		return err
	}
	one := len(sources) == 1 && !p.Parents
	if one && sources[0].info.Mode().IsRegular() {
		return p.one(sources[0].file, path.Base(sources[0].path), sources[0].info)
	}
	root := &tar.Header{Typeflag: tar.TypeDir, Name: "./", Mode: 0o755, ModTime: time.Now(), Format: tar.FormatGNU}
	if one {
		if root, err = headerOf("./", sources[0].info, ""); err != nil {
			return err
		}
	}
	if err := p.out.WriteHeader(root); err != nil {
		return err
	}
	for _, s := range sources {
		if err := p.source(s); err != nil {
			return err
		}
	}
	return nil
}

// sources finds the files of all paths. A path without wildcards must exist, and so must one of those with.
func (p *packing) sources() (all []source, err error) {
	for _, name := range p.Paths {
		if !path.IsAbs(name) {
			return nil, fmt.Errorf("%q is no absolute path", name)
		}
		above, _, _ := strings.Cut(name, "/./")
		if above == name {
			above = "/"
		}
		found := []string{path.Clean(name)}
		if strings.ContainsAny(name, `*?[\`) {
			if found, err = filepath.Glob(name); err != nil {
				return nil, fmt.Errorf("%q is no pattern: %w", name, err)
			}
		}
		for _, one := range found {
			file, err := filepath.EvalSymlinks(one)
			var info fs.FileInfo
			if err == nil {
				info, err = os.Lstat(file)
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("there is no %q", one)
			}
			if err != nil {
				return nil, err
			}
			if !info.Mode().IsRegular() && !info.IsDir() {
				return nil, fmt.Errorf("%q is no file and no directory", one)
			}
			kept := strings.Trim(strings.TrimPrefix(one, path.Clean(above)), "/")
			all = append(all, source{one, kept, file, info})
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no file matches %q", p.Paths)
	}
	return all, nil
}

// source writes one of several sources, or a directory.
func (p *packing) source(s source) error {
	into := "."
	if p.Parents {
		into = s.kept
		if err := p.parentsOf(into, s.path); err != nil {
			return err
		}
	}
	if !s.info.IsDir() {
		name := path.Base(s.path)
		if p.Parents {
			name = into
		}
		excluded, err := p.match.MatchesOrParentMatches(path.Base(s.path))
		if err != nil || excluded {
			return err
		}
		return p.one(s.file, name, s.info)
	}
	if p.Parents && into != "" {
		if err := p.one(s.file, into, s.info); err != nil {
			return err
		}
	}
	return p.tree(s, into)
}

// parentsOf writes the directories above a name, as they are above the path.
func (p *packing) parentsOf(name, from string) error {
	dir := path.Dir(name)
	if dir == "." || dir == "/" || p.parents[dir] {
		return nil
	}
	above := path.Dir(path.Clean(from))
	if err := p.parentsOf(dir, above); err != nil {
		return err
	}
	p.parents[dir] = true
	info, err := os.Stat(above)
	if err != nil {
		return err
	}
	return p.one(above, dir, info)
}

// tree writes the content of a directory.
func (p *packing) tree(s source, into string) error {
	device := deviceOf(s.info)
	return filepath.WalkDir(s.file, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if file == s.file {
			return nil
		}
		inside, err := filepath.Rel(s.file, file)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if d.IsDir() && deviceOf(info) != device {
			return fs.SkipDir
		}
		excluded, err := p.match.MatchesOrParentMatches(inside)
		switch {
		case err != nil:
			return err
		case excluded && d.IsDir() && !p.match.Exclusions():
			return fs.SkipDir
		case excluded:
			return nil
		}
		return p.one(file, path.Join(into, inside), info)
	})
}

func deviceOf(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Dev
	}
	return 0
}

// one writes one file.
func (p *packing) one(file, name string, info fs.FileInfo) error {
	if p.files++; p.files > p.MaxFiles {
		return fmt.Errorf("there are more than %d files", p.MaxFiles)
	}
	link := ""
	switch mode := info.Mode(); {
	case mode&fs.ModeSymlink != 0:
		var err error
		if link, err = os.Readlink(file); err != nil {
			return err
		}
	case mode.IsRegular():
		if p.bytes += info.Size(); p.bytes > p.MaxBytes || info.Size() > p.MaxBytes {
			return fmt.Errorf("the files have more than %d bytes", p.MaxBytes)
		}
	case !mode.IsDir():
		_, _ = fmt.Fprintf(p.notes, "%q is a socket, a FIFO or a device, and is left out\n", file)
		return nil
	}
	h, err := headerOf(name, info, link)
	if err != nil {
		return err
	}
	if err := p.out.WriteHeader(h); err != nil || h.Typeflag != tar.TypeReg {
		return err
	}
	in, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	_, err = io.CopyN(p.out, in, h.Size)
	if err = errors.Join(err, in.Close()); err != nil {
		return fmt.Errorf("read %q: %w", file, err)
	}
	return nil
}

// headerOf returns a file's header. Format GNU has long names, and the tar of BusyBox reads it too.
func headerOf(name string, info fs.FileInfo, link string) (*tar.Header, error) {
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return nil, err
	}
	h.Name, h.Format, h.ModTime = name, tar.FormatGNU, h.ModTime.Truncate(time.Second)
	h.AccessTime, h.ChangeTime, h.Uname, h.Gname = time.Time{}, time.Time{}, "", "" // names are another image's
	if info.IsDir() && !strings.HasSuffix(name, "/") {
		h.Name += "/"
	}
	return h, nil
}
