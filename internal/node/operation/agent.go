package operation

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/agentconn"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// conn is the container of the operation, to reach its agent.
func (w *Operation) conn() agentconn.Container {
	return agentconn.Container{
		ID: w.Row.Plan.ID, Address: w.Row.Address, Sidecar: w.sidecar(), Alive: w.Row.Process.Alive, Output: w.printed, Serves: w.printedServes,
	}
}

// printedServes reports whether the agent that this operation has started has printed that it serves.
func (w *Operation) printedServes() bool { return w.console != nil && w.console.Has(envd.Serves) }

// printed is the output of the container, if it was started by this operation.
func (w *Operation) printed() string {
	if w.console == nil {
		return ""
	}
	return w.console.Text()
}

func (w *Operation) awaitAgent(ctx context.Context) error {
	return w.host.Agents.AwaitStarted(ctx, w.conn())
}

// rewriteConfig changes the configuration that the agent reads at its next start.
func (w *Operation) rewriteConfig(ctx context.Context) (*envd.Config, error) {
	cfg, err := envd.ReadConfig(w.agentConfigFile())
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
	return cfg, errs.Retryable(envd.WriteConfig(w.agentConfigFile(), cfg))
}

// setAgentToken makes the agent require its token, or none if the sandbox was created so.
func (w *Operation) setAgentToken(cfg *envd.Config) {
	cfg.AccessToken, cfg.Open = "", !w.Row.Plan.Secure || w.host.cfg.AgentToken == nil
	if !cfg.Open {
		cfg.AccessToken = w.host.cfg.AgentToken(w.Row.Plan.ID)
	}
}

func (w *Operation) awaitRestored(ctx context.Context) error {
	if err := w.host.Agents.AwaitRestored(ctx, w.conn()); err != nil {
		return err
	}
	return w.eachSidecar(ctx, (*Operation).awaitRestored)
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
	if err := envd.WriteConfig(w.agentConfigFile(), cfg); err != nil {
		return errs.Retryable(err)
	}
	return w.eachSidecar(ctx, (*Operation).writeNewAddress)
}

// linkAgent gives a container that does not run a program as its agent, in place of an earlier one.
func (w *Operation) linkAgent(program string) error {
	link := filepath.Join(w.Path("agent"), filepath.Base(oci.AgentPath))
	have, err := os.Stat(link)
	ours, more := os.Stat(program)
	if err == nil && more == nil && os.SameFile(have, ours) {
		return nil
	}
	if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Retryable(err)
	}
	return errs.Retryable(os.Link(program, link))
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
		steps = append(steps, step{name: "bind_agent", do: func(ctx context.Context) error { return w.host.Agents.Configure(ctx, w.conn(), cfg) }})
	}
	return w.doAll(ctx, steps)
}
