package pods

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// noSandboxes has none.
type noSandboxes struct{ asked int }

func (n *noSandboxes) Get(context.Context, string, *metav1.GetOptions) (runtime.Object, error) {
	n.asked++
	return nil, errors.New("none")
}

// TestForwardsAreBounded: one request carries any number of connections, of which a namespace has a share.
func TestForwardsAreBounded(t *testing.T) {
	has := &noSandboxes{}
	h := &host{sandboxes: has}
	forward := func(namespace string) error {
		stream, other := net.Pipe()
		defer func() { _, _ = stream.Close(), other.Close() }()
		f := forwarder{t.Context(), h, &agents.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "s"}}}
		return f.PortForward(t.Context(), "s", "", 80, io.ReadWriteCloser(stream))
	}
	for range maxForwards {
		h.forwards.Take("a", maxForwards)
	}
	if err := forward("a"); err == nil || !strings.Contains(err.Error(), "1000 connections of port-forward") || has.asked != 0 {
		t.Errorf("one more: %v", err)
	}
	if _ = forward("b"); has.asked != 1 {
		t.Error("another namespace is refused")
	}
	h.forwards.Release("a")
	for range 3 { // each gives its own back
		_ = forward("a")
	}
	if has.asked != 4 {
		t.Errorf("%d got through after one was closed, want all", has.asked-1)
	}
}
