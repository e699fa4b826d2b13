package apiserver

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	"k8s.io/utils/exec"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// streamIdle is after how long a stream ends on which nothing moves, as for a kubelet.
const streamIdle = 4 * time.Hour

// Command is what to run in a sandbox, and what it is connected to.
type Command struct {
	Argv           []string
	Stdin          io.Reader // nil: none
	Stdout, Stderr io.Writer // of a terminal all goes to Stdout
	Terminal       bool
	// Resize has the terminal's sizes until it is closed.
	Resize <-chan TerminalSize
}

// TerminalSize is in characters. It is an alias, so that an agent's client takes the same channel.
type TerminalSize = struct{ Cols, Rows uint16 }

// Pods does in sandboxes what clients ask of Pods. Errors are of the kinds of package errs; those
// that are not public are not shown to clients.
type Pods interface {
	// Ready returns the sandbox as it is when it runs. A paused one is resumed if traffic may do so.
	Ready(ctx context.Context, s *agents.Sandbox) (*agents.Sandbox, error)
	// Exec runs a command to its end and returns its exit code. When ctx ends, so does the command.
	Exec(ctx context.Context, s *agents.Sandbox, c Command) (exitCode int, err error)
	// Logs calls each for every line kept, and for all that follow if it is to follow.
	Logs(ctx context.Context, s *agents.Sandbox, follow bool, each func(at time.Time, line string) error) error
	// Dial connects to a port of the sandbox, also one of its loopback.
	Dial(ctx context.Context, s *agents.Sandbox, port uint16) (net.Conn, error)
}

// podStream is a subresource of Pods that is served by a handler.
type podStream struct {
	sandboxes *store
	pods      Pods
	methods   []string
	wakes     bool // resumes a paused sandbox where traffic may do so
	serve     func(s *agents.Sandbox, w http.ResponseWriter, req *http.Request) error
}

var _ rest.Connecter = (*podStream)(nil)

// podStreams are the subresources, by their names.
func podStreams(sandboxes *store, pods Pods) map[string]*podStream {
	both := []string{http.MethodGet, http.MethodPost}
	e, f, l := &podExec{pods}, &podPortForward{pods, sandboxes}, &podLogs{pods}
	return map[string]*podStream{
		"exec":        {sandboxes, pods, both, true, e.serve},
		"portforward": {sandboxes, pods, both, true, f.serve},
		"log":         {sandboxes, pods, []string{http.MethodGet}, false, l.serve},
	}
}

// New implements rest.Storage.
func (p *podStream) New() runtime.Object { return &corev1.Pod{} }

// Destroy implements rest.Storage.
func (p *podStream) Destroy() {}

// NewConnectOptions implements rest.Connecter. Handlers read the query themselves.
func (p *podStream) NewConnectOptions() (runtime.Object, bool, string) { return nil, false, "" }

// ConnectMethods implements rest.Connecter.
func (p *podStream) ConnectMethods() []string { return p.methods }

// Connect implements rest.Connecter.
func (p *podStream) Connect(ctx context.Context, name string, _ runtime.Object, r rest.Responder) (http.Handler, error) {
	o, err := p.sandboxes.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	s := o.(*agents.Sandbox)
	if p.wakes {
		if s, err = p.pods.Ready(ctx, s); err != nil {
			return nil, podError(name, err)
		}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		ctx, cancel := context.WithCancel(req.Context())
		defer cancel()
		if err := p.serve(s, &cuttable{w, ctx, cancel}, req.WithContext(ctx)); err != nil {
			r.Error(podError(name, err))
		}
	}), nil
}

// podError makes a status of an error.
func podError(name string, err error) error {
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		return err
	}
	message, public := errs.PublicMessage(err)
	if !public {
		message = "the sandbox does not answer"
	}
	pods := corev1.Resource("pods")
	switch {
	case errors.Is(err, errs.ErrNotFound):
		return apierrors.NewNotFound(pods, name)
	case errors.Is(err, errs.ErrInvalid):
		return apierrors.NewBadRequest(message)
	case errors.Is(err, errs.ErrForbidden):
		return apierrors.NewForbidden(pods, name, errors.New(message))
	case errors.Is(err, errs.ErrConflict):
		return apierrors.NewConflict(pods, name, errors.New(message))
	}
	return apierrors.NewServiceUnavailable(message)
}

