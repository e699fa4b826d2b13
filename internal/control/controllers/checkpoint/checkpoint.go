package checkpoint

import (
	"cmp"
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
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/controllers"
)

const (
	retryFirst = 100 * time.Millisecond
	retryMost  = time.Minute

	// defaultWorkers exceeds the concurrent captures of a node, so that the others get a status too.
	defaultWorkers = 16
	// share is how many of them one namespace may have, one less than a node captures at once; see controllers.Fits.
	share = 3
	// inUseRetry is the retry interval of the deletion of a checkpoint that is in use.
	inUseRetry = time.Minute
)

// Objects reads objects from memory; package cache implements it. The caller owns the results.
type Objects interface {
	Checkpoint(ctx context.Context, key types.NamespacedName) (*barchan.Checkpoint, error)
	// Unfinished returns the checkpoints of a sandbox that are not captured yet.
	Unfinished(ctx context.Context, source types.NamespacedName) ([]barchan.Checkpoint, error)
	// RestoringFrom and TemplatesFrom return the sandboxes and templates that refer to a checkpoint.
	RestoringFrom(ctx context.Context, checkpoint types.NamespacedName) ([]agents.Sandbox, error)
	TemplatesFrom(ctx context.Context, checkpoint types.NamespacedName) ([]extensions.SandboxTemplate, error)
}

// Config configures New. Fields are required unless documented otherwise.
type Config struct {
	Log *slog.Logger
	// Client reads and writes the API server directly.
	Client client.Client
	// Cache provides the watches, and Objects reads it.
	Cache   crcache.Cache
	Objects Objects
	// Runner stores the data. Nil on a cluster, where nothing does: each checkpoint fails at once, and its deletion waits for nothing.
	Runner controllers.CheckpointRunner
	// Node is the Runner's node name. Checkpoints of other nodes are ignored. Empty without a Runner.
	Node string
	// Events records Kubernetes events; nil records none.
	Events events.EventRecorder
	// Workers is the number of concurrent reconciles. Default 16.
	Workers int
	// SweepEvery is the interval of the scan for data without an object and objects without data; the first
	// scan runs at the start. Default 5 minutes.
	SweepEvery time.Duration
	// ImportPatience bounds the duration of an import. Default 10 minutes.
	ImportPatience time.Duration
}

func (c *Config) complete() error {
	if c.Log == nil || c.Client == nil || c.Cache == nil || c.Objects == nil || (c.Runner == nil) != (c.Node == "") {
		return fmt.Errorf("checkpoint controller: Log, Client, Cache and Objects are required, and Node for a Runner: %w", errs.ErrInvalid)
	}
	c.Workers = cmp.Or(c.Workers, defaultWorkers)
	c.SweepEvery = cmp.Or(c.SweepEvery, 5*time.Minute)
	c.ImportPatience = cmp.Or(c.ImportPatience, 10*time.Minute)
	return nil
}

// New returns the controller of checkpoints. Its Start blocks until ctx is done.
func New(cfg Config) (controller.Controller, error) {
	if err := cfg.complete(); err != nil {
		return nil, err
	}
	cfg.Log = cfg.Log.With(telemetry.Component, "checkpoint-controller")
	r := &reconciler{Config: cfg, began: time.Now()}
	return controllers.New(controllers.Work{
		Name: "checkpoint", Log: r.Log, Workers: cfg.Workers, Share: share, RetryFirst: retryFirst, RetryMost: retryMost,
		Reconciler: r, Sources: r.sources(cfg.Cache),
	})
}

type reconciler struct {
	Config
	// began is the start of this process: imports begun earlier have failed.
	began time.Time
}
