package sandboxes

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

const (
	// maxParallel bounds --parallel.
	maxParallel = 1000
	// placeholder is replaced by the input in each argument of the command.
	placeholder = "{}"
	// retryAfter is the first pause before an input is tried again; each further one is twice as long.
	retryAfter = time.Second
	// progressEvery is how often the line of progress is painted.
	progressEvery = 200 * time.Millisecond
	// readAhead is how many inputs are read before their turn.
	readAhead = 100_000
	// outputInJSON bounds each stream of a command in --json, in bytes.
	outputInJSON = 1 << 20
)

// parallelOptions are the flags of run for many inputs.
type parallelOptions struct {
	parallel, retries int
	queue             time.Duration
}

func (o *parallelOptions) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.IntVar(&o.parallel, "parallel", 0, "run the command for each line of standard input, this many at once")
	f.IntVar(&o.retries, "retries", 2, "with --parallel: more tries after faults that are not the command's")
	f.DurationVar(&o.queue, "queue", 0, "longest wait for the quota of the namespace (default: none, with --parallel 1h)")
}

func (o *parallelOptions) queueTimeout(cmd *cobra.Command) time.Duration {
	if o.parallel > 0 && !cmd.Flags().Changed("queue") {
		return time.Hour
	}
	return o.queue
}

func (o *parallelOptions) check(cmd *cobra.Command, a *app.App, run *runOptions, argv []string) error {
	switch {
	case o.queue < 0:
		return app.Usage(cmd, fmt.Errorf("--queue: %s is negative", o.queue))
	case o.parallel == 0 && (cmd.Flags().Changed("retries") || a.JSON):
		return app.Usage(cmd, errors.New("--retries and --json need --parallel"))
	case o.parallel == 0:
		return nil
	case o.parallel < 0 || o.parallel > maxParallel:
		return app.Usage(cmd, fmt.Errorf("--parallel: %d is not from 1 to %d", o.parallel, maxParallel))
	case o.retries < 0:
		return app.Usage(cmd, fmt.Errorf("--retries: %d is negative", o.retries))
	case run.keep || run.tty || run.interactive:
		return app.Usage(cmd, errors.New("--parallel: not with --keep, -i or -t"))
	case !strings.Contains(strings.Join(argv, " "), placeholder):
		return app.Usage(cmd, fmt.Errorf("--parallel: the command has no %s, which stands for the input", placeholder))
	case terminal.IsTerminal(a.Stdin):
		return app.Usage(cmd, errors.New("--parallel: standard input is a terminal; want a file or a pipe with an input in each line"))
	}
	return nil
}

// outcome is the result of one input.
type outcome struct {
	Input string `json:"input"`
	// ExitCode is the command's; absent if it did not run to its end.
	ExitCode *int    `json:"exitCode,omitempty"`
	Error    string  `json:"error,omitempty"`
	Tries    int     `json:"tries"`
	Seconds  float64 `json:"seconds"`
	Stdout   string  `json:"stdout"`
	Stderr   string  `json:"stderr"`
}

// batch runs a command for many inputs.
type batch struct {
	app     *app.App
	options parallelOptions
	// run runs the command for one input in a new sandbox, with the output of a.
	run func(ctx context.Context, a *app.App, argv []string) error

	mu     sync.Mutex
	inputs tally // +checklocks:mu
	broken error // of the output; +checklocks:mu
}

// tally counts inputs. read are those so far; whole: there are no more.
type tally struct {
	read, running, succeeded, failed, unfinished int
	whole                                        bool
}

func (t tally) done() int { return t.succeeded + t.failed + t.unfinished }

// String is the line of progress, with a bar once it is known how many inputs there are.
func (t tally) String() string {
	text := fmt.Sprintf("%d done, %d running or waiting, %d not successful", t.done(), t.running, t.failed+t.unfinished)
	if !t.whole || t.read == 0 {
		return text
	}
	return fmt.Sprintf("%s %d%% of %d: %s", terminal.Bar(int64(t.done()), int64(t.read)), 100*t.done()/t.read, t.read, text)
}

// each runs the command for each line of standard input. The error is an [app.ExitCode] if any did not succeed.
func (b *batch) each(ctx context.Context, argv []string) error {
	began := time.Now()
	painted := b.paint()
	var group errgroup.Group
	group.SetLimit(b.options.parallel)
	inputs, readErr := b.read(ctx)
	for input := range inputs {
		if ctx.Err() != nil || b.outputErr() != nil {
			break
		}
		group.Go(func() error { b.one(ctx, input, argv); return nil })
	}
	_ = group.Wait() // no function has an error
	painted()
	b.mu.Lock()
	defer b.mu.Unlock()
	fmt.Fprintf(b.app.Stderr, "%d succeeded, %d failed, %d did not run to their end, in %s\n", b.inputs.succeeded, b.inputs.failed, b.inputs.unfinished, time.Since(began).Round(time.Second/10))
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case b.broken != nil:
		return b.broken
	case *readErr != nil:
		return fmt.Errorf("read the inputs: %w", *readErr)
	case b.inputs.failed+b.inputs.unfinished > 0:
		return app.ExitCode(app.CodeError)
	}
	return nil
}

// read reads the lines of standard input, ahead of their turn, so that it is soon known how many there are. The error is set
// when the channel is closed, unless ctx was done.
func (b *batch) read(ctx context.Context) (inputs <-chan string, err *error) {
	lines, err := make(chan string, readAhead), new(error)
	scanner := bufio.NewScanner(b.app.Stdin)
	scanner.Buffer(nil, 1<<20)
	go func() {
		defer close(lines)
		for scanner.Scan() {
			if scanner.Text() == "" {
				continue
			}
			select {
			case lines <- scanner.Text():
				b.count(func(n *tally) { n.read++ })
			case <-ctx.Done():
				return
			}
		}
		*err = scanner.Err()
		b.count(func(n *tally) { n.whole = true })
	}()
	return lines, err
}