// cuttable is a response whose connection, once it is taken over, is closed when ctx ends, and
// cancels ctx when the client has gone: after that point net/http does neither.
type cuttable struct {
	http.ResponseWriter
	ctx    context.Context //nolint:containedctx // it is that of the request
	cancel context.CancelFunc
}

// Flush implements http.Flusher.
func (c *cuttable) Flush() { _ = http.NewResponseController(c.ResponseWriter).Flush() }

// Hijack implements http.Hijacker.
func (c *cuttable) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(c.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	context.AfterFunc(c.ctx, func() { _ = conn.Close() })
	watched := &watchedConn{Conn: conn, read: rw.Reader, gone: c.cancel}
	return watched, bufio.NewReadWriter(bufio.NewReader(watched), rw.Writer), nil
}

// watchedConn says when the other end has gone.
type watchedConn struct {
	net.Conn
	read *bufio.Reader
	gone func()
}

// Read reads what was read ahead first.
func (c *watchedConn) Read(b []byte) (int, error) {
	n, err := c.read.Read(b)
	if err != nil {
		c.gone()
	}
	return n, err
}

// podExec runs commands, by WebSocket or SPDY.
type podExec struct{ pods Pods }

func (x *podExec) serve(s *agents.Sandbox, w http.ResponseWriter, req *http.Request) error {
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
	if err := checkContainer(s, q.Get("container")); err != nil {
		return err
	}
	run := sandboxExecutor{x.pods, s}
	if wsstream.IsWebSocketRequestWithStreamCloseProtocol(req) {
		return serveExecV5(w, req, run, argv, opts)
	}
	remotecommand.ServeExec(w, req, run, s.Name, string(s.UID), "", argv, opts, streamIdle,
		remotecommand.DefaultStreamCreationTimeout, remotecommand.SupportedStreamingProtocols)
	return nil
}

func isTrue(q url.Values, name string) bool {
	b, _ := strconv.ParseBool(q.Get(name))
	return b
}

// checkContainer refuses a container that the sandbox does not have.
func checkContainer(s *agents.Sandbox, name string) error {
	var names []string
	for _, c := range s.Spec.PodTemplate.Spec.Containers {
		if name == "" || name == c.Name {
			return nil
		}
		names = append(names, c.Name)
	}
	if name == "" {
		return nil
	}
	return apierrors.NewBadRequest(fmt.Sprintf("container: %q is not in pod %s; it has %q", name, s.Name, names))
}

// sandboxExecutor is a remotecommand.Executor for one sandbox.
type sandboxExecutor struct {
	pods Pods
	s    *agents.Sandbox
}

