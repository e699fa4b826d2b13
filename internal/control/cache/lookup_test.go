package cache_test

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestCurrentSandbox: where the watch is cut off, a sandbox that it has not shown is found, and none is missing while the API server
// does not answer. While it is open, nothing is listed.
func TestCurrentSandbox(t *testing.T) {
	cfg, net := serve(t), &network{}
	cfg.Wrap(net.wrap)
	c, _ := startOn(t, cfg)
	eventually.True(t, "the watch is taken for unbroken", func() bool {
		lists := net.count()
		_, err := c.CurrentSandbox(t.Context(), "default", "i0000000000000000000")
		return errors.Is(err, errs.ErrNotFound) && net.count() == lists
	})
	net.cut()
	made := create(t, c)
	id := sandbox.IDOf(made.UID)
	eventually.NoError(t, "the sandbox is found", func() error { // once the informer notices
		got, err := c.CurrentSandbox(t.Context(), made.Namespace, id)
		if err == nil && (got.UID != made.UID || len(got.Spec.PodTemplate.Spec.Containers) != 1) {
			t.Errorf("CurrentSandbox = %+v", got)
		}
		return err
	})
	if _, err := c.SandboxByID(t.Context(), id); !errors.Is(err, errs.ErrNotFound) {
		t.Fatalf("the watch is not cut off: %v", err)
	}
	for what, of := range map[string]struct {
		namespace string
		id        sandbox.ID
	}{"another namespace": {"kube-system", id}, "another ID": {made.Namespace, "i0000000000000000000"}} {
		if got, err := c.CurrentSandbox(t.Context(), of.namespace, of.id); !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("%s: %v, %v", what, got, err)
		}
	}
	net.away()
	if _, err := c.CurrentSandbox(t.Context(), made.Namespace, "i0000000000000000000"); !errors.Is(err, errs.ErrUnavailable) || errors.Is(err, errs.ErrNotFound) {
		t.Errorf("without an API server: %v", err)
	}
}

// network fails the watches of sandboxes after cut, and all requests after away. It counts lists of sandboxes.
type network struct {
	next http.RoundTripper

	mu                 sync.Mutex
	lists              int
	watchesCut, isAway bool
	watches            []io.Closer
}

func (n *network) wrap(next http.RoundTripper) http.RoundTripper {
	n.next = next
	return n
}

func (n *network) cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.watchesCut = true
	for _, w := range n.watches {
		_ = w.Close()
	}
}

func (n *network) away() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.isAway = true
}

func (n *network) count() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lists
}

func (n *network) RoundTrip(r *http.Request) (*http.Response, error) {
	ofAll := r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/sandboxes")
	isWatch := ofAll && r.URL.Query().Get("watch") != ""
	n.mu.Lock()
	fails := n.isAway || isWatch && n.watchesCut
	if ofAll && !isWatch {
		n.lists++
	}
	n.mu.Unlock()
	if fails {
		return nil, errors.New("connection refused")
	}
	resp, err := n.next.RoundTrip(r)
	if err == nil && isWatch {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.watches = append(n.watches, resp.Body)
	}
	return resp, err
}
