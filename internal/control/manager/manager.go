package manager

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/agentclient"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
	"github.com/barchan-dev/barchan/internal/control/claiming"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Objects writes to the API server, and reads what it holds this instant. A
// controller-runtime client has it.
type Objects interface {
	Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error
	Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error
	Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error
	Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error
}

// Sandboxes reads sandboxes from memory. What it returns is the caller's own copy; what it does
// not hold is an errs.ErrNotFound.
type Sandboxes interface {
	Sandbox(ctx context.Context, key types.NamespacedName) (*agents.Sandbox, error)
	SandboxByID(ctx context.Context, id sandbox.ID) (*agents.Sandbox, error)
	Sandboxes(ctx context.Context, namespace string) ([]agents.Sandbox, error)
	// SandboxesByIdempotency finds those with this value of pool.AnnotationIdempotencyKey.
	SandboxesByIdempotency(ctx context.Context, namespace, hash string) ([]agents.Sandbox, error)
	// WaitSandbox blocks until done says so. done gets nil once the sandbox is gone.
	WaitSandbox(ctx context.Context, key types.NamespacedName, done func(*agents.Sandbox) (bool, error)) (*agents.Sandbox, error)
}

// Templates reads templates, as Sandboxes does sandboxes.
type Templates interface {
	Template(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, error)
	Templates(ctx context.Context, namespace string) ([]extensions.SandboxTemplate, error)
	// CurrentTemplate is a template, with its revision, as a read of the API server found it that
	// began after the call.
	CurrentTemplate(ctx context.Context, key types.NamespacedName) (*extensions.SandboxTemplate, string, error)
	// PoolsOf lists the warm pools of a template in a namespace, or in all if that is empty.
	PoolsOf(ctx context.Context, namespace string, template types.NamespacedName) ([]extensions.SandboxWarmPool, error)
}

// Checkpoints reads checkpoints, as Sandboxes does sandboxes.
type Checkpoints interface {
	Checkpoint(ctx context.Context, key types.NamespacedName) (*barchan.Checkpoint, error)
	Checkpoints(ctx context.Context, namespace string) ([]barchan.Checkpoint, error)
	// WaitCheckpoint blocks until done says so. done gets nil once the checkpoint is gone.
	WaitCheckpoint(ctx context.Context, key types.NamespacedName, done func(*barchan.Checkpoint) (bool, error)) (*barchan.Checkpoint, error)
}

// Keys reads API keys, as Sandboxes does sandboxes.
type Keys interface {
	APIKeyByHash(ctx context.Context, hash string) (*barchan.APIKey, error)
	APIKeys(ctx context.Context, namespace string) ([]barchan.APIKey, error)
}

// Cache is all that a manager reads from memory; package cache has it.
type Cache interface {
	Sandboxes
	Templates
	Checkpoints
	Keys
}

// Routes is told of every change before its caller is; package route has it.
type Routes interface {
	Apply(s *agents.Sandbox) bool
	ApplyDelete(s *agents.Sandbox) bool
	// Name returns the object that a sandbox's route names, pushed by another replica or seen in the watch.
	Name(id sandbox.ID) (types.NamespacedName, bool)
	// Ended says why a sandbox of a namespace has ended, for some time after; empty where that is not known.
	Ended(namespace string, id sandbox.ID) string
}

// AgentReader reads from the agents of sandboxes; package agentclient has it.
type AgentReader interface {
	// Stats is what a running sandbox uses now.
	Stats(ctx context.Context, s *agents.Sandbox) (envd.Metrics, error)
	// Logs returns the lines kept of a sandbox that are not older than since, oldest first.
	Logs(ctx context.Context, s *agents.Sandbox, since time.Time) ([]envd.LogLine, error)
}

// Picker leases the warm members of pools; package picker has it.
type Picker interface {
	Begin(pool types.UID) *picker.Pick
	Ready(pool types.UID, revision string) int
	// Orphans are members that were written for claims whose callers had left.
	Orphans() <-chan *agents.Sandbox
}

// Quota grants a namespace what a sandbox uses, or refuses with an errs.ErrExhausted; package
// quota has it.
type Quota interface {
	Hold(ctx context.Context, req quota.Request) (*quota.Reservation, error)
	SizeOf(pod *corev1.PodSpec) quota.Size
	// Observe is told what was ended or paused here, so that the next request finds the room.
	Observe(older, newer *agents.Sandbox)
}

// Binder sends a request to the agent of a running sandbox; package agentclient has it.
type Binder interface {
	Bind(ctx context.Context, s *agents.Sandbox, req envd.InitRequest) error
}

// Size is what a sandbox has where its template does not say.
type Size struct {
	CPUs             int
	MemoryMB, DiskMB int64
}

