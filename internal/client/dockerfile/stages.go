package dockerfile

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/barchan-dev/barchan/client/template"
	"github.com/barchan-dev/barchan/internal/client/dockerfile/buildcontext"
)

// file is what the stages of a Dockerfile share.
type file struct {
	opt   Options
	files *buildcontext.Tree
	lex   *shell.Lex
	plan  *Plan
	// faults are messages with their lines.
	faults  []string
	globals variables
	used    map[string]bool // arguments that have an ARG

	all []stage
	// named has the stages of plan by what steps call them.
	named map[string]string
	// replaced is the stage whose image Options.FromTemplate replaces.
	replaced int
	needed   []int
}

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

// fault and note record a message once: a stage may be translated as a part of others.
func (f *file) fault(line int, format string, args ...any) {
	record(&f.faults, fmt.Sprintf("%s:%d: ", f.opt.Name, line)+fmt.Sprintf(format, args...))
}

func (f *file) note(line int, format string, args ...any) {
	record(&f.plan.Notes, fmt.Sprintf("%s:%d: ", f.opt.Name, line)+fmt.Sprintf(format, args...))
}

func record(list *[]string, text string) {
	if text = strings.Join(strings.Split(text, "\n"), " "); !slices.Contains(*list, text) {
		*list = append(*list, text)
	}
}

// readStages reads all instructions. ARG before the first FROM sets globals.
func (f *file) readStages(ast *parser.Node) {
	outer := &translator{file: f, args: variables{}, env: variables{}}
	for _, node := range ast.Children {
		parsed, err := instructions.ParseInstruction(node)
		if err != nil {
			f.fault(node.StartLine, "%v", err)
			continue
		}
		switch c := parsed.(type) {
		case *instructions.Stage:
			f.all = append(f.all, stage{Stage: *c, line: node.StartLine})
		case instructions.Command:
			arg, isArg := c.(*instructions.ArgCommand)
			switch n := len(f.all); {
			case n > 0:
				last := &f.all[n-1]
				last.commands = append(last.commands, command{c, node.StartLine, textOf(node)})
			case isArg:
				outer.declare(node.StartLine, arg, f.globals, nil)
			default:
				f.fault(node.StartLine, "%s is before the first FROM", strings.ToUpper(c.Name()))
			}
		}
	}
	if len(f.all) == 0 && len(f.faults) == 0 {
		f.faults = append(f.faults, f.opt.Name+": has no FROM")
	}
}

// textOf returns an instruction as one line.
func textOf(node *parser.Node) string {
	line, _, _ := strings.Cut(strings.TrimSpace(node.Original), "\n")
	return strings.Join(strings.Fields(line), " ")
}

// build translates the target stage, and those that it takes files of.
func (f *file) build() {
	at, ok := f.target(f.opt.Target)
	if !ok {
		f.faults = append(f.faults, fmt.Sprintf("%s: has no stage %q; --target names one", f.opt.Name, f.opt.Target))
		return
	}
	chain, _ := f.chainOf(at)
	f.replaced = chain[len(chain)-1]
	t := f.translate(at, true)
	t.end()
	f.plan.From, f.plan.Steps = t.from, t.steps
	for i := range f.all {
		if !slices.Contains(f.needed, i) {
			f.note(f.all[i].line, "this stage is left out: stage %s needs nothing of it", f.title(at))
		}
	}
	var unused []string
	for name := range f.opt.BuildArgs {
		if !f.used[name] {
			unused = append(unused, name)
		}
	}
	slices.Sort(unused)
	for _, name := range unused {
		record(&f.plan.Notes, fmt.Sprintf("%s: has no ARG %s, which --build-arg sets", f.opt.Name, name))
	}
}

// checkSizes refuses what the server would.
func (f *file) checkSizes() {
	check := func(steps []Step) {
		if n := len(steps); n > maxSteps {
			record(&f.faults, fmt.Sprintf("%s: makes %d steps, the maximum is %d; join some of its instructions", f.opt.Name, n, maxSteps))
		}
	}
	check(f.plan.Steps)
	for i := range f.plan.Stages {
		check(f.plan.Stages[i].Steps)
	}
	if n := len(f.plan.Stages); n > maxStages {
		record(&f.faults, fmt.Sprintf("%s: takes files of %d stages and images, the maximum is %d", f.opt.Name, n, maxStages))
	}
}

// title is what a message calls a stage.
func (f *file) title(i int) string {
	if f.all[i].Name != "" {
		return f.all[i].Name
	}
	return strconv.Itoa(i)
}

// target returns the index of the stage to build.
func (f *file) target(name string) (int, bool) {
	if name == "" {
		return len(f.all) - 1, true
	}
	return f.lookup(name)
}

// lookup finds a stage by its name or number; of several the last.
func (f *file) lookup(name string) (int, bool) {
	for i, s := range slices.Backward(f.all) {
		if s.Name != "" && strings.EqualFold(s.Name, name) {
			return i, true
		}
	}
	i, err := strconv.Atoi(name)
	return i, err == nil && i >= 0 && i < len(f.all)
}

// chainOf returns a stage, the one that it is FROM, and so on, and the image of the last one.
func (f *file) chainOf(at int) (chain []int, image string) {
	for {
		chain = append(chain, at)
		name := f.baseOf(&f.all[at])
		earlier := slices.IndexFunc(f.all[:at], func(s stage) bool { return s.Name != "" && strings.EqualFold(s.Name, name) })
		if earlier < 0 {
			return chain, name
		}
		at = earlier
	}
}