// one runs the command for an input, and prints its output at its end.
func (b *batch) one(ctx context.Context, input string, argv []string) {
	b.count(func(n *tally) { n.running++ })
	result := outcome{Input: input}
	began := time.Now()
	replaced := make([]string, len(argv))
	for i := range argv {
		replaced[i] = strings.ReplaceAll(argv[i], placeholder, input)
	}
	var out, errOut spool
	defer out.close()
	defer errOut.close()
	var err error
	for pause := retryAfter; ; pause *= 2 {
		result.Tries++
		out.reset()
		errOut.reset()
		quiet := *b.app
		quiet.Stdin, quiet.Stdout, quiet.Stderr = nil, &out, &errOut
		if err = b.run(ctx, &quiet, replaced); !transient(err) || result.Tries > b.options.retries {
			break
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
	result.Seconds = time.Since(began).Seconds()
	if result.end(err); result.ExitCode == nil && ctx.Err() != nil {
		result.Error = "interrupted"
	}
	b.count(func(n *tally) {
		n.running--
		switch {
		case result.ExitCode == nil:
			n.unfinished++
		case *result.ExitCode == 0:
			n.succeeded++
		default:
			n.failed++
		}
	})
	b.print(&result, &out, &errOut)
}

// transient reports whether an error is neither the command's nor the request's, so that another try may succeed.
func transient(err error) bool {
	return errors.Is(err, errs.ErrUnavailable) || errors.Is(err, errs.ErrTimeout) || errors.Is(err, errs.ErrConflict)
}

// end takes over the end of the last try.
func (o *outcome) end(err error) {
	code, start := app.ExitCode(0), &app.StartError{}
	switch {
	case err == nil, errors.As(err, &code):
		o.ExitCode = new(int(code))
	case errors.As(err, &start):
		o.ExitCode, o.Error = new(start.Code), err.Error()
	default:
		o.Error = err.Error()
	}
}

func (b *batch) count(change func(n *tally)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change(&b.inputs)
}

func (b *batch) outputErr() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.broken
}

// print writes an outcome at once, so that no other's output is between.
func (b *batch) print(result *outcome, out, errOut *spool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.wipeLocked()
	var err error
	if b.app.JSON {
		result.Stdout, result.Stderr = out.text(outputInJSON), errOut.text(outputInJSON)
		err = json.NewEncoder(b.app.Stdout).Encode(result)
	} else {
		err = errors.Join(out.copyTo(b.app.Stdout), errOut.copyTo(b.app.Stderr))
		if result.Error != "" {
			fmt.Fprintf(b.app.Stderr, "barchan: input %q: %s\n", result.Input, terminal.Plain(result.Error))
		} else if *result.ExitCode != 0 {
			fmt.Fprintf(b.app.Stderr, "barchan: input %q: exit code %d\n", result.Input, *result.ExitCode)
		}
	}
	if b.broken == nil {
		b.broken = err
	}
}

// paint shows the progress on a terminal until the returned function is called.
func (b *batch) paint() (end func()) {
	if !terminal.IsTerminal(b.app.Stderr) {
		return func() {}
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(progressEvery)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				b.mu.Lock()
				b.wipeLocked()
				fmt.Fprint(b.app.Stderr, b.inputs)
				b.mu.Unlock()
			}
		}
	})
	return func() {
		close(stop)
		wg.Wait()
		b.mu.Lock()
		defer b.mu.Unlock()
		b.wipeLocked()
	}
}

// wipeLocked removes the line of progress.
//
// +checklocks:b.mu
func (b *batch) wipeLocked() {
	if terminal.IsTerminal(b.app.Stderr) {
		fmt.Fprint(b.app.Stderr, "\r\x1b[K")
	}
}

// spool keeps output in a file without a name until it can be printed. Its zero value is empty.
type spool struct {
	file *os.File
	size int64
}

func (s *spool) Write(b []byte) (int, error) {
	if s.file == nil {
		f, err := os.CreateTemp("", "barchan-run-")
		if err != nil {
			return 0, err
		}
		_ = os.Remove(f.Name())
		s.file = f
	}
	n, err := s.file.WriteAt(b, s.size)
	s.size += int64(n)
	return n, err
}

func (s *spool) reset() { s.size = 0 }

func (s *spool) copyTo(w io.Writer) error {
	if s.file == nil {
		return nil
	}
	_, err := io.Copy(w, io.NewSectionReader(s.file, 0, s.size))
	return err
}

// text returns the last bytes, at most so many.
func (s *spool) text(most int64) string {
	if s.file == nil {
		return ""
	}
	from := max(0, s.size-most)
	b, _ := io.ReadAll(io.NewSectionReader(s.file, from, s.size-from)) // what can be read
	return strings.ToValidUTF8(string(b), "�")
}

func (s *spool) close() {
	if s.file != nil {
		_ = s.file.Close()
	}
}

// runEach runs a command for each line of standard input, in sandboxes of n.
func runEach(ctx context.Context, a *app.App, t *app.Server, n client.CreateOptions, v variant, argv []string, run processOptions, o parallelOptions) error {
	run.noInput = true
	b := &batch{app: a, options: o, run: func(ctx context.Context, a *app.App, argv []string) error {
		return runInNew(ctx, a, t, n, v, argv, run, false)
	}}
	return b.each(ctx, argv)
}
