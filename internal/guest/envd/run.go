package envd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

const (
	// runTail is the most output that Run returns, in bytes.
	runTail = 4 << 10
	// runKillTime is how long Run tries to kill what it must not leave behind.
	runKillTime = 10 * time.Second
)

// RunOptions are a program's options. The zero value is the sandbox's environment, and the
// directory that requests start in.
type RunOptions struct {
	Env map[string]string
	// Dir is an absolute path.
	Dir string
}

// Run runs a program to its end, as the client's user, without input, and returns its exit code
// and the last 4 KiB of what it printed to either output, as they came. A program that a signal
// ended has the code -1. When ctx ends first, the program and what it started in its process group are
// killed, and the error is ctx's cause. Other errors are those of RPCs: a program that cannot be
// started is a [connect.CodeInvalidArgument], see [IsCode].
func (c *Client) Run(ctx context.Context, argv []string, o RunOptions) (exit int32, tail []byte, err error) {
	if len(argv) == 0 || argv[0] == "" {
		return 0, nil, connect.NewError(connect.CodeInvalidArgument, errors.New("run: a program is needed"))
	}
	cfg := &processpb.ProcessConfig{Cmd: argv[0], Args: argv[1:], Envs: o.Env}
	if o.Dir != "" {
		cfg.Cwd = &o.Dir
	}
	noInput := false
	// The stream must outlast ctx: without the program's PID it cannot be killed.
	streaming, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	starting := context.AfterFunc(ctx, func() { time.AfterFunc(runKillTime, cut) })
	defer starting()
	stream, err := c.process.Start(streaming, connect.NewRequest(&processpb.StartRequest{Process: cfg, Stdin: &noInput}))
	if err != nil {
		return 0, nil, fmt.Errorf("run %s: %w", argv[0], errors.Join(context.Cause(ctx), err))
	}
	defer func() { _ = stream.Close() }()
	ended, tail, err := c.follow(ctx, stream)
	switch {
	case ctx.Err() != nil && (ended == nil || !ended.GetExited()):
		return 0, tail, fmt.Errorf("run %s: %w", argv[0], context.Cause(ctx))
	case ended != nil:
		return ended.GetExitCode(), tail, nil
	case err == nil:
		err = errors.New("the stream ended without an exit")
	}
	return 0, tail, fmt.Errorf("run %s: %w", argv[0], err)
}

// follow reads a program's events to its end, and kills it when ctx ends.
func (c *Client) follow(ctx context.Context, stream *connect.ServerStreamForClient[processpb.StartResponse]) (
	ended *processpb.ProcessEvent_EndEvent, tail []byte, err error,
) {
	for started := false; stream.Receive(); {
		switch ev := stream.Msg().GetEvent(); {
		case ev.GetStart() != nil && started:
			return nil, tail, errStartedTwice
		case ev.GetStart() != nil:
			started = true
			pid := ev.GetStart().GetPid()
			defer context.AfterFunc(ctx, func() { c.kill(ctx, pid) })()
		case ev.GetData() != nil:
			tail = append(append(tail, ev.GetData().GetStdout()...), ev.GetData().GetStderr()...)
			tail = tail[max(0, len(tail)-runTail):]
		case ev.GetEnd() != nil:
			return ev.GetEnd(), tail, nil
		}
	}
	return nil, tail, stream.Err()
}

// kill ends a process. If that does not reach it, the agent's own time limits have to.
func (c *Client) kill(ctx context.Context, pid uint32) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), runKillTime)
	defer cancel()
	_ = c.signal(ctx, pid, processpb.Signal_SIGNAL_SIGKILL)
}
