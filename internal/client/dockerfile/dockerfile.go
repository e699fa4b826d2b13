// Package dockerfile turns a Dockerfile and a directory into the steps of a template build, and packs the files that they
// copy. It reads files of that directory alone, sends nothing, and runs nothing. What it cannot do exactly it refuses by line,
// or says in a note.
package dockerfile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/barchan-dev/barchan/client/template"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/dockerfile/buildcontext"
)

// What a build starts with and ends with unless the Dockerfile says otherwise, as in E2B's SDKs.
const (
	firstUser    = "root"
	firstWorkdir = "/"
	lastUser     = "user"
	lastWorkdir  = "/home/user"
)

// maxSteps and maxStages are the server's.
const (
	maxSteps  = 256
	maxStages = 32
)

// Files are those of one COPY.
type Files = buildcontext.Files

// Plan is a template build.
type Plan struct {
	From Source
	// Stages are those whose files steps take, each after those that it takes files of itself.
	Stages []Stage
	Steps  []Step
	// StartCommand and ReadyCommand are for a shell; empty: none.
	StartCommand, ReadyCommand string
	// Notes say what of the Dockerfile has no effect, by line.
	Notes []string
}

// Stage is a chain of steps whose files others take.
type Stage struct {
	// Name is for the server: lower-case letters, digits and dashes. Title is how the Dockerfile calls it.
	Name, Title string
	From        Source
	Steps       []Step
}

// Source is what a build starts from: an image or a template.
type Source struct {
	Image, Template string
	// Line is of FROM or, with the Text of it, of the instruction that takes files of an image.
	Line int
	Text string
}

// Step is one instruction of a build.
type Step struct {
	Type string
	Args []string
	// Files are those of a template.StepCopy from the context; nil for others.
	Files *Files
	// From has the files of a template.StepCopy from a stage.
	From *template.StageFiles
	// Mounts are those of a template.StepRun. Bound has the files of a Bind of the context by its index in Mounts; its FilesHash is to be set.
	Mounts  []template.Mount
	Bound   map[int]*Files
	Network string
	// Line of the Dockerfile, from 1, and the instruction on one line. A step that no line asks for has the line of FROM.
	Line int
	Text string
}

// Options configure Parse.
type Options struct {
	// Name of the Dockerfile in messages; required.
	Name string
	// BuildArgs are values of ARG instructions.
	BuildArgs map[string]string
	// Target is the last stage, by name or number from 0; empty: the last one of the file.
	Target string
	// Secrets are the IDs that the build is given.
	Secrets []string
	// FromTemplate is a template that replaces the image of FROM; empty: the image.
	FromTemplate string
	// Context has the files to copy; required.
	Context *os.Root
	// Ignore is the content of .dockerignore; files that it excludes are as if Context had them not.
	Ignore []byte
}

// Parse returns the build that a Dockerfile describes. Its error, of kind errs.ErrInvalid, has a line for each fault. The
// files of Plan are read later, from opt.Context.
func Parse(content []byte, opt Options) (*Plan, error) {
	ast, err := parser.Parse(bytes.NewReader(content))
	if err != nil {
		return nil, fmt.Errorf("%s%s: %w", opt.Name, position(err), withKind(err))
	}
	from, err := buildcontext.New(opt.Context, opt.Ignore)
	if err != nil {
		return nil, err
	}
	f := &file{opt: opt, files: from, lex: shell.NewLex(ast.EscapeToken), used: map[string]bool{}, globals: variables{}, named: map[string]string{}, plan: &Plan{}}
	f.readStages(ast.AST)
	if len(f.faults) == 0 {
		f.build()
	}
	f.checkSizes()
	if len(f.faults) > 0 {
		return nil, fmt.Errorf("%s: %w", strings.Join(f.faults, "\n"), errs.ErrInvalid)
	}
	return f.plan, nil
}

// position returns ":LINE" of an error of the parser, or nothing.
func position(err error) string {
	if at, ok := errors.AsType[*parser.LocationError](err); ok && len(at.Locations) > 0 && len(at.Locations[0]) > 0 && at.Locations[0][0].Start.Line > 0 {
		return ":" + strconv.Itoa(at.Locations[0][0].Start.Line)
	}
	return ""
}

func withKind(err error) error { return fmt.Errorf("%w: %w", err, errs.ErrInvalid) }
