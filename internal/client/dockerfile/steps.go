package dockerfile

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"github.com/barchan-dev/barchan/client/template"
)

// translator holds the state between the instructions of a stage, and of those that it is FROM.
type translator struct {
	*file
	steps []Step
	from  Source
	// at is the index of the stage whose instructions are translated.
	at int

	args, env           variables
	shell               []string
	workdir             string
	userSet, workdirSet bool
	// entrypoint, cmd and health are words of commands. An ENTRYPOINT in shell form takes no CMD.
	entrypoint, cmd, health []string
	entrypointShell         bool
	healthTime              time.Duration
	// cmdSet is of this stage: an ENTRYPOINT drops the CMD of an earlier one.
	cmdSet bool
}

func (t *translator) add(s Step) { t.steps = append(t.steps, s) }

// step translates one instruction.
func (t *translator) step(c command) {
	switch i := c.Command.(type) {
	case *instructions.ArgCommand:
		t.declare(c.line, i, t.args, t.globals)
	case *instructions.RunCommand:
		t.run(c, i)
	case *instructions.CopyCommand, *instructions.AddCommand, *instructions.EnvCommand, *instructions.UserCommand, *instructions.WorkdirCommand:
		t.expanded(c)
	case *instructions.ShellCommand:
		t.shell = i.Shell
	case *instructions.CmdCommand:
		t.cmd, t.cmdSet = t.words(i.ShellDependantCmdLine), true
	case *instructions.EntrypointCommand:
		t.entrypoint, t.entrypointShell = t.words(i.ShellDependantCmdLine), i.PrependShell
		if !t.cmdSet {
			t.cmd = nil
		}
	case *instructions.HealthCheckCommand:
		t.healthcheck(c, i)
	case *instructions.LabelCommand, *instructions.ExposeCommand, *instructions.MaintainerCommand, *instructions.StopSignalCommand:
		t.note(c.line, "%s has no effect", strings.ToUpper(c.Name()))
	case *instructions.VolumeCommand:
		t.note(c.line, "VOLUME has no effect: its files are a sandbox's like all others")
	case *instructions.OnbuildCommand:
		t.fault(c.line, "ONBUILD is for images that others are built from, which a template is not; put the instruction into that Dockerfile")
	default:
		t.fault(c.line, "%s is not supported yet", strings.ToUpper(c.Name()))
	}
}

// expanded translates an instruction after its variables have been replaced; a RUN leaves that to its shell.
func (t *translator) expanded(c command) {
	var err error
	if e, ok := c.Command.(instructions.SupportsSingleWordExpansion); ok {
		err = e.Expand(t.expander(c.line))
	}
	if e, ok := c.Command.(instructions.SupportsSingleWordExpansionRaw); ok && err == nil {
		err = e.ExpandRaw(t.expandText)
	}
	if err != nil {
		t.fault(c.line, "%s: %v", strings.ToUpper(c.Name()), err)
		return
	}
	switch i := c.Command.(type) {
	case *instructions.CopyCommand:
		t.copy(c, i)
	case *instructions.AddCommand:
		t.addFiles(c, i)
	case *instructions.EnvCommand:
		t.setEnv(c, i)
	case *instructions.UserCommand:
		t.setUser(c, i)
	case *instructions.WorkdirCommand:
		t.setWorkdir(c, i)
	}
}

// expandText replaces the variables of a file that the Dockerfile has inline.
func (t *translator) expandText(text string) (string, error) {
	lex := shell.NewLex('\\')
	lex.SkipProcessQuotes = true
	text, _, err := lex.ProcessWord(text, t.scope())
	return text, cause(err)
}

func (t *translator) run(c command, i *instructions.RunCommand) {
	if security := instructions.GetSecurity(i); security != instructions.SecuritySandbox {
		t.fault(c.line, "RUN --security=%s: no command leaves its sandbox", security)
		return
	}
	words, err := t.runWords(i)
	step := Step{Type: template.StepRun, Line: c.line, Text: c.text}
	if err == nil {
		err = t.surround(&step, i)
	}
	switch {
	case err != nil:
		t.fault(c.line, "RUN: %v", err)
	case len(words) == 0:
		t.fault(c.line, "RUN has no command")
	default:
		step.Args = []string{t.exports() + quote(words...)}
		t.add(step)
	}
}

