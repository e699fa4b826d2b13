package agent_test

import (
	"crypto/rand"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// beside starts the agent of a container beside one with the same token, and returns a client that reaches it through that.
func beside(t *testing.T, cfg envd.Config) (c *envd.Client, first *testAgent) {
	t.Helper()
	cfg.Container, cfg.AccessToken = strings.ToLower(rand.Text()), "secret"
	startGuarded(t, cfg)
	first = start(t, envd.Config{AccessToken: "secret"})
	c, err := first.client("root", "secret").Container(cfg.Container)
	noError(t, err)
	eventually.NoError(t, "it answers", func() error { return c.Health(t.Context()) })
	for header, want := range map[string]int{"": 401, "wrong": 401, "secret": 204} {
		if status, _, body := first.do("GET", envd.PathContainers+cfg.Container+"/health", "", "X-Access-Token", header); status != want {
			t.Errorf("with token %q: %d %s", header, status, body)
		}
	}
	return c, first
}

// TestContainer: the agent of another container is reached through the first one's, and starts its program again.
func TestContainer(t *testing.T) {
	c, first := beside(t, envd.Config{Entrypoint: []string{"sh", "-c", "echo run; exit 3"}, Restart: envd.RestartOnFailure})
	eventually.True(t, "the program waits for its third start", func() bool {
		e, err := c.Entrypoint(t.Context())
		return err == nil && e.Restarts >= 1 && e.Again != nil && e.Failed() && *e.ExitCode == 3 && e.Last != nil && *e.Last.ExitCode == 3
	})
	runs := 0
	noError(t, c.Logs(t.Context(), envd.SourceEntrypoint, false, func(envd.LogLine) error {
		runs++
		return nil
	}))
	if runs < 2 {
		t.Errorf("the log has %d runs", runs)
	}
	var out strings.Builder
	code, err := c.Exec(t.Context(), []string{"cat"}, envd.ExecOptions{Stdin: strings.NewReader("through both"), Stdout: &out})
	if err != nil || code != 0 || out.String() != "through both" {
		t.Errorf("exec: code %d, %v, %q", code, err, out.String())
	}
	none, err := first.client("root", "secret").Container("none")
	noError(t, err)
	wantStatus(t, none.Health(t.Context()), 502, "")
	wantStatus(t, first.client("root", "secret").Restart(t.Context()), 409, "not started again")
}

// TestContainerRestart: a program restarts on request, and one that has succeeded does not, by its policy.
func TestContainerRestart(t *testing.T) {
	c, _ := beside(t, envd.Config{Entrypoint: []string{"sh", "-c", "sleep 1000 & sleep 1000"}, Restart: envd.RestartAlways})
	was := entrypointOnceRunning(t, c)
	noError(t, c.Restart(t.Context()))
	eventually.True(t, "it runs again", func() bool {
		e, err := c.Entrypoint(t.Context())
		return err == nil && e.Running && e.Restarts == 1 && e.PID != was.PID
	})
	c, _ = beside(t, envd.Config{Entrypoint: []string{"true"}, Restart: envd.RestartOnFailure})
	eventually.True(t, "it has ended", func() bool {
		e, err := c.Entrypoint(t.Context())
		return err == nil && e.Ended() && e.Restarts == 0 && e.Again == nil
	})
}
