package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// keepalive is the time in seconds between two signs of life of a silent command.
const keepalive = "30"

// Commands runs commands in a sandbox.
type Commands struct{ agent *envd.Client }

// CommandOptions are those of a command.
type CommandOptions struct {
	// Env has more variables; Dir is the directory to run in; empty: the user's home.
	Env map[string]string
	Dir string
	// Stdout and Stderr receive the output as it comes. What has no writer is in the [CommandResult].
	Stdout, Stderr io.Writer
	// Timeout kills the command after a time; zero: none.
	Timeout time.Duration
	// Stdin is the input of a command of [Commands.Run]; nil: it has none. A read that blocks outlives the command: the caller then closes Stdin.
	Stdin io.Reader
	// OpenStdin gives a command of [Commands.Start] an input, for [Command.SendStdin].
	OpenStdin bool
}

// CommandResult is how a command ended.
type CommandResult struct {
	// ExitCode is 128 and the number for a command that a signal ended.
	ExitCode       int
	Stdout, Stderr string
}

// Process is a running command.
type Process struct {
	PID  uint32
	Tag  string
	Cmd  string
	Args []string
	Env  map[string]string
	Dir  string
}

// shell runs a command line as E2B's SDKs do.
func shell(cmd string) []string { return []string{"/bin/bash", "-l", "-c", cmd} }

// Run runs a command line to its end. Another exit code than 0 is an [*ExitError]; the result is there too. When ctx ends or the timeout is over,
// the command is killed, and the result has what it has printed.
func (c *Commands) Run(ctx context.Context, cmd string, o CommandOptions) (*CommandResult, error) {
	if o.OpenStdin {
		return nil, fmt.Errorf("run: OpenStdin is for Start: %w", ErrInvalid)
	}
	limited, cancel := ctx, func() {}
	if o.Timeout > 0 {
		limited, cancel = context.WithTimeoutCause(ctx, o.Timeout, ErrTimeout)
	}
	defer cancel()
	var out outputs
	exit, err := c.agent.Exec(limited, shell(cmd), envd.ExecOptions{Stdin: o.Stdin, Stdout: out.stdout(o), Stderr: out.stderr(o), Env: o.Env, Dir: o.Dir})
	res := out.result(exit)
	if err != nil {
		return res, guestError(limited, "run command", err)
	}
	return res, res.error()
}

// outputs keeps what has no writer.
type outputs struct{ out, err strings.Builder }

func (s *outputs) stdout(o CommandOptions) io.Writer { return or(o.Stdout, &s.out) }
func (s *outputs) stderr(o CommandOptions) io.Writer { return or(o.Stderr, &s.err) }
func (s *outputs) result(code int) *CommandResult {
	return &CommandResult{ExitCode: code, Stdout: s.out.String(), Stderr: s.err.String()}
}

func or(w io.Writer, otherwise io.Writer) io.Writer {
	if w != nil {
		return w
	}
	return otherwise
}

func (r *CommandResult) error() error {
	if r.ExitCode != 0 {
		return &ExitError{*r}
	}
	return nil
}

// Start starts a command line and returns. The command goes on when ctx ends, but its output is no longer read.
// Every Command is ended by [Command.Wait] or [Command.Disconnect]. A timeout is the server's.
func (c *Commands) Start(ctx context.Context, cmd string, o CommandOptions) (*Command, error) {
	if o.Stdin != nil {
		return nil, fmt.Errorf("start: Stdin is for Run; set OpenStdin, and use SendStdin: %w", ErrInvalid)
	}
	argv := shell(cmd)
	req := &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: argv[0], Args: argv[1:], Envs: o.Env}, Stdin: &o.OpenStdin}
	if o.Dir != "" {
		req.Process.Cwd = &o.Dir
	}
	return start(ctx, c.agent, req, o)
}

// Connect follows a command that runs, or ended a moment ago, from now on.
func (c *Commands) Connect(ctx context.Context, pid uint32, o CommandOptions) (*Command, error) {
	return follow(ctx, c.agent, pid, o)
}

// List returns the commands that run.
func (c *Commands) List(ctx context.Context) ([]Process, error) {
	res, err := c.agent.Process().List(ctx, connect.NewRequest(&processpb.ListRequest{}))
	if err != nil {
		return nil, guestError(ctx, "list commands", err)
	}
	list := []Process{}
	for _, p := range res.Msg.GetProcesses() {
		cfg := p.GetConfig()
		list = append(list, Process{PID: p.GetPid(), Tag: p.GetTag(), Cmd: cfg.GetCmd(), Args: cfg.GetArgs(), Env: cfg.GetEnvs(), Dir: cfg.GetCwd()})
	}
	return list, nil
}

// Kill kills a command and its process group; one that has ended is an [ErrNotFound].
func (c *Commands) Kill(ctx context.Context, pid uint32) error { return kill(ctx, c.agent, pid) }

// SendStdin writes to the input of a command.
func (c *Commands) SendStdin(ctx context.Context, pid uint32, data []byte) error {
	return sendInput(ctx, c.agent, pid, &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: data}})
}

