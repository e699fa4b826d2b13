package buildcontext

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/moby/patternmatcher"
)

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

// Packing collects the entries of an archive by their names.
type Packing struct {
	*Tree
	// exclude has what --exclude leaves out, by paths in each source; nil: none.
	exclude *patternmatcher.PatternMatcher
	entries map[string]entry
	// found, if not nil, is called for each entry.
	found func(entry) error
}

// Pack adds a file, or a directory with its content, under a name. A link that it is itself is followed; others are kept.
func (p *Packing) Pack(file, name string) error {
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
func (p *Packing) walk(file, name string, ignored bool, match patternmatcher.MatchInfo, inside string) error {
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
func (p *Packing) children(file, name string, match patternmatcher.MatchInfo, inside string) error {
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
func (p *Packing) leavesOut(file, inside string, info fs.FileInfo) (bool, error) {
	if inside == "" && !info.IsDir() {
		inside = path.Base(file)
	}
	if p.exclude == nil || inside == "" {
		return false, nil
	}
	return p.exclude.MatchesOrParentMatches(inside)
}

// one adds one file.
func (p *Packing) one(file, name string, info fs.FileInfo) error {
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
func (p *Packing) sorted() []entry {
	all := make([]entry, 0, len(p.entries))
	for _, e := range p.entries {
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b entry) int { return strings.Compare(a.name, b.name) })
	return all
}

// NewPacking returns an empty archive of files of the context. exclude are patterns of what it leaves out, by paths in each source.
func (t *Tree) NewPacking(exclude []string) (*Packing, error) {
	m, err := patternmatcher.New(exclude)
	if err != nil {
		return nil, err
	}
	return &Packing{Tree: t, exclude: m, entries: map[string]entry{}}, nil
}

// Inline packs a file of a content.
func (p *Packing) Inline(name, content string) {
	p.entries[name] = entry{name: name, mode: 0o644, data: []byte(content), size: int64(len(content)), inline: true}
}

// Files returns what was packed, for a COPY from source to dest.
func (p *Packing) Files(source, dest string) *Files {
	return &Files{root: p.root, Source: source, Dest: dest, entries: p.sorted()}
}

// WithParents packs a source by a part of its path, with the directories above it.
func (p *Packing) WithParents(file, from string) error {
	above := strings.TrimSuffix(strings.TrimSuffix(file, from), "/")
	for i, c := range from {
		if c != '/' {
			continue
		}
		target, err := p.resolve(path.Join(above, from[:i]))
		if err != nil {
			return err
		}
		info, err := p.root.Lstat(target)
		if err != nil {
			return err
		}
		if err := p.one(target, from[:i], info); err != nil {
			return err
		}
	}
	if from == "" {
		from = "."
	}
	return p.Pack(file, from)
}

// Flatten packs a source as one of several.
func (p *Packing) Flatten(file string) error {
	target, err := p.resolve(file)
	if err != nil {
		return err
	}
	info, err := p.root.Lstat(target)
	if err != nil {
		return err
	}
	if info.IsDir() {
		return p.Pack(file, ".")
	}
	return p.Pack(file, path.Base(file))
}
