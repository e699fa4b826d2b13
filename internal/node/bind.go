package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// Bind gives a sandbox that exists already what its object has got since it was made: the
// environment of its container, and whether its agent asks for a token. Processes started
// afterwards have it, and so has the container whenever it is started anew. What runs is left
// alone, the template's program too. Of a sandbox that has it all already, nothing is written.
//
// Whoever hands a member of a pool to its owner tells the agent first, to be quick; Bind then
// repeats that, and makes it last. The order is the agent's configuration on disk, the agent,
// the journal: a death in between leaves the journal behind, and the next Bind begins again.
//
// A sandbox that sleeps or is not on the node is left as it is: an object that differs then is
// bound once it runs. Kinds of error: errs.ErrInvalid for what no sandbox may have;
// errs.ErrUnavailable, where a retry may help.
func (n *Node) Bind(ctx context.Context, s *agents.Sandbox) error {
	if err := n.awaitAdopted(ctx); err != nil {
		return err
	}
	u := n.handles.Lookup(s.UID)
	if u == nil || !unbound(u.Row(), s) {
		return nil
	}
	at := field.NewPath("spec", "podTemplate", "spec")
	if problems := sandbox.CheckRunnable(&s.Spec.PodTemplate.Spec, at); len(problems) > 0 {
		return fmt.Errorf("%w: %w", problems.ToAggregate(), errs.ErrInvalid)
	}
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return err
	}
	defer done()
	r := u.Row()
	if u.IsRemoved() || !unbound(r, s) {
		return nil
	}
	if err := n.bind(ctx, u, r, s); err != nil {
		return fmt.Errorf("bind sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	n.log.InfoContext(ctx, "sandbox bound to its object", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name)
	return nil
}

// unbound reports whether a sandbox that can be bound now lacks something of its object.
func unbound(r *journal.Row, s *agents.Sandbox) bool {
	if r == nil || (r.Stage != journal.Live && r.Stage != journal.Restarting) || len(s.Spec.PodTemplate.Spec.Containers) == 0 {
		return false
	}
	env := s.Spec.PodTemplate.Spec.Containers[0].Env
	return r.Plan.Secure != s.Spec.AgentSecured() || !apiequality.Semantic.DeepEqual(r.Plan.Env, env)
}

// bind does the work of Bind, in the unit's turn.
func (n *Node) bind(ctx context.Context, u *registry.Handle, r *journal.Row, s *agents.Sandbox) error {
	w := &operation{n: n, row: new(journal.Row)}
	*w.row = *r
	w.row.Plan.Env = slices.Clone(s.Spec.PodTemplate.Spec.Containers[0].Env)
	w.row.Plan.Secure = s.Spec.AgentSecured()
	var cfg *envd.Config
	todo := []step{{name: "bind_config", do: func(context.Context) (err error) {
		cfg, err = w.rewriteConfig()
		return err
	}}}
	if r.Stage == journal.Live { // one that is being restarted reads its configuration
		todo = append(todo, step{name: "bind_agent", do: func(ctx context.Context) error { return w.tellAgent(ctx, cfg) }})
	}
	for _, s := range todo {
		if err := w.doOne(ctx, s); err != nil {
			return err
		}
	}
	return n.handles.Note(u, w.row, r.Stage)
}

// rewriteConfig changes the configuration that the agent reads when it is started anew.
func (w *operation) rewriteConfig() (*envd.Config, error) {
	file := filepath.Join(w.path("agent"), filepath.Base(envd.ConfigPath))
	cfg, err := envd.ReadConfig(file)
	if err != nil {
		return nil, errs.Retryable(err)
	}
	if w.row.ImageEnv == nil { // what it was made with has it
		for _, name := range slices.Sorted(maps.Keys(cfg.Env)) {
			w.row.ImageEnv = append(w.row.ImageEnv, name+"="+cfg.Env[name])
		}
	}
	cfg.Env = w.environment()
	w.guardAgent(cfg)
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("agent's configuration: %w: %w", err, errs.ErrInvalid)
	}
	return cfg, errs.Retryable(envd.WriteConfig(file, cfg))
}

// guardAgent has the agent ask for its token, or for none where the sandbox was made so.
func (w *operation) guardAgent(cfg *envd.Config) {
	cfg.AccessToken, cfg.Open = "", !w.row.Plan.Secure || w.n.cfg.AgentToken == nil
	if !cfg.Open {
		cfg.AccessToken = w.n.cfg.AgentToken(w.row.Plan.ID)
	}
}

// tellAgent hands an agent that runs what it would read if it were started now. It gives no
// time, by which a request of somebody else could make this one count as late.
func (w *operation) tellAgent(ctx context.Context, cfg *envd.Config) error {
	agent, err := w.n.agentOf(w.row.Plan.ID, w.row.Address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, w.n.cfg.StartTimeout)
	defer cancel()
	err = agent.Init(ctx, envd.InitRequest{EnvVars: cfg.Env, AccessToken: cfg.AccessToken, Open: cfg.Open})
	if refused, ok := errors.AsType[*envd.Error](err); ok && refused.Status == http.StatusBadRequest {
		return fmt.Errorf("agent: %w: %w", err, errs.ErrInvalid)
	}
	return errs.Retryable(err)
}
