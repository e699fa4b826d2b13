// Package recovery makes host, journal and registry agree: it adopts sandboxes at the start, sweeps the host every
// minute, and removes sandboxes until nothing of them is left. It decides on removals only; it creates and suspends
// nothing.
//
// Lock order: it takes the lock of a sandbox for each change, and holds one at a time. Callers of Clear hold it.
package recovery

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/capture"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/inventory"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/netdev"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/registry"
	"github.com/barchan-dev/barchan/internal/node/supervise"
	"github.com/barchan-dev/barchan/internal/node/suspend"
)

// Config is what New needs; every field but Exists is required.
type Config struct {
	Log         *slog.Logger
	Containerd  *ctrd.Client
	Host        *operation.Host
	Journal     *journal.Journal
	Registry    *registry.Registry
	Inventory   *inventory.Scanner
	Network     *netdev.Network
	Allocator   *ipam.Allocator
	Checkpoints *checkpoint.Store
	Maker       *capture.Maker
	Supervisor  *supervise.Supervisor
	Suspender   *suspend.Suspender
	// Exists asks the source of truth whether a sandbox exists. Nil: no orphan is removed.
	Exists func(ctx context.Context, ref sandbox.Ref) (bool, error)
	// ReconcileAddresses compares the address leases with the host, before the first allocation. It gets all readable rows and all
	// records of containers.
	ReconcileAddresses func(ctx context.Context, rows []journal.Summary, records []ctrd.Container) error
	// AdoptEgress restores the egress policy of a sandbox.
	AdoptEgress func(ctx context.Context, u *registry.Handle, r *journal.Row)
	Absent      func() sandbox.Observed
	// Changes gets sandboxes that changed without a request.
	Changes *registry.ChangeQueue
	// Later runs a function in the background until the node stops.
	Later func(func(context.Context))
	// Sweeps counts the scans of the whole host, by result.
	Sweeps *prometheus.CounterVec
	// Removals counts the orphans that were removed, by kind.
	Removals *prometheus.CounterVec
}

// Recovery makes host, journal and registry agree. Make it with New.
type Recovery struct {
	cfg Config
	// BootTimeout bounds the waits of Adopt. Default 3 min; it may be set before.
	BootTimeout time.Duration
	// ahead is what ReadAhead reads; nil if it was not called.
	ahead *listing
	// sweeping has an element during a Sweep, which alone uses orphanScans: the number of consecutive scans in which a
	// resource was without a sandbox, by ID.
	sweeping    chan struct{}
	orphanScans map[string]int
}

// New starts nothing.
func New(cfg Config) *Recovery {
	return &Recovery{cfg: cfg, BootTimeout: 3 * time.Minute, sweeping: make(chan struct{}, 1)}
}

// Results of a sweep, by which it is counted.
const (
	SweepOK     = "ok"
	SweepFailed = "failed" // nothing was removed
)
