package picker

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/errs"
)

// ErrNone says that a pool has nothing ready and nothing in the making that is not spoken
// for: a sandbox started cold is there sooner.
var ErrNone = fmt.Errorf("no member of the warm pool is ready or about to be: %w", errs.ErrNotFound)

// Writer is what a picker needs of the API server itself.
type Writer interface {
	Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error
	Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error
}

// Config is what New needs.
type Config struct {
	// Writer asks the API server itself, never a cache. Required.
	Writer Writer
	// Orphaned, if set, is told of a member that was adopted for a caller who had left before
	// it was known: nobody will use it. It must not block.
	Orphaned func(*agents.Sandbox)
	// Log; nil discards.
	Log *slog.Logger
	// Metrics; nil keeps them to itself.
	Metrics prometheus.Registerer
}

// Request asks for a member of a pool.
type Request struct {
	// Pool is the UID of the warm pool.
	Pool types.UID
	// Current tells the revision that the pool's template has now, by a read of the API server
	// that began after the call. It is asked before the first try and again after any wait.
	Current func(ctx context.Context) (revision string, err error)
	// Adopt makes of a member what is to be written; build it on pool.Adopt. It is called anew
	// for each try, with a copy of its own.
	Adopt func(member *agents.Sandbox) *agents.Sandbox
}

// Picker hands out members. All of its methods may be called at any time by anyone.
type Picker struct{ cfg Config }

// New returns a picker that knows no members yet.
func New(cfg Config) (*Picker, error) {
	if cfg.Writer == nil {
		return nil, fmt.Errorf("picker: Writer is required: %w", errs.ErrInvalid)
	}
	return &Picker{cfg: cfg}, nil
}

// Pick returns a member that is the caller's alone, as it was written.
func (p *Picker) Pick(ctx context.Context, req Request) (*agents.Sandbox, error) {
	return nil, ErrNone
}

// Observe takes a change of any Sandbox: newer is nil when it is gone, older when it is new.
func (p *Picker) Observe(older, newer *agents.Sandbox) {}

// Ready tells how many members of a revision could be handed out at once.
func (p *Picker) Ready(pool types.UID, revision string) int { return 0 }
