package boot_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
)

var errBoom = errors.New("boom")

func TestCheck(t *testing.T) {
	a := boot.Phase{Name: "a", Provides: []boot.Resource{"x"}}
	b := boot.Phase{Name: "b", Needs: []boot.Resource{"x"}, Provides: []boot.Resource{"y"}}
	for name, tt := range map[string]struct {
		phases []boot.Phase
		want   string // in the error; empty: none
	}{
		"in order":          {[]boot.Phase{a, b}, ""},
		"exchanged":         {[]boot.Phase{b, a}, `"b" needs "x"`},
		"missing":           {[]boot.Phase{b}, `"b" needs "x"`},
		"its own":           {[]boot.Phase{{Name: "c", Needs: []boot.Resource{"z"}, Provides: []boot.Resource{"z"}}}, `"c" needs "z"`},
		"provided twice":    {[]boot.Phase{a, {Name: "c", Provides: []boot.Resource{"x"}}}, `both provide "x"`},
		"one name for two":  {[]boot.Phase{a, {Name: "a"}}, "not unique"},
		"without any names": {[]boot.Phase{{}}, "empty"},
	} {
		t.Run(name, func(t *testing.T) {
			err := boot.Check(tt.phases)
			if (err != nil) != (tt.want != "") || err != nil && (!errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("Check = %v, want %q", err, tt.want)
			}
			ran := false
			phases := append([]boot.Phase{{Name: "first", Run: func(context.Context) error { ran = true; return nil }}}, tt.phases...)
			err = boot.Run(t.Context(), phases, boot.NewProgress(telemetry.Discard(), nil, nil), &lifecycle.Stack{})
			if (err != nil) != (tt.want != "") || ran != (err == nil) {
				t.Errorf("Run = %v, and the first phase ran: %v", err, ran)
			}
		})
	}
}

// TestRun starts the services of a phase after its Run and before the next phase, and stops them in reverse.
func TestRun(t *testing.T) {
	var order []string
	note := func(what string) { order = append(order, what) }
	phase := func(name string, failure error) boot.Phase {
		return boot.Phase{
			Name: name, Run: func(context.Context) error { note("run " + name); return nil },
			Services: func() []boot.Service {
				note("services " + name)
				return []boot.Service{{Name: name, Run: func(ctx context.Context, ready func()) error {
					if failure != nil {
						return failure
					}
					ready()
					<-ctx.Done()
					note("stopped " + name)
					return nil
				}}}
			},
		}
	}
	var stack lifecycle.Stack
	err := boot.Run(t.Context(), []boot.Phase{phase("a", nil), phase("b", nil), phase("c", errBoom), phase("d", nil)}, boot.NewProgress(telemetry.Discard(), nil, nil), &stack)
	if !errors.Is(err, errBoom) || !strings.Contains(err.Error(), `"c"`) {
		t.Errorf("Run = %v", err)
	}
	if err := stack.Stop(); err != nil {
		t.Error(err)
	}
	want := "run a, services a, run b, services b, run c, services c, stopped b, stopped a"
	if got := strings.Join(order, ", "); got != want {
		t.Errorf("order: %s, want %s", got, want)
	}
}

// TestRunStopsWhenAServiceEnds has a service of an earlier phase end during a later one.
func TestRunStopsWhenAServiceEnds(t *testing.T) {
	var stack lifecycle.Stack
	end := make(chan struct{})
	err := boot.Run(t.Context(), []boot.Phase{
		{Name: "a", Services: func() []boot.Service {
			return []boot.Service{boot.Background("brief", func(context.Context) error { <-end; return errBoom })}
		}},
		{Name: "b", Run: func(context.Context) error {
			close(end)
			<-stack.Failed()
			return nil
		}},
		{Name: "c", Run: func(context.Context) error { t.Error("a later phase runs"); return nil }},
	}, boot.NewProgress(telemetry.Discard(), nil, nil), &stack)
	if err == nil || !strings.Contains(err.Error(), `"b"`) {
		t.Errorf("Run = %v", err)
	}
	if err := stack.Stop(); !errors.Is(err, errBoom) {
		t.Errorf("Stop = %v", err)
	}
}

var errAwait = errors.New("await failed")

func TestAwaited(t *testing.T) {
	never := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	for name, tt := range map[string]struct {
		run, await func(context.Context) error
		want       error // nil: ready
	}{
		"ready":              {never, func(context.Context) error { time.Sleep(time.Hour); return nil }, nil},
		"run fails":          {func(context.Context) error { return errBoom }, never, errBoom},
		"run fails later":    {func(context.Context) error { time.Sleep(time.Hour); return errBoom }, never, errBoom},
		"await fails":        {never, func(context.Context) error { return errBoom }, errBoom},
		"run fails, closed":  {func(context.Context) error { return errBoom }, boot.Closed(make(chan struct{})), errBoom},
		"both fail, run's":   {func(ctx context.Context) error { <-ctx.Done(); return errBoom }, func(context.Context) error { return errAwait }, errBoom},
		"both fail, await's": {func(ctx context.Context) error { <-ctx.Done(); return errBoom }, func(context.Context) error { return errAwait }, errAwait},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var stack lifecycle.Stack
				began := time.Now()
				err := boot.Push(t.Context(), &stack, boot.Awaited("x", tt.run, tt.await))
				if !errors.Is(err, tt.want) || (err == nil && time.Since(began) != time.Hour) {
					t.Errorf("Push = %v after %s, want %v", err, time.Since(began), tt.want)
				}
				if err != nil && errors.Is(err, context.Canceled) {
					t.Errorf("Push = %v has a consequence of the cause", err)
				}
				if err := stack.Stop(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestProgress(t *testing.T) {
	p := boot.NewProgress(telemetry.Discard(), nil, nil)
	readyz := func() (int, string) {
		rec := httptest.NewRecorder()
		p.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/readyz", http.NoBody))
		var body struct {
			Ready  bool
			Phase  string
			Phases []struct{ Name string }
		}
		if err := json.Unmarshal(rec.Body.Bytes(), &body); err != nil {
			t.Fatal(err)
		}
		return rec.Code, body.Phase
	}
	if err := p.Do(t.Context(), "first", func(context.Context) error {
		if code, phase := readyz(); code != http.StatusServiceUnavailable || phase != "first" {
			t.Errorf("within a phase: %d, %q", code, phase)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	boom := errors.New("boom")
	if err := p.Do(t.Context(), "second", func(context.Context) error { return boom }); !errors.Is(err, boom) || !strings.Contains(err.Error(), `"second"`) {
		t.Errorf("a phase that fails: %v", err)
	}
	p.SetReady()
	if code, phase := readyz(); code != http.StatusOK || phase != "ready" {
		t.Errorf("when ready: %d, %q", code, phase)
	}
	p.SetStopping()
	if code, phase := readyz(); code != http.StatusServiceUnavailable || phase != "stopping" {
		t.Errorf("while it stops: %d, %q", code, phase)
	}
}

func TestHandlerBeforeReady(t *testing.T) {
	h := boot.NewProgress(telemetry.Discard(), nil, nil).Handler()
	for path, want := range map[string]int{"/healthz": http.StatusOK, "/readyz": http.StatusServiceUnavailable, "/sandboxes": http.StatusServiceUnavailable} {
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, http.NoBody))
		if rec.Code != want || (want != http.StatusOK && rec.Header().Get("Retry-After") == "") {
			t.Errorf("%s: %d, headers %v", path, rec.Code, rec.Header())
		}
	}
}
