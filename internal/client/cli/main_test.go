package cli

import (
	"context"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/barchan-dev/barchan/internal/adminapi"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
	"github.com/barchan-dev/barchan/internal/config"
)

// binDir keeps what tests build.
var binDir string

func TestMain(m *testing.M) {
	testscript.Main(tidy{m}, map[string]func(){"barchan": barchanMain})
}

// tidy removes what tests built. What scripts run never gets here.
type tidy struct{ m *testing.M }

func (t tidy) Run() int {
	var err error
	if binDir, err = os.MkdirTemp("", "bcli-bin"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() { _ = os.RemoveAll(binDir) }()
	return t.m.Run()
}

// barchanMain is the program as scripts run it: real but for the server, which
// only reports that it was started, and stays until it is stopped.
func barchanMain() {
	ctx, stop := terminal.WithSignals(context.Background())
	code := Run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr, app.Deps{
		Version:   "1.2.3",
		RunServer: scriptServer,
		RemoveAll: func(_ context.Context, cfg config.Config, progress func(adminclient.Event)) error {
			progress(adminclient.Event{Step: "removed", Message: "bridge " + cfg.BridgeName})
			return nil
		},
		Doctor: func(context.Context, config.Config) []adminclient.Check {
			return []adminclient.Check{
				{Name: "kernel", State: adminclient.CheckOK, Detail: "6.1"},
				{Name: "cgroups", State: adminclient.CheckFailed, Detail: "no pids controller", Remedy: "boot with it"},
			}
		},
	})
	stop()
	os.Exit(code)
}

// scriptServer fails, ends at once, or serves the real admin API until it is
// stopped, by the name of its node.
func scriptServer(ctx context.Context, cfg config.Config, log io.Writer) error {
	fmt.Fprintln(log, "serving on "+cfg.HTTPAddr)
	switch cfg.NodeName {
	case "unlucky":
		return fmt.Errorf("start containerd: no space left on device")
	case "brief":
		return nil
	}
	if err := config.Save(cfg); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	s := &scripted{cfg: cfg, stop: stop}
	api, err := adminapi.New(adminapi.Config{Socket: cfg.AdminSocket(), Server: s, Images: imageList{}, Build: imageList{}, Log: telemetry.Discard()})
	if err != nil {
		return err
	}
	return api.Run(ctx)
}

// scripted is ready after three requests, and has two sandboxes.
type scripted struct {
	cfg   config.Config
	stop  func()
	polls atomic.Int32
}

func (s *scripted) Status(context.Context) (adminclient.Status, error) {
	st := adminclient.Status{Version: "1.2.3", PID: os.Getpid(), DataDir: s.cfg.DataDir, Phase: "caches", Sandboxes: map[string]int{"Running": 2}}
	st.Phases = []adminclient.Phase{{Name: "lock", Done: true, Milli: 1.5}, {Name: "caches"}}
	if s.polls.Add(1) > 2 {
		st.Phases[1] = adminclient.Phase{Name: "caches", Done: true, Milli: 20}
		st.Ready, st.Phase = true, "ready"
	}
	return st, nil
}

func (s *scripted) Doctor(context.Context) ([]adminclient.Check, error) { return nil, nil }

func (s *scripted) Prepare(_ context.Context, req adminclient.ShutdownRequest, progress func(adminclient.Event)) error {
	if req.All {
		progress(adminclient.Event{Step: "removed", Message: "sandbox default/a"})
	}
	return nil
}

func (s *scripted) Stop() { s.stop() }

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script",
		Condition: func(cond string) (bool, error) {
			if cond != "root" {
				return false, fmt.Errorf("unknown condition %s", cond)
			}
			return os.Geteuid() == 0, nil
		},
		Setup: func(env *testscript.Env) error {
			dir, err := os.MkdirTemp("", "bs") //nolint:usetesting // $WORK is too long for a socket
			if err != nil {
				return err
			}
			env.Defer(func() {
				// A script that fails may have left a server.
				_ = Run(context.Background(), []string{"--data-dir", dir, "down"}, nil, io.Discard, io.Discard, app.Deps{})
				_ = os.RemoveAll(dir)
			})
			env.Setenv("BARCHAN_DATA_DIR", dir)
			env.Setenv("BARCHAN_CONFIG", "")
			env.Setenv("NO_COLOR", "1")
			return nil
		},
	})
}
