// Package process serves E2B's process API: it starts programs, streams their output to subscribers
// and keeps exited ones findable for a while. It leaves forking and reaping to package spawn.
//
// Lock order: Table.mu, then fanout.mu; inputGate admits one writer and is held over writes.
package process

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/guest/agent/spawn"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

const (
	// outputGrace is how long a process's output is still awaited after its
	// exit, when its children keep the pipes open.
	outputGrace = 300 * time.Millisecond
	// exitKept is how long Connect finds a process after its end.
	exitKept = 30 * time.Second
	// exitSteps is in how many steps that time is counted.
	exitSteps = 6
	// chunk is the most output in one event.
	chunk = 32 << 10
	// pipeCapacity is the default for kernels that do not report it.
	pipeCapacity = 64 << 10
)

// process is one that a client started.
type process struct {
	fanout

	pid    int
	seq    uint64 // the order of starts
	config *processpb.ProcessConfig
	tag    *string
	io     *spawn.Stdio
	input  inputGate

	ended    atomic.Bool
	timedOut atomic.Bool
	killer   *time.Timer // nil without a timeout
}

type wrapFunc func([]byte) *processpb.ProcessEvent_DataEvent

func wrapStdout(b []byte) *processpb.ProcessEvent_DataEvent {
	return &processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Stdout{Stdout: b}}
}

func wrapStderr(b []byte) *processpb.ProcessEvent_DataEvent {
	return &processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Stderr{Stderr: b}}
}

func wrapPty(b []byte) *processpb.ProcessEvent_DataEvent {
	return &processpb.ProcessEvent_DataEvent{Output: &processpb.ProcessEvent_DataEvent_Pty{Pty: b}}
}

// follow carries the output to the subscribers until the process has ended and
// all it wrote is out, and then publishes the end.
func (p *process) follow(exit <-chan syscall.WaitStatus) {
	var pumps sync.WaitGroup
	if p.io.TTY != nil {
		pumps.Go(func() { p.pump(p.io.TTY, wrapPty) })
	} else {
		pumps.Go(func() { p.pump(p.io.Stdout, wrapStdout) })
		pumps.Go(func() { p.pump(p.io.Stderr, wrapStderr) })
	}
	ws := <-exit
	p.ended.Store(true)
	if p.killer != nil {
		p.killer.Stop()
	}
	if p.io.Stdin != nil {
		// The reader is gone, so there is nothing that closing could lose.
		_ = p.io.Stdin.Close()
	}
	deadline := time.Now().Add(outputGrace)
	for _, f := range []*os.File{p.io.Stdout, p.io.Stderr, p.io.TTY} {
		if f != nil {
			// It fails only on a file that its pump has closed already.
			_ = f.SetReadDeadline(deadline)
		}
	}
	pumps.Wait()
	p.finish(endEvent(ws))
	p.discard()
}

// discard keeps reading after the end, so that SIGPIPE does not kill children that keep
// writing. A terminal hangs up instead.
func (p *process) discard() {
	if p.io.TTY != nil {
		_ = p.io.TTY.Close()
		return
	}
	var rest sync.WaitGroup
	for _, f := range []*os.File{p.io.Stdout, p.io.Stderr} {
		rest.Go(func() {
			if f.SetReadDeadline(time.Time{}) == nil {
				// It ends with the last writer, or when the agent closes the file.
				_, _ = io.Copy(io.Discard, f)
			}
			_ = f.Close()
		})
	}
	rest.Wait()
}

// pump publishes what f gives until its end or its deadline; then it still
// takes what was in the pipe at that time.
func (p *process) pump(f *os.File, wrap wrapFunc) {
	buf := make([]byte, chunk)
	for {
		n, err := f.Read(buf)
		if n > 0 {
			p.publishData(buf[:n], wrap)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			p.drain(f, buf, wrap)
			return
		}
		if err != nil {
			// io.EOF from a pipe, EIO from a terminal.
			_ = f.Close()
			return
		}
	}
}

