package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// StandardInput reads standard input until the context is done: Ctrl-C ends the read.
func (a *App) StandardInput(ctx context.Context) (io.Reader, error) {
	return NewInterruptible(ctx, a.Stdin)
}

// Open opens a named file; - is standard input.
func (a *App) Open(ctx context.Context, name string) (io.ReadCloser, error) {
	if name != "-" {
		return os.Open(name)
	}
	in, err := a.StandardInput(ctx)
	return io.NopCloser(in), err
}

// interruptible reads a file until its context is done, even while the file has no data; a plain read
// of a terminal could not be cancelled.
type interruptible struct {
	file *os.File
	wake *os.File
	ctx  func() error
}

// NewInterruptible wraps files; other readers are returned unchanged, because they end without it.
func NewInterruptible(ctx context.Context, in io.Reader) (io.Reader, error) {
	f, ok := in.(*os.File)
	if !ok {
		return in, nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe: %w", err)
	}
	context.AfterFunc(ctx, func() { _ = w.Close() }) // wakes the poll
	return &interruptible{file: f, wake: r, ctx: ctx.Err}, nil
}

// Read waits for data or the end of the context, and then returns its error.
func (i *interruptible) Read(b []byte) (int, error) {
	for {
		if err := i.ctx(); err != nil {
			return 0, err
		}
		fds := []unix.PollFd{
			{Fd: int32(i.file.Fd()), Events: unix.POLLIN},
			{Fd: int32(i.wake.Fd()), Events: unix.POLLIN},
		}
		_, err := unix.Poll(fds, -1)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return 0, fmt.Errorf("wait for input: %w", err)
		case fds[0].Revents != 0 && i.ctx() == nil:
			return i.file.Read(b)
		}
	}
}

// ReadPassword reads a line of a terminal without echo. If the context is done first the echo is
// restored, and the read is left until the program exits: it cannot be cancelled.
func ReadPassword(ctx context.Context, terminal int) ([]byte, error) {
	before, err := term.GetState(terminal)
	if err != nil {
		return nil, err
	}
	type line struct {
		text []byte
		err  error
	}
	read := make(chan line, 1)
	go func() {
		text, err := term.ReadPassword(terminal)
		read <- line{text, err}
	}()
	select {
	case l := <-read:
		return l.text, l.err
	case <-ctx.Done():
		return nil, errors.Join(ctx.Err(), term.Restore(terminal, before))
	}
}
