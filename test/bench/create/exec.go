package create

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// execBar is the median, in milliseconds, that /bin/true over HTTP shall keep to.
const execBar = 15

// Exec runs /bin/true over a connection that is kept, beside a request that starts
// nothing, over the same connection.
func Exec(ctx context.Context, b *harness.Bench) error {
	host, err := processStarts(ctx, b.Rounds(300))
	if err != nil {
		return err
	}
	b.Report.Add("exec", "process start on the host, no sandbox", "ms", host)
	for _, class := range b.Server.Classes {
		if err := execIn(ctx, b, class); err != nil {
			return err
		}
	}
	return nil
}

func execIn(ctx context.Context, b *harness.Bench, class string) error {
	x, err := b.Server.Create(ctx, class)
	if err != nil {
		return err
	}
	n := b.Rounds(500)
	health, err := harness.Times(n, func() error { return x.Agent.Health(ctx) })
	if err != nil {
		return fmt.Errorf("read health: %w", err)
	}
	execs, err := harness.Times(n, func() error {
		_, err := x.Run(ctx, "/bin/true")
		return err
	})
	if err != nil {
		return err
	}
	inside, err := startsInside(ctx, x, b.Rounds(200))
	if err != nil {
		return err
	}
	const name = "GET /health of the agent"
	f := b.Report.Add("exec", "/bin/true over HTTP, "+class, "ms", execs).Over(name, health.At(0.5))
	if class == "gvisor" {
		f.AtMost(execBar)
	}
	b.Report.Add("exec", name+" through the gateway, "+class, "ms", health)
	b.Report.Add("exec", "process start by a shell inside, "+class, "ms", inside)
	return b.Server.Kill(ctx, x)
}

// startsInside has a shell in the sandbox start /bin/true and print how long each took: what
// the sandbox's kernel itself needs for a process, without us.
func startsInside(ctx context.Context, x harness.Sandbox, n int) (report.Samples, error) {
	script := `for ((i = 0; i < ` + strconv.Itoa(n) + `; i++)); do
	a=${EPOCHREALTIME/./}; /bin/true; b=${EPOCHREALTIME/./}; echo $((b - a)); done`
	out, err := x.Run(ctx, "/bin/bash", "-c", script)
	if err != nil {
		return nil, err
	}
	var took report.Samples
	for line := range strings.Lines(out.Text) {
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