// drain takes what is in a pipe now, without waiting for more.
func (p *process) drain(f *os.File, buf []byte, wrap wrapFunc) {
	conn, err := f.SyscallConn()
	if err != nil || f.SetReadDeadline(time.Time{}) != nil {
		return
	}
	left := pipeCapacity
	for left > 0 {
		n := 0
		err := conn.Read(func(fd uintptr) bool {
			if size, err := unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0); err == nil && left == pipeCapacity {
				left = size
			}
			var rerr error
			n, rerr = unix.Read(int(fd), buf)
			for errors.Is(rerr, unix.EINTR) {
				n, rerr = unix.Read(int(fd), buf)
			}
			return true
		})
		if err != nil || n <= 0 {
			return
		}
		p.publishData(buf[:n], wrap)
		left -= n
	}
}

func (p *process) publishData(b []byte, wrap wrapFunc) {
	own := append([]byte(nil), b...)
	p.publish(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Data{Data: wrap(own)}})
}

func startEvent(pid int) *processpb.ProcessEvent {
	return &processpb.ProcessEvent{Event: &processpb.ProcessEvent_Start{
		Start: &processpb.ProcessEvent_StartEvent{Pid: uint32(pid)},
	}}
}

func endEvent(ws syscall.WaitStatus) *processpb.ProcessEvent {
	end := &processpb.ProcessEvent_EndEvent{ExitCode: int32(ws.ExitStatus()), Exited: ws.Exited(), Status: spawn.StatusText(ws)}
	if !ws.Exited() || ws.ExitStatus() != 0 {
		end.Error = &end.Status
	}
	return &processpb.ProcessEvent{Event: &processpb.ProcessEvent_End{End: end}}
}

var (
	errNoStdin  = errors.New("the process's standard input is closed, or it was started without one")
	errUsePty   = errors.New("the process has a terminal: send the input as pty")
	errNoPty    = errors.New("the process has no terminal: send the input as stdin")
	errPtyClose = errors.New("the input of a terminal cannot be closed: send Ctrl-D (0x04)")
)

// inputGate lets one writer at a time through to a process's input.
type inputGate struct {
	once sync.Once
	slot chan struct{}
}

func (g *inputGate) enter(ctx context.Context) (leave func(), err error) {
	g.once.Do(func() { g.slot = make(chan struct{}, 1) })
	select {
	case g.slot <- struct{}{}:
		return func() { <-g.slot }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// write sends input in one piece. It waits while the process does not read,
// at most as long as ctx.
func (p *process) write(ctx context.Context, in *processpb.ProcessInput) error {
	var f *os.File
	var b []byte
	switch in := in.GetInput().(type) {
	case *processpb.ProcessInput_Stdin:
		if p.io.TTY != nil {
			return errUsePty
		}
		f, b = p.io.Stdin, in.Stdin
	case *processpb.ProcessInput_Pty:
		if p.io.TTY == nil {
			return errNoPty
		}
		f, b = p.io.TTY, in.Pty
	default:
		return errors.New("input: stdin or pty is needed")
	}
	if f == nil {
		return errNoStdin
	}
	leave, err := p.input.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	fired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = f.SetWriteDeadline(time.Unix(1, 0))
		close(fired)
	})
	defer func() {
		if !stop() {
			<-fired
			_ = f.SetWriteDeadline(time.Time{})
		}
	}()
	_, err = f.Write(b)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, os.ErrClosed) || errors.Is(err, syscall.EPIPE):
		return errNoStdin
	}
	return err
}

// closeStdin ends the input.
func (p *process) closeStdin(ctx context.Context) error {
	if p.io.TTY != nil {
		return errPtyClose
	}
	if p.io.Stdin == nil {
		return errNoStdin
	}
	leave, err := p.input.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if err := p.io.Stdin.Close(); err != nil {
		return errNoStdin
	}
	return nil
}
