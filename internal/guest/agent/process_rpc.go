package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

const defaultKeepalive = 90 * time.Second

// processService is the wire side of processes.
type processService struct {
	processes *processes
	users     users
}

var _ processpb.ProcessHandler = (*processService)(nil)

// Start runs a process and streams its events.
func (s *processService) Start(ctx context.Context, req *connect.Request[processpb.StartRequest], stream *connect.ServerStream[processpb.StartResponse]) error {
	acc, err := s.users.of(req.Header())
	if err != nil {
		return err
	}
	timeout, err := timeoutOf(req.Header())
	if err != nil {
		return err
	}
	p, sub, err := s.processes.start(acc, req.Msg, timeout)
	if err != nil {
		return err
	}
	defer sub.leave()
	err = relay(ctx, p, sub, req.Header(), func(ev *processpb.ProcessEvent) error {
		return stream.Send(&processpb.StartResponse{Event: ev})
	})
	if connect.CodeOf(err) == connect.CodeDeadlineExceeded {
		s.processes.expire(p)
	}
	return err
}

// Connect streams the events of a process that runs already.
func (s *processService) Connect(ctx context.Context, req *connect.Request[processpb.ConnectRequest], stream *connect.ServerStream[processpb.ConnectResponse]) error {
	p, err := s.processes.find(req.Msg.GetProcess(), true)
	if err != nil {
		return err
	}
	sub := p.subscribe()
	defer sub.leave()
	return relay(ctx, p, sub, req.Header(), func(ev *processpb.ProcessEvent) error {
		return stream.Send(&processpb.ConnectResponse{Event: ev})
	})
}

// relay sends start, then all events to the end, and signs of life between.
func relay(ctx context.Context, p *process, sub *subscriber, h http.Header, send func(*processpb.ProcessEvent) error) error {
	if err := send(startEvent(p.pid)); err != nil {
		return err
	}
	interval := keepaliveOf(h)
	keepalive := time.NewTimer(interval)
	defer keepalive.Stop()
	for {
		var ev *processpb.ProcessEvent
		select {
		case ev = <-sub.events:
		case <-keepalive.C:
			ev = &processpb.ProcessEvent{Event: &processpb.ProcessEvent_Keepalive{Keepalive: &processpb.ProcessEvent_KeepAlive{}}}
		case <-ctx.Done():
			return contextError(ctx)
		}
		if ev.GetEnd() != nil && p.timedOut.Load() {
			return connect.NewError(connect.CodeDeadlineExceeded, context.DeadlineExceeded)
		}
		if err := send(ev); err != nil {
			return err
		}
		if ev.GetEnd() != nil {
			return nil
		}
		keepalive.Reset(interval)
	}
}

// List names the running processes.
func (s *processService) List(context.Context, *connect.Request[processpb.ListRequest]) (*connect.Response[processpb.ListResponse], error) {
	res := &processpb.ListResponse{}
	for _, p := range s.processes.list() {
		res.Processes = append(res.Processes, &processpb.ProcessInfo{Config: p.config, Pid: uint32(p.pid), Tag: p.tag})
	}
	return connect.NewResponse(res), nil
}

// Update changes a terminal's size.
func (s *processService) Update(_ context.Context, req *connect.Request[processpb.UpdateRequest]) (*connect.Response[processpb.UpdateResponse], error) {
	p, err := s.processes.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if size := winsize(req.Msg.GetPty()); size != nil {
		if p.io.tty == nil {
			return nil, connect.NewError(connect.CodeFailedPrecondition, errNoPty)
		}
		if err := resize(p.io.tty, size); err != nil {
			return nil, connect.NewError(connect.CodeInternal, fmt.Errorf("resize terminal: %w", err))
		}
	}
	return connect.NewResponse(&processpb.UpdateResponse{}), nil
}

// SendInput writes to a process's input.
func (s *processService) SendInput(ctx context.Context, req *connect.Request[processpb.SendInputRequest]) (*connect.Response[processpb.SendInputResponse], error) {
	p, err := s.processes.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if err := p.write(ctx, req.Msg.GetInput()); err != nil {
		return nil, inputError(err)
	}
	return connect.NewResponse(&processpb.SendInputResponse{}), nil
}

