package envd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// The size of a terminal until the client sends one.
const (
	defaultCols = 80
	defaultRows = 24
)

// TerminalSize is in characters.
type TerminalSize = struct{ Cols, Rows uint16 }

// ExecOptions connect a program of [Client.Exec]. Stdout and Stderr are required;
// with a terminal all output goes to Stdout.
type ExecOptions struct {
	// Stdin nil: the program has no input.
	Stdin          io.Reader
	Stdout, Stderr io.Writer
	// Env has more variables, and Dir is the directory to run in; empty: the user's home.
	Env map[string]string
	Dir string
	// Terminal gives the program a terminal, of 80 by 24 characters until Resize has another size.
	Terminal bool
	// Resize has the terminal's sizes, until it is closed; it may be nil.
	Resize <-chan TerminalSize
	// Signals has signals to send to the program, until it is closed; it may be nil.
	Signals <-chan processpb.Signal
	// Hangup is for clients that may break off: when ctx ends, a program with a terminal gets SIGHUP, and
	// another one continues without input and with its output discarded. Otherwise the program is killed.
	Hangup bool
}

// request is for a program.
func (o *ExecOptions) request(argv []string) *processpb.StartRequest {
	hasInput, env := o.Stdin != nil, map[string]string{}
	maps.Copy(env, o.Env)
	req := &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: argv[0], Args: argv[1:], Envs: env}, Stdin: &hasInput}
	if o.Dir != "" {
		req.Process.Cwd = &o.Dir
	}
	if o.Terminal {
		req.Pty = PTY(TerminalSize{Cols: defaultCols, Rows: defaultRows})
		if env["TERM"] == "" {
			env["TERM"] = "xterm" // as in a container of Kubernetes
		}
	}
	return req
}

// Exec runs a program to its end as the client's user and returns its exit code, 128 and the number
// for one that a signal ended. When ctx ends, or the output cannot be written, the program is killed.
// The caller must close Stdin, Resize and Signals afterwards: a read of any may be under way.
// Errors are those of RPCs, as for [Client.Run].
func (c *Client) Exec(ctx context.Context, argv []string, o ExecOptions) (exit int, err error) {
	if len(argv) == 0 || argv[0] == "" {
		return 0, connect.NewError(connect.CodeInvalidArgument, errors.New("exec: a program is needed"))
	}
	req := o.request(argv)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// The stream must outlast ctx: until the program's number is known it cannot be killed.
	streaming, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(runKillTime, cut) })()
	stream, err := c.process.Start(streaming, connect.NewRequest(req))
	if err != nil {
		return 0, fmt.Errorf("exec %s: %w", argv[0], errors.Join(context.Cause(ctx), err))
	}
	defer func() { _ = stream.Close() }()
	var ended *processpb.ProcessEvent_EndEvent
	started := false
	for ended == nil && stream.Receive() {
		switch ev := stream.Msg().GetEvent(); {
		case ev.GetStart() != nil && started:
			return 0, fmt.Errorf("exec %s: %w", argv[0], errStartedTwice)
		case ev.GetStart() != nil:
			started = true
			pid := ev.GetStart().GetPid()
			defer context.AfterFunc(ctx, func() { c.end(ctx, pid, o) })()
			c.feed(ctx, pid, o)
		case ev.GetData() != nil:
			if err := WriteOutput(ev.GetData(), o.Stdout, o.Stderr); err != nil {
				cancel(fmt.Errorf("write output: %w", err))
			}
		case ev.GetEnd() != nil:
			ended = ev.GetEnd()
		}
	}
	switch {
	case ctx.Err() != nil:
		return 0, fmt.Errorf("exec %s: %w", argv[0], context.Cause(ctx))
	case ended != nil:
		return ExitCode(ended), nil
	case stream.Err() != nil:
		return 0, fmt.Errorf("exec %s: %w", argv[0], stream.Err())
	}
	return 0, fmt.Errorf("exec %s: the agent reported no end", argv[0])
}

