// Package dockerfile turns a Dockerfile and a directory into the steps of a template build, and packs the files that they
// copy. It reads files of that directory alone, sends nothing, and runs nothing. What it cannot do exactly it refuses by line,
// or says in a note.
package dockerfile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Types of steps, as the E2B API names them.
const (
	StepRun     = "RUN"     // the command
	StepCopy    = "COPY"    // source, destination, owner, octal mode
	StepWorkdir = "WORKDIR" // the path
	StepUser    = "USER"    // the name
	StepEnv     = "ENV"     // names and values in turn
)

// What a build starts with and ends with unless the Dockerfile says otherwise, as in E2B's SDKs.
const (
	firstUser    = "root"
	firstWorkdir = "/"
	lastUser     = "user"
	lastWorkdir  = "/home/user"
)

// maxSteps is the server's.
const maxSteps = 256

// Plan is a template build.
type Plan struct {
	From  Source
	Steps []Step
	// StartCommand and ReadyCommand are for a shell; empty: none.
	StartCommand, ReadyCommand string
	// Notes say what of the Dockerfile has no effect, by line.
	Notes []string
}

// Source is what a build starts from: an image or a template.
type Source struct {
	Image, Template string
	Line            int // of FROM
}

// Step is one instruction of a build.
type Step struct {
	Type string
	Args []string
	// Files are those of a StepCopy; nil for others.
	Files *Files
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
	from, err := newTree(opt.Context, opt.Ignore)
	if err != nil {
		return nil, err
	}
	t := &translator{
		opt: opt, files: from, lex: shell.NewLex(ast.EscapeToken), used: map[string]bool{},
		env: variables{}, args: variables{}, globals: variables{}, shell: []string{"/bin/sh", "-c"}, plan: &Plan{},
	}
	stages := t.stages(ast.AST)
	if len(t.faults) == 0 {
		t.build(stages)
	}
	if n := len(t.plan.Steps); n > maxSteps {
		t.faults = append(t.faults, fmt.Sprintf("%s: makes %d steps, the maximum is %d; join some of its instructions", opt.Name, n, maxSteps))
	}
	if len(t.faults) > 0 {
		return nil, fmt.Errorf("%s: %w", strings.Join(t.faults, "\n"), errs.ErrInvalid)
	}
	return t.plan, nil
}

// position returns ":LINE" of an error of the parser, or nothing.
func position(err error) string {
	if at, ok := errors.AsType[*parser.LocationError](err); ok && len(at.Locations) > 0 && len(at.Locations[0]) > 0 && at.Locations[0][0].Start.Line > 0 {
		return ":" + strconv.Itoa(at.Locations[0][0].Start.Line)
	}
	return ""
}

func withKind(err error) error { return fmt.Errorf("%w: %w", err, errs.ErrInvalid) }

// stage is a FROM with its instructions.
type stage struct {
	instructions.Stage
	line     int
	commands []command
}

// command is an instruction with its line.
type command struct {
	instructions.Command
	line int
	text string
}

// stages reads all instructions. ARG before the first FROM sets globals.
func (t *translator) stages(ast *parser.Node) []stage {
	var all []stage
	for _, node := range ast.Children {
		parsed, err := instructions.ParseInstruction(node)
		if err != nil {
			t.fault(node.StartLine, "%v", err)
			continue
		}
		switch c := parsed.(type) {
		case *instructions.Stage:
			all = append(all, stage{Stage: *c, line: node.StartLine})
		case *instructions.ArgCommand:
			if len(all) == 0 {
				t.declare(node.StartLine, c, t.globals, nil)
				continue
			}
			last := &all[len(all)-1]
			last.commands = append(last.commands, command{c, node.StartLine, textOf(node)})
		case instructions.Command:
			if len(all) == 0 {
				t.fault(node.StartLine, "%s is before the first FROM", strings.ToUpper(c.Name()))
				continue
			}
			last := &all[len(all)-1]
			last.commands = append(last.commands, command{c, node.StartLine, textOf(node)})
		}
	}
	if len(all) == 0 && len(t.faults) == 0 {
		t.faults = append(t.faults, t.opt.Name+": has no FROM")
	}
	return all
}

