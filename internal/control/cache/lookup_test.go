package cache_test

import (
	"errors"
	"net/http"
	"sync/atomic"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/lag"
)

// TestCurrentSandbox finds a sandbox that the watch has not shown, and calls none missing while the API server does not answer.
func TestCurrentSandbox(t *testing.T) {
	cfg, hold, release := lag.New(serve(t), lag.Only("sandboxes"))
	var away atomic.Bool
	cfg = rest.CopyConfig(cfg)
	cfg.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTrip(func(r *http.Request) (*http.Response, error) {
			if away.Load() && r.URL.Query().Get("watch") == "" {
				return nil, errors.New("connection refused")
			}
			return next.RoundTrip(r)
		})
	})
	c, _ := startOn(t, cfg)
	t.Cleanup(release)
	hold()
	made := create(t, c)
	id := sandbox.IDOf(made.UID)
	if _, err := c.SandboxByID(t.Context(), id); !errors.Is(err, errs.ErrNotFound) {
		t.Fatalf("the cache does not lag: %v", err)
	}
	if got, err := c.CurrentSandbox(t.Context(), made.Namespace, id); err != nil || got.UID != made.UID || len(got.Spec.PodTemplate.Spec.Containers) != 1 {
		t.Errorf("CurrentSandbox = %+v, %v", got, err)
	}
	for what, of := range map[string]struct {
		namespace string
		id        sandbox.ID
	}{"another namespace": {"kube-system", id}, "another ID": {made.Namespace, "i0000000000000000000"}} {
		if got, err := c.CurrentSandbox(t.Context(), of.namespace, of.id); !errors.Is(err, errs.ErrNotFound) {
			t.Errorf("%s: %v, %v", what, got, err)
		}
	}
	away.Store(true)
	if _, err := c.CurrentSandbox(t.Context(), made.Namespace, "i0000000000000000000"); !errors.Is(err, errs.ErrUnavailable) || errors.Is(err, errs.ErrNotFound) {
		t.Errorf("without an API server: %v", err)
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
