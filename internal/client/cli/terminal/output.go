// Package terminal writes to standard output and standard error: tables, sizes and times, progress, text of guests made safe, and the signals
// that end a command. It knows no server and no command.
package terminal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// Interrupted is the cause of a context that a signal ended.
type Interrupted struct{ syscall.Signal }

// Error names the signal.
func (i Interrupted) Error() string { return "interrupted by signal: " + i.String() }

// Is matches context.Canceled, which contexts and net/http otherwise return.
func (Interrupted) Is(target error) bool { return target == context.Canceled }

// CodeInterrupted is the exit code after SIGINT, as shells count it.
const CodeInterrupted = 128 + int(syscall.SIGINT)

// sameSignal is the time within which further signals are the first one again.
const sameSignal = time.Second

// WithSignals returns a context that ends with the first SIGINT, SIGTERM or SIGHUP, and a function
// that restores the signals. A second signal, a second or more later, ends the program at once, without
// cleanup: timeout(1), for example, sends the first one twice, to the program and to its group. From now on
// a write to a closed pipe fails; by default it would end the program before the cleanup.
func WithSignals(ctx context.Context) (context.Context, func()) {
	signals := []os.Signal{syscall.SIGINT, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // nohup ignores it
		signals = append(signals, syscall.SIGHUP)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	received, broken := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(received, signals...)
	signal.Notify(broken, syscall.SIGPIPE) // not Ignore, which children inherit
	go func() {                            // ends with ctx
		select {
		case sig := <-received:
			time.AfterFunc(sameSignal, func() { signal.Stop(received) })
			cancel(Interrupted{sig.(syscall.Signal)})
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		cancel(nil)
		signal.Stop(received)
		signal.Stop(broken)
	}
}

// OutputError is a failed write to a standard stream.
type OutputError struct {
	stream string
	err    error
}

// Error names the stream and the cause, without the name of the file.
func (o *OutputError) Error() string {
	err := o.err
	if p, ok := errors.AsType[*os.PathError](err); ok {
		err = p.Err
	}
	return fmt.Sprintf("write %s: %v", o.stream, err)
}

// Unwrap returns the cause.
func (o *OutputError) Unwrap() error { return o.err }

// Output is a standard stream whose writes fail with an [OutputError].
type Output struct {
	io.Writer
	Stream string
	Failed func(error) // not nil
	mu     sync.Mutex  // one write at a time
}

// Write writes, and passes a failure to Failed too, because most callers of the fmt package ignore it.
func (o *Output) Write(b []byte) (int, error) {
	o.mu.Lock()
	n, err := o.Writer.Write(b)
	o.mu.Unlock()
	if err != nil {
		err = &OutputError{o.Stream, err}
		o.Failed(err)
	}
	return n, err
}

// FileOf returns the file of a stream, or nil.
func FileOf(stream any) *os.File {
	if o, ok := stream.(*Output); ok {
		stream = o.Writer
	}
	f, _ := stream.(*os.File)
	return f
}