// CloseStdin ends the input of a command.
func (c *Commands) CloseStdin(ctx context.Context, pid uint32) error {
	_, err := c.agent.Process().CloseStdin(ctx, connect.NewRequest(&processpb.CloseStdinRequest{Process: envd.Selector(pid)}))
	return guestError(ctx, "close input", err)
}

func kill(ctx context.Context, agent *envd.Client, pid uint32) error {
	_, err := agent.Process().SendSignal(ctx, connect.NewRequest(&processpb.SendSignalRequest{Process: envd.Selector(pid), Signal: processpb.Signal_SIGNAL_SIGKILL}))
	return guestError(ctx, "kill command", err)
}

func sendInput(ctx context.Context, agent *envd.Client, pid uint32, in *processpb.ProcessInput) error {
	_, err := agent.Process().SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{Process: envd.Selector(pid), Input: in}))
	return guestError(ctx, "send input", err)
}

// Command is a command whose output is followed.
type Command struct {
	PID uint32

	agent  *envd.Client
	ctx    context.Context //nolint:containedctx // of the stream, as in os/exec
	cancel context.CancelFunc
	next   func() *processpb.ProcessEvent // nil at the end
	err    func() error
	close  func() error
	o      CommandOptions
}

func start(ctx context.Context, agent *envd.Client, req *processpb.StartRequest, o CommandOptions) (*Command, error) {
	return open(ctx, agent, "start command", req, agent.Process().Start, (*processpb.StartResponse).GetEvent, o)
}

func follow(ctx context.Context, agent *envd.Client, pid uint32, o CommandOptions) (*Command, error) {
	req := &processpb.ConnectRequest{Process: envd.Selector(pid)}
	return open(ctx, agent, "connect to command", req, agent.Process().Connect, (*processpb.ConnectResponse).GetEvent, o)
}

// open calls an RPC whose stream has the events of a process.
func open[In, Out any](
	ctx context.Context, agent *envd.Client, action string, in *In,
	call func(context.Context, *connect.Request[In]) (*connect.ServerStreamForClient[Out], error), event func(*Out) *processpb.ProcessEvent, o CommandOptions,
) (*Command, error) {
	ctx, cancel := context.WithCancel(ctx)
	req := connect.NewRequest(in)
	req.Header().Set(envd.HeaderKeepalive, keepalive)
	if o.Timeout > 0 {
		req.Header().Set(envd.HeaderConnectMillis, fmt.Sprint(o.Timeout.Milliseconds()))
	}
	stream, err := call(ctx, req)
	if err != nil {
		cancel()
		return nil, guestError(ctx, action, err)
	}
	c := &Command{agent: agent, ctx: ctx, cancel: cancel, err: stream.Err, close: stream.Close, o: o, next: func() *processpb.ProcessEvent {
		if stream.Receive() {
			return event(stream.Msg())
		}
		return nil
	}}
	return c.begin(action)
}

// begin reads the first event, which has the PID.
func (c *Command) begin(action string) (*Command, error) {
	first := c.next().GetStart()
	if first == nil {
		err := guestError(c.ctx, action, errors.Join(c.err()))
		c.Disconnect()
		if err == nil {
			err = fmt.Errorf("%s: the stream has no start: %w", action, ErrUnavailable)
		}
		return nil, err
	}
	c.PID = first.GetPid()
	return c, nil
}

// Wait copies the output until the command ends; another exit code than 0 is an [*ExitError]. It returns when the context of
// [Commands.Start] ends, and the command goes on. It is called once.
func (c *Command) Wait() (*CommandResult, error) {
	defer c.Disconnect()
	var out outputs
	for ev := c.next(); ev != nil; ev = c.next() {
		if end := ev.GetEnd(); end != nil {
			res := out.result(envd.ExitCode(end))
			return res, res.error()
		}
		if err := envd.WriteOutput(ev.GetData(), out.stdout(c.o), out.stderr(c.o)); err != nil {
			return out.result(0), fmt.Errorf("write output: %w", err)
		}
	}
	err := guestError(c.ctx, "follow command", c.err())
	if err == nil {
		err = fmt.Errorf("follow command: the stream has no end: %w", ErrUnavailable)
	}
	return out.result(0), err
}

// Disconnect ends the stream, and leaves the command running.
func (c *Command) Disconnect() {
	c.cancel()
	_ = c.close() // the stream is cut
}

// Kill kills the command and its process group.
func (c *Command) Kill(ctx context.Context) error { return kill(ctx, c.agent, c.PID) }

// SendStdin writes to the command's input; OpenStdin gives it one.
func (c *Command) SendStdin(ctx context.Context, data []byte) error {
	return (&Commands{c.agent}).SendStdin(ctx, c.PID, data)
}

// CloseStdin ends the command's input.
func (c *Command) CloseStdin(ctx context.Context) error {
	return (&Commands{c.agent}).CloseStdin(ctx, c.PID)
}
