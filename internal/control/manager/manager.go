// Package manager puts the operations of the APIs together, one field for each part: keys, templates, sandboxes,
// builds, snapshots, creates. A tenant is a namespace. It parses no wire format, runs no sandbox, and has no rule of its
// own; the parts write desired state into objects and wait for the controllers.
//
// Every error that a user may see carries a public message ([errs.PublicMessage]). It has no lock.
package manager

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/signedurl"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	buildfiles "github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/claiming"
	"github.com/barchan-dev/barchan/internal/control/events"
	"github.com/barchan-dev/barchan/internal/control/manager/apikeys"
	"github.com/barchan-dev/barchan/internal/control/manager/builds"
	"github.com/barchan-dev/barchan/internal/control/manager/creating"
	"github.com/barchan-dev/barchan/internal/control/manager/idempotency"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/control/manager/snapshots"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/manager/volumes"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/control/webhooks"
)

// Cache is everything that the parts read from memory; package cache has it.
type Cache interface {
	apikeys.Cache
	templates.Cache
	sandboxes.Cache
	snapshots.Cache
	builds.Cache
	volumes.Cache
	creating.Cache
}

// Config configures a Manager. Fields without a default are required, unless the comment allows nil.
type Config struct {
	Objects sandboxes.Objects
	Cache   Cache
	Routes  sandboxes.Routes
	Tokens  *sandbox.Tokens
	Log     *slog.Logger
	Picker  *picker.Picker
	Quota   *quota.Quotas
	// Binder and Agents reach the agents; package agentclient has both.
	Binder claiming.Binder
	Agents sandboxes.Agents
	// Assumed has the sandboxes that the cache may lack; the events of the cache feed it.
	Assumed *assumecache.Sandboxes
	// Listing has the order of lists; the events of the cache feed it, too. Nil: each list reads all sandboxes of its namespace.
	Listing *sandboxes.Listing
	// Gate refuses new work while the server is degraded. Nil: never.
	Gate *health.Gate
	// BuildFiles are the files of template builds. Nil: this process has no builds.
	BuildFiles *buildfiles.Store
	// Pods is of a cluster, where sandboxes are Pods, which keep volumes alone; and there are no builds, so that clients delete the
	// templates that were applied in their namespace.
	Pods bool
	// VolumeFiles are the files of volumes. Nil: there are no volumes.
	VolumeFiles volumes.Files
	// Events is the log of events. Nil: this process records none.
	Events *events.Store
	// Webhooks are those of all namespaces. Nil: there are none.
	Webhooks *webhooks.Service
	// Metrics may be nil.
	Metrics prometheus.Registerer
	// MaxTimeout bounds a sandbox's time to live, counted from its start or resume. Default 24 h.
	MaxTimeout time.Duration
	// StartTimeout bounds the wait for a new sandbox to be ready. Default 60 s.
	StartTimeout time.Duration
	// MoveTimeout bounds the wait for a pause or a resume. Default 60 s.
	MoveTimeout time.Duration
	// CaptureTimeout bounds the wait for a snapshot to be durable. Default 10 min.
	CaptureTimeout time.Duration
	// SettleTimeout bounds the wait until the cache shows a write, BindTimeout that for a member's agent. Default 5 s.
	SettleTimeout, BindTimeout time.Duration
	// ForkSecrets is that of [creating.Creator], DefaultSize of [templates.Catalog], DiskUsed and TraceEgress of [sandboxes.Store].
	ForkSecrets bool
	DefaultSize templates.Size
	DiskUsed    func(ctx context.Context, ref sandbox.Ref) (int64, error)
	TraceEgress func(ctx context.Context, id sandbox.ID, q sandboxes.EgressQuery) (sandboxes.EgressDecision, error)
}

// Manager has the parts. It is safe for concurrent use.
type Manager struct {
	Keys      *apikeys.Store
	Templates *templates.Catalog
	Sandboxes *sandboxes.Store
	Snapshots *snapshots.Store
	// Builds is nil in replicas, whose server runs them, and on clusters.
	Builds *builds.Service
	// Volumes is nil on clusters.
	Volumes *volumes.Service
	Creates *creating.Creator
	// DeleteTemplate deletes a tenant's own template by its name, alias or ID: one that builds made, or on a cluster, which has no builds,
	// one that was applied.
	DeleteTemplate func(ctx context.Context, namespace, id string) error
	// Events is nil in the replicas of a server, which has them.
	Events *events.Store
	// Webhooks is nil in replicas, whose server has them, and on clusters.
	Webhooks *webhooks.Service
}

// Metrics registers the metrics of a manager without one, for their reference.
func Metrics(to prometheus.Registerer) error {
	_, err := newMetrics(to)
	return err
}

func newMetrics(to prometheus.Registerer) (*prometheus.HistogramVec, error) {
	seconds := prometheus.NewHistogramVec(telemetry.DurationOpts("manager", "operation",
		"Time of an operation on a sandbox (`create`, `claim`, `kill`, `pause`, `resume`, `snapshot`, `fork`), by result: `ok`, `refused`: the request could not succeed, such as for a quota, or `error`: the server is to blame."),
		[]string{"operation", "result"})
	return seconds, telemetry.Register(to, seconds)
}