// StreamInput writes to a process's input many times.
func (s *processService) StreamInput(ctx context.Context, stream *connect.ClientStream[processpb.StreamInputRequest]) (*connect.Response[processpb.StreamInputResponse], error) {
	var p *process
	for stream.Receive() {
		switch ev := stream.Msg().GetEvent().(type) {
		case *processpb.StreamInputRequest_Start:
			var err error
			if p, err = s.processes.find(ev.Start.GetProcess(), false); err != nil {
				return nil, err
			}
		case *processpb.StreamInputRequest_Data:
			if p == nil {
				return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("the first message must be start"))
			}
			if err := p.write(ctx, ev.Data.GetInput()); err != nil {
				return nil, inputError(err)
			}
		case *processpb.StreamInputRequest_Keepalive:
		default:
			return nil, connect.NewError(connect.CodeUnimplemented, errors.New("unknown kind of message"))
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&processpb.StreamInputResponse{}), nil
}

// CloseStdin ends a process's input.
func (s *processService) CloseStdin(ctx context.Context, req *connect.Request[processpb.CloseStdinRequest]) (*connect.Response[processpb.CloseStdinResponse], error) {
	p, err := s.processes.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if err := p.closeStdin(ctx); err != nil {
		return nil, inputError(err)
	}
	return connect.NewResponse(&processpb.CloseStdinResponse{}), nil
}

// SendSignal sends SIGTERM or SIGKILL to a process and to what it started in its group.
func (s *processService) SendSignal(_ context.Context, req *connect.Request[processpb.SendSignalRequest]) (*connect.Response[processpb.SendSignalResponse], error) {
	p, err := s.processes.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	var sig syscall.Signal
	switch req.Msg.GetSignal() {
	case processpb.Signal_SIGNAL_SIGKILL:
		sig = syscall.SIGKILL
	case processpb.Signal_SIGNAL_SIGTERM:
		sig = syscall.SIGTERM
	case processpb.Signal_SIGNAL_UNSPECIFIED:
		fallthrough
	default:
		return nil, connect.NewError(connect.CodeUnimplemented, fmt.Errorf("signal %s: only SIGTERM and SIGKILL can be sent", req.Msg.GetSignal()))
	}
	err = s.processes.reaper.signal(p.pid, sig)
	switch {
	case errors.Is(err, errGone):
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("process with %s not found", selectorText(req.Msg.GetProcess())))
	case err != nil:
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(&processpb.SendSignalResponse{}), nil
}

func inputError(err error) error {
	if errors.Is(err, errRestored) {
		return connect.NewError(connect.CodeUnavailable, errRestored)
	}
	for _, state := range []error{errNoStdin, errUsePty, errNoPty, errPtyClose} {
		if errors.Is(err, state) {
			return connect.NewError(connect.CodeFailedPrecondition, err)
		}
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, err)
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, err)
	}
	return connect.NewError(connect.CodeInternal, fmt.Errorf("write input: %w", err))
}

func contextError(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), errRestored) {
		return connect.NewError(connect.CodeUnavailable, errRestored)
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return connect.NewError(connect.CodeDeadlineExceeded, ctx.Err())
	}
	return connect.NewError(connect.CodeCanceled, ctx.Err())
}

// timeoutOf reads the time a process may take; zero is without end.
func timeoutOf(h http.Header) (time.Duration, error) {
	text := h.Get(envd.HeaderConnectMillis)
	if text == "" {
		return 0, nil
	}
	// The protocol allows ten digits, which a Duration holds.
	ms, err := strconv.ParseUint(text, 10, 34)
	if err != nil {
		return 0, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%s: %q is not a number of milliseconds", envd.HeaderConnectMillis, text))
	}
	return time.Duration(ms) * time.Millisecond, nil
}

// keepaliveOf reads how often a client wants a sign of life.
func keepaliveOf(h http.Header) time.Duration {
	if s, err := strconv.ParseUint(h.Get(envd.HeaderKeepalive), 10, 16); err == nil && s > 0 {
		return time.Duration(s) * time.Second
	}
	return defaultKeepalive
}