// WriteOutput writes the output of one event; a terminal's goes to stdout.
func WriteOutput(data *processpb.ProcessEvent_DataEvent, stdout, stderr io.Writer) (err error) {
	switch out := data.GetOutput().(type) {
	case *processpb.ProcessEvent_DataEvent_Stdout:
		_, err = stdout.Write(out.Stdout)
	case *processpb.ProcessEvent_DataEvent_Stderr:
		_, err = stderr.Write(out.Stderr)
	case *processpb.ProcessEvent_DataEvent_Pty:
		_, err = stdout.Write(out.Pty)
	}
	return err
}

// feed passes input and sizes on. Its goroutines end with what they read from.
func (c *Client) feed(ctx context.Context, pid uint32, o ExecOptions) {
	if o.Stdin != nil {
		go c.Feed(ctx, pid, o.Stdin, o.Terminal)
	}
	if o.Terminal && o.Resize != nil {
		go func() {
			for size := range o.Resize {
				// The next size corrects what this one may fail to set.
				_, _ = c.process.Update(ctx, connect.NewRequest(&processpb.UpdateRequest{Process: Selector(pid), Pty: PTY(size)}))
			}
		}()
	}
	if o.Signals != nil {
		go func() {
			for sig := range o.Signals {
				_ = c.signal(ctx, pid, sig) // it fails if the program has ended
			}
		}()
	}
}

// end ends a program whose client has gone, or leaves it to itself.
func (c *Client) end(ctx context.Context, pid uint32, o ExecOptions) {
	if !o.Hangup {
		c.kill(ctx, pid)
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), runKillTime)
	defer cancel()
	if !o.Terminal {
		_, _ = c.process.CloseStdin(ctx, connect.NewRequest(&processpb.CloseStdinRequest{Process: Selector(pid)})) // it may be closed
		return
	}
	if IsCode(c.signal(ctx, pid, processpb.Signal_SIGNAL_SIGHUP), connect.CodeUnimplemented) { // an agent older than this signal
		_ = c.signal(ctx, pid, processpb.Signal_SIGNAL_SIGKILL)
	}
}

func (c *Client) signal(ctx context.Context, pid uint32, sig processpb.Signal) error {
	_, err := c.process.SendSignal(ctx, connect.NewRequest(&processpb.SendSignalRequest{Process: Selector(pid), Signal: sig}))
	return err
}

// Feed passes input on to a program until it ends, ctx is done, or the program takes no more. Then the
// program's input is closed, unless it is a terminal.
func (c *Client) Feed(ctx context.Context, pid uint32, in io.Reader, terminal bool) {
	buf := make([]byte, 64<<10)
	for {
		n, err := in.Read(buf)
		if n > 0 {
			input := &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: buf[:n]}}
			if terminal {
				input = &processpb.ProcessInput{Input: &processpb.ProcessInput_Pty{Pty: buf[:n]}}
			}
			if _, err := c.process.SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{Process: Selector(pid), Input: input})); err != nil {
				return // the program has ended, or closed its input, as `head` does
			}
		}
		if err != nil {
			break
		}
	}
	if !terminal && ctx.Err() == nil {
		_, _ = c.process.CloseStdin(ctx, connect.NewRequest(&processpb.CloseStdinRequest{Process: Selector(pid)})) // fails if it has ended
	}
}

// Selector selects a process by its PID.
func Selector(pid uint32) *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: pid}}
}

// PTY is a terminal of a size.
func PTY(size TerminalSize) *processpb.PTY {
	return &processpb.PTY{Size: &processpb.PTY_Size{Cols: uint32(size.Cols), Rows: uint32(size.Rows)}}
}

// ExitCode is a program's exit code as shells report it: 128 and the number of the signal that
// ended it, which the protocol names only in words.
func ExitCode(end *processpb.ProcessEvent_EndEvent) int {
	if end.GetExited() {
		return int(end.GetExitCode())
	}
	name, _, _ := strings.Cut(end.GetStatus(), " (")
	for n := syscall.Signal(1); n < 65; n++ {
		if name == "signal: "+n.String() {
			return 128 + int(n)
		}
	}
	return 255
}
