package sandboxes

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// processOptions are the flags of run and exec.
type processOptions struct {
	interactive, tty bool
	noInput, detach  bool
	env              []string
	workdir, user    string
}

func (o *processOptions) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.BoolVarP(&o.interactive, "interactive", "i", false, "pass on standard input (a pipe or a file is passed on anyway)")
	f.BoolVarP(&o.noInput, "no-stdin", "n", false, "pass on no standard input, not a pipe or a file either")
	f.BoolVarP(&o.tty, "tty", "t", false, "give the command a terminal")
	f.StringArrayVarP(&o.env, "env", "e", nil, "NAME=VALUE for the command; NAME alone takes this shell's value")
	f.StringVarP(&o.workdir, "workdir", "w", "", "directory to run in")
	f.StringVarP(&o.user, "user", "u", "", "user to run as: a name or a number, with :GROUP if wanted (default the template's)")
	f.SetInterspersed(false)
}

// environment parses NAME=VALUE pairs.
func environment(a *app.App, list []string) (map[string]string, error) {
	out := map[string]string{}
	for _, item := range list {
		name, value, given := strings.Cut(item, "=")
		if !given {
			value, given = a.LookupEnv(name)
		}
		if name == "" || !given {
			return nil, fmt.Errorf("--env: %q is neither NAME=VALUE nor the NAME of a variable that is set: %w", item, errs.ErrInvalid)
		}
		out[name] = value
	}
	return out, nil
}

// input returns the command's input: this program's standard input, if requested or a pipe or a file.
func input(a *app.App, o processOptions) (io.Reader, error) {
	if o.noInput || o.detach {
		if o.interactive || o.tty {
			return nil, fmt.Errorf("-i and -t: not with --no-stdin or --detach: %w", errs.ErrInvalid)
		}
		return nil, nil //nolint:nilnil // no input is an answer
	}
	if o.tty {
		if !terminal.IsTerminal(a.Stdin) || !terminal.IsTerminal(a.Stdout) {
			return nil, fmt.Errorf("-t: standard input and output are not a terminal; leave it out: %w", errs.ErrInvalid)
		}
		return a.Stdin, nil
	}
	if o.interactive {
		return a.Stdin, nil
	}
	f, ok := a.Stdin.(*os.File)
	if !ok {
		return nil, nil //nolint:nilnil // no input is an answer
	}
	info, err := f.Stat()
	if err == nil && (info.Mode().IsRegular() || info.Mode()&os.ModeNamedPipe != 0) {
		return a.Stdin, nil
	}
	return nil, nil //nolint:nilnil // no input is an answer
}

// check refuses flags that cannot be honoured, before a sandbox is made for them.
func (o *processOptions) check(cmd *cobra.Command, a *app.App) error {
	_, err := environment(a, o.env)
	if err == nil {
		_, err = input(a, *o)
	}
	if err != nil {
		return app.Usage(cmd, err)
	}
	return nil
}

// checkUnused refuses what is set for a command where there is none.
func (o *processOptions) checkUnused(cmd *cobra.Command) error {
	for _, name := range []string{"env", "workdir", "user", "interactive", "tty", "no-stdin", "detach"} {
		if cmd.Flags().Changed(name) {
			return app.Usage(cmd, fmt.Errorf("--%s: it is for a command, and there is none; add `-- COMMAND`, or leave it out: %w", name, errs.ErrInvalid))
		}
	}
	return nil
}

// process runs one command in a sandbox.
type process struct {
	app   *app.App
	on    *app.Sandbox
	cut   func()    // ends the stream
	input io.Reader // nil: none
	tty   *os.File  // nil: no terminal
	sized chan os.Signal
	pid   uint32
}

const (
	keepalive = "30" // seconds
	// endWithin is the time that a command has to end after SIGTERM, and after SIGKILL.
	endWithin = 5 * time.Second
)

// startRequest returns the request for a command with the options.
func startRequest(a *app.App, argv []string, o processOptions, input bool) (*connect.Request[processpb.StartRequest], error) {
	env, err := environment(a, o.env)
	if err != nil {
		return nil, err
	}
	req := &processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: argv[0], Args: argv[1:], Envs: env},
		Stdin:   &input,
	}
	if o.workdir != "" {
		req.Process.Cwd = &o.workdir
	}
	if o.tty {
		for _, name := range []string{"TERM", "LANG"} {
			if v, ok := a.LookupEnv(name); ok && env[name] == "" {
				env[name] = v
			}
		}
	}
	call := connect.NewRequest(req)
	call.Header().Set(envd.HeaderKeepalive, keepalive)
	return call, nil
}