// textOf returns an instruction as one line.
func textOf(node *parser.Node) string {
	line, _, _ := strings.Cut(strings.TrimSpace(node.Original), "\n")
	return strings.Join(strings.Fields(line), " ")
}

// build translates the target stage, after those that it is FROM.
func (t *translator) build(all []stage) {
	at, ok := target(all, t.opt.Target)
	if !ok {
		t.faults = append(t.faults, fmt.Sprintf("%s: has no stage %q; --target names one", t.opt.Name, t.opt.Target))
		return
	}
	chain := []int{at}
	name := t.baseOf(&all[at])
	for {
		earlier := slices.IndexFunc(all[:at], func(s stage) bool { return s.Name != "" && strings.EqualFold(s.Name, name) })
		if earlier < 0 {
			break
		}
		at = earlier
		chain = append(chain, at)
		name = t.baseOf(&all[at])
	}
	for i := range all {
		if !slices.Contains(chain, i) {
			t.note(all[i].line, "this stage is left out: stage %s is not FROM it", stageName(all, chain[0]))
		}
	}
	t.from(&all[at], name)
	for _, i := range slices.Backward(chain) {
		t.cmdSet = false
		for _, c := range all[i].commands {
			t.step(c)
		}
	}
	t.end()
}

func stageName(all []stage, i int) string {
	if all[i].Name != "" {
		return all[i].Name
	}
	return strconv.Itoa(i)
}

// target returns the index of the stage to build.
func target(all []stage, name string) (int, bool) {
	if name == "" {
		return len(all) - 1, true
	}
	for i := range all {
		if all[i].Name != "" && strings.EqualFold(all[i].Name, name) {
			return i, true
		}
	}
	i, err := strconv.Atoi(name)
	return i, err == nil && i >= 0 && i < len(all)
}

// baseOf returns the image or stage of a FROM.
func (t *translator) baseOf(s *stage) string {
	name, err := t.expandWith(s.line, s.BaseName, t.globals)
	if err != nil {
		t.fault(s.line, "FROM %s: %v", s.BaseName, err)
	} else if name == "" {
		t.fault(s.line, "FROM %s: the name is empty; give its arguments a value by --build-arg", s.BaseName)
	}
	return name
}

// from sets what the build starts from.
func (t *translator) from(s *stage, image string) {
	switch {
	case t.opt.FromTemplate != "":
		t.plan.From.Template = t.opt.FromTemplate
	case image == "scratch":
		t.fault(s.line, "FROM scratch is not supported yet; a template needs an image with a shell")
	default:
		t.plan.From.Image = image
	}
	if s.Platform != "" {
		t.note(s.line, "FROM --platform has no effect: sandboxes have the platform of their server")
	}
	t.plan.From.Line = s.line
	t.preset(StepUser, firstUser)
	t.preset(StepWorkdir, firstWorkdir)
	t.workdir = firstWorkdir
	for _, name := range proxyArgs {
		if value, ok := t.opt.BuildArgs[name]; ok {
			t.args.set(name, value)
			t.used[name] = true
		}
	}
}

// preset adds a step that no line asks for.
func (t *translator) preset(kind, value string) {
	t.add(Step{Type: kind, Args: []string{value}, Line: t.plan.From.Line, Text: kind + " " + value})
}

// end adds the steps and commands of the end.
func (t *translator) end() {
	if !t.userSet {
		t.preset(StepUser, lastUser)
	}
	if !t.workdirSet {
		t.preset(StepWorkdir, lastWorkdir)
	}
	start := t.entrypoint
	if !t.entrypointShell {
		start = slices.Concat(t.entrypoint, t.cmd)
	}
	if len(start) > 0 {
		t.plan.StartCommand = t.path() + quote(start...)
	}
	if len(t.health) > 0 {
		t.plan.ReadyCommand = t.path() + quote(t.health...)
	}
	var unused []string
	for name := range t.opt.BuildArgs {
		if !t.used[name] {
			unused = append(unused, name)
		}
	}
	slices.Sort(unused)
	for _, name := range unused {
		t.plan.Notes = append(t.plan.Notes, fmt.Sprintf("%s: has no ARG %s, which --build-arg sets", t.opt.Name, name))
	}
}
