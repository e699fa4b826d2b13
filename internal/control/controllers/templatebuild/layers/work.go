package layers

import (
	"context"
	"fmt"
	"log/slog"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/keyedlock"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild/buildlog"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Objects reads what layers depend on; package cache implements it.
type Objects interface {
	Checkpoint(ctx context.Context, key types.NamespacedName) (*barchan.Checkpoint, error)
	Members(ctx context.Context, pool types.UID) ([]*agents.Sandbox, error)
	WaitSandbox(ctx context.Context, key types.NamespacedName, done func(*agents.Sandbox) (bool, error)) (*agents.Sandbox, error)
	WaitCheckpoint(ctx context.Context, key types.NamespacedName, done func(*barchan.Checkpoint) (bool, error)) (*barchan.Checkpoint, error)
}

// Agents reaches the agents of sandboxes; package agentclient implements it.
type Agents interface {
	// AgentAs returns a client whose programs run as a user; empty: the agent's default.
	AgentAs(s *agents.Sandbox, user string) (*envd.Client, error)
}

// Config configures New. All fields are required.
type Config struct {
	Log *slog.Logger
	// Client reads and writes the API server directly.
	Client  client.Client
	Objects Objects
	Agents  Agents
	Quota   *quota.Quotas
	// Store has the uploaded files, the archives of stages and caches, the secrets and the logs.
	Store *builds.Store
}

// Runner runs the layers of all builds. It is safe for concurrent use.
type Runner struct {
	Config

	caches keyedlock.Lock[string] // those that steps lock, by namespace and ID
}

// New returns a runner.
func New(cfg Config) (*Runner, error) {
	if cfg.Log == nil || cfg.Client == nil || cfg.Objects == nil || cfg.Agents == nil || cfg.Quota == nil || cfg.Store == nil {
		return nil, fmt.Errorf("layers: Log, Client, Objects, Agents, Quota and Store are required: %w", errs.ErrInvalid)
	}
	return &Runner{Config: cfg}, nil
}

// Callbacks are what the layers of a build ask of its reconciler.
type Callbacks struct {
	// FindBase finds what the build, or a stage, starts from. It calls Starts of the work when it knows.
	FindBase func(ctx context.Context, from *barchan.BuildSource) (*Base, error)
	// Write writes a changed status, and replaces Build of the work.
	Write func(ctx context.Context, status *barchan.TemplateBuildStatus) error
}

// Work is one attempt at a build. One goroutine uses it: Plan, then Run, then Result.
type Work struct {
	// Build is the build as it was last written. CachedSteps of its status is counted before it is written.
	Build *barchan.TemplateBuild
	Log   *buildlog.Log

	r    *Runner
	call Callbacks
	// chain is the one that is worked at, and target the template's.
	*chain
	target *chain
	stages map[string]*chain
}

// Begin returns an attempt at a build, of which nothing has been done.
func (r *Runner) Begin(b *barchan.TemplateBuild, call Callbacks) *Work {
	return &Work{
		r: r, Build: b, call: call, chain: &chain{}, Log: buildlog.New(r.Store, r.Log, b.UID, barchan.BuildStepBase, b.Status.Log),
	}
}

// Plan finds the layers of the template and of all stages, and those that are kept. It runs nothing.
func (w *Work) Plan(ctx context.Context) (err error) {
	w.target, err = w.chains(ctx)
	return err
}

// Run runs the template's layers that are missing, and the stages' that they need.
func (w *Work) Run(ctx context.Context) error { return w.finishChain(ctx, w.target) }

// Starts logs what the chain that is planned starts from.
func (w *Work) Starts(from string) { w.Log.Say(builds.LevelInfo, "%s", w.started(from)) }
