package backend

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// OpTimeout bounds every call that asks the backend, UploadTimeout one that waits for an upload. After it the caller gets
	// EIO, and the call goes on until the backend's own timeouts.
	OpTimeout     = 15 * time.Second
	UploadTimeout = 10 * time.Minute
	// downTimeout bounds every call while the backend cannot be reached: one of a sandbox is several here.
	downTimeout = time.Second
	// maxCalls bounds the calls that wait for the backend.
	maxCalls = 256
)

// Calls bounds what waits for the backend, in number and time.
type Calls struct {
	slots chan struct{}
	errno func(error) syscall.Errno
	// Trouble is set when a call has failed, Down while the backend cannot be reached.
	Trouble, Down atomic.Bool
}

// NewCalls returns the bounds of one backend. errno is what a program sees of one of its errors.
func NewCalls(errno func(error) syscall.Errno) *Calls {
	return &Calls{slots: make(chan struct{}, maxCalls), errno: errno}
}

// Health implements [Backend].
func (c *Calls) Health() *Calls { return c }

// Call runs what may ask the backend. Its context ends when the caller no longer waits.
func (c *Calls) Call(ctx context.Context, limit time.Duration, do func(context.Context) error) syscall.Errno {
	if c.Down.Load() {
		limit = downTimeout
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case c.slots <- struct{}{}:
	case <-timer.C:
		return syscall.EIO
	case <-ctx.Done():
		return syscall.EINTR
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	done := make(chan error, 1)
	go func() {
		defer func() { <-c.slots }()
		defer cancel()
		done <- do(bounded)
	}()
	select {
	case err := <-done:
		code := c.errno(err)
		if code == syscall.EIO {
			c.Trouble.Store(true)
		}
		return code
	case <-timer.C:
		c.Trouble.Store(true)
		return syscall.EIO
	}
}

// Errno is what a program sees of an error: the number of a call that failed with one, else EIO.
func Errno(err error) syscall.Errno {
	if err == nil {
		return 0
	}
	var number syscall.Errno
	var network *net.OpError // its number is of a connection
	if errors.As(err, &number) && !errors.As(err, &network) {
		return number
	}
	fmt.Fprintln(os.Stderr, Shorten(err))
	return syscall.EIO
}
