package dockerfile

import (
	"archive/tar"
	"bytes"
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
	"path"
	"slices"
	"strings"
	"time"

	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// tree is the context: a directory without what .dockerignore excludes.
type tree struct {
	root   *os.Root
	ignore *patternmatcher.PatternMatcher
}

func newTree(root *os.Root, ignore []byte) (*tree, error) {
	patterns, err := ignorefile.ReadAll(bytes.NewReader(ignore))
	if err != nil {
		return nil, fmt.Errorf(".dockerignore: %w", withKind(err))
	}
	m, err := patternmatcher.New(patterns)
	if err != nil {
		return nil, fmt.Errorf(".dockerignore: %w", withKind(err))
	}
	return &tree{root, m}, nil
}

// match returns the files that a source names, by their paths in the context, which need not be clean of links.
func (t *tree) match(source string) ([]string, error) {
	name := path.Clean(strings.TrimLeft(source, "/"))
	if name == ".." || strings.HasPrefix(name, "../") {
		return nil, fmt.Errorf("%q is outside of the context", source)
	}
	found, pattern := []string{name}, strings.ContainsAny(name, `*?[\`)
	if pattern {
		var err error
		if found, err = fs.Glob(t.root.FS(), name); err != nil {
			return nil, fmt.Errorf("%q is no pattern: %w", source, err)
		}
	}
	var left []string
	for _, file := range found {
		target, err := t.resolve(file)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("the context has no %q", file)
		}
		if err != nil {
			return nil, err
		}
		excluded, err := t.excluded(target)
		if err != nil {
			return nil, err
		}
		if excluded && !pattern {
			return nil, fmt.Errorf("%q is excluded by .dockerignore", source)
		}
		if !excluded {
			left = append(left, file)
		}
	}
	return left, nil
}

// maxLinks bounds the links of a path.
const maxLinks = 40

// resolve follows the links of a path, and refuses those that lead out of the context.
func (t *tree) resolve(name string) (string, error) {
	todo, done := strings.Split(name, "/"), []string{}
	for links := 0; len(todo) > 0; {
		part := todo[0]
		todo = todo[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			if len(done) == 0 {
				return "", fmt.Errorf("%q leads out of the context by a link", name)
			}
			done = done[:len(done)-1]
			continue
		}
		at := path.Join(append(slices.Clone(done), part)...)
		info, err := t.root.Lstat(at)
		if err != nil {
			return "", err
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			done = append(done, part)
			continue
		}
		link, err := t.root.Readlink(at)
		if err != nil {
			return "", err
		}
		if links++; links > maxLinks {
			return "", fmt.Errorf("%q has too many links", name)
		}
		if path.IsAbs(link) {
			return "", fmt.Errorf("%q leads out of the context by a link", name)
		}
		todo = append(strings.Split(link, "/"), todo...)
	}
	if len(done) == 0 {
		return ".", nil
	}
	return path.Join(done...), nil
}

// excluded reports whether nothing of a path is in the context. A directory may have files that an exception includes again.
func (t *tree) excluded(file string) (bool, error) {
	if file == "." {
		return false, nil
	}
	is, err := t.ignore.MatchesOrParentMatches(file)
	if err != nil || !is || !t.ignore.Exclusions() {
		return is, err
	}
	info, err := t.root.Lstat(file)
	if err != nil || !info.IsDir() {
		return is, err
	}
	some := errors.New("some")
	p := packing{tree: t, entries: map[string]entry{}, found: func(entry) error { return some }}
	if err := p.pack(file, file); !errors.Is(err, some) {
		return err == nil, err
	}
	return false, nil
}

// entry is a file of an archive.
type entry struct {
	name string // in the archive
	file string // in the context, without links but for the last part
	mode fs.FileMode
	size int64
	time time.Time
	link string
	// inline: the content is data.
	inline bool
	data   []byte
}

// packing collects the entries of an archive by their names.
type packing struct {
	*tree
	// exclude has what --exclude leaves out, by paths in each source; nil: none.
	exclude *patternmatcher.PatternMatcher
	entries map[string]entry
	// found, if not nil, is called for each entry.
	found func(entry) error
}

// pack adds a file, or a directory with its content, under a name. A link that it is itself is followed; others are kept.
func (p *packing) pack(file, name string) error {
	target, err := p.resolve(file)
	if err != nil {
		return err
	}
	var parents patternmatcher.MatchInfo
	ignored := false
	for i, c := range target {
		if c == '/' {
			if ignored, parents, err = p.ignore.MatchesUsingParentResults(target[:i], parents); err != nil {
				return err
			}
		}
	}
	if target != "." {
		if ignored, parents, err = p.ignore.MatchesUsingParentResults(target, parents); err != nil {
			return err
		}
	}
	return p.walk(target, name, ignored, parents, "")
}

// walk adds a file by its name, and what is in it. inside is its path in the source.
func (p *packing) walk(file, name string, ignored bool, match patternmatcher.MatchInfo, inside string) error {
	info, err := p.root.Lstat(file)
	if err != nil {
		return err
	}
	out, err := p.leavesOut(file, inside, info)
	if err != nil || (out && !p.exclude.Exclusions()) {
		return err
	}
	if !ignored && !out && name != "." {
		err = p.one(file, name, info)
	}
	if err != nil || !info.IsDir() || (ignored && !p.ignore.Exclusions()) {
		return err
	}
	return p.children(file, name, match, inside)
}

// children adds what is in a directory.
func (p *packing) children(file, name string, match patternmatcher.MatchInfo, inside string) error {
	list, err := fs.ReadDir(p.root.FS(), file)
	if err != nil {
		return err
	}
	for _, e := range list {
		child := path.Join(file, e.Name())
		ignored, match, err := p.ignore.MatchesUsingParentResults(child, match)
		if err != nil {
			return err
		}
		if err := p.walk(child, path.Join(name, e.Name()), ignored, match, path.Join(inside, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// leavesOut reports whether --exclude has a file. A source that is a file itself is matched by its name.
func (p *packing) leavesOut(file, inside string, info fs.FileInfo) (bool, error) {
	if inside == "" && !info.IsDir() {
		inside = path.Base(file)
	}
	if p.exclude == nil || inside == "" {
		return false, nil
	}
	return p.exclude.MatchesOrParentMatches(inside)
}

// one adds one file.
func (p *packing) one(file, name string, info fs.FileInfo) error {
	e := entry{name: name, file: file, mode: info.Mode(), time: info.ModTime()}
	switch {
	case info.Mode().IsRegular():
		e.size = info.Size()
	case info.Mode()&fs.ModeSymlink != 0:
		link, err := p.root.Readlink(file)
		if err != nil {
			return err
		}
		e.link = link
	case !info.IsDir():
		return fmt.Errorf("%q is a socket, a FIFO or a device, which cannot be copied; .dockerignore excludes it", file)
	}
	p.entries[name] = e
	if p.found != nil {
		return p.found(e)
	}
	return nil
}

// sorted returns the entries, a directory before its content.
func (p *packing) sorted() []entry {
	all := make([]entry, 0, len(p.entries))
	for _, e := range p.entries {
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b entry) int { return strings.Compare(a.name, b.name) })
	return all
}

// Files are those of one COPY. They are read anew by each call, from the context that Parse was given.
type Files struct {
	root         *os.Root
	source, dest string
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
		err = fmt.Errorf("read %s: its files have changed; build again: %w", f.source, errs.ErrConflict)
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
	fields(sum, StepCopy, f.source, f.dest)
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
