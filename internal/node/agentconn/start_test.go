package agentconn

import (
	"errors"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// never is a time that no test reaches.
const never = time.Hour

// fakeAgent opens its port, prints its line and ends at times since its start. It answers with codes in turn, the last of them
// from then on.
type fakeAgent struct {
	opens, prints, ends time.Duration
	codes               []int
	began               time.Time
	requests            []string
}

func (f *fakeAgent) since(d time.Duration) bool { return time.Since(f.began) >= d }

// RoundTrip is the agent's, or that of a machine whose port is closed.
func (f *fakeAgent) RoundTrip(r *http.Request) (*http.Response, error) {
	f.requests = append(f.requests, r.URL.Path)
	if !f.since(f.opens) || f.since(f.ends) {
		return nil, syscall.ECONNREFUSED
	}
	code := f.codes[0]
	f.codes = f.codes[min(1, len(f.codes)-1):]
	return &http.Response{StatusCode: code, Body: io.NopCloser(strings.NewReader("{}")), Request: r, Header: http.Header{}}, nil
}

// start awaits the start of an agent, and returns how long that took.
func start(t *testing.T, f *fakeAgent) (took time.Duration, err error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		if f.ends == 0 {
			f.ends = never
		}
		if f.codes == nil {
			f.codes = []int{http.StatusNoContent}
		}
		f.began = time.Now()
		a := New(nil, time.Minute)
		a.HTTP = &http.Client{Transport: f}
		err = a.AwaitStarted(t.Context(), Container{
			ID: "a", Address: netip.MustParseAddr("10.9.0.2"),
			Alive:  func() bool { return !f.since(f.ends) },
			Output: func() string { return "no space left" },
			Serves: func() bool { return f.since(f.prints) },
		})
		took = time.Since(f.began)
	})
	return took, err
}

func TestStart(t *testing.T) {
	const opens = 300 * time.Millisecond
	for name, tt := range map[string]struct {
		agent    fakeAgent
		until    time.Duration // at most
		requests int           // 0: any number
	}{
		"after its line":             {agent: fakeAgent{opens: opens, prints: opens}, until: opens + look, requests: 1},
		"line of another":            {agent: fakeAgent{opens: opens}, until: opens + MaxPause},
		"without a line":             {agent: fakeAgent{opens: opens, prints: never}, until: lineTimeout, requests: 1},
		"late, without a line":       {agent: fakeAgent{opens: 3 * time.Second, prints: never}, until: 3*time.Second + MaxPause},
		"before the agent beside it": {agent: fakeAgent{codes: []int{http.StatusBadGateway, http.StatusNoContent}}, until: minPause, requests: 2},
	} {
		t.Run(name, func(t *testing.T) {
			took, err := start(t, &tt.agent)
			if err != nil || took < tt.agent.opens || took > tt.until {
				t.Errorf("after %s of at most %s: %v", took, tt.until, err)
			}
			if n := len(tt.agent.requests); tt.requests > 0 && n != tt.requests {
				t.Errorf("%d requests, want %d", n, tt.requests)
			}
			if slices.ContainsFunc(tt.agent.requests, func(path string) bool { return path != envd.PathInit }) {
				t.Errorf("requests to %q, want %s alone", tt.agent.requests, envd.PathInit)
			}
		})
	}
}

// A sandbox that ends has no agent to wait for, and its output says why.
func TestStartOfWhatEnds(t *testing.T) {
	const ends = 100 * time.Millisecond
	for name, f := range map[string]*fakeAgent{
		"before its line":   {opens: never, prints: never, ends: ends},
		"after a false one": {opens: never, ends: ends},
	} {
		t.Run(name, func(t *testing.T) {
			took, err := start(t, f)
			if !errors.Is(err, errs.ErrUnavailable) || !strings.Contains(err.Error(), "no space left") || took > ends+looks*look+MaxPause {
				t.Errorf("after %s: %v", took, err)
			}
		})
	}
}

// What an agent refuses is not requested again.
func TestStartRefused(t *testing.T) {
	f := &fakeAgent{codes: []int{http.StatusUnauthorized}}
	if took, err := start(t, f); !errors.Is(err, errs.ErrUnavailable) || took > 0 || len(f.requests) != 1 {
		t.Errorf("after %s and %d requests: %v", took, len(f.requests), err)
	}
}

// A server has no line of an agent whose memory it restores.
func TestRestoreAwaitsNoLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeAgent{ends: never, codes: []int{http.StatusNoContent}, began: time.Now()}
		a := New(nil, time.Minute)
		a.HTTP = &http.Client{Transport: f}
		err := a.AwaitRestored(t.Context(), Container{
			ID: "a", Address: netip.MustParseAddr("10.9.0.2"), Alive: func() bool { return true },
			Output: func() string { return "" }, Serves: func() bool { return false },
		})
		if took := time.Since(f.began); err != nil || took > 0 || !slices.Equal(f.requests, []string{envd.PathHealth, envd.PathRestored}) {
			t.Errorf("after %s and requests to %q: %v", took, f.requests, err)
		}
	})
}
