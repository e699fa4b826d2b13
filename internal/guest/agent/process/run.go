package process

import (
	"context"
	"syscall"

	"github.com/barchan-dev/barchan/internal/guest/agent/account"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// Output is what a program of [Table.Run] wrote, and its exit code: 128 and the number for one that a signal ended.
type Output struct {
	Stdout, Stderr []byte
	Code           int
	// Cut reports whether more was written than is kept.
	Cut bool
}

// Run runs a program without input to its end, and keeps at most so many bytes of each output. When ctx ends first, the program is
// killed, and the error is ctx's cause.
func (t *Table) Run(ctx context.Context, acc account.User, argv []string, most int) (out Output, err error) {
	noInput := false
	p, sub, err := t.start(acc, &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: argv[0], Args: argv[1:]}, Stdin: &noInput}, 0)
	if err != nil {
		return out, err
	}
	defer sub.leave()
	keep := func(to *[]byte, b []byte) {
		room := min(len(b), most-len(*to))
		*to, out.Cut = append(*to, b[:room]...), out.Cut || room < len(b)
	}
	for {
		select {
		case ev := <-sub.events:
			if end := ev.GetEnd(); end != nil {
				out.Code = envd.ExitCode(end)
				return out, nil
			}
			keep(&out.Stdout, ev.GetData().GetStdout())
			keep(&out.Stderr, ev.GetData().GetStderr())
		case <-ctx.Done():
			_ = t.reaper.Signal(p.pid, syscall.SIGKILL) // it may have ended
			return out, context.Cause(ctx)
		}
	}
}
