package process

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/agent/reply"
	"github.com/barchan-dev/barchan/internal/guest/agent/settings"
	"github.com/barchan-dev/barchan/internal/guest/agent/spawn"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// RPC is the wire side of processes.
type RPC struct {
	Processes *Table
	Users     settings.Users
}

var _ processpb.ProcessHandler = (*RPC)(nil)

// Start runs a process and streams its events.
func (s *RPC) Start(ctx context.Context, req *connect.Request[processpb.StartRequest], stream *connect.ServerStream[processpb.StartResponse]) error {
	acc, err := s.Users.Of(req.Header())
	if err != nil {
		return err
	}
	timeout, err := reply.Timeout(req.Header())
	if err != nil {
		return err
	}
	p, sub, err := s.Processes.start(acc, req.Msg, timeout)
	if err != nil {
		return err
	}
	defer sub.leave()
	err = relay(ctx, p, sub, req.Header(), func(ev *processpb.ProcessEvent) error {
		return stream.Send(&processpb.StartResponse{Event: ev})
	})
	if connect.CodeOf(err) == connect.CodeDeadlineExceeded {
		s.Processes.expire(p)
	}
	return err
}

// Connect streams the events of a process that runs already.
func (s *RPC) Connect(ctx context.Context, req *connect.Request[processpb.ConnectRequest], stream *connect.ServerStream[processpb.ConnectResponse]) error {
	p, err := s.Processes.find(req.Msg.GetProcess(), true)
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
	interval := reply.Keepalive(h)
	keepalive := time.NewTimer(interval)
	defer keepalive.Stop()
	for {
		var ev *processpb.ProcessEvent
		select {
		case ev = <-sub.events:
		case <-keepalive.C:
			ev = &processpb.ProcessEvent{Event: &processpb.ProcessEvent_Keepalive{Keepalive: &processpb.ProcessEvent_KeepAlive{}}}
		case <-ctx.Done():
			return reply.ContextError(ctx)
		}
		if ev.GetEnd() != nil {
			if p.timedOut.Load() {
				return connect.NewError(connect.CodeDeadlineExceeded, context.DeadlineExceeded)
			}
			reply.Last(ctx)
			return send(ev)
		}
		if err := send(ev); err != nil {
			return err
		}
		keepalive.Reset(interval)
	}
}

// List names the running processes.
func (s *RPC) List(context.Context, *connect.Request[processpb.ListRequest]) (*connect.Response[processpb.ListResponse], error) {
	res := &processpb.ListResponse{}
	for _, p := range s.Processes.list() {
		res.Processes = append(res.Processes, &processpb.ProcessInfo{Config: p.config, Pid: uint32(p.pid), Tag: p.tag})
	}
	return connect.NewResponse(res), nil
}

// Update changes a terminal's size.
func (s *RPC) Update(_ context.Context, req *connect.Request[processpb.UpdateRequest]) (*connect.Response[processpb.UpdateResponse], error) {
	p, err := s.Processes.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if size := winsize(req.Msg.GetPty()); size != nil {
		if p.io.TTY == nil {
			return nil, connect.NewError(connect.CodeFailedPrecondition, errNoPty)
		}
		if err := spawn.Resize(p.io.TTY, size); err != nil {
			return nil, connect.NewError(connect.CodeInternal, fmt.Errorf("resize terminal: %w", err))
		}
	}
	return connect.NewResponse(&processpb.UpdateResponse{}), nil
}

// SendInput writes to a process's input.
func (s *RPC) SendInput(ctx context.Context, req *connect.Request[processpb.SendInputRequest]) (*connect.Response[processpb.SendInputResponse], error) {
	p, err := s.Processes.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if err := p.write(ctx, req.Msg.GetInput()); err != nil {
		return nil, inputError(err)
	}
	return connect.NewResponse(&processpb.SendInputResponse{}), nil
}

// StreamInput writes to a process's input many times.
func (s *RPC) StreamInput(ctx context.Context, stream *connect.ClientStream[processpb.StreamInputRequest]) (*connect.Response[processpb.StreamInputResponse], error) {
	var p *process
	for stream.Receive() {
		switch ev := stream.Msg().GetEvent().(type) {
		case *processpb.StreamInputRequest_Start:
			var err error
			if p, err = s.Processes.find(ev.Start.GetProcess(), false); err != nil {
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
func (s *RPC) CloseStdin(ctx context.Context, req *connect.Request[processpb.CloseStdinRequest]) (*connect.Response[processpb.CloseStdinResponse], error) {
	p, err := s.Processes.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	if err := p.closeStdin(ctx); err != nil {
		return nil, inputError(err)
	}
	return connect.NewResponse(&processpb.CloseStdinResponse{}), nil
}

// SendSignal sends a signal to a process and to what it started in its group.
func (s *RPC) SendSignal(_ context.Context, req *connect.Request[processpb.SendSignalRequest]) (*connect.Response[processpb.SendSignalResponse], error) {
	p, err := s.Processes.find(req.Msg.GetProcess(), false)
	if err != nil {
		return nil, err
	}
	sig := req.Msg.GetSignal()
	if _, known := processpb.Signal_name[int32(sig)]; !known || sig == processpb.Signal_SIGNAL_UNSPECIFIED {
		return nil, connect.NewError(connect.CodeUnimplemented, fmt.Errorf("signal %s: only SIGHUP, SIGINT, SIGQUIT, SIGKILL, SIGUSR1, SIGUSR2 and SIGTERM can be sent", sig))
	}
	err = s.Processes.reaper.Signal(p.pid, syscall.Signal(sig))
	switch {
	case errors.Is(err, spawn.ErrGone):
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("process with %s not found", selectorText(req.Msg.GetProcess())))
	case err != nil:
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(&processpb.SendSignalResponse{}), nil
}

func inputError(err error) error {
	if errors.Is(err, reply.ErrRestored) {
		return connect.NewError(connect.CodeUnavailable, reply.ErrRestored)
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
