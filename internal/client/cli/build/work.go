package build

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/client/template"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/client/dockerfile"
)

// cancelWithin bounds the cancellation of a build.
const cancelWithin = 10 * time.Second

// work is one build that the server knows.
type work struct {
	a     *app.App
	t     *app.Server
	name  string
	file  string // of messages
	plan  *dockerfile.Plan
	build template.Info
	// current is the step whose lines are printed, as in the log.
	current string
	cached  map[string]bool
}

// Result is what --json prints.
type Result struct {
	Name       string `json:"name"`
	TemplateID string `json:"templateID"`
	BuildID    string `json:"buildID"`
	Status     string `json:"status"` // ready or error
	Steps      int    `json:"steps"`
	Cached     int    `json:"cachedSteps"`
	// Failure is of an error.
	Failure *Failure `json:"failure,omitempty"`
}

// Failure is why a build failed.
type Failure struct {
	Message string `json:"message"`
	// Step is its number from 1, after "STAGE/" if it is a stage's, or base, or finalize.
	Step string `json:"step"`
	Line int    `json:"line,omitempty"`
	Text string `json:"text,omitempty"`
	// place is its number among all steps of its stage.
	place string
}

// start returns the build as the server takes it, with the hashes of all files.
func start(p *dockerfile.Plan, force bool, secrets map[string][]byte) (s template.Spec, err error) {
	s = template.Spec{
		FromImage: p.From.Image, FromTemplate: p.From.Template, StartCmd: p.StartCommand, ReadyCmd: p.ReadyCommand, Force: force, Secrets: secrets,
	}
	for _, stage := range p.Stages {
		out := template.Stage{Name: stage.Name, FromImage: stage.From.Image, FromTemplate: stage.From.Template}
		if out.Steps, err = wireSteps(stage.Steps); err != nil {
			return s, err
		}
		s.Stages = append(s.Stages, out)
	}
	s.Steps, err = wireSteps(p.Steps)
	return s, err
}

func wireSteps(steps []dockerfile.Step) ([]template.Step, error) {
	var all []template.Step
	for _, step := range steps {
		out := template.Step{Type: step.Type, Args: step.Args, From: step.From, Mounts: slices.Clone(step.Mounts), Network: step.Network}
		var err error
		if step.Files != nil {
			if out.FilesHash, err = step.Files.Hash(); err != nil {
				return nil, err
			}
		}
		for i, files := range step.Bound {
			if out.Mounts[i].FilesHash, err = files.Hash(); err != nil {
				return nil, err
			}
		}
		all = append(all, out)
	}
	return all, nil
}

// run uploads the files, starts the build and follows it to its end.
func (w *work) run(ctx context.Context, s template.Spec) error {
	steps := 0
	for _, list := range w.lists() {
		steps += len(list.steps)
		for i := range list.steps {
			if err := w.uploadAll(ctx, &list.steps[i]); err != nil {
				return fmt.Errorf("%s:%d: %w", w.file, list.steps[i].Line, err)
			}
		}
	}
	if err := template.Start(ctx, w.t.REST, w.build, s); err != nil {
		return err
	}
	status, err := template.Follow(ctx, w.t.REST, w.build, func(s *template.Status) {
		for i := range s.LogEntries {
			w.print(&s.LogEntries[i], s.Reason)
		}
	})
	if err != nil {
		return err
	}
	result := Result{Name: w.name, TemplateID: w.build.TemplateID, BuildID: w.build.BuildID, Status: status.Status, Steps: steps, Cached: len(w.cached)}
	if status.Status == template.StatusReady {
		return w.a.Result(result, w.build.TemplateID)
	}
	result.Failure = w.failure(status.Reason)
	if w.a.JSON {
		if err := w.a.PrintJSON(result); err != nil {
			return err
		}
	}
	return result.Failure.error(w.file)
}

// list is the steps of a stage, or of the template.
type list struct {
	stage, title string // empty: the template's
	from         dockerfile.Source
	steps        []dockerfile.Step
}

// lists returns those of the stages, and last that of the template.
func (w *work) lists() (all []list) {
	for _, s := range w.plan.Stages {
		all = append(all, list{s.Name, s.Title, s.From, s.Steps})
	}
	return append(all, list{from: w.plan.From, steps: w.plan.Steps})
}

// uploadAll sends the files of a step, and of its mounts.
func (w *work) uploadAll(ctx context.Context, step *dockerfile.Step) error {
	all := slices.Collect(maps.Values(step.Bound))
	if step.Files != nil {
		all = append(all, step.Files)
	}
	for _, files := range all {
		if err := w.upload(ctx, files, step.Text); err != nil {
			return err
		}
	}
	return nil
}

