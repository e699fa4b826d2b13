package dockerfile

import (
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/patternmatcher"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

// copying is a COPY or ADD.
type copying struct {
	instructions.SourcesAndDest
	verb         string
	chown, chmod string
	parents      bool
	exclude      []string
}

func (t *translator) copy(c command, i *instructions.CopyCommand) {
	what := &copying{SourcesAndDest: i.SourcesAndDest, verb: "COPY", chown: i.Chown, chmod: i.Chmod, parents: i.Parents, exclude: i.ExcludePatterns}
	if i.From != "" {
		t.copyStage(c, what, i.From)
		return
	}
	t.copyFiles(c, what)
}

// octal is a mode that all servers know.
var octal = regexp.MustCompile(`^0?[0-7]{3,4}$`)

// fits refuses a copy that has no place or no mode.
func (t *translator) fits(c command, what *copying) bool {
	switch {
	case what.DestPath == "":
		t.fault(c.line, "%s has no destination", what.verb)
	case len(what.SourcePaths)+len(what.SourceContents) > 1 && !strings.HasSuffix(what.DestPath, "/"):
		t.fault(c.line, "%s of several sources needs a directory as its destination: add a / to %q", what.verb, what.DestPath)
	case what.chmod != "" && !octal.MatchString(what.chmod):
		t.fault(c.line, "%s --chmod=%s is not supported yet; use an octal mode such as 0755", what.verb, what.chmod)
	default:
		return true
	}
	return false
}

func (t *translator) copyFiles(c command, what *copying) {
	if !t.fits(c, what) {
		return
	}
	files, err := t.gather(what)
	switch {
	case err != nil:
		t.fault(c.line, "%s: %v", what.verb, err)
	case files == nil:
		t.note(c.line, "%s has no effect: no file matches %s", what.verb, strings.Join(what.SourcePaths, " "))
	default:
		t.add(Step{Type: StepCopy, Args: []string{files.source, files.dest, owner(what.chown), mode(what.chmod)}, Files: files, Line: c.line, Text: c.text})
	}
}

// copyStage copies files of a stage or an image. Without --chown they keep their owners.
func (t *translator) copyStage(c command, what *copying, from string) {
	switch {
	case !t.fits(c, what):
		return
	case len(what.SourceContents) > 0:
		t.fault(c.line, "COPY --from=%s: an inline file is of no stage", from)
		return
	}
	stage, err := t.stageNamed(from)
	if err != nil {
		t.fault(c.line, "COPY --from=%s: %v", from, err)
		return
	}
	for i, source := range what.SourcePaths {
		what.SourcePaths[i] = "/" + strings.TrimLeft(source, "/")
	}
	args := []string{what.SourcePaths[0], t.destination(what), "", mode(what.chmod)}
	if what.chown != "" {
		args[2] = owner(what.chown)
	}
	t.add(Step{Type: StepCopy, Args: args, Line: c.line, Text: c.text, From: &barchan.StageFiles{
		Stage: stage, Paths: what.SourcePaths[1:], Exclude: what.exclude, Parents: what.parents,
	}})
}

// destination returns the absolute path, with a / at its end if it is a directory.
func (t *translator) destination(what *copying) string {
	dest := t.absolute(what.DestPath)
	if last := path.Base(what.DestPath); strings.HasSuffix(what.DestPath, "/") || last == "." || last == ".." {
		dest = strings.TrimSuffix(dest, "/") + "/"
	}
	return dest
}

// mode returns an octal mode of four digits, as E2B's SDKs send it.
func mode(text string) string {
	if text == "" {
		return ""
	}
	n, _ := strconv.ParseUint(text, 8, 32) // it matches octal
	return fmt.Sprintf("%04o", n)
}

// owner returns what chown takes for a --chown: without a group it is the user's own, and without a user root.
func owner(text string) string {
	user, group, both := strings.Cut(text, ":")
	switch {
	case text == "":
		return "root:root"
	case both && (user == "" || group != ""):
		return text
	}
	if _, err := strconv.ParseUint(user, 10, 32); err == nil {
		return user + ":" + user
	}
	return user + ":"
}

// gather finds the files of a COPY; nil: wildcards alone, which match none. A single source is packed by its path in the
// context. Several are packed as they will be in the destination: files by their names, and directories by their content; with
// --parents by their paths.
func (t *translator) gather(what *copying) (*Files, error) {
	found, err := t.matches(what)
	if err != nil {
		return nil, err
	}
	f := &Files{root: t.opt.Context, dest: t.destination(what)}
	p := packing{tree: t.files, entries: map[string]entry{}}
	if p.exclude, err = patternmatcher.New(what.exclude); err != nil {
		return nil, fmt.Errorf("--exclude: %w", err)
	}
	switch inline := what.SourceContents; {
	case len(found)+len(inline) == 0:
		return nil, nil
	case len(found) == 1 && len(inline) == 0 && !what.parents:
		f.source = found[0].file
		if err := p.pack(found[0].file, found[0].file); err != nil {
			return nil, err
		}
	case len(found) == 0 && len(inline) == 1:
		f.source = path.Base(inline[0].Path)
		p.inline(inline[0])
	default:
		f.source = "."
		f.dest = strings.TrimSuffix(f.dest, "/") + "/"
		for _, m := range found {
			if what.parents {
				err = p.withParents(m)
			} else {
				err = p.flatten(m.file)
			}
			if err != nil {
				return nil, err
			}
		}
		for _, content := range inline {
			p.inline(content)
		}
	}
	f.entries = p.sorted()
	return f, nil
}

// matched is a file that a source names. Its parents from that part of its path on are kept by --parents.
type matched struct{ file, from string }

func (t *translator) matches(what *copying) (found []matched, err error) {
	for _, source := range what.SourcePaths {
		above, _, pivot := strings.Cut(strings.TrimLeft(source, "/"), "/./")
		if above = path.Clean(above); !pivot {
			above = "."
		}
		files, err := t.files.match(source)
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			from := file
			if above != "." {
				from = strings.TrimPrefix(strings.TrimPrefix(file, above), "/")
			}
			found = append(found, matched{file, from})
		}
	}
	return found, nil
}

// withParents packs a source by its path, with the directories above it.
func (p *packing) withParents(m matched) error {
	above := strings.TrimSuffix(strings.TrimSuffix(m.file, m.from), "/")
	for i, c := range m.from {
		if c != '/' {
			continue
		}
		target, err := p.resolve(path.Join(above, m.from[:i]))
		if err != nil {
			return err
		}
		info, err := p.root.Lstat(target)
		if err != nil {
			return err
		}
		if err := p.one(target, m.from[:i], info); err != nil {
			return err
		}
	}
	if m.from == "" {
		m.from = "."
	}
	return p.pack(m.file, m.from)
}

// flatten packs a source as one of several.
func (p *packing) flatten(file string) error {
	target, err := p.resolve(file)
	if err != nil {
		return err
	}
	info, err := p.root.Lstat(target)
	if err != nil {
		return err
	}
	if info.IsDir() {
		return p.pack(file, ".")
	}
	return p.pack(file, path.Base(file))
}

// inline packs a file that the Dockerfile has itself.
func (p *packing) inline(content instructions.SourceContent) {
	name := path.Base(content.Path)
	p.entries[name] = entry{name: name, mode: 0o644, data: []byte(content.Data), size: int64(len(content.Data)), inline: true}
}
