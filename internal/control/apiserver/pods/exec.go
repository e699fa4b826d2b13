package pods

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	"k8s.io/utils/exec"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// exec runs a command, by WebSocket or SPDY.
func (h *host) exec(s *agents.Sandbox, w http.ResponseWriter, req *http.Request) error {
	q := req.URL.Query()
	argv := q["command"]
	opts := &remotecommand.Options{Stdin: isTrue(q, "stdin"), Stdout: isTrue(q, "stdout"), Stderr: isTrue(q, "stderr"), TTY: isTrue(q, "tty")}
	opts.Stderr = opts.Stderr && !opts.TTY
	switch {
	case len(argv) == 0:
		return apierrors.NewBadRequest("command: is missing")
	case !opts.Stdin && !opts.Stdout && !opts.Stderr:
		return apierrors.NewBadRequest("one of stdin, stdout and stderr must be true")
	}
	container, err := checkContainer(s, q.Get("container"))
	if err != nil {
		return err
	}
	if wsstream.IsWebSocketRequestWithStreamCloseProtocol(req) {
		return executor{h, s, container}.serveV5(w, req, argv, opts)
	}
	remotecommand.ServeExec(w, req, executor{h, s, container}, s.Name, string(s.UID), "", argv, opts, streamIdle,
		remotecommand.DefaultStreamCreationTimeout, remotecommand.SupportedStreamingProtocols)
	return nil
}

// executor is a remotecommand.Executor for one container of a sandbox.
type executor struct {
	*host
	s         *agents.Sandbox
	container string
}

func (x executor) ExecInContainer(ctx context.Context, _, _, _ string, argv []string, in io.Reader, out, errOut io.WriteCloser,
	tty bool, resize <-chan remotecommand.TerminalSize, _ time.Duration,
) error {
	c := Command{Container: x.container, Argv: argv, Stdin: in, Stdout: io.Discard, Stderr: io.Discard, Terminal: tty}
	if out != nil {
		c.Stdout = out
	}
	if errOut != nil {
		c.Stderr = errOut
	}
	c.Resize = sizes(ctx, func() (size remotecommand.TerminalSize, ok bool) {
		if resize != nil {
			size, ok = <-resize
		}
		return size, ok
	})
	return x.run(ctx, c)
}

// sizes returns a channel with the results of next until it returns false, or ctx is done.
func sizes(ctx context.Context, next func() (remotecommand.TerminalSize, bool)) <-chan TerminalSize {
	c := make(chan TerminalSize)
	go func() { // ends with the connection
		defer close(c)
		for size, ok := next(); ok; size, ok = next() {
			select {
			case c <- TerminalSize{Cols: size.Width, Rows: size.Height}:
			case <-ctx.Done():
				return
			}
		}
	}()
	return c
}

func (x executor) run(ctx context.Context, c Command) error {
	code, err := x.Exec(ctx, x.s, c)
	if err != nil {
		if message, public := errs.PublicMessage(err); public {
			return errors.New(message)
		}
		return err
	}
	if code != 0 {
		return exec.CodeExitError{Err: fmt.Errorf("exit code %d", code), Code: code}
	}
	return nil
}

// serveV5 serves v5.channel.k8s.io, which package remotecommand leaves to API servers. It is
// WebSocket's v4 with a message by which the client ends its input.
func (x executor) serveV5(w http.ResponseWriter, req *http.Request, argv []string, opts *remotecommand.Options) error {
	channels := make([]wsstream.ChannelType, remotecommand.StreamResize+1) // ignored, unless opened
	open := func(n int, requested bool, t wsstream.ChannelType) {
		if requested {
			channels[n] = t
		}
	}
	open(remotecommand.StreamStdIn, opts.Stdin, wsstream.ReadChannel)
	open(remotecommand.StreamStdOut, opts.Stdout, wsstream.WriteChannel)
	open(remotecommand.StreamStdErr, opts.Stderr, wsstream.WriteChannel)
	open(remotecommand.StreamErr, true, wsstream.WriteChannel)
	open(remotecommand.StreamResize, opts.TTY, wsstream.ReadChannel)
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{remotecommand.StreamProtocolV5Name: {Binary: true, Channels: channels}})
	conn.SetIdleTimeout(streamIdle)
	_, streams, err := conn.Open(w, req)
	if err != nil {
		return nil // the client has its response
	}
	defer func() { _ = conn.Close() }()
	c := Command{Container: x.container, Argv: argv, Stdout: streams[remotecommand.StreamStdOut], Stderr: streams[remotecommand.StreamStdErr], Terminal: opts.TTY}
	if opts.Stdin {
		c.Stdin = streams[remotecommand.StreamStdIn]
	}
	dec := json.NewDecoder(streams[remotecommand.StreamResize]) // without a terminal the stream is empty
	c.Resize = sizes(req.Context(), func() (size remotecommand.TerminalSize, ok bool) {
		return size, opts.TTY && dec.Decode(&size) == nil
	})
	text, err := json.Marshal(execStatus(x.run(req.Context(), c)))
	if err != nil {
		return err
	}
	_, _ = streams[remotecommand.StreamErr].Write(text) // fails if the client has gone
	return nil
}

// execStatus returns the result of a command for the client.
func execStatus(err error) *metav1.Status {
	if err == nil {
		return &metav1.Status{Status: metav1.StatusSuccess}
	}
	if exited, ok := errors.AsType[exec.CodeExitError](err); ok {
		return &metav1.Status{
			Status: metav1.StatusFailure, Reason: remotecommand.NonZeroExitCodeReason, Message: "command terminated with " + exited.Error(),
			Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: remotecommand.ExitCodeCauseType, Message: strconv.Itoa(exited.Code)}}},
		}
	}
	status := apierrors.NewInternalError(err).Status()
	return &status
}