// runWords returns the words of a command, with its inline files as Docker takes them: one that is the whole command is a
// script for the shell or, if it begins with #!, for its interpreter; others are left to the shell.
func (t *translator) runWords(i *instructions.RunCommand) ([]string, error) {
	if len(i.Files) == 0 {
		return t.words(i.ShellDependantCmdLine), nil
	}
	if len(i.CmdLine) != 1 || !i.PrependShell {
		return nil, errors.New("an inline file needs a command in shell form")
	}
	heredoc, err := parser.ParseHeredoc(i.CmdLine[0])
	if err != nil {
		return nil, err
	}
	script := i.CmdLine[0]
	if heredoc == nil {
		for _, f := range i.Files {
			script += "\n" + f.Data + f.Name
		}
	} else {
		script = i.Files[0].Data
		if i.Files[0].Chomp {
			script = parser.ChompHeredocContent(script)
		}
		if strings.HasPrefix(script, "#!") {
			script = `file=$(mktemp) && printf %s ` + quote(script) + ` >"$file" && chmod 755 "$file" && "$file"; code=$?; rm -f "$file"; exit $code`
			return []string{"/bin/sh", "-c", script}, nil
		}
	}
	return append(slices.Clone(t.shell), script), nil
}

// words returns the words of a command in shell or exec form.
func (t *translator) words(line instructions.ShellDependantCmdLine) []string {
	if line.PrependShell && len(line.CmdLine) > 0 {
		return append(slices.Clone(t.shell), strings.Join(line.CmdLine, " "))
	}
	return line.CmdLine
}

func (t *translator) healthcheck(c command, i *instructions.HealthCheckCommand) {
	t.health, t.healthTime = nil, i.Health.Timeout
	if test := i.Health.Test; len(test) > 1 && test[0] == "CMD" {
		t.health = test[1:]
	} else if len(test) > 1 && test[0] == "CMD-SHELL" {
		t.health = append(slices.Clone(t.shell), test[1])
	}
	if h := i.Health; h.Interval != 0 || h.StartPeriod != 0 || h.StartInterval != 0 || h.Retries != 0 {
		t.note(c.line, "HEALTHCHECK: only --timeout has an effect: a build repeats the command every second at most, for 10 minutes")
	}
}

// ready returns the command of HEALTHCHECK for a shell, which ends it after its time if the image has timeout.
func (t *translator) ready() string {
	words := quote(t.health...)
	if t.healthTime > 0 {
		seconds := max(1, int64((t.healthTime+time.Second-1)/time.Second))
		words = fmt.Sprintf("if command -v timeout >/dev/null; then exec timeout -s KILL %d %s; fi; %s", seconds, words, words)
	}
	return t.path() + words
}

func (t *translator) setEnv(c command, i *instructions.EnvCommand) {
	var args []string
	for _, pair := range i.Env {
		args = append(args, pair.Key, pair.Value)
		t.env.set(pair.Key, pair.Value)
	}
	t.add(Step{Type: template.StepEnv, Args: args, Line: c.line, Text: c.text})
}

func (t *translator) setUser(c command, i *instructions.UserCommand) {
	user := strings.TrimSuffix(i.User, ":")
	if user == "" || user[0] == ':' {
		t.fault(c.line, "USER has no name")
		return
	}
	t.userSet = true
	t.add(Step{Type: template.StepUser, Args: []string{user}, Line: c.line, Text: c.text})
}

func (t *translator) setWorkdir(c command, i *instructions.WorkdirCommand) {
	if i.Path == "" {
		t.fault(c.line, "WORKDIR has no path")
		return
	}
	t.workdirSet, t.workdir = true, t.absolute(i.Path)
	t.add(Step{Type: template.StepWorkdir, Args: []string{t.workdir}, Line: c.line, Text: c.text})
}

// absolute returns a path in the sandbox, which may be relative to the working directory.
func (t *translator) absolute(p string) string {
	if path.IsAbs(p) {
		return path.Clean(p)
	}
	return path.Join(t.workdir, p)
}
