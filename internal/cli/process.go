package cli

import (
	"context"
	"errors"
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

	"github.com/barchan-dev/barchan/internal/envd"
	"github.com/barchan-dev/barchan/internal/envd/processpb"
	"github.com/barchan-dev/barchan/internal/errs"
)

// processOptions are the flags of run and exec.
type processOptions struct {
	interactive, tty bool
	env              []string
	workdir, user    string
}

func (o *processOptions) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.BoolVarP(&o.interactive, "interactive", "i", false, "pass on standard input (a pipe or a file is passed on anyway)")
	f.BoolVarP(&o.tty, "tty", "t", false, "give the command a terminal")
	f.StringArrayVarP(&o.env, "env", "e", nil, "NAME=VALUE for the command; NAME alone takes this shell's value")
	f.StringVarP(&o.workdir, "workdir", "w", "", "directory to run in")
	f.StringVarP(&o.user, "user", "u", "", "user to run as (default the template's)")
	f.SetInterspersed(false)
}

// environment reads NAME=VALUE pairs.
func (a *app) environment(list []string) (map[string]string, error) {
	out := map[string]string{}
	for _, item := range list {
		name, value, given := strings.Cut(item, "=")
		if !given {
			value, given = a.lookupEnv(name)
		}
		if name == "" || !given {
			return nil, fmt.Errorf("--env %q: want NAME=VALUE, or the NAME of a variable that is set: %w", item, errs.ErrInvalid)
		}
		out[name] = value
	}
	return out, nil
}

// input decides what the command reads: this program's standard input, if it
// is wanted or is a pipe or a file.
func (a *app) input(o processOptions) (io.Reader, error) {
	if o.tty {
		if !isTerminal(a.stdin) || !isTerminal(a.stdout) {
			return nil, fmt.Errorf("-t: standard input and output are not a terminal; leave it out: %w", errs.ErrInvalid)
		}
		return a.stdin, nil
	}
	if o.interactive {
		return a.stdin, nil
	}
	f, ok := a.stdin.(*os.File)
	if !ok {
		return nil, nil //nolint:nilnil // no input is an answer
	}
	info, err := f.Stat()
	if err == nil && (info.Mode().IsRegular() || info.Mode()&os.ModeNamedPipe != 0) {
		return a.stdin, nil
	}
	return nil, nil //nolint:nilnil // no input is an answer
}

// process runs one command in a sandbox.
type process struct {
	app    *app
	client *envd.Client
	input  io.Reader // nil: none
	tty    *os.File  // nil: no terminal
	sized  chan os.Signal
	pid    uint32
}

const keepalive = "30" // seconds

// runProcess runs a command to its end and returns its exit code, as a shell
// would tell it. When ctx ends the command is ended too.
func (a *app) runProcess(ctx context.Context, client *envd.Client, argv []string, o processOptions) (int, error) {
	env, err := a.environment(o.env)
	if err != nil {
		return 0, err
	}
	p := &process{app: a, client: client}
	if p.input, err = a.input(o); err != nil {
		return 0, err
	}
	hasInput := p.input != nil
	req := &processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: argv[0], Args: argv[1:], Envs: env},
		Stdin:   &hasInput,
	}
	if o.workdir != "" {
		req.Process.Cwd = &o.workdir
	}
	if o.tty {
		p.tty, _ = a.stdin.(*os.File)
		// From before the size is read, or a change between the two is never told.
		p.sized = make(chan os.Signal, 1)
		signal.Notify(p.sized, syscall.SIGWINCH)
		defer signal.Stop(p.sized)
		req.Pty = terminalSize(p.tty)
		for _, name := range []string{"TERM", "LANG"} {
			if v, ok := a.lookupEnv(name); ok && env[name] == "" {
				env[name] = v
			}
		}
	}
	call := connect.NewRequest(req)
	call.Header().Set(envd.HeaderKeepalive, keepalive)
	stream, err := client.Process().Start(ctx, call)
	if err != nil {
		return 0, processError(err)
	}
	defer func() { _ = stream.Close() }()
	return p.follow(ctx, stream)
}

func terminalSize(tty *os.File) *processpb.PTY {
	cols, rows, err := term.GetSize(int(tty.Fd()))
	if err != nil || cols <= 0 || rows <= 0 {
		cols, rows = 80, 24
	}
	return &processpb.PTY{Size: &processpb.PTY_Size{Cols: uint32(cols), Rows: uint32(rows)}}
}