// upload sends files, unless the server has them.
func (w *work) upload(ctx context.Context, files *dockerfile.Files, text string) error {
	hash, err := files.Hash()
	if err != nil {
		return err
	}
	to, err := template.FilesURL(ctx, w.t.REST, w.build.TemplateID, hash)
	if err != nil || to.Present {
		return err
	}
	spool, err := os.CreateTemp("", "barchan-build-*.tar.gz")
	if err != nil {
		return err
	}
	defer func() { _ = errors.Join(spool.Close(), os.Remove(spool.Name())) }()
	if err := files.Archive(spool); err != nil {
		return err
	}
	size, err := spool.Seek(0, io.SeekCurrent)
	if err == nil {
		_, err = spool.Seek(0, io.SeekStart)
	}
	if err != nil {
		return err
	}
	p := terminal.NewQuietProgress(w.a.Stderr)
	defer p.End()
	return template.Upload(ctx, w.t.REST, to, &terminal.CountingReader{Reader: spool, Step: text, Total: size, Report: p.Event}, size)
}

// print prints one line of the log, below the text of its step.
func (w *work) print(e *template.LogEntry, reason *template.Reason) {
	if e.Level == "debug" || (reason != nil && e.Level == "error" && e.Message == reason.Message) { // the error is printed at the end
		return
	}
	if e.Step != w.current {
		w.current = e.Step
		if step, place := w.stepOf(e.Step); step != nil {
			cached := strings.HasPrefix(e.Message, "CACHED ")
			w.header(e.Step, place, step, cached)
			if cached || strings.HasPrefix(e.Message, step.Type+" ") { // the server's own text of the step
				return
			}
		}
	}
	line := e.Message[strings.LastIndexByte(strings.TrimRight(e.Message, "\r"), '\r')+1:] // of a progress bar the last state
	text := terminal.Escaped(strings.ReplaceAll(strings.TrimRight(line, "\r"), "\t", "    "), terminal.MaxErrorLine)
	if step, _ := w.stepOf(e.Step); step != nil {
		text = "  " + text
	}
	fmt.Fprintln(w.a.Stderr, w.paint(map[string]string{"warn": terminal.Yellow, "error": terminal.Red}[e.Level], text))
}

// header prints the number and the text of a step.
func (w *work) header(number, place string, step *dockerfile.Step, cached bool) {
	text := fmt.Sprintf("[%s] %s", place, terminal.Plain(step.Text))
	if cached {
		w.cached[number] = true
		text += " (cached)"
	}
	fmt.Fprintln(w.a.Stderr, w.paint(terminal.Green, text))
}

func (w *work) paint(colour, text string) string {
	if colour == "" || !w.a.Coloured(w.a.Stderr) {
		return text
	}
	return terminal.Paint(colour, text)
}

// listOf returns the list of a step's number in the log, which follows the name of its stage, or of another word there.
func (w *work) listOf(number string) (*list, string) {
	stage, rest, of := strings.Cut(number, "/")
	if !of {
		stage, rest = "", number
	}
	for _, l := range w.lists() {
		if l.stage == stage {
			return &l, rest
		}
	}
	return nil, rest
}

// stepOf returns the step of a number in the log, and the number among all; nil if there is none.
func (w *work) stepOf(number string) (step *dockerfile.Step, place string) {
	l, rest := w.listOf(number)
	if n, err := strconv.Atoi(rest); err == nil && l != nil && n >= 1 && n <= len(l.steps) {
		return &l.steps[n-1], strings.TrimLeft(fmt.Sprintf("%s %d/%d", l.title, n, len(l.steps)), " ")
	}
	return nil, ""
}

// failure names the step that failed as the Dockerfile has it.
func (w *work) failure(reason *template.Reason) *Failure {
	if reason == nil {
		return &Failure{Message: "the server gives no reason"}
	}
	f := &Failure{Message: reason.Message, Step: reason.Step}
	l, word := w.listOf(reason.Step)
	switch step, place := w.stepOf(reason.Step); {
	case step != nil:
		f.Line, f.Text, f.place = step.Line, step.Text, place
		if step.Type == template.StepRun { // whose command is that text
			f.Message = strings.TrimPrefix(f.Message, "failed to run command '"+step.Args[0]+"': ")
		}
	case word == "base" && l != nil:
		f.Line, f.Text = l.from.Line, cmp.Or(l.from.Text, "FROM "+l.from.Image+l.from.Template)
	case reason.Step == "finalize" && w.plan.StartCommand != "":
		f.Text = "start of " + w.plan.StartCommand
	}
	return f
}

// error returns the failure with its place.
func (f *Failure) error(file string) error {
	at := file
	if f.Line > 0 {
		at += ":" + strconv.Itoa(f.Line)
	}
	what := f.Text
	if f.place != "" {
		what = fmt.Sprintf("step %s, %s", strings.Replace(f.place, "/", " of ", 1), f.Text)
	}
	if what != "" {
		what += ": "
	}
	return fmt.Errorf("%s: %s%s", at, what, f.Message)
}

// cancel ends an interrupted build.
func (w *work) cancel(ctx context.Context) {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), cancelWithin)
	defer stop()
	if err := template.Cancel(ctx, w.t.REST, w.build); err != nil {
		fmt.Fprintf(w.a.Stderr, "build %[1]s may go on (%[2]s);\n`kubectl get templatebuild %[1]s -w` follows it, `kubectl delete templatebuild %[1]s` cancels it\n",
			w.build.BuildID, app.Message(err))
		return
	}
	fmt.Fprintf(w.a.Stderr, "build %s is canceled\n", w.build.BuildID)
}
