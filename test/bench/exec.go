package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// execBar is the median, in milliseconds, that /bin/true over HTTP shall keep to.
const execBar = 15

// ran is what a command did, and when.
type ran struct {
	stdout string
	output time.Time // when the first of it came
}

// run runs a command to its end, as an SDK does: one RPC whose stream has output and end.
func (x box) run(ctx context.Context, argv ...string) (ran, error) {
	var r ran
	stream, err := x.agent.Process().Start(ctx, connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: argv[0], Args: argv[1:]},
	}))
	if err != nil {
		return r, fmt.Errorf("start %s: %w", argv[0], err)
	}
	defer func() { _ = stream.Close() }()
	var end *processpb.ProcessEvent_EndEvent
	var stdout strings.Builder
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		if data := event.GetData(); data != nil {
			if r.output.IsZero() {
				r.output = time.Now()
			}
			stdout.Write(data.GetStdout())
		}
		if e := event.GetEnd(); e != nil {
			end = e
		}
	}
	r.stdout = stdout.String()
	switch err := stream.Err(); {
	case err != nil:
		return r, fmt.Errorf("run %s: %w", argv[0], err)
	case end == nil:
		return r, errors.New("the stream ended before the process")
	case end.GetExitCode() != 0:
		return r, fmt.Errorf("%s ended with %d: %s", argv[0], end.GetExitCode(), end.GetError())
	}
	return r, nil
}

// measureExec runs /bin/true over a connection that is kept, beside a request that starts
// nothing, over the same connection.
func measureExec(ctx context.Context, b *bench) error {
	host, err := processStarts(ctx, b.rounds(300))
	if err != nil {
		return err
	}
	b.report.add("exec", "process start on the host, no sandbox", "ms", host)
	for _, class := range b.server.classes {
		if err := b.execIn(ctx, class); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) execIn(ctx context.Context, class string) error {
	x, err := b.server.create(ctx, class)
	if err != nil {
		return err
	}
	n := b.rounds(500)
	health, err := times(n, func() error { return x.agent.Health(ctx) })
	if err != nil {
		return fmt.Errorf("read health: %w", err)
	}
	execs, err := times(n, func() error {
		_, err := x.run(ctx, "/bin/true")
		return err
	})
	if err != nil {
		return err
	}
	inside, err := x.startsInside(ctx, b.rounds(200))
	if err != nil {
		return err
	}
	const name = "GET /health of the agent"
	f := b.report.add("exec", "/bin/true over HTTP, "+class, "ms", execs).over(name, health.at(0.5))
	if class == "gvisor" {
		f.atMost(execBar)
	}
	b.report.add("exec", name+" through the gateway, "+class, "ms", health)
	b.report.add("exec", "process start by a shell inside, "+class, "ms", inside)
	return b.server.kill(ctx, x)
}

// times measures f n times, after a few times that only warm.
func times(n int, f func() error) (samples, error) {
	const warm = 5
	var took samples
	for i := range n + warm {
		began := time.Now()
		if err := f(); err != nil {
			return nil, err
		}
		if i >= warm {
			took = append(took, millis(time.Since(began)))
		}
	}
	return took, nil
}

// startsInside has a shell in the sandbox start /bin/true and print how long each took: what
// the sandbox's kernel itself needs for a process, without us.
func (x box) startsInside(ctx context.Context, n int) (samples, error) {
	script := `for ((i = 0; i < ` + strconv.Itoa(n) + `; i++)); do
	a=${EPOCHREALTIME/./}; /bin/true; b=${EPOCHREALTIME/./}; echo $((b - a)); done`
	r, err := x.run(ctx, "/bin/bash", "-c", script)
	if err != nil {
		return nil, err
	}
	var took samples
	for line := range strings.Lines(r.stdout) {
		us, err := strconv.ParseFloat(strings.TrimSpace(line), 64)
		if err != nil {
			return nil, fmt.Errorf("read the shell's times: %w", err)
		}
		took = append(took, us/1000)
	}
	if len(took) != n {
		return nil, fmt.Errorf("the shell printed %d times instead of %d", len(took), n)
	}
	return took, nil
}
