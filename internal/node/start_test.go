package node

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// early notes requests that came before what they ask for was open.
type early struct {
	http.RoundTripper
	mu    sync.Mutex
	inits int      // +checklocks:mu
	all   []string // +checklocks:mu
}

func (e *early) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := e.RoundTripper.RoundTrip(r)
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil && !errors.Is(err, context.DeadlineExceeded) || err == nil && res.StatusCode == http.StatusBadGateway {
		e.all = append(e.all, r.URL.Path)
	}
	if err == nil && r.URL.Path == envd.PathInit {
		e.inits++
	}
	return res, err
}

// A node sends an agent its first request once the port is open, not before: the agent prints a line, which the node reads.
func TestFirstRequestIsAnswered(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	seen := &early{RoundTripper: n.host.Agents.HTTP.Transport}
	n.host.Agents.HTTP.Transport = seen
	began := time.Now()
	ensure(t, n, object(class("runc")))
	s := object(withSidecars)
	ensure(t, n, s)
	took := time.Since(began)
	seen.mu.Lock()
	tooEarly, inits := slices.Clone(seen.all), seen.inits
	seen.mu.Unlock()
	if inits < 2 {
		t.Errorf("%d requests to %s", inits, envd.PathInit)
	}
	if len(tooEarly) > 0 && took < 2*time.Second { // after that time a node requests without the line
		t.Errorf("too early: %q", tooEarly)
	}

	if out, code := run(t, n, s, "echo '"+envd.Serves+"' > /proc/1/fd/2"); code == 0 {
		t.Errorf("a program writes to the agent's output: %q", out)
	}
}
