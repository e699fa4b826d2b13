package dockerfile

import (
	"fmt"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"

	"github.com/barchan-dev/barchan/client/template"
)

// remote matches what ADD would fetch, git those that are repositories.
var (
	remote = regexp.MustCompile(`^([a-zA-Z][a-zA-Z0-9+.-]*://|git@)`)
	git    = regexp.MustCompile(`^(git|ssh)(@|://)|\.git(#|$)`)
	digest = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
)

// boundDir is where the server mounts the file of a step's first mount.
const boundDir = "/run/barchan/0"

func (t *translator) addFiles(c command, i *instructions.AddCommand) {
	what := &copying{SourcesAndDest: i.SourcesAndDest, verb: "ADD", chown: i.Chown, chmod: i.Chmod, exclude: i.ExcludePatterns}
	unpack := i.Unpack == nil || *i.Unpack
	switch {
	case slices.ContainsFunc(i.SourcePaths, remote.MatchString):
		t.fetch(c, what, i)
		return
	case i.Checksum != "" || i.KeepGitDir != nil:
		t.fault(c.line, "ADD --checksum and --keep-git-dir are for URLs")
		return
	case !unpack || !t.fits(c, what):
		t.copyFiles(c, what)
		return
	}
	archives, err := t.unpacked(what)
	if err != nil {
		t.fault(c.line, "ADD: %v", err)
		return
	}
	if len(what.SourcePaths)+len(what.SourceContents) > 0 {
		t.copyFiles(c, what)
	}
	for _, file := range archives {
		t.extract(c, what, file)
	}
}

// unpacked takes the archives away from the sources of an ADD, and returns them.
func (t *translator) unpacked(what *copying) (archives []string, err error) {
	var plain []string
	for _, source := range what.SourcePaths {
		found, err := t.files.Match(source)
		if err != nil {
			return nil, err
		}
		packed, err := t.files.Archives(found)
		if err != nil {
			return nil, err
		}
		archives = append(archives, packed...)
		if len(packed) == 0 {
			plain = append(plain, source)
			continue
		}
		for _, file := range found {
			if !slices.Contains(packed, file) {
				plain = append(plain, file)
			}
		}
	}
	what.SourcePaths = plain
	return archives, nil
}

// extract has the sandbox's tar unpack an archive, in which it is mounted: a hostile one meets the sandbox's limits.
func (t *translator) extract(c command, what *copying, file string) {
	if what.chown != "" || what.chmod != "" || len(what.exclude) > 0 {
		t.fault(c.line, "ADD of an archive with --chown, --chmod or --exclude is not supported yet; add a RUN that changes the files")
		return
	}
	files, err := t.gather(&copying{SourcesAndDest: instructions.SourcesAndDest{SourcePaths: []string{file}, DestPath: "/"}})
	if err != nil {
		t.fault(c.line, "ADD: %v", err)
		return
	}
	at, dest := path.Join(boundDir, path.Base(files.Source)), t.absolute(what.DestPath)
	script := fmt.Sprintf("mkdir -p %s && tar -xf %s -C %[1]s", quote(dest), quote(at))
	step := Step{Type: template.StepRun, Args: []string{script, firstUser}, Line: c.line, Text: c.text}
	mount := template.Mount{Type: template.MountBind, Target: at}
	t.bound(&step, &mount, 0, files)
	step.Mounts = append(step.Mounts, mount)
	t.add(step)
}

// fetch has the sandbox fetch a URL, under its rules of egress. The result is kept by what the instruction says, so that it must
// say what the content is.
func (t *translator) fetch(c command, what *copying, i *instructions.AddCommand) {
	source := i.SourcePaths[0]
	u, err := url.Parse(source)
	switch {
	case git.MatchString(source):
		t.fault(c.line, "ADD of a git repository is not supported; use RUN git clone")
	case err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "":
		t.fault(c.line, "ADD of %.80q: only http and https are supported", source)
	case len(i.SourcePaths)+len(i.SourceContents) > 1:
		t.fault(c.line, "ADD of a URL takes no other source; use an ADD of each")
	case !digest.MatchString(i.Checksum):
		t.fault(c.line, "ADD of a URL needs --checksum=sha256:HEX, for its kept result would hide a change; or use RUN curl -o")
	case len(what.exclude) > 0:
		t.fault(c.line, "ADD --exclude is not for URLs")
	case t.fits(c, what):
		t.download(c, what, u, strings.TrimPrefix(i.Checksum, "sha256:"))
	}
}

func (t *translator) download(c command, what *copying, u *url.URL, sum string) {
	dest := t.destination(what)
	if strings.HasSuffix(dest, "/") {
		name := path.Base(u.Path)
		if name == "/" || name == "." {
			t.fault(c.line, "ADD: the URL has no name of a file; name one in the destination")
			return
		}
		dest += name
	}
	mode := mode(what.chmod)
	if mode == "" {
		mode = "0600" // as in Docker
	}
	script := fmt.Sprintf(`set -e; mkdir -p %s; if command -v curl >/dev/null; then curl -fsSL -o %[2]s %[3]s; else wget -q -O %[2]s %[3]s; fi; `+
		`echo %[4]s | sha256sum -c - >/dev/null || { echo "the file has another checksum:" >&2; sha256sum %[2]s >&2; exit 1; }; chown %[5]s %[2]s; chmod %[6]s %[2]s`,
		quote(path.Dir(dest)), quote(dest), quote(what.SourcePaths[0]), quote(sum+"  "+dest), quote(owner(what.chown)), mode)
	t.add(Step{Type: template.StepRun, Args: []string{t.exports() + quote("/bin/sh", "-c", script), firstUser}, Line: c.line, Text: c.text})
}
