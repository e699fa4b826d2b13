// Package buildcontext reads the directory of a build without what .dockerignore excludes, and packs files of it as archives with a hash. It
// follows no link out of the directory, and knows nothing of Dockerfiles.
package buildcontext

import (
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/moby/patternmatcher"
	"github.com/moby/patternmatcher/ignorefile"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Tree is the context: a directory without what .dockerignore excludes.
type Tree struct {
	root   *os.Root
	ignore *patternmatcher.PatternMatcher
}

// New returns the files of a directory without those of the patterns of a .dockerignore.
func New(root *os.Root, ignore []byte) (*Tree, error) {
	patterns, err := ignorefile.ReadAll(bytes.NewReader(ignore))
	if err != nil {
		return nil, fmt.Errorf(".dockerignore: %w", withKind(err))
	}
	m, err := patternmatcher.New(patterns)
	if err != nil {
		return nil, fmt.Errorf(".dockerignore: %w", withKind(err))
	}
	return &Tree{root, m}, nil
}

// Match returns the files that a source names, by their paths in the context, which need not be clean of links.
func (t *Tree) Match(source string) ([]string, error) {
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
func (t *Tree) resolve(name string) (string, error) {
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
func (t *Tree) excluded(file string) (bool, error) {
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
	p := Packing{Tree: t, entries: map[string]entry{}, found: func(entry) error { return some }}
	if err := p.Pack(file, file); !errors.Is(err, some) {
		return err == nil, err
	}
	return false, nil
}

// Archives returns those of some files that ADD unpacks.
func (t *Tree) Archives(files []string) (packed []string, err error) {
	for _, file := range files {
		is, err := t.isArchive(file)
		if err != nil {
			return nil, err
		}
		if is {
			packed = append(packed, file)
		}
	}
	return packed, nil
}

// head is how much of a file says whether it is a tar.
const head = 512

// isArchive reports whether a file is a tar, maybe compressed. Of one that is packed by xz the name must say so.
func (t *Tree) isArchive(file string) (bool, error) {
	target, err := t.resolve(file)
	if err != nil {
		return false, err
	}
	info, err := t.root.Lstat(target)
	if err != nil || !info.Mode().IsRegular() {
		return false, err
	}
	f, err := t.root.Open(target)
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	start, err := begin(f)
	if err != nil {
		return false, fmt.Errorf("read %s: %w", file, err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return false, err
	}
	switch {
	case bytes.HasPrefix(start, []byte("\x1f\x8b")):
		zip, err := gzip.NewReader(f)
		if err != nil {
			return false, nil // it is copied as it is
		}
		start, _ = begin(zip)
	case bytes.HasPrefix(start, []byte("BZh")):
		start, _ = begin(bzip2.NewReader(f))
	case bytes.HasPrefix(start, []byte("\xfd7zXZ\x00")):
		return strings.HasSuffix(file, ".tar.xz") || strings.HasSuffix(file, ".txz"), nil
	}
	return len(start) == head && string(start[257:262]) == "ustar", nil
}

// begin returns the beginning of a file.
func begin(r io.Reader) ([]byte, error) {
	b := make([]byte, head)
	n, err := io.ReadFull(r, b)
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		err = nil
	}
	return b[:n], err
}

func withKind(err error) error { return fmt.Errorf("%w: %w", err, errs.ErrInvalid) }