// runProcess runs a command; another exit code than 0, as a shell would give it, is an [app.ExitCode]. When ctx ends the command is
// killed.
func runProcess(ctx context.Context, a *app.App, on *app.Sandbox, argv []string, o processOptions) error {
	p := &process{app: a, on: on}
	var err error
	if p.input, err = input(a, o); err != nil {
		return err
	}
	call, err := startRequest(a, argv, o, p.input != nil)
	if err != nil {
		return err
	}
	if o.tty {
		p.tty = terminal.FileOf(a.Stdin)
		// Before the size is read, or a change between the two would be lost.
		p.sized = make(chan os.Signal, 1)
		signal.Notify(p.sized, syscall.SIGWINCH)
		defer signal.Stop(p.sized)
		call.Msg.Pty = terminalSize(p.tty)
	}
	// The stream outlives ctx: it has the process to kill, and its end.
	var streaming context.Context
	streaming, p.cut = context.WithCancel(context.WithoutCancel(ctx))
	defer p.cut()
	waiting := context.AfterFunc(ctx, func() { time.AfterFunc(endWithin, p.cut) })
	stream, err := on.Client.Process().Start(streaming, call)
	if err != nil {
		return on.Lost(ctx, err)
	}
	defer func() { _ = stream.Close() }()
	started := stream.Receive() && stream.Msg().GetEvent().GetStart() != nil
	waiting()
	if !started {
		return on.Lost(ctx, stream.Err())
	}
	p.pid = stream.Msg().GetEvent().GetStart().GetPid()
	if o.detach { // a process outlives its stream
		fmt.Fprintln(a.Stdout, p.pid)
		return nil
	}
	return p.follow(ctx, stream)
}

func terminalSize(tty *os.File) *processpb.PTY {
	cols, rows, err := term.GetSize(int(tty.Fd()))
	if err != nil || cols <= 0 || rows <= 0 {
		cols, rows = 80, 24
	}
	return envd.PTY(envd.TerminalSize{Cols: uint16(cols), Rows: uint16(rows)})
}

// follow copies in both directions until the command has ended. When ctx ends, or the output cannot be
// written, it kills the command.
func (p *process) follow(ctx context.Context, stream *connect.ServerStreamForClient[processpb.StartResponse]) error {
	side, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	over := make(chan struct{})
	wg.Go(func() { p.endAfter(side, over) })
	restore, err := p.rawTerminal()
	defer restore()
	if err == nil && p.input != nil {
		var in io.Reader
		if in, err = app.NewInterruptible(side, p.input); err == nil {
			wg.Go(func() { p.on.Client.Feed(side, p.pid, in, p.tty != nil) })
		}
	}
	if p.tty != nil {
		wg.Go(func() { p.resize(side) })
	}
	var end *processpb.ProcessEvent_EndEvent
	for end == nil && stream.Receive() {
		if err != nil {
			cancel(err) // later output is dropped
		} else {
			err = envd.WriteOutput(stream.Msg().GetEvent().GetData(), p.app.Stdout, p.app.Stderr)
		}
		end = stream.Msg().GetEvent().GetEnd()
	}
	close(over)
	if end == nil && (err != nil || ctx.Err() != nil) {
		fmt.Fprintf(p.app.Stderr, "barchan: process %d of sandbox %s did not end in time, or is out of reach; it may still run\n", p.pid, p.on.ID)
	}
	switch {
	case err != nil:
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	case end == nil:
		return p.on.Lost(ctx, stream.Err())
	case envd.ExitCode(end) != 0:
		return app.ExitCode(envd.ExitCode(end))
	}
	return nil
}

// endAfter kills the command when ctx is done before over, first with SIGTERM, then with SIGKILL.
func (p *process) endAfter(ctx context.Context, over <-chan struct{}) {
	select {
	case <-over:
		return
	case <-ctx.Done():
	}
	for _, sig := range []processpb.Signal{processpb.Signal_SIGNAL_SIGTERM, processpb.Signal_SIGNAL_SIGKILL} {
		p.signal(ctx, sig)
		select {
		case <-over:
			return
		case <-time.After(endWithin):
		}
	}
	p.cut()
}

// resize forwards each new terminal size to the command.
func (p *process) resize(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.sized:
			// A later change corrects a failed update.
			_, _ = p.on.Client.Process().Update(ctx, connect.NewRequest(&processpb.UpdateRequest{
				Process: envd.Selector(p.pid), Pty: terminalSize(p.tty),
			}))
		}
	}
}

// rawTerminal passes every key to the command, and returns a function that restores the terminal.
func (p *process) rawTerminal() (func(), error) {
	if p.tty == nil {
		return func() {}, nil
	}
	state, err := term.MakeRaw(int(p.tty.Fd()))
	if err != nil {
		return nil, fmt.Errorf("prepare the terminal: %w", err)
	}
	return func() { _ = term.Restore(int(p.tty.Fd()), state) }, nil
}

// signal sends a signal to the command, which may have ended or be unreachable: endAfter handles that.
func (p *process) signal(ctx context.Context, sig processpb.Signal) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endWithin)
	defer cancel()
	_, _ = p.on.Client.Process().SendSignal(ctx, connect.NewRequest(&processpb.SendSignalRequest{Process: envd.Selector(p.pid), Signal: sig}))
}
