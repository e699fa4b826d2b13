package dockerfile

import (
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"

	"github.com/barchan-dev/barchan/client/template"
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
		t.add(Step{Type: template.StepCopy, Args: []string{files.Source, files.Dest, owner(what.chown), mode(what.chmod)}, Files: files, Line: c.line, Text: c.text})
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
	stage, err := t.stageNamed(from, c.line)
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
	t.add(Step{Type: template.StepCopy, Args: args, Line: c.line, Text: c.text, From: &template.StageFiles{
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
	source, dest := ".", t.destination(what)
	p, err := t.files.NewPacking(what.exclude)
	if err != nil {
		return nil, fmt.Errorf("--exclude: %w", err)
	}
	switch inline := what.SourceContents; {
	case len(found)+len(inline) == 0:
		return nil, nil
	case len(found) == 1 && len(inline) == 0 && !what.parents:
		source = found[0].file
		if err := p.Pack(source, source); err != nil {
			return nil, err
		}
	case len(found) == 0 && len(inline) == 1:
		source = path.Base(inline[0].Path)
		p.Inline(source, inline[0].Data)
	default:
		dest = strings.TrimSuffix(dest, "/") + "/"
		for _, m := range found {
			if what.parents {
				err = p.WithParents(m.file, m.from)
			} else {
				err = p.Flatten(m.file)
			}
			if err != nil {
				return nil, err
			}
		}
		for _, content := range inline {
			p.Inline(path.Base(content.Path), content.Data)
		}
	}
	return p.Files(source, dest), nil
}

// matched is a file that a source names. Its parents from that part of its path on are kept by --parents.
type matched struct{ file, from string }

func (t *translator) matches(what *copying) (found []matched, err error) {
	for _, source := range what.SourcePaths {
		above, _, pivot := strings.Cut(strings.TrimLeft(source, "/"), "/./")
		if above = path.Clean(above); !pivot {
			above = "."
		}
		files, err := t.files.Match(source)
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