// Config is what New needs.
type Config struct {
	// Objects, Cache, Routes, Tokens and Log are required.
	Objects Objects
	Cache   Cache
	Routes  Routes
	Tokens  *sandbox.Tokens
	Log     *slog.Logger
	// Picker leases warm members. Nil starts every sandbox cold.
	Picker Picker
	// Quota bounds what namespaces use. Nil: nothing does.
	Quota Quota
	// Binder reaches the agents of claimed members. Default: an [agentclient.Client] with Tokens.
	Binder Binder
	// Witness of what sandboxes use and say. Default: an [agentclient.Client] with Tokens.
	Witness AgentReader
	// Assumed has the sandboxes that the cache may not show yet; the events of the cache feed it. Default: one
	// that no event feeds.
	Assumed *assumecache.Sandboxes
	// Gate refuses what is new while something is wrong. Nil: nothing does.
	Gate *health.Gate
	// Metrics, if given, gets our histograms.
	Metrics prometheus.Registerer
	// PublicNamespace holds the templates that every tenant may use if they are marked public.
	// Default "barchan-system".
	PublicNamespace string
	// MaxTimeout bounds a sandbox's time to live, counted from its start or resume. Default 24 h.
	MaxTimeout time.Duration
	// StartTimeout bounds the wait for a new sandbox to be ready. Default 60 s.
	StartTimeout time.Duration
	// MoveTimeout bounds the wait for a pause or a resume. Default 60 s.
	MoveTimeout time.Duration
	// CaptureTimeout bounds the wait for a snapshot to be durable. Default 10 min.
	CaptureTimeout time.Duration
	// ForkSecrets lets sandboxes start from the memory of others whose claims brought variables,
	// without a word in the request. Default false.
	ForkSecrets bool
	// DefaultSize is told of sandboxes whose template sets no limits. Default 2 CPUs, 1024 and 10240 MiB.
	DefaultSize Size
	// DiskUsed is how many bytes a sandbox has written. Nil, as in a replica, has metrics say 0.
	DiskUsed func(ctx context.Context, ref sandbox.Ref) (int64, error)
}

// DefaultPublicNamespace is where templates for every tenant lie.
const DefaultPublicNamespace = "barchan-system"

func (c *Config) setDefaults() error {
	switch {
	case c.Objects == nil, c.Cache == nil, c.Routes == nil, c.Tokens == nil, c.Log == nil:
		return fmt.Errorf("manager: Objects, Cache, Routes, Tokens and Log are required: %w", errs.ErrInvalid)
	case c.MaxTimeout < 0 || c.StartTimeout < 0 || c.MoveTimeout < 0 || c.CaptureTimeout < 0:
		return fmt.Errorf("manager: timeouts must be positive: %w", errs.ErrInvalid)
	}
	setIfZero(&c.PublicNamespace, DefaultPublicNamespace)
	setIfZero(&c.MaxTimeout, 24*time.Hour)
	setIfZero(&c.StartTimeout, time.Minute)
	setIfZero(&c.MoveTimeout, time.Minute)
	setIfZero(&c.CaptureTimeout, 10*time.Minute)
	if c.Binder == nil || c.Witness == nil {
		byAddress := agentclient.New(agentclient.Config{Tokens: c.Tokens})
		if c.Binder == nil {
			c.Binder = byAddress
		}
		if c.Witness == nil {
			c.Witness = byAddress
		}
	}
	if c.Assumed == nil {
		c.Assumed = assumecache.New(c.Cache.Sandbox)
	}
	setIfZero(&c.DefaultSize.CPUs, 2)
	setIfZero(&c.DefaultSize.MemoryMB, 1024)
	setIfZero(&c.DefaultSize.DiskMB, 10240)
	return nil
}

func setIfZero[T comparable](p *T, value T) {
	var zero T
	if *p == zero {
		*p = value
	}
}

// Manager acts on sandboxes, templates and keys. It is safe for concurrent use.
type Manager struct {
	cfg     Config
	objects Objects
	cache   Cache
	log     *slog.Logger
	seconds *prometheus.HistogramVec // by operation and result
	claims  *claiming.Claimer
	assumed *assumecache.Sandboxes
	// settleIn and bindIn are settleTimeout and claiming.BindTimeout; tests over a real API server are more patient.
	settleIn time.Duration
	bindIn   time.Duration

	mu sync.Mutex
	// fresh holds keys made here that the cache may not have yet, by hash.
	fresh map[string]freshKey // +checklocks:mu
	// flights are the idempotent creates under way.
	flights map[flightKey]*inflightCreate // +checklocks:mu
}

// New checks the configuration.
func New(cfg Config) (*Manager, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	m := &Manager{
		cfg: cfg, objects: cfg.Objects, cache: cfg.Cache,
		log:     cfg.Log.With(telemetry.Component, "manager"),
		seconds: prometheus.NewHistogramVec(telemetry.DurationOpts("manager", "operation", "Time that an operation on a sandbox took."), []string{"operation", "result"}),
		assumed: cfg.Assumed, settleIn: settleTimeout, bindIn: claiming.BindTimeout,
		fresh:   map[string]freshKey{},
		flights: map[flightKey]*inflightCreate{},
	}
	var err error
	if m.claims, err = claiming.New(m.claimingConfig()); err != nil {
		return nil, err
	}
	if cfg.Metrics != nil {
		if err := cfg.Metrics.Register(m.seconds); err != nil {
			return nil, fmt.Errorf("register the manager's metrics: %w", err)
		}
	}
	return m, nil
}

// claimingConfig is of what claims share with SandboxClaims. A nil of ours stays a nil.
func (m *Manager) claimingConfig() claiming.Config {
	c := claiming.Config{Creator: m.objects, Reader: m.cache, Binder: m.cfg.Binder, Assumed: m.assumed, BindTimeout: m.bindIn}
	if m.cfg.Picker != nil {
		c.Picker = m.cfg.Picker
	}
	if m.cfg.Quota != nil {
		c.Quota = m.cfg.Quota
	}
	return c
}

// Operations as the histogram barchan_manager_operation_seconds labels them.
const (
	opCreate = "create" // request to ready
	opClaim  = "claim"  // request to owned: the durable write done
	opPause  = "pause"
	opResume = "resume"
	opKill   = "kill"

	opSnapshot = "snapshot" // request to durable
	opFork     = "fork"     // request to the last fork ready
)

func (m *Manager) observe(operation string, start time.Time, err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.seconds.WithLabelValues(operation, result).Observe(time.Since(start).Seconds())
}
