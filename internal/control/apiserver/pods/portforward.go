package pods

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/util/proxy"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// portForward connects to ports, by SPDY, which clients may tunnel through a WebSocket.
func (h *host) portForward(s *agents.Sandbox, w http.ResponseWriter, req *http.Request) error {
	handler := http.HandlerFunc(func(w http.ResponseWriter, inner *http.Request) {
		opts, err := portforward.NewV4Options(inner)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		portforward.ServePortForward(w, inner, forwarder{req.Context(), h, s}, s.Name, string(s.UID), opts, streamIdle,
			remotecommand.DefaultStreamCreationTimeout, portforward.SupportedProtocols)
	})
	if wsstream.IsWebSocketRequestWithTunnelingProtocol(req) {
		proxy.NewTunnelingHandler(handler).ServeHTTP(w, req)
	} else {
		handler.ServeHTTP(w, req)
	}
	return nil
}

// forwarder is a portforward.PortForwarder for one sandbox. The context that the package passes
// to it never ends.
type forwarder struct {
	ctx context.Context //nolint:containedctx // see above
	*host
	s *agents.Sandbox
}

// dial reads the sandbox again for each connection: meanwhile it may have been deleted, and its
// address given to another.
func (f forwarder) dial(ctx context.Context, port uint16) (net.Conn, error) {
	o, err := f.sandboxes.Get(genericapirequest.WithNamespace(ctx, f.s.Namespace), f.s.Name, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	s := o.(*agents.Sandbox)
	if s.UID != f.s.UID {
		return nil, apierrors.NewNotFound(corev1.Resource("pods"), s.Name)
	}
	if s, err = f.Ready(ctx, s); err != nil {
		return nil, err
	}
	return f.Dial(ctx, s, port)
}

func (f forwarder) PortForward(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	if _, ok := f.forwards.Take(f.s.Namespace, maxForwards); !ok {
		return fmt.Errorf("namespace %s has %d connections of port-forward open; close some", f.s.Namespace, maxForwards)
	}
	defer f.forwards.Release(f.s.Namespace)
	ctx, cancel := context.WithCancel(f.ctx)
	defer cancel()
	conn, err := f.dial(ctx, uint16(port)) //nolint:contextcheck // the parameter never ends
	if err != nil {
		return statusOf(f.s.Name, err)
	}
	defer func() { _ = conn.Close() }()
	context.AfterFunc(ctx, func() { _ = conn.Close() }) //nolint:contextcheck // as above
	go func() {                                         // ends with the stream, which is closed when the sandbox has sent all
		_, _ = io.Copy(conn, stream)
		if half, ok := conn.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
		}
	}()
	_, err = io.Copy(stream, conn)
	return err
}
