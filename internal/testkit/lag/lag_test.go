package lag

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

	"k8s.io/client-go/rest"
)

// server answers each request with its path.
type server struct{}

func (server) RoundTrip(req *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(req.URL.Path)), Request: req}, nil
}

func TestWhatIsHeld(t *testing.T) {
	for name, tt := range map[string]struct {
		opts []Option
		url  string
		held bool
	}{
		"watch":                 {nil, "/apis/g/v1/sandboxes?watch=true", true},
		"watch in one":          {nil, "/apis/g/v1/namespaces/a/sandboxes?watch=1", true},
		"list":                  {nil, "/apis/g/v1/sandboxes", false},
		"list, with the option": {[]Option{Lists()}, "/apis/g/v1/namespaces/a/sandboxes?limit=5", true},
		"get":                   {[]Option{Lists()}, "/apis/g/v1/namespaces/a/sandboxes/b", false},
		"this one":              {[]Option{Only("sandboxes")}, "/apis/g/v1/sandboxes?watch=true", true},
		"another":               {[]Option{Only("sandboxes"), Lists()}, "/api/v1/namespaces?watch=true", false},
		"no resource":           {[]Option{Lists()}, "/apis/g/v1", false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cfg, hold, release := New(&rest.Config{Transport: server{}}, tt.opts...)
				hold()
				got := make(chan string, 1)
				go func() { got <- read(t, cfg, tt.url) }()
				synctest.Wait()
				if held := len(got) == 0; held != tt.held {
					t.Errorf("held = %v, want %v", held, tt.held)
				}
				release()
				if path, _, _ := strings.Cut(tt.url, "?"); <-got != path {
					t.Error("the answer is not what the server sent")
				}
			})
		})
	}
}

func TestHeldReadsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg, hold, _ := New(&rest.Config{Transport: server{}})
		hold()
		ctx, cancel := context.WithCancel(t.Context())
		byContext, byClose := do(ctx, t, cfg, "/api/v1/pods?watch=true"), do(t.Context(), t, cfg, "/api/v1/pods?watch=true")
		ended := make(chan error, 2)
		for _, resp := range []*http.Response{byContext, byClose} {
			go func() {
				_, err := io.ReadAll(resp.Body)
				ended <- err
			}()
		}
		synctest.Wait()
		if len(ended) > 0 {
			t.Fatal("not held")
		}
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("read whose context ends = %v", err)
		}
		_ = byContext.Body.Close()
		_ = byClose.Body.Close()
		if err := <-ended; !errors.Is(err, http.ErrBodyReadAfterClose) {
			t.Errorf("read of what is closed = %v", err)
		}
	})
}

func do(ctx context.Context, t *testing.T, cfg *rest.Config, url string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://x"+url, nil)
	if err != nil {
		t.Fatal(err)
	}
	rt, err := rest.TransportFor(cfg)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := rt.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

func read(t *testing.T, cfg *rest.Config, url string) string {
	t.Helper()
	resp := do(t.Context(), t, cfg, url)
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Error(err)
	}
	return string(text)
}
