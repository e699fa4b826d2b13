package operation

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// awaitAgent waits until the agent responds, and sets its clock.
func (w *Operation) awaitAgent(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.host.cfg.StartTimeout)
	defer cancel()
	agent, err := w.awaitHealth(ctx)
	if err != nil {
		return err
	}
	now := time.Now()
	if err := agent.Init(ctx, envd.InitRequest{Timestamp: &now}); err != nil {
		return errs.Retryable(fmt.Errorf("init agent: %w", err))
	}
	return nil
}

// awaitHealth waits until the agent responds.
func (w *Operation) awaitHealth(ctx context.Context) (*envd.Client, error) {
	agent, err := w.host.AgentOf(w.Row.Plan.ID, w.Row.Address)
	if err != nil {
		return nil, err
	}
	pause, timeout := minProbePause, firstProbeTimeout
	for {
		limited, done := context.WithTimeout(ctx, timeout)
		err := agent.Health(limited)
		if limited.Err() != nil {
			timeout = min(timeout+timeout/4, maxProbeTimeout)
		}
		done()
		if err == nil {
			return agent, nil
		}
		if !w.Row.Process.Alive() {
			return nil, fmt.Errorf("sandbox exited before its agent responded: %s: %w", w.console.Text(), errs.ErrUnavailable)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, fmt.Errorf("no response from agent within %s: %w: %s: %w", w.host.cfg.StartTimeout, err, w.console.Text(), errs.ErrUnavailable)
		}
		pause = min(2*pause, maxProbePause)
	}
}

// rewriteConfig changes the configuration that the agent reads at its next start.
func (w *Operation) rewriteConfig(ctx context.Context) (*envd.Config, error) {
	file := filepath.Join(w.Path("agent"), filepath.Base(envd.ConfigPath))
	cfg, err := envd.ReadConfig(file)
	if err != nil {
		return nil, errs.Retryable(err)
	}
	if w.Row.ImageEnv == nil { // the configuration from its creation has it
		for _, name := range slices.Sorted(maps.Keys(cfg.Env)) {
			w.Row.ImageEnv = append(w.Row.ImageEnv, name+"="+cfg.Env[name])
		}
	}
	if cfg.Env, err = w.environment(ctx, cfg.Env); err != nil {
		return nil, err
	}
	w.setAgentToken(cfg)
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("agent configuration: %w: %w", err, errs.ErrInvalid)
	}
	return cfg, errs.Retryable(envd.WriteConfig(file, cfg))
}

// setAgentToken makes the agent require its token, or none if the sandbox was created so.
func (w *Operation) setAgentToken(cfg *envd.Config) {
	cfg.AccessToken, cfg.Open = "", !w.Row.Plan.Secure || w.host.cfg.AgentToken == nil
	if !cfg.Open {
		cfg.AccessToken = w.host.cfg.AgentToken(w.Row.Plan.ID)
	}
}

// configureAgent sends a running agent the configuration that it would read at a start. It omits the time,
// which could make a concurrent request count as late.
func (w *Operation) configureAgent(ctx context.Context, cfg *envd.Config) error {
	agent, err := w.host.AgentOf(w.Row.Plan.ID, w.Row.Address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, w.host.cfg.StartTimeout)
	defer cancel()
	if w.isConfigured(ctx, agent, cfg) {
		return nil
	}
	err = agent.Init(ctx, envd.InitRequest{EnvVars: cfg.Env, AccessToken: cfg.AccessToken, Open: cfg.Open})
	if refused, ok := errors.AsType[*envd.Error](err); ok && refused.Status == http.StatusBadRequest {
		return fmt.Errorf("agent: %w: %w", err, errs.ErrInvalid)
	}
	return errs.Retryable(err)
}

// isConfigured reports whether a running agent has the environment and the access of a configuration, as after a
// claim that sent both. It reads the agent, not the journal, which may be behind after a crash.
func (w *Operation) isConfigured(ctx context.Context, agent *envd.Client, cfg *envd.Config) bool {
	stranger, err := envd.NewClient(w.host.agentConfig(w.Row.Address))
	if err != nil {
		return false
	}
	_, err = stranger.Envs(ctx)
	refused, _ := errors.AsType[*envd.Error](err)
	if cfg.Open && err != nil || !cfg.Open && (refused == nil || refused.Status != http.StatusUnauthorized) {
		return false
	}
	env, err := agent.Envs(ctx)
	for name, value := range cfg.Env { // the agent has more of its own
		if has, ok := env[name]; !ok || has != value {
			return false
		}
	}
	return err == nil
}

// awaitRestored waits until the agent responds, and notifies it of the restore. It sets the clock of an agent
// without that request.
func (w *Operation) awaitRestored(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, w.host.cfg.StartTimeout)
	defer cancel()
	agent, err := w.awaitHealth(ctx)
	if err != nil {
		return err
	}
	now := time.Now()
	err = agent.Restored(ctx, now)
	if refused, ok := errors.AsType[*envd.Error](err); ok && (refused.Status == http.StatusNotFound || refused.Status == http.StatusUnauthorized) {
		err = agent.Init(ctx, envd.InitRequest{Timestamp: &now})
	}
	if err != nil {
		return errs.Retryable(fmt.Errorf("notify agent of restore: %w", err))
	}
	return nil
}

// writeNewAddress writes the sandbox's current address into the agent's configuration, which it reads when it
// is restored. Only the agent may change its other files: the restored kernel has cached them.
func (w *Operation) writeNewAddress(ctx context.Context) error {
	if !w.moved {
		return nil
	}
	cfg, err := w.rewriteConfig(ctx)
	if err != nil {
		return err
	}
	cfg.SystemFiles = w.systemFiles()
	return errs.Retryable(envd.WriteConfig(w.agentConfigFile(), cfg))
}

// replaceAgent gives a container that is started again the installed agent of this server: an older one may
// not understand newer configuration.
func (w *Operation) replaceAgent(context.Context) error {
	link := filepath.Join(w.Path("agent"), filepath.Base(oci.AgentPath))
	have, err := os.Stat(link)
	ours, more := os.Stat(w.host.AgentFile)
	if err == nil && more == nil && os.SameFile(have, ours) {
		return nil
	}
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Retryable(err)
	}
	return errs.Retryable(os.Link(w.host.AgentFile, link))
}

func (w *Operation) agentConfigFile() string {
	return filepath.Join(w.Path("agent"), filepath.Base(envd.ConfigPath))
}

// Bind writes the row's environment and token into the agent's configuration, and sends them to a running
// agent that does not have them.
func (w *Operation) Bind(ctx context.Context, runs bool) error {
	var cfg *envd.Config
	steps := []step{{name: "bind_config", do: func(ctx context.Context) (err error) {
		cfg, err = w.rewriteConfig(ctx)
		return err
	}}}
	if runs {
		steps = append(steps, step{name: "bind_agent", do: func(ctx context.Context) error { return w.configureAgent(ctx, cfg) }})
	}
	return w.doAll(ctx, steps)
}
