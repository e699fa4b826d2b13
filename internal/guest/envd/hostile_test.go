package envd_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/hostileagent"
)

const (
	// what a client may read of an attack, with what the kernel's buffers hold, and what it may allocate
	maxRead      = 24 << 20
	maxAllocated = 96 << 20
)

// calls are all that the server asks of agents.
func calls() map[string]func(ctx context.Context, c *envd.Client) error {
	each := func(envd.LogLine) error { return nil }
	return map[string]func(ctx context.Context, c *envd.Client) error{
		"health":  func(ctx context.Context, c *envd.Client) error { return c.Health(ctx) },
		"init":    func(ctx context.Context, c *envd.Client) error { return c.Init(ctx, envd.InitRequest{}) },
		"metrics": func(ctx context.Context, c *envd.Client) error { _, err := c.Metrics(ctx); return err },
		"envs":    func(ctx context.Context, c *envd.Client) error { _, err := c.Envs(ctx); return err },
		"history": func(ctx context.Context, c *envd.Client) error {
			_, err := c.MetricsHistory(ctx, time.Now())
			return err
		},
		"ports":      func(ctx context.Context, c *envd.Client) error { _, err := c.Ports(ctx); return err },
		"freeze":     func(ctx context.Context, c *envd.Client) error { return c.Freeze(ctx) },
		"restored":   func(ctx context.Context, c *envd.Client) error { return c.Restored(ctx, time.Now()) },
		"entrypoint": func(ctx context.Context, c *envd.Client) error { _, err := c.Entrypoint(ctx); return err },
		"await":      func(ctx context.Context, c *envd.Client) error { _, err := c.AwaitEntrypoint(ctx); return err },
		"logs":       func(ctx context.Context, c *envd.Client) error { return c.Logs(ctx, "", false, each) },
		"output":     func(ctx context.Context, c *envd.Client) error { c.LastOutput(ctx, 100); return nil },
		"upload": func(ctx context.Context, c *envd.Client) error {
			_, err := c.Upload(ctx, "/x", strings.NewReader("x"), nil)
			return err
		},
		"run": func(ctx context.Context, c *envd.Client) error {
			_, _, err := c.Run(ctx, []string{"true"}, envd.RunOptions{})
			return err
		},
		"exec": func(ctx context.Context, c *envd.Client) error {
			_, err := c.Exec(ctx, []string{"true"}, envd.ExecOptions{Stdout: io.Discard, Stderr: io.Discard})
			return err
		},
	}
}

// followed reports whether a call reads for as long as its caller wants. What it reads it does not keep.
func followed(call string) bool { return call == "await" || call == "run" || call == "exec" }

func TestHostileAgent(t *testing.T) {
	for attack, answer := range hostileagent.Attacks() {
		t.Run(attack, func(t *testing.T) {
			for name, call := range calls() {
				if runs := name == "run" || name == "exec"; runs && (attack == "silence" || attack == "endless empty frames") {
					continue // they end, after ten seconds in which they would kill the program
				}
				agent := hostileagent.Start(t, answer)
				c, err := envd.NewClient(envd.ClientConfig{
					HTTP:    &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: envd.MaxResponseHeader}},
					BaseURL: "http://" + agent.Address,
				})
				if err != nil {
					t.Fatal(err)
				}
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				err = call(ctx, c)
				cancel()
				runtime.ReadMemStats(&after)
				if err != nil && len(err.Error()) > 4<<10 {
					t.Errorf("%s: the error has %d bytes", name, len(err.Error()))
				}
				if sent := agent.Sent(); sent > maxRead && !followed(name) {
					t.Errorf("%s: %d bytes were read of %q", name, sent, attack)
				}
				if all := after.TotalAlloc - before.TotalAlloc; all > maxAllocated && (!followed(name) || !strings.HasPrefix(attack, "endless")) {
					t.Errorf("%s: %d bytes were allocated for %q", name, all, attack)
				}
			}
		})
	}
}

func TestAgentDoesNotRedirect(t *testing.T) {
	other := hostileagent.Start(t, hostileagent.Attacks()["web page"])
	agent := hostileagent.Start(t, hostileagent.Redirect("http://"+other.Address+"/"))
	for name, call := range calls() {
		c, err := envd.NewClient(envd.ClientConfig{HTTP: &http.Client{}, BaseURL: "http://" + agent.Address, Token: func() string { return "secret" }})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		err = call(ctx, c)
		cancel()
		if name != "output" && err == nil {
			t.Errorf("%s: a redirect was a success", name)
		}
	}
	if n := other.Requests.Load(); n != 0 {
		t.Errorf("%d requests followed the redirect", n)
	}
}

// TestCallsEnd has an agent that answers nothing, and callers without a deadline.
func TestCallsEnd(t *testing.T) {
	for _, name := range []string{"health", "init", "metrics", "envs", "ports", "freeze", "restored", "entrypoint", "logs", "output"} {
		synctest.Test(t, func(t *testing.T) {
			silent := &http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
				here, there := net.Pipe()
				go func() { _, _ = io.Copy(io.Discard, there) }()
				return here, nil
			}}}
			c, err := envd.NewClient(envd.ClientConfig{HTTP: silent, BaseURL: "http://10.0.0.2:49983"})
			if err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			_ = calls()[name](context.Background(), c)
			if took := time.Since(begin); took > 2*time.Minute {
				t.Errorf("%s ended after %s", name, took)
			}
		})
	}
}

// TestAwaitEntrypointIsPaced has an agent that logs without a pause: each line once cost a request.
func TestAwaitEntrypointIsPaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		states := 0
		agent := roundTrip(func(req *http.Request) (*http.Response, error) {
			res := &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(`{"running":true}`)), Request: req}
			if req.URL.Path == envd.PathLogs {
				res.Body = &lines{ended: req.Context().Done()}
				return res, nil
			}
			if states++; states > 40 {
				res.Body = io.NopCloser(strings.NewReader(`{"configured":true,"exitCode":0,"startedAt":"2026-01-01T00:00:00Z","finishedAt":"2026-01-01T00:00:01Z"}`))
			}
			return res, nil
		})
		c, err := envd.NewClient(envd.ClientConfig{HTTP: &http.Client{Transport: agent}, BaseURL: "http://10.0.0.2:49983"})
		if err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		state, err := c.AwaitEntrypoint(t.Context())
		if err != nil || !state.Ended() {
			t.Fatalf("got %+v, %v", state, err)
		}
		if took := time.Since(begin); took < 2500*time.Millisecond {
			t.Errorf("41 states were read within %s", took)
		}
	})
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// lines is a log with a line every millisecond.
type lines struct{ ended <-chan struct{} }

func (l *lines) Read(b []byte) (int, error) {
	select {
	case <-l.ended:
		return 0, io.EOF
	case <-time.After(time.Millisecond):
		return copy(b, `{"source":"agent","line":"x"}`+"\n"), nil
	}
}

func (l *lines) Close() error { return nil }
