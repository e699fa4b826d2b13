package cache_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/cache"
)

func TestNewRefuses(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for name, tt := range map[string]struct {
		ctx  func() context.Context
		rest *rest.Config
		want error
	}{
		"no config":     {t.Context, nil, errs.ErrInvalid},
		"bad host":      {t.Context, &rest.Config{Host: "http://[::bad"}, nil},
		"bad files":     {t.Context, &rest.Config{Host: "https://x", TLSClientConfig: rest.TLSClientConfig{CAFile: "/none"}}, nil},
		"ended context": {func() context.Context { return ended }, &rest.Config{Host: "http://127.0.0.1:1"}, errs.ErrTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := cache.New(tt.ctx(), cache.Config{REST: tt.rest}); err == nil || (tt.want != nil && !errors.Is(err, tt.want)) {
				t.Errorf("New = %v, want %v", err, tt.want)
			}
		})
	}
}

// run runs a cache that will not sync, and returns what ends it.
func run(t *testing.T, cfg *rest.Config) (*cache.Cache, func()) {
	t.Helper()
	c, err := cache.New(t.Context(), cache.Config{REST: cfg})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Sandboxes(t.Context(), ""); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("read of a cache that does not run = %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := c.Run(ctx); err != nil {
			t.Errorf("Run = %v", err)
		}
	})
	stop := func() { cancel(); running.Wait() }
	t.Cleanup(stop)
	return c, stop
}

func TestWaitSyncedTellsWhy(t *testing.T) {
	forbidding := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		_ = json.NewEncoder(w).Encode(metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure,
			Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden, Message: "mallory cannot list " + r.URL.Path,
		})
	}))
	defer forbidding.Close()
	closed := httptest.NewServer(http.NotFoundHandler())
	closed.Close()
	for name, tt := range map[string]struct {
		host string
		kind error
		text string
	}{
		"forbidden":   {forbidding.URL, errs.ErrForbidden, "mallory cannot list"},
		"unreachable": {closed.URL, errs.ErrUnavailable, "refused"},
	} {
		t.Run(name, func(t *testing.T) {
			c, stop := run(t, &rest.Config{Host: tt.host})
			for { // until the first error has been noted
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
				err := c.WaitSynced(ctx)
				cancel()
				if err != nil && strings.Contains(err.Error(), tt.text) {
					if !errors.Is(err, tt.kind) || !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "Namespace") {
						t.Errorf("WaitSynced = %v", err)
					}
					break
				}
				if err == nil || t.Context().Err() != nil {
					t.Fatalf("WaitSynced = %v", err)
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := c.Sandbox(ctx, types.NamespacedName{Namespace: "a", Name: "b"}); !errors.Is(err, errs.ErrTimeout) {
				t.Errorf("read with an ended context = %v", err)
			}
			waiting := make(chan error, 1)
			go func() { waiting <- c.WaitSynced(context.WithoutCancel(t.Context())) }()
			stop()
			if err := <-waiting; !errors.Is(err, cache.ErrStopped) {
				t.Errorf("WaitSynced of a cache that stops = %v", err)
			}
		})
	}
}

func TestRunsOnce(t *testing.T) {
	c, _ := start(t)
	if err := c.Run(t.Context()); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("second Run = %v", err)
	}
	waiting := make(chan error, 1)
	requested := make(chan struct{})
	go func() {
		_, err := c.WaitSandbox(t.Context(), types.NamespacedName{Namespace: "default", Name: "a"}, func(s *agents.Sandbox) (bool, error) {
			if s == nil {
				close(requested)
			}
			return s != nil, nil
		})
		waiting <- err
	}()
	<-requested
	create(t, c)
	if err := <-waiting; err != nil {
		t.Errorf("the second Run ended the waits of the first: %v", err)
	}
}