// baseOf returns the image or stage of a FROM.
func (f *file) baseOf(s *stage) string {
	name, err := f.expandWith(s.line, s.BaseName, f.globals)
	if err != nil {
		f.fault(s.line, "FROM %s: %v", s.BaseName, err)
	} else if name == "" {
		f.fault(s.line, "FROM %s: the name is empty; give its arguments a value by --build-arg", s.BaseName)
	}
	return name
}

// translate translates a stage, after those that it is FROM, as one chain of steps.
func (f *file) translate(at int, last bool) *translator {
	chain, image := f.chainOf(at)
	t := &translator{file: f, env: variables{}, shell: []string{"/bin/sh", "-c"}}
	t.begin(&f.all[chain[len(chain)-1]], image, f.opt.FromTemplate != "" && chain[len(chain)-1] == f.replaced)
	for _, i := range slices.Backward(chain) {
		if !slices.Contains(f.needed, i) {
			f.needed = append(f.needed, i)
		}
		t.at, t.cmdSet, t.args = i, false, t.proxies()
		for _, c := range f.all[i].commands {
			if last || !isOfSandboxes(c) {
				t.step(c)
			}
		}
	}
	return t
}

// isOfSandboxes reports whether an instruction is for the sandboxes of a template alone.
func isOfSandboxes(c command) bool {
	switch c.Command.(type) {
	case *instructions.CmdCommand, *instructions.EntrypointCommand, *instructions.HealthCheckCommand, *instructions.LabelCommand, *instructions.ExposeCommand,
		*instructions.MaintainerCommand, *instructions.StopSignalCommand, *instructions.VolumeCommand:
		return true
	}
	return false
}

// begin sets what a chain starts from.
func (t *translator) begin(s *stage, image string, replaced bool) {
	switch {
	case replaced:
		t.from.Template = t.opt.FromTemplate
	case image == "scratch":
		t.fault(s.line, "FROM scratch: commands and copies need a shell; start from an image that has one")
	default:
		t.from.Image = image
	}
	if s.Platform != "" {
		t.note(s.line, "FROM --platform has no effect: sandboxes have the platform of their server")
	}
	t.from.Line = s.line
	t.preset(template.StepUser, firstUser)
	t.preset(template.StepWorkdir, firstWorkdir)
	t.workdir = firstWorkdir
}

// proxies returns the arguments that need no ARG.
func (t *translator) proxies() variables {
	args := variables{}
	for _, name := range proxyArgs {
		if value, ok := t.opt.BuildArgs[name]; ok {
			args.set(name, value)
			t.used[name] = true
		}
	}
	return args
}

// preset adds a step that no line asks for.
func (t *translator) preset(kind, value string) {
	t.add(Step{Type: kind, Args: []string{value}, Line: t.from.Line, Text: kind + " " + value})
}

// end adds the steps and commands of the end.
func (t *translator) end() {
	if !t.userSet {
		t.preset(template.StepUser, lastUser)
	}
	if !t.workdirSet {
		t.preset(template.StepWorkdir, lastWorkdir)
	}
	start := t.entrypoint
	if !t.entrypointShell {
		start = slices.Concat(t.entrypoint, t.cmd)
	}
	if len(start) > 0 {
		t.plan.StartCommand = t.path() + quote(start...)
	}
	if len(t.health) > 0 {
		t.plan.ReadyCommand = t.ready()
	}
}

// stageNamed returns the name of a stage or an image in the plan, and adds it if it is new. line has the instruction that takes its files.
func (t *translator) stageNamed(from string, line int) (string, error) {
	at, is := t.lookup(from)
	switch {
	case strings.EqualFold(from, "scratch"):
		return "", errors.New("it has no files")
	case is && at >= t.at:
		return "", fmt.Errorf("stage %s is not before this one", t.title(at))
	case !is:
		if _, err := strconv.Atoi(from); err == nil {
			return "", errors.New("there is no such stage")
		}
		return t.addStage("image:"+from, "image", from, func() (Source, []Step) {
			return Source{Image: from, Line: line, Text: "from=" + from}, nil
		}), nil
	}
	title := t.title(at)
	return t.addStage("stage:"+strconv.Itoa(at), title, title, func() (Source, []Step) {
		s := t.translate(at, false)
		return s.from, s.essential()
	}), nil
}

// unnamed are the characters that a stage of the server cannot have in its name.
var unnamed = regexp.MustCompile(`[^a-z0-9]+`)

// addStage adds a stage to the plan by its key, once, after those that it needs itself.
func (f *file) addStage(key, wish, title string, translate func() (Source, []Step)) string {
	if name, has := f.named[key]; has {
		return name
	}
	from, steps := translate()
	if wish = strings.Trim(unnamed.ReplaceAllString(strings.ToLower(wish), "-"), "-"); wish == "" || wish[0] <= '9' {
		wish = strings.TrimSuffix("stage-"+wish, "-")
	}
	wish = wish[:min(len(wish), 50)]
	name := wish
	for n := 2; slices.ContainsFunc(f.plan.Stages, func(s Stage) bool { return s.Name == name }); n++ {
		name = fmt.Sprintf("%s-%d", wish, n)
	}
	f.named[key] = name
	f.plan.Stages = append(f.plan.Stages, Stage{Name: name, Title: title, From: from, Steps: steps})
	return name
}

// essential returns the steps of a stage; none if they change no file, so that its image needs no shell.
func (t *translator) essential() []Step {
	if slices.ContainsFunc(t.steps, func(s Step) bool {
		return s.Type == template.StepRun || s.Type == template.StepCopy || (s.Type == template.StepWorkdir && s.Text != template.StepWorkdir+" "+firstWorkdir)
	}) {
		return t.steps
	}
	return nil
}
