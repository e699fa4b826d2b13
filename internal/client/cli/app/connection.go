package app

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Sandbox is a sandbox with a client of its agent.
type Sandbox struct {
	Server *Server
	ID     string
	EndAt  time.Time // its expiry when the command began
	Client *envd.Client
}

// StartError is the error of a program that cannot be started; its exit code is the shells'.
type StartError struct {
	error
	Code int
}

// Unwrap returns the cause.
func (e *StartError) Unwrap() error { return e.error }

const (
	// lostWithin bounds the API calls that explain an unreachable agent.
	lostWithin = 10 * time.Second
	// SettleTime is the time in which a sandbox with closed connections changes its state.
	SettleTime = 3 * time.Second
	// PollInterval is the time between two reads of such a state.
	PollInterval = 200 * time.Millisecond
)

// PausedError refuses work in a paused sandbox.
func PausedError(id string) error {
	return fmt.Errorf("sandbox %s is paused; resume it with `barchan resume %s`: %w", id, id, errs.ErrConflict)
}

// Lost explains the error of a call to the agent; nil is a stream that ended too early. If the agent
// did not respond, the API has the state of the sandbox.
func (r *Sandbox) Lost(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if answer := answerOf(err); answer != nil {
		return answer
	}
	ctx, cancel := context.WithTimeout(ctx, lostWithin)
	defer cancel()
	d, apiErr := r.Server.REST.Get(ctx, r.ID)
	for until := time.Now().Add(SettleTime); apiErr == nil && d.State == client.StateRunning && time.Now().Before(until); {
		time.Sleep(PollInterval) // a pause and an end close connections first
		d, apiErr = r.Server.REST.Get(ctx, r.ID)
	}
	if apiErr != nil {
		return r.gone(apiErr)
	}
	if d.State == client.StatePaused {
		return fmt.Errorf("sandbox %s was paused while it was in use; `barchan resume %s` continues its programs: %w", r.ID, r.ID, errs.ErrConflict)
	}
	why := "it ended early"
	if err != nil {
		why = err.Error()
	}
	return fmt.Errorf("the connection to sandbox %s broke off (%s); the sandbox still runs, and so may the command: %w", r.ID, why, errs.ErrUnavailable)
}

// gone explains why the API does not describe the sandbox.
func (r *Sandbox) gone(err error) error {
	answer, answered := errors.AsType[*client.Error](err)
	switch {
	case !answered:
		return fmt.Errorf("the server at %s is out of reach; sandboxes keep running without it, and so may the command in %s: see `barchan status`: %w", r.Server.URL, r.ID, errs.ErrUnavailable)
	case !errors.Is(err, errs.ErrNotFound):
		return fmt.Errorf("read the state of sandbox %s: %w", r.ID, err)
	case !r.EndAt.IsZero() && !time.Now().Before(r.EndAt):
		return fmt.Errorf("sandbox %s ended at its timeout; set a longer one with --timeout: %w", r.ID, errs.ErrTimeout)
	}
	return fmt.Errorf("sandbox %s ended while it was in use: it was killed, or its memory or processes were used up (%s): %w", r.ID, answer.Message, errs.ErrUnavailable)
}

// answerOf returns the agent's own error, or nil.
func answerOf(err error) error {
	if err == nil || errors.Is(err, io.ErrUnexpectedEOF) || isNetwork(err) {
		return nil
	}
	ce, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return err
	}
	switch ce.Code() { //nolint:exhaustive // others keep their message
	case connect.CodeUnavailable: // from the gateway
		return nil
	case connect.CodeDeadlineExceeded:
		return errs.Public(errs.ErrTimeout, "the command's timeout is over, and it was killed")
	case connect.CodeCanceled:
		return context.Canceled
	}
	refusal := errs.Public(err, ce.Message())
	if code, err := strconv.Atoi(ce.Meta().Get(envd.HeaderExitCode)); err == nil {
		return &StartError{refusal, code}
	}
	return refusal
}

// isNetwork reports whether a connection failed, or could not be made.
func isNetwork(err error) bool {
	_, called := errors.AsType[*url.Error](err)
	_, broke := errors.AsType[*net.OpError](err)
	return called || broke || errors.Is(err, io.EOF)
}
