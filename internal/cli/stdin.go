package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// interruptible reads a file until its context is done, even while the file
// has nothing to give; a plain read of a terminal could not be ended.
type interruptible struct {
	file *os.File
	wake *os.File
	stop func() bool
	ctx  func() error
}

// newInterruptible wraps files; other readers are returned as they are, for
// they come to their end by themselves.
func newInterruptible(ctx context.Context, in io.Reader) (io.Reader, error) {
	f, ok := in.(*os.File)
	if !ok {
		return in, nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = w.Close() }) // wakes the poll
	return &interruptible{file: f, wake: r, stop: stop, ctx: ctx.Err}, nil
}

// Read waits for the file or the end of the context, which it gives as io.EOF.
func (i *interruptible) Read(b []byte) (int, error) {
	for {
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
		case i.ctx() != nil:
			return 0, errors.Join(io.EOF, i.wake.Close())
		case fds[0].Revents != 0:
			return i.file.Read(b)
		}
	}
}
