package checkpoint

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

// AnnotationImport is changed by whoever imports a checkpoint when its data have reached the node, or
// will not. As a time of RFC 3339, with nanoseconds, it says when something was done last: what a server
// before this one was importing has failed.
const AnnotationImport = "barchan.dev/import-changed"

const (
	retryFirst = 100 * time.Millisecond
	retryMost  = time.Minute

	// defaultWorkers is more than a node captures at once, so that the others are told what they wait for.
	defaultWorkers = 16
	defaultSweep   = 5 * time.Minute
	defaultImport  = 10 * time.Minute
	// lookAgain is how long a checkpoint that is in use waits for an event that says otherwise.
	lookAgain = time.Minute
)

// Objects reads objects from memory; package cache has it. What it returns is the caller's own.
type Objects interface {
	Checkpoint(ctx context.Context, key types.NamespacedName) (*barchan.Checkpoint, error)
	// Unfinished returns the checkpoints that are still to be taken of a sandbox.
	Unfinished(ctx context.Context, source types.NamespacedName) ([]barchan.Checkpoint, error)
	// RestoringFrom and TemplatesFrom return the sandboxes and templates that name a checkpoint.
	RestoringFrom(ctx context.Context, checkpoint types.NamespacedName) ([]agents.Sandbox, error)
	TemplatesFrom(ctx context.Context, checkpoint types.NamespacedName) ([]extensions.SandboxTemplate, error)
}

// Config is what New needs; every field is required unless it says so.
type Config struct {
	Log *slog.Logger
	// Client asks the API server itself, for reads as for writes.
	Client client.Client
	// Cache is what is watched, and Objects reads it.
	Cache   crcache.Cache
	Objects Objects
	// Runner keeps the data.
	Runner controllers.CheckpointRunner
	// Node is the name of the Runner's machine. The checkpoints of others are left alone.
	Node string
	// Events records what users should see beside the object; nil records nothing.
	Events events.EventRecorder
	// Workers bounds how many checkpoints are worked on at once. Default 16.
	Workers int
	// SweepEvery is how often data without an object, and objects without data, are looked for, besides
	// once at the start. Default 5 minutes.
	SweepEvery time.Duration
	// ImportPatience is how long an import may take to bring its data. Default 10 minutes.
	ImportPatience time.Duration
}

func (c *Config) complete() error {
	if c.Log == nil || c.Client == nil || c.Cache == nil || c.Objects == nil || c.Runner == nil || c.Node == "" {
		return fmt.Errorf("checkpoint controller: Log, Client, Cache, Objects, Runner and Node are required: %w", errs.ErrInvalid)
	}
	if c.Workers == 0 {
		c.Workers = defaultWorkers
	}
	if c.SweepEvery == 0 {
		c.SweepEvery = defaultSweep
	}
	if c.ImportPatience == 0 {
		c.ImportPatience = defaultImport
	}
	return nil
}

// New returns the controller of checkpoints. Its Start blocks until ctx is done.
func New(cfg Config) (controller.Controller, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	r := &reconciler{
		log: cfg.Log.With("component", "checkpoint-controller"), client: cfg.Client, objects: cfg.Objects, runner: cfg.Runner, node: cfg.Node,
		events: cfg.Events, sweepEvery: cfg.SweepEvery, importPatience: cfg.ImportPatience,
		began: time.Now(),
	}
	return controllers.New(controllers.Work{
		Name: "checkpoint", Log: r.log, Workers: cfg.Workers, RetryFirst: retryFirst, RetryMost: retryMost,
		Reconciler: r, Sources: r.sources(cfg.Cache),
	})
}

type reconciler struct {
	log            *slog.Logger
	client         client.Client
	objects        Objects
	runner         controllers.CheckpointRunner
	node           string
	events         events.EventRecorder
	sweepEvery     time.Duration
	importPatience time.Duration
	// began is when this process did: what was being imported before that will not come.
	began time.Time
}