// ExecInContainer implements remotecommand.Executor.
func (x sandboxExecutor) ExecInContainer(ctx context.Context, _, _, _ string, argv []string, in io.Reader, out, errOut io.WriteCloser,
	tty bool, resize <-chan remotecommand.TerminalSize, _ time.Duration,
) error {
	c := Command{Argv: argv, Stdout: io.Discard, Stderr: io.Discard, Terminal: tty}
	if in != nil {
		c.Stdin = in
	}
	if out != nil {
		c.Stdout = out
	}
	if errOut != nil {
		c.Stderr = errOut
	}
	sizes := make(chan TerminalSize)
	if resize == nil {
		close(sizes)
	} else {
		go func() { // ends with resize, or with ctx
			defer close(sizes)
			for size := range resize {
				select {
				case sizes <- TerminalSize{Cols: size.Width, Rows: size.Height}:
				case <-ctx.Done():
					return
				}
			}
		}()
	}
	c.Resize = sizes
	code, err := x.pods.Exec(ctx, x.s, c)
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

// serveExecV5 serves v5.channel.k8s.io, which package remotecommand leaves to API servers. It is
// WebSocket's v4 with a message by which the client ends its input.
func serveExecV5(w http.ResponseWriter, req *http.Request, run remotecommand.Executor, argv []string, opts *remotecommand.Options) error {
	channels := make([]wsstream.ChannelType, remotecommand.StreamResize+1) // ignored, unless wanted
	wanted := func(n int, is bool, t wsstream.ChannelType) {
		if is {
			channels[n] = t
		}
	}
	wanted(remotecommand.StreamStdIn, opts.Stdin, wsstream.ReadChannel)
	wanted(remotecommand.StreamStdOut, opts.Stdout, wsstream.WriteChannel)
	wanted(remotecommand.StreamStdErr, opts.Stderr, wsstream.WriteChannel)
	wanted(remotecommand.StreamErr, true, wsstream.WriteChannel)
	wanted(remotecommand.StreamResize, opts.TTY, wsstream.ReadChannel)
	conn := wsstream.NewConn(map[string]wsstream.ChannelProtocolConfig{remotecommand.StreamProtocolV5Name: {Binary: true, Channels: channels}})
	conn.SetIdleTimeout(streamIdle)
	_, streams, err := conn.Open(w, req)
	if err != nil {
		return nil // the client has its answer
	}
	defer func() { _ = conn.Close() }()
	var in io.Reader
	if opts.Stdin {
		in = streams[remotecommand.StreamStdIn]
	}
	var sizes chan remotecommand.TerminalSize
	if opts.TTY {
		sizes = make(chan remotecommand.TerminalSize)
		go func() { // ends with the connection
			defer close(sizes)
			dec := json.NewDecoder(streams[remotecommand.StreamResize])
			for {
				var size remotecommand.TerminalSize
				if dec.Decode(&size) != nil {
					return
				}
				select {
				case sizes <- size:
				case <-req.Context().Done():
					return
				}
			}
		}()
	}
	err = run.ExecInContainer(req.Context(), "", "", "", argv, in, streams[remotecommand.StreamStdOut], streams[remotecommand.StreamStdErr], opts.TTY, sizes, 0)
	text, err := json.Marshal(execStatus(err))
	if err != nil {
		return err
	}
	_, _ = streams[remotecommand.StreamErr].Write(text) // fails if the client has gone
	return nil
}

// execStatus is how a client learns of a command's end.
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

// podPortForward leads to ports, by SPDY, which clients may put into a WebSocket.
type podPortForward struct {
	pods      Pods
	sandboxes *store
}

// now reads the sandbox anew for a connection: meanwhile it may have ended, and its address may be
// another's.
func (f *podPortForward) now(ctx context.Context, s *agents.Sandbox) (*agents.Sandbox, error) {
	o, err := f.sandboxes.Get(genericapirequest.WithNamespace(ctx, s.Namespace), s.Name, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	current := o.(*agents.Sandbox)
	if current.UID != s.UID {
		return nil, apierrors.NewNotFound(corev1.Resource("pods"), s.Name)
	}
	return f.pods.Ready(ctx, current)
}

func (f *podPortForward) serve(s *agents.Sandbox, w http.ResponseWriter, req *http.Request) error {
	handler := http.HandlerFunc(func(w http.ResponseWriter, inner *http.Request) {
		opts, err := portforward.NewV4Options(inner)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		portforward.ServePortForward(w, inner, sandboxForwarder{req.Context(), f, s}, s.Name, string(s.UID), opts, streamIdle,
			remotecommand.DefaultStreamCreationTimeout, portforward.SupportedProtocols)
	})
	if wsstream.IsWebSocketRequestWithTunnelingProtocol(req) {
		proxy.NewTunnelingHandler(handler).ServeHTTP(w, req)
	} else {
		handler.ServeHTTP(w, req)
	}
	return nil
}

// sandboxForwarder is a portforward.PortForwarder for one sandbox. The package hands it no
// context that ends.
type sandboxForwarder struct {
	ctx context.Context //nolint:containedctx // see above
	*podPortForward
	s *agents.Sandbox
}

func (f sandboxForwarder) dial(ctx context.Context, port uint16) (net.Conn, error) {
	s, err := f.now(ctx, f.s)
	if err != nil {
		return nil, err
	}
	return f.pods.Dial(ctx, s, port)
}

// PortForward implements portforward.PortForwarder.
func (f sandboxForwarder) PortForward(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	ctx, cancel := context.WithCancel(f.ctx)
	defer cancel()
	conn, err := f.dial(ctx, uint16(port)) //nolint:contextcheck // the one that it is called with never ends
	if err != nil {
		return podError(f.s.Name, err)
	}
	defer func() { _ = conn.Close() }()
	context.AfterFunc(ctx, func() { _ = conn.Close() }) //nolint:contextcheck // as above
	go func() {                                         // ends with the stream, which is closed when the sandbox has no more to say
		_, _ = io.Copy(conn, stream)
		if half, ok := conn.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
		}
	}()
	_, err = io.Copy(stream, conn)
	return err
}