// New checks the configuration.
func New(cfg Config) (*Manager, error) {
	switch {
	case cfg.Objects == nil, cfg.Cache == nil, cfg.Routes == nil, cfg.Tokens == nil, cfg.Log == nil, cfg.Picker == nil,
		cfg.Quota == nil, cfg.Binder == nil, cfg.Agents == nil, cfg.Assumed == nil:
		return nil, fmt.Errorf("manager: a required part is missing: %w", errs.ErrInvalid)
	case min(cfg.MaxTimeout, cfg.StartTimeout, cfg.MoveTimeout, cfg.CaptureTimeout) < 0:
		return nil, fmt.Errorf("manager: timeouts must be positive: %w", errs.ErrInvalid)
	}
	seconds, err := newMetrics(cfg.Metrics)
	if err != nil {
		return nil, fmt.Errorf("manager: %w", err)
	}
	read := sandboxes.Cache(cfg.Cache)
	if cfg.Listing != nil {
		read = cfg.Listing.Over(read)
	}
	startTimeout, bindTimeout := cmp.Or(cfg.StartTimeout, time.Minute), cmp.Or(cfg.BindTimeout, claiming.BindTimeout)
	claims, err := claiming.New(claiming.Config{
		Creator: cfg.Objects, Reader: cfg.Cache, Picker: cfg.Picker, Quota: cfg.Quota, Binder: cfg.Binder, Assumed: cfg.Assumed, BindTimeout: bindTimeout,
	})
	if err != nil {
		return nil, err
	}
	m := &Manager{Templates: &templates.Catalog{Cache: cfg.Cache, DefaultSize: cfg.DefaultSize}}
	log := cfg.Log.With(telemetry.Component, "manager")
	m.Events, m.Webhooks = cfg.Events, cfg.Webhooks
	m.Keys = &apikeys.Store{Objects: cfg.Objects, Cache: cfg.Cache, Quota: cfg.Quota, Log: log}
	m.Sandboxes = &sandboxes.Store{
		Objects: cfg.Objects, Cache: read, Routes: cfg.Routes, Agents: cfg.Agents, Templates: m.Templates, Tokens: cfg.Tokens,
		Quota: cfg.Quota, Assumed: cfg.Assumed, Listing: cfg.Listing, Log: log, Gate: cfg.Gate, Pods: cfg.Pods, DiskUsed: cfg.DiskUsed, TraceEgress: cfg.TraceEgress,
		MaxTimeout: cmp.Or(cfg.MaxTimeout, 24*time.Hour), MoveTimeout: cmp.Or(cfg.MoveTimeout, time.Minute), SettleTimeout: cmp.Or(cfg.SettleTimeout, 5*time.Second),
		Observe: func(ctx context.Context, operation string, start time.Time, err error) {
			telemetry.ObserveSince(ctx, seconds.WithLabelValues(operation, result(err)), start)
		},
	}
	m.Snapshots = &snapshots.Store{Sandboxes: m.Sandboxes, Cache: cfg.Cache, CaptureTimeout: cmp.Or(cfg.CaptureTimeout, 10*time.Minute)}
	m.DeleteTemplate = (&builds.Service{Objects: cfg.Objects, Cache: cfg.Cache, Templates: m.Templates, Log: log, Applied: cfg.Pods}).Delete
	if cfg.BuildFiles != nil {
		key, err := cfg.Tokens.Derive(signedurl.PurposeUploads)
		if err != nil {
			return nil, err
		}
		m.Builds = &builds.Service{Objects: cfg.Objects, Cache: cfg.Cache, Templates: m.Templates, Snapshots: m.Snapshots, Files: cfg.BuildFiles, Quota: cfg.Quota, Log: log, UploadKey: key, Gate: cfg.Gate}
		m.DeleteTemplate = m.Builds.Delete
	}
	if cfg.VolumeFiles != nil {
		key, err := cfg.Tokens.Derive(volumes.PurposeTokens)
		if err != nil {
			return nil, err
		}
		m.Volumes = &volumes.Service{Objects: cfg.Objects, Quota: cfg.Quota, Cache: cfg.Cache, Files: cfg.VolumeFiles, Log: log, TokenKey: key, Gate: cfg.Gate}
	}
	hasher, err := idempotency.NewHasher(cfg.Tokens)
	if err != nil {
		return nil, err
	}
	m.Creates = &creating.Creator{
		Sandboxes: m.Sandboxes, Snapshots: m.Snapshots, Volumes: m.Volumes, Cache: cfg.Cache, Picker: cfg.Picker, Claims: claims,
		StartTimeout: startTimeout, BindTimeout: bindTimeout, ForkSecrets: cfg.ForkSecrets, Hasher: hasher,
	}
	return m, nil
}

// Run removes the picker's orphans until ctx is done. Other operations do not need it.
func (m *Manager) Run(ctx context.Context) error {
	m.Creates.RemoveOrphans(ctx, m.Creates.Picker.Orphans())
	return nil
}

// result is the label of an operation's end. An alert asks for errors, which requests are not to blame for.
func result(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, errs.ErrUnavailable), errors.Is(err, errs.ErrTimeout), errs.Kind(err) == nil && !errors.Is(err, errors.ErrUnsupported):
		return "error"
	}
	return "refused"
}
