package dockerfile

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
)

// copying is a COPY or ADD.
type copying struct {
	instructions.SourcesAndDest
	verb         string
	chown, chmod string
	// check refuses a file; nil: none.
	check func(file string) error
}

func (t *translator) copy(c command, i *instructions.CopyCommand) {
	switch {
	case i.From != "":
		t.fault(c.line, "COPY --from is not supported yet")
	case i.Parents:
		t.fault(c.line, "COPY --parents is not supported yet")
	case len(i.ExcludePatterns) > 0:
		t.fault(c.line, "COPY --exclude is not supported yet; .dockerignore excludes files")
	default:
		t.copyFiles(c, &copying{SourcesAndDest: i.SourcesAndDest, verb: "COPY", chown: i.Chown, chmod: i.Chmod})
	}
}

// remote matches what ADD would fetch.
var remote = regexp.MustCompile(`^([a-zA-Z][a-zA-Z0-9+.-]*://|git@)`)

func (t *translator) addFiles(c command, i *instructions.AddCommand) {
	switch {
	case slices.ContainsFunc(i.SourcePaths, remote.MatchString):
		t.fault(c.line, "ADD of URLs is not supported yet; use RUN curl -o")
	case i.Checksum != "" || i.KeepGitDir != nil || i.Unpack != nil:
		t.fault(c.line, "ADD --checksum, --keep-git-dir and --unpack are not supported yet")
	case len(i.ExcludePatterns) > 0:
		t.fault(c.line, "ADD --exclude is not supported yet; .dockerignore excludes files")
	default:
		t.copyFiles(c, &copying{SourcesAndDest: i.SourcesAndDest, verb: "ADD", chown: i.Chown, chmod: i.Chmod, check: t.files.refuseArchive})
	}
}

// octal is a mode that all servers know.
var octal = regexp.MustCompile(`^0?[0-7]{3,4}$`)

func (t *translator) copyFiles(c command, what *copying) {
	if what.DestPath == "" {
		t.fault(c.line, "%s has no destination", what.verb)
		return
	}
	if len(what.SourcePaths)+len(what.SourceContents) > 1 && !strings.HasSuffix(what.DestPath, "/") {
		t.fault(c.line, "%s of several sources needs a directory as its destination: add a / to %q", what.verb, what.DestPath)
		return
	}
	if what.chmod != "" && !octal.MatchString(what.chmod) {
		t.fault(c.line, "%s --chmod=%s is not supported yet; use an octal mode such as 0755", what.verb, what.chmod)
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
// context. Several are packed as they will be in the destination: files by their names, and directories by their content.
func (t *translator) gather(what *copying) (*Files, error) {
	var found []string
	for _, source := range what.SourcePaths {
		more, err := t.files.match(source)
		if err != nil {
			return nil, err
		}
		found = append(found, more...)
	}
	f := &Files{root: t.opt.Context, dest: t.absolute(what.DestPath)}
	if last := path.Base(what.DestPath); strings.HasSuffix(what.DestPath, "/") || last == "." || last == ".." {
		f.dest = strings.TrimSuffix(f.dest, "/") + "/"
	}
	p := packing{tree: t.files, check: what.check, entries: map[string]entry{}}
	switch inline := what.SourceContents; {
	case len(found)+len(inline) == 0:
		return nil, nil
	case len(found) == 1 && len(inline) == 0:
		f.source = found[0]
		if err := p.pack(found[0], found[0]); err != nil {
			return nil, err
		}
	case len(found) == 0 && len(inline) == 1:
		f.source = path.Base(inline[0].Path)
		p.inline(inline[0])
	default:
		f.source = "."
		f.dest = strings.TrimSuffix(f.dest, "/") + "/"
		for _, file := range found {
			if err := p.flatten(file); err != nil {
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
