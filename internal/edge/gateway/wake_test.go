package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// waker resumes a box, or fails.
type waker struct {
	calls   atomic.Int64
	release chan struct{}
	do      func() error
}

func (k *waker) Wake(ctx context.Context, _ sandbox.ID) error {
	k.calls.Add(1)
	select {
	case <-k.release:
		return k.do()
	case <-ctx.Done():
		return ctx.Err()
	}
}

func TestWakeOnce(t *testing.T) {
	k := &waker{release: make(chan struct{})}
	w := newFixture(t, func(c *Config) { c.Waker = k })
	port := backend(t, hello)
	b := w.box("a", wakeable)
	b.sleep()
	b.apply()
	k.do = func() error { b.run("10.9.0.2"); b.apply(); return nil }
	const waiting = 50
	answers := make(chan int, waiting)
	for range waiting {
		go func() { answers <- w.statusOf(w.client, b.url(port, "/")) }()
	}
	eventually.True(t, "all wait", func() bool { return w.flying() == waiting+1 }) // and the wake itself
	close(k.release)
	for range waiting {
		if status := <-answers; status != http.StatusOK {
			t.Errorf("a waiter got %d", status)
		}
	}
	if n := k.calls.Load(); n != 1 {
		t.Errorf("woken %d times", n)
	}
}

// TestWakeJustOver: a request that found a sandbox paused does not wake it again after another wake.
func TestWakeJustOver(t *testing.T) {
	k := &waker{release: make(chan struct{})}
	close(k.release)
	k.do = func() error { return errs.ErrConflict }
	w := newFixture(t, func(c *Config) { c.Waker = k })
	b := w.box("a", wakeable)
	b.sleep()
	b.apply()
	entry, _ := w.table.Lookup(b.id)
	b.run("10.9.0.2")
	b.apply()
	if woken, err := w.gateway.wakes.Wake(t.Context(), entry); woken || err != nil || k.calls.Load() != 0 {
		t.Errorf("woken %v, %v", woken, err)
	}
}

func TestWakeRefusals(t *testing.T) {
	port := backend(t, hello)
	for name, c := range map[string]struct {
		err    error
		status int
	}{
		"not found": {errs.ErrNotFound, 502}, "forbidden": {errs.ErrForbidden, 403}, "conflict": {errs.ErrConflict, 409},
		"limits": {errs.ErrExhausted, 429}, "busy": {errs.ErrUnavailable, 503}, "odd": {errors.New("odd"), 503},
		"never ready": {nil, 409},
	} {
		// One of its own for each: a wake continues when the request that began it is answered.
		k := &waker{release: make(chan struct{}), do: func() error { return c.err }}
		close(k.release)
		w := newFixture(t, func(cfg *Config) {
			if cfg.Waker = k; c.err == nil {
				cfg.WakeTimeout = 50 * time.Millisecond
			}
		})
		b := w.box(name, wakeable)
		b.sleep()
		b.apply()
		if status, text := w.get(b.url(port, "/")); status != c.status {
			t.Errorf("%s: got %d %s, want %d", name, status, text, c.status)
		}
	}
}

