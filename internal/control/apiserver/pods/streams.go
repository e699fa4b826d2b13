package pods

import (
	"bufio"
	"context"
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
	"k8s.io/apiserver/pkg/registry/rest"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/inflight"
)

// streamIdle ends a stream without traffic after the time that a kubelet allows.
const streamIdle = 4 * time.Hour

// maxForwards bounds the connections of port-forward of a namespace: one request carries any number, and each takes a descriptor.
const maxForwards = 1000

// Command is a command to run in a sandbox, with its streams.
type Command struct {
	// Container is where it runs; empty: in the first one.
	Container      string
	Argv           []string
	Stdin          io.Reader // nil: none
	Stdout, Stderr io.Writer // a terminal writes only to Stdout
	Terminal       bool
	// Resize has the terminal's sizes until it is closed.
	Resize <-chan TerminalSize
}

// TerminalSize is in characters. It is an alias, so that an agent's client takes the same channel.
type TerminalSize = struct{ Cols, Rows uint16 }

// Runtime does in sandboxes what clients request of Pods. Errors are of the kinds of package errs;
// clients do not see those that are not public.
type Runtime interface {
	// Ready returns the sandbox once it runs. A paused one is resumed if traffic may resume it.
	Ready(ctx context.Context, s *agents.Sandbox) (*agents.Sandbox, error)
	// Exec runs a command to its end and returns its exit code. When ctx ends, so does the command.
	Exec(ctx context.Context, s *agents.Sandbox, c Command) (exitCode int, err error)
	// Logs calls each for every kept line of a container, the first one if empty, and for all later ones if it is to follow.
	Logs(ctx context.Context, s *agents.Sandbox, container string, follow bool, each func(at time.Time, line string) error) error
	// Dial connects to a port of the sandbox, also one of its loopback.
	Dial(ctx context.Context, s *agents.Sandbox, port uint16) (net.Conn, error)
}

// host is shared by the streams.
type host struct {
	sandboxes rest.Getter
	Runtime
	// forwards are the connections of port-forward that are open, by namespace.
	forwards inflight.Counter[string]
}

// stream is a subresource of Pods that a handler serves.
type stream struct {
	*host
	methods []string
	resumes bool // a paused sandbox, if traffic may resume it
	serve   func(s *agents.Sandbox, w http.ResponseWriter, req *http.Request) error
}

var _ rest.Connecter = (*stream)(nil)

// streams returns the subresources by name.
func streams(sandboxes rest.Getter, r Runtime) map[string]*stream {
	h, both := &host{sandboxes: sandboxes, Runtime: r}, []string{http.MethodGet, http.MethodPost}
	return map[string]*stream{
		"exec":        {h, both, true, h.exec},
		"portforward": {h, both, true, h.portForward},
		"log":         {h, []string{http.MethodGet}, false, h.logs},
	}
}

func (p *stream) New() runtime.Object { return &corev1.Pod{} }

func (p *stream) Destroy() {}

func (p *stream) NewConnectOptions() (runtime.Object, bool, string) { return nil, false, "" }

func (p *stream) ConnectMethods() []string { return p.methods }

func (p *stream) Connect(ctx context.Context, name string, _ runtime.Object, r rest.Responder) (http.Handler, error) {
	o, err := p.sandboxes.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	s := o.(*agents.Sandbox)
	if p.resumes {
		if s, err = p.Ready(ctx, s); err != nil {
			return nil, statusOf(name, err)
		}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		ctx, cancel := context.WithCancel(req.Context())
		defer cancel()
		if err := p.serve(s, &cuttable{w, ctx, cancel}, req.WithContext(ctx)); err != nil {
			r.Error(statusOf(name, err))
		}
	}), nil
}

// statusOf returns the API status of an error.
func statusOf(name string, err error) error {
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

func isTrue(q url.Values, name string) bool {
	b, _ := strconv.ParseBool(q.Get(name))
	return b
}

// checkContainer returns the name of a container besides the first, or empty for that. It refuses one that the sandbox does
// not have.
func checkContainer(s *agents.Sandbox, name string) (other string, err error) {
	if name == "" {
		return "", nil
	}
	var names []string
	for i, c := range s.Spec.PodTemplate.Spec.Containers {
		if name == c.Name && i == 0 {
			return "", nil
		}
		if name == c.Name {
			return name, nil
		}
		names = append(names, c.Name)
	}
	for _, c := range s.Spec.PodTemplate.Spec.InitContainers {
		if name == c.Name {
			return "", apierrors.NewBadRequest(fmt.Sprintf("container: %q is an init container, of which nothing is kept; terminationMessagePolicy FallbackToLogsOnError "+
				"puts the end of its output into the condition Ready when it fails", name))
		}
	}
	return "", apierrors.NewBadRequest(fmt.Sprintf("container: %q is not in pod %s; it has %q", name, s.Name, names))
}

// cuttable is a response whose connection, once hijacked, is closed when ctx ends, and cancels
// ctx when the client has gone: net/http does neither after a hijack.
type cuttable struct {
	http.ResponseWriter
	ctx    context.Context //nolint:containedctx // of the request
	cancel context.CancelFunc
}

func (c *cuttable) Flush() { _ = http.NewResponseController(c.ResponseWriter).Flush() }

func (c *cuttable) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(c.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	context.AfterFunc(c.ctx, func() { _ = conn.Close() })
	watched := &watchedConn{Conn: conn, read: rw.Reader, gone: c.cancel}
	return watched, bufio.NewReadWriter(bufio.NewReader(watched), rw.Writer), nil
}

// A client may continue to send for maxLinger after the stream has ended, and be silent for linger.
const (
	linger    = time.Second
	maxLinger = 10 * time.Second
)

// watchedConn calls gone when the other end has closed.
type watchedConn struct {
	net.Conn
	read *bufio.Reader
	gone func()
}

// Read returns buffered bytes first.
func (c *watchedConn) Read(b []byte) (int, error) {
	n, err := c.read.Read(b)
	if err != nil {
		c.gone()
	}
	return n, err
}

// Close implements net.Conn. It reads what the client still sends: data that is unread when a connection
// closes makes the kernel reset it, and the client may lose the end of its output.
func (c *watchedConn) Close() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		rest := make([]byte, 32<<10)
		end := time.Now().Add(maxLinger)
		for err := error(nil); err == nil && time.Now().Before(end); {
			_ = c.SetReadDeadline(time.Now().Add(linger))
			_, err = c.Conn.Read(rest)
		}
	}
	return c.Conn.Close()
}