// follow copies in both directions until the command has ended.
func (p *process) follow(ctx context.Context, stream *connect.ServerStreamForClient[processpb.StartResponse]) (int, error) {
	if !stream.Receive() || stream.Msg().GetEvent().GetStart() == nil {
		return 0, processError(stream.Err())
	}
	p.pid = stream.Msg().GetEvent().GetStart().GetPid()
	restore, err := p.rawTerminal()
	if err != nil {
		return 0, errors.Join(err, p.terminate(ctx))
	}
	defer restore()

	var wg sync.WaitGroup
	defer wg.Wait()
	side, cancel := context.WithCancel(ctx)
	defer cancel()
	if p.input != nil {
		in, err := newInterruptible(side, p.input)
		if err != nil {
			return 0, errors.Join(err, p.terminate(ctx))
		}
		wg.Go(func() { p.feed(side, in) })
	}
	if p.tty != nil {
		wg.Go(func() { p.resize(side) })
	}
	for stream.Receive() {
		if end := stream.Msg().GetEvent().GetEnd(); end != nil {
			return exitCodeOf(end), nil
		}
		if err := p.show(stream.Msg().GetEvent().GetData()); err != nil {
			return 0, errors.Join(err, p.terminate(ctx))
		}
	}
	if ctx.Err() != nil {
		return 0, errors.Join(ctx.Err(), p.terminate(ctx))
	}
	return 0, processError(stream.Err())
}

func (p *process) show(data *processpb.ProcessEvent_DataEvent) error {
	var err error
	switch out := data.GetOutput().(type) {
	case *processpb.ProcessEvent_DataEvent_Stdout:
		_, err = p.app.stdout.Write(out.Stdout)
	case *processpb.ProcessEvent_DataEvent_Stderr:
		_, err = p.app.stderr.Write(out.Stderr)
	case *processpb.ProcessEvent_DataEvent_Pty:
		_, err = p.app.stdout.Write(out.Pty)
	}
	return err
}

func (p *process) selector() *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: p.pid}}
}

// feed passes input on until it ends, the command does not take it any more,
// or ctx is done.
func (p *process) feed(ctx context.Context, in io.Reader) {
	buf := make([]byte, 64<<10)
	for {
		n, err := in.Read(buf)
		if n > 0 {
			input := &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: buf[:n]}}
			if p.tty != nil {
				input = &processpb.ProcessInput{Input: &processpb.ProcessInput_Pty{Pty: buf[:n]}}
			}
			_, sendErr := p.client.Process().SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{
				Process: p.selector(), Input: input,
			}))
			if sendErr != nil {
				return // it ended, or closed its input, as `head` does
			}
		}
		if err != nil {
			break
		}
	}
	if p.tty == nil && ctx.Err() == nil {
		// A command that has ended meanwhile needs it no more.
		_, _ = p.client.Process().CloseStdin(ctx, connect.NewRequest(&processpb.CloseStdinRequest{Process: p.selector()}))
	}
}

// resize tells the command's terminal each new size of ours.
func (p *process) resize(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.sized:
			// The next change corrects what this one may fail to tell.
			_, _ = p.client.Process().Update(ctx, connect.NewRequest(&processpb.UpdateRequest{
				Process: p.selector(), Pty: terminalSize(p.tty),
			}))
		}
	}
}

// rawTerminal hands every key to the command, and returns the way back.
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

// terminate ends the command after its stream broke off.
func (p *process) terminate(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_, err := p.client.Process().SendSignal(ctx, connect.NewRequest(&processpb.SendSignalRequest{
		Process: p.selector(), Signal: processpb.Signal_SIGNAL_SIGTERM,
	}))
	if err != nil && !envd.IsCode(err, connect.CodeNotFound) {
		return fmt.Errorf("end the command: %w", err)
	}
	return nil
}

// exitCodeOf is the code as a shell tells it: 128 and its number for a signal,
// which the protocol names only in words.
func exitCodeOf(end *processpb.ProcessEvent_EndEvent) int {
	if end.GetExited() {
		return int(end.GetExitCode())
	}
	for n := syscall.Signal(1); n < 65; n++ {
		if text, _, _ := strings.Cut(end.GetStatus(), " ("); text == "signal: "+n.String() {
			return 128 + int(n)
		}
	}
	return 255
}

// processError has the agent's words without the protocol's.
func processError(err error) error {
	if err == nil {
		return fmt.Errorf("the sandbox closed the connection; it may have been killed: %w", errs.ErrUnavailable)
	}
	ce, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return err
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return errs.Public(errs.ErrUnavailable, "the connection broke off: the sandbox was killed, reached its end of life, or used up its memory")
	}
	switch ce.Code() { //nolint:exhaustive // the rest is told as it is
	case connect.CodeUnavailable:
		return errs.Public(errs.ErrUnavailable, "the sandbox is gone: "+ce.Message())
	case connect.CodeCanceled:
		return context.Canceled
	default:
		return errs.Public(err, ce.Message())
	}
}