// TestWakeErrors: responses have the part of an error that is meant for users, and nothing else.
func TestWakeTellsWhy(t *testing.T) {
	k := &waker{release: make(chan struct{})}
	close(k.release)
	w := newFixture(t, func(c *Config) { c.Waker = k })
	port := backend(t, hello)
	browser := []string{"User-Agent", "Mozilla/5.0", "Accept", "text/html"}
	for name, c := range map[string]struct {
		err    error
		status int
		want   string
		never  string
	}{
		"busy":     {errs.Public(fmt.Errorf("disk of 10.0.0.1: %w", errs.ErrUnavailable), "64 MiB <are> free"), 503, "could not be woken: 64 MiB <are> free", "10.0.0.1"},
		"conflict": {fmt.Errorf("resume: %w", errs.Public(errs.ErrConflict, "its image is gone")), 409, "could not be woken: its image is gone", "resume"},
		"limits":   {errs.Public(errs.ErrExhausted, "3 sandboxes run"), 429, "could not be woken: 3 sandboxes run", ""},
		"gone":     {errs.Public(errs.ErrNotFound, "no such thing"), 502, "The sandbox was not found", "no such thing"},
		"untold":   {fmt.Errorf("dial 10.0.0.1: %w", errs.ErrUnavailable), 503, "could not be woken; try again", "10.0.0.1"},
		"slow":     {fmt.Errorf("wait: %w", errs.ErrTimeout), 409, "was not ready in time", "wait:"},
		"long":     {errs.Public(errs.ErrConflict, strings.Repeat("ä", 2000)), 409, "ä…", ""},
	} {
		b := w.box(name, wakeable)
		b.sleep()
		b.apply()
		k.do = func() error { return c.err }
		status, text := w.get(b.url(port, "/"))
		var response struct {
			SandboxID sandbox.ID `json:"sandboxId"`
			Message   string
			Code      int
		}
		if err := json.Unmarshal([]byte(text), &response); err != nil || status != c.status || response.Code != c.status || response.SandboxID != b.id ||
			!strings.Contains(response.Message, c.want) || c.never != "" && strings.Contains(text, c.never) || len(text) > 1000 {
			t.Errorf("%s: got %d %s, want %d %s", name, status, text, c.status, c.want)
		}
		status, text = w.get(b.url(port, "/"), browser...)
		if status != c.status || !strings.Contains(text, html.EscapeString(c.want)) || !strings.Contains(text, "<h1>") {
			t.Errorf("%s: a person got %d %s", name, status, text)
		}
	}
}

// TestWakeTokens: a request without access wakes no sandbox.
func TestWakeTokens(t *testing.T) {
	k := &waker{release: make(chan struct{})}
	close(k.release)
	w := newFixture(t, func(c *Config) { c.Waker = k })
	b := w.box("a", wakeable, private)
	k.do = func() error { return errs.ErrExhausted } // shows that it was tried
	b.sleep()
	b.apply()
	agent, traffic := w.tokens.Agent(b.id), w.tokens.Traffic(b.id)
	expiry := time.Now().Add(time.Minute)
	past := time.Now().Add(-time.Minute)
	signed := func(op envd.Operation, at time.Time) string {
		return fmt.Sprintf("/files?path=/a&signature=%s&signature_expiration=%d", url.QueryEscape(envd.Sign("/a", op, "", agent, &at)), at.Unix())
	}
	for name, c := range map[string]struct {
		port    uint16
		path    string
		headers []string
		woken   bool
	}{
		"no traffic token":    {80, "/", nil, false},
		"wrong traffic token": {80, "/", []string{envd.HeaderTrafficToken, agent}, false},
		"traffic token":       {80, "/", []string{envd.HeaderTrafficToken, traffic}, true},
		"no agent token":      {envd.Port, "/metrics", nil, false},
		"wrong agent token":   {envd.Port, "/metrics", []string{envd.HeaderAccessToken, traffic}, false},
		"agent token":         {envd.Port, "/metrics", []string{envd.HeaderAccessToken, agent}, true},
		"whether it runs":     {envd.Port, "/health", []string{envd.HeaderAccessToken, agent}, false},
		"the app's own":       {80, "/health", []string{envd.HeaderTrafficToken, traffic}, true},
		"signed URL":          {envd.Port, signed(envd.OpRead, expiry), nil, true},
		"signed for writing":  {envd.Port, signed(envd.OpWrite, expiry), nil, false},
		"expired":             {envd.Port, signed(envd.OpRead, past), nil, false},
		"internal":            {envd.Port, "/init", []string{envd.HeaderAccessToken, agent}, false},
	} {
		before := k.calls.Load()
		status, text := w.get(b.url(c.port, c.path), c.headers...)
		if woken := k.calls.Load() > before; woken != c.woken || (status == http.StatusTooManyRequests) != c.woken {
			t.Errorf("%s: woken %v, got %d %s", name, woken, status, text)
		}
	}
}

func wakeable(s *agents.Sandbox) { s.Spec.Barchan.Wake = &agents.WakePolicy{OnTraffic: true} }
