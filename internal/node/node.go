package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sync/singleflight"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/capture"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/cpushare"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/disk"
	"github.com/barchan-dev/barchan/internal/node/images"
	"github.com/barchan-dev/barchan/internal/node/inventory"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/memstore"
	"github.com/barchan-dev/barchan/internal/node/netdev"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/programs"
	"github.com/barchan-dev/barchan/internal/node/recovery"
	"github.com/barchan-dev/barchan/internal/node/registry"
	"github.com/barchan-dev/barchan/internal/node/resolver"
	"github.com/barchan-dev/barchan/internal/node/supervise"
	"github.com/barchan-dev/barchan/internal/node/suspend"
	"github.com/barchan-dev/barchan/internal/node/transfer"
	"github.com/barchan-dev/barchan/internal/node/volumes"
)

// Defaults where a Config leaves a field empty.
const (
	DefaultCPU          = 2000    // thousandths of a processor
	DefaultMemory       = 1 << 30 // bytes
	DefaultDisk         = 10 << 30
	DefaultPids         = 4096
	DefaultStartTimeout = 30 * time.Second
	DefaultCoolDown     = time.Minute
)

// Config is what New needs. All names and directories belong to one instance.
type Config struct {
	// Name is the node's name in observed states.
	Name string
	// DataDir has what survives a reboot, RunDir what need not.
	DataDir, RunDir string
	// MemoryDir has the memory of paused sandboxes; empty means below DataDir. Its file system should be as durable as that
	// of DataDir.
	MemoryDir string
	// EncryptMemory encrypts the memory of paused sandboxes and checkpoints that is written from now on. MemoryKey is the file with
	// the keys, of 32 bytes each, of which the first is for new memory; a missing one is made. Empty means below DataDir.
	EncryptMemory bool
	MemoryKey     string
	// StoreAfter is how long a gVisor sandbox is frozen before its memory is moved to disk; zero means never.
	StoreAfter time.Duration
	// MemoryLow reports whether the memory of frozen sandboxes is moved to disk at once; nil: never. StoreAfter 0 overrules it.
	MemoryLow func() bool
	// ReleaseAddresses releases the addresses of sandboxes on disk; a resume allocates others.
	ReleaseAddresses bool
	// Containerd has images, snapshots and records.
	Containerd *ctrd.Client
	// Runtimes are the classes that the node offers, at least one.
	Runtimes []oci.Config
	// DefaultClass is for sandboxes without a class; empty means gVisor.
	DefaultClass oci.Class
	// AgentBinary is the path of the static agent.
	AgentBinary string
	// Network is the instance's network; its logger may be empty.
	Network netdev.Config
	// RemoteVolumes mounts volumes that are elsewhere; nil: there are none.
	RemoteVolumes volumes.Mounter
	// Upstreams are the DNS servers that the sandboxes' resolver forwards to; empty means those of Network, or else the
	// host's.
	Upstreams []netip.AddrPort
	// InternalZones are answered to sandboxes whatever their addresses; see resolver.Internal.
	InternalZones []string
	// CoolDown is how long a released address is not allocated again; zero means DefaultCoolDown.
	CoolDown time.Duration
	// CgroupParent is the path below which sandboxes are; it begins with a slash.
	CgroupParent string
	// DefaultLimits are for sandboxes that set none; zero fields mean the defaults above.
	DefaultLimits oci.Limits
	// EqualCPU leaves all sandboxes at the same priority, however much they use contended processors; see package cpushare.
	EqualCPU bool
	// DefaultDisk bounds the files of sandboxes that set no limit, in bytes; zero means DefaultDisk.
	DefaultDisk int64
	// Unbounded gives new sandboxes no disks, as before there were any: for tests.
	Unbounded bool
	// StartTimeout bounds the wait for an agent to answer; zero means DefaultStartTimeout.
	StartTimeout time.Duration
	// AgentToken is the access token of a sandbox's agent; nil means none.
	AgentToken func(sandbox.ID) string
	// Objects reads Secrets and ConfigMaps, which sandboxes refer to; nil: there are none.
	Objects podsource.Objects
	// ImageRoom makes room for that many bytes of images, or returns why there is none; nil: there always is.
	ImageRoom func(ctx context.Context, bytes int64) error
	// ImagePulled is called after each pull; nil: not called.
	ImagePulled func()
	// Event writes an Event of a sandbox: the progress of a pull that it waits for, a killed process. kind is Normal or Warning. Nil: none.
	Event func(ref sandbox.Ref, kind, reason, text string)
	// Exists reports whether the source of truth, not a cache, has a sandbox. The node removes orphans only if it returns
	// false without an error. Nil: it removes none.
	Exists func(ctx context.Context, ref sandbox.Ref) (bool, error)
	// Refuse returns why no work that needs disk space may begin, as an errs.ErrUnavailable, or nil. Required.
	Refuse func() error
	// CheckSpace returns an errs.ErrExhausted if that many bytes do not fit below a directory, which need not exist. The node
	// calls it before it writes memory or a checkpoint, for the whole of it. Required.
	CheckSpace func(dir string, bytes int64) error
	// Journalled gets the result of each write of the journal; nil: none.
	Journalled func(error)
	// ObserveStep gets the time of each step, by class; nil: the metric of steps does.
	ObserveStep func(class, step string, took time.Duration)
	// OnRepair gets each difference between the address leases and the host, repaired or not; nil: none.
	OnRepair func(ctx context.Context, r ipam.Repair)
	// Metrics registers the node's metrics; nil: they are not registered.
	Metrics prometheus.Registerer
	// AfterStep is called after each step's do; its error fails the step. For tests of crashes; nil in production.
	AfterStep func(step string) error
	// BeforeUndo is called before each step's undo; its error fails the undo. For tests; nil in production.
	BeforeUndo func(step string) error
	Log        *slog.Logger
}

// Node runs sandboxes. It is safe for concurrent use. Its methods wait until Run has adopted existing sandboxes.
type Node struct {
	cfg         Config
	log         *slog.Logger
	runtimes    *programs.Runtimes
	network     *netdev.Network
	resolver    *resolver.Resolver
	db          *bolt.DB
	journal     *journal.Journal
	allocator   *ipam.Allocator
	adopted     chan struct{}
	changes     chan sandbox.Ref
	tasks       *registry.Tasks
	inits       initializations
	dirty       *registry.ChangeQueue
	supervisor  *supervise.Supervisor
	suspender   *suspend.Suspender
	checkpoints *checkpoint.Store
	transfer    *transfer.Transfer
	host        *operation.Host
	images      *images.Store
	inventory   *inventory.Scanner
	maker       *capture.Maker
	recovery    *recovery.Recovery

	*metrics
	// reconciler compares leases with the host.
	reconciler *ipam.Reconciler
	// scanned reports whether the last scan of addresses in use was complete.
	scanned atomic.Bool
	// sweepEvery is how often Run sweeps, sweepAfter when first; tests change them.
	sweepEvery, sweepAfter time.Duration

	handles *registry.Registry
	disks   *disk.Store
	memory  *memstore.Store
	// Volumes outlive sandboxes.
	Volumes   *volumes.Store
	measuring singleflight.Group // of disk usage
}

// New checks the configuration and opens the journal, which only one process can open. It starts nothing and changes nothing
// else on the host.
func New(cfg Config) (*Node, error) {
	if err := complete(&cfg); err != nil {
		return nil, err
	}
	m, err := newMetrics(cfg.Metrics)
	if err != nil {
		return nil, fmt.Errorf("node: %w", err)
	}
	if cfg.ObserveStep == nil {
		cfg.ObserveStep = m.observeStep
	}
	n := &Node{
		cfg: cfg, metrics: m, log: cfg.Log.With("component", "node"),
		adopted: make(chan struct{}), changes: make(chan sandbox.Ref), tasks: registry.NewTasks(), dirty: registry.NewChangeQueue(),
		sweepEvery: sweepEvery, sweepAfter: sweepAfter,
	}
	if n.runtimes, err = programs.New(programs.Config{Dir: n.runtimesDir(), Runtimes: cfg.Runtimes, Log: n.log}); err != nil {
		return nil, err
	}
	if !n.runtimes.Offers(cfg.DefaultClass) {
		return nil, fmt.Errorf("node: no runtime for the default class %s: %w", cfg.DefaultClass, errs.ErrInvalid)
	}
	if n.network, err = netdev.New(cfg.Network); err != nil {
		return nil, err
	}
	if err := n.open(); err != nil {
		n.network.Close()
		return nil, err
	}
	n.resolver, err = n.newResolver()
	if err == nil {
		err = n.openReconciler()
	}
	if err != nil {
		n.network.Close()
		return nil, errors.Join(err, n.db.Close())
	}
	return n, nil
}

func complete(cfg *Config) error {
	switch {
	case cfg.Log == nil || cfg.Containerd == nil || cfg.Refuse == nil || cfg.CheckSpace == nil:
		return fmt.Errorf("node: a logger, containerd, Refuse and CheckSpace are needed: %w", errs.ErrInvalid)
	case !filepath.IsAbs(cfg.DataDir) || !filepath.IsAbs(cfg.RunDir):
		return fmt.Errorf("node directories %q and %q: must be absolute: %w", cfg.DataDir, cfg.RunDir, errs.ErrInvalid)
	case cfg.MemoryDir != "" && !filepath.IsAbs(cfg.MemoryDir):
		return fmt.Errorf("node memory directory %q: must be absolute: %w", cfg.MemoryDir, errs.ErrInvalid)
	case len(cfg.CgroupParent) < 2 || cfg.CgroupParent[0] != '/':
		return fmt.Errorf("node cgroup parent %q: must begin with a slash: %w", cfg.CgroupParent, errs.ErrInvalid)
	}
	if _, err := os.Stat(cfg.AgentBinary); err != nil {
		return fmt.Errorf("node agent: %w: %w", err, errs.ErrInvalid)
	}
	if cfg.Network.Log == nil {
		cfg.Network.Log = cfg.Log
	}
	setHooks(cfg)
	cfg.MemoryDir = cmp.Or(cfg.MemoryDir, filepath.Join(cfg.DataDir, "memory"))
	cfg.MemoryKey = cmp.Or(cfg.MemoryKey, filepath.Join(cfg.DataDir, "memory.key"))
	cfg.DefaultClass = cmp.Or(cfg.DefaultClass, oci.GVisor)
	cfg.CoolDown = cmp.Or(cfg.CoolDown, DefaultCoolDown)
	cfg.StartTimeout = cmp.Or(cfg.StartTimeout, DefaultStartTimeout)
	cfg.DefaultLimits.MilliCPU = cmp.Or(cfg.DefaultLimits.MilliCPU, DefaultCPU)
	cfg.DefaultLimits.Memory = cmp.Or(cfg.DefaultLimits.Memory, DefaultMemory)
	cfg.DefaultDisk = cmp.Or(cfg.DefaultDisk, DefaultDisk)
	cfg.DefaultLimits.Pids = cmp.Or(cfg.DefaultLimits.Pids, DefaultPids)
	if len(cfg.Upstreams) == 0 {
		cfg.Upstreams = resolver.Upstreams(cfg.Network.Resolvers)
	}
	if len(cfg.Network.Resolvers) == 0 {
		cfg.Network.Resolvers = resolver.HostServers()
	}
	cfg.Network.Resolvers = cfg.internalNames().Direct(cfg.Network.Resolvers)
	return nil
}

// setHooks sets hooks that are nil to functions that do nothing.
func setHooks(cfg *Config) {
	for _, hook := range []*func(string) error{&cfg.AfterStep, &cfg.BeforeUndo} {
		if *hook == nil {
			*hook = func(string) error { return nil }
		}
	}
	if cfg.Event == nil {
		cfg.Event = func(sandbox.Ref, string, string, string) {}
	}
	if cfg.Journalled == nil {
		cfg.Journalled = func(error) {}
	}
}

// open opens the database with journal and leases.
func (n *Node) open() error {
	for _, dir := range []string{n.cfg.DataDir, n.cfg.RunDir} {
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return fmt.Errorf("make directory of the node: %w", err)
		}
	}
	if err := os.MkdirAll(n.cfg.MemoryDir, 0o700); err != nil {
		return fmt.Errorf("make directory of sandboxes' memory: %w", err)
	}
	path := filepath.Join(n.cfg.DataDir, "node.db")
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: time.Second})
	if err != nil {
		return fmt.Errorf("open %s, which only one server can use: %w", path, err)
	}
	n.db = db
	if n.journal, err = journal.Open(db); err == nil {
		n.handles = registry.New(registry.Config{Journal: n.journal, Absent: n.absent(), Journalled: n.cfg.Journalled, ObserveStep: n.observeStep})
		n.allocator, err = n.openAllocator()
	}
	n.disks = disk.Open(filepath.Join(n.cfg.DataDir, "disks"))
	n.memory = memstore.New(memstore.Config{
		Dir: n.cfg.DataDir, Plain: n.cfg.MemoryDir, Encrypt: n.cfg.EncryptMemory, KeyFile: n.cfg.MemoryKey, Disks: n.disks,
	})
	if err == nil {
		n.checkpoints, err = checkpoint.Open(checkpoint.Config{
			DB: db, Memory: n.memory, Dir: filepath.Join(n.cfg.DataDir, "checkpoints"), Node: n.cfg.Name, Containerd: n.cfg.Containerd,
			ImageUsed: func(digest string) bool { return len(n.imageUsers(digest)) > 0 }, Journalled: n.cfg.Journalled, Log: n.log,
		})
	}
	if err != nil {
		return errors.Join(err, db.Close())
	}
	n.images, err = images.New(images.Config{
		Containerd: n.cfg.Containerd, Objects: n.cfg.Objects, Room: n.cfg.ImageRoom, Pulled: n.cfg.ImagePulled, Space: n.cfg.Refuse, Later: n.tasks.Start, Log: n.log,
	})
	if err != nil {
		return errors.Join(err, db.Close())
	}
	if err := n.disks.Fault(); err != nil {
		n.log.Warn("disks of sandboxes not bounded", telemetry.Error, err)
	}
	if n.Volumes, err = volumes.Open(filepath.Join(n.cfg.DataDir, "volumes"), n.disks, n.mounting, n.cfg.RemoteVolumes); err != nil {
		return errors.Join(err, db.Close())
	}
	n.inventory = n.newScanner()
	n.host = operation.NewHost(operation.HostConfig{
		Name: n.cfg.Name, DataDir: n.cfg.DataDir, MemoryDir: n.cfg.MemoryDir, Memory: n.memory, CgroupParent: n.cfg.CgroupParent,
		Containerd: n.cfg.Containerd, Images: n.images, Network: n.network, Subnet6: n.cfg.Network.Subnet6,
		Resolvers: n.cfg.Network.Resolvers, Allocator: n.allocator, Runtimes: n.runtimes, Checkpoints: n.checkpoints, Volumes: n.Volumes, Disks: n.disks,
		AgentToken: n.cfg.AgentToken, Objects: n.cfg.Objects, StartTimeout: n.cfg.StartTimeout, ReleaseAddresses: n.cfg.ReleaseAddresses,
		Holder: n.inventory.Holder, CheckSpace: n.cfg.CheckSpace,
		AfterStep: n.cfg.AfterStep, BeforeUndo: n.cfg.BeforeUndo, ObserveStep: n.cfg.ObserveStep, Log: n.log,
	})
	n.supervisor = supervise.New(supervise.Config{
		Name: n.cfg.Name, Log: n.log, Host: n.host, Registry: n.handles, Changes: n.dirty, Cut: n.network.Cut, Later: n.tasks.Start,
		Event: n.cfg.Event, OOMKills: n.oomKills,
	})
	n.suspender = suspend.New(suspend.Config{
		Log: n.log, Host: n.host, Registry: n.handles, Runtimes: n.runtimes, Allocator: n.allocator, MemoryDirs: n.memory.SandboxDirs,
		StoreAfter: n.cfg.StoreAfter, MemoryLow: n.cfg.MemoryLow, ReleaseAddresses: n.cfg.ReleaseAddresses, Absent: n.absent, SetRunning: n.supervisor.SetRunning, Changes: n.dirty,
		Refuse: n.cfg.Refuse, Later: n.tasks.Start, ObserveStep: n.cfg.ObserveStep,
	})
	n.maker = capture.New(capture.Config{
		Log: n.log, Containerd: n.cfg.Containerd, Host: n.host, Registry: n.handles, Checkpoints: n.checkpoints, Runtimes: n.runtimes,
		Find: n.find, Release: n.suspender.Release, Refuse: n.cfg.Refuse, CheckSpace: n.cfg.CheckSpace, Later: n.tasks.Start, ObserveStep: n.cfg.ObserveStep,
	})
	n.recovery = recovery.New(recovery.Config{
		Log: n.log, Containerd: n.cfg.Containerd, Host: n.host, Journal: n.journal, Registry: n.handles, Inventory: n.inventory,
		Network: n.network, Allocator: n.allocator, Checkpoints: n.checkpoints, Maker: n.maker, Supervisor: n.supervisor, Suspender: n.suspender,
		Exists: n.cfg.Exists, ReconcileAddresses: n.firstReconcile, AdoptEgress: n.adoptEgress, Absent: n.absent,
		Changes: n.dirty, Later: n.tasks.Start, Sweeps: n.sweeps, Removals: n.removals,
	})
	n.transfer = transfer.New(transfer.Config{
		Checkpoints: n.checkpoints, Containerd: n.cfg.Containerd, Offers: n.runtimes.Offers, CheckMemory: n.checkRestores,
		Refuse: n.cfg.Refuse, CheckSpace: n.cfg.CheckSpace, ObserveStep: n.observeStep, Log: n.log,
	})
	return nil
}

func (n *Node) openAllocator() (*ipam.Allocator, error) {
	store, err := ipam.NewBoltStore(n.db)
	if err != nil {
		return nil, err
	}
	return ipam.Open(ipam.Config{
		Subnet: n.network.Subnet(), Excluded: []netip.Addr{n.network.Gateway()}, CoolDown: n.cfg.CoolDown, Store: store, Log: n.cfg.Log,
	})
}

func (n *Node) newScanner() *inventory.Scanner {
	s := &inventory.Scanner{
		DataDir: n.cfg.DataDir, Memory: n.memory, CgroupParent: n.cfg.CgroupParent, Network: n.cfg.Network,
		Containerd: n.cfg.Containerd, Devices: n.network, Runtimes: n.runtimes, Handles: n.handles, Journal: n.journal,
		Allocator: n.allocator, Checkpoints: n.checkpoints,
	}
	for _, r := range n.cfg.Runtimes {
		s.RuntimeRoots = append(s.RuntimeRoots, r.Root)
	}
	return s
}

// mounting returns the sandboxes that mount a volume, or will when they resume.
func (n *Node) mounting(volume types.NamespacedName) (names []string) {
	for _, u := range n.handles.All() {
		if r := u.Row(); r != nil && r.Stage != journal.Ended && r.Plan.Ref.Namespace == volume.Namespace && r.Plan.Mounts(volume.Name) {
			names = append(names, r.Plan.Ref.Name)
		}
	}
	return names
}

// Audit lists resources of the instance without a sandbox in the journal, one line each.
func (n *Node) Audit(ctx context.Context) ([]string, error) { return n.inventory.Audit(ctx) }

func (n *Node) openReconciler() (err error) {
	n.reconciler, err = ipam.NewReconciler(ipam.ReconcilerConfig{
		Allocator: n.allocator, Live: n.scanWith(n.inventory.InUse), OnRepair: n.cfg.OnRepair, Log: n.cfg.Log, Metrics: n.cfg.Metrics,
	})
	return err
}

// StoredMemory returns whether memory that is written now is encrypted, and details for an operator.
func (n *Node) StoredMemory() (state, detail string) { return n.memory.Describe() }

// Close closes what New opened. Sandboxes keep running. Run must have returned.
func (n *Node) Close() error {
	n.host.Close()
	n.network.Close()
	if err := n.db.Close(); err != nil {
		return fmt.Errorf("close the journal: %w", err)
	}
	return nil
}

// ReadAhead starts to read what Run begins with, and returns a function that waits for the end. It may be called once, before Run, if
// nothing else uses the node until then.
func (n *Node) ReadAhead(ctx context.Context) (wait func()) { return n.recovery.ReadAhead(ctx) }

// Run opens the network, adopts existing sandboxes, undoes interrupted creates, and then watches sandboxes until ctx ends. It
// leaves them running.
func (n *Node) Run(ctx context.Context) error {
	var err error
	if n.host.AgentFile, err = programs.InstallAgent(n.cfg.AgentBinary, filepath.Join(n.cfg.DataDir, "agents")); err != nil {
		return err
	}
	if err := n.runtimes.Install(ctx); err != nil {
		return err
	}
	if err := n.memory.Open(ctx); err != nil {
		return err
	}
	if err := n.network.Open(ctx); err != nil {
		return err
	}
	if err := n.recovery.Adopt(ctx); err != nil {
		return err
	}
	if err := n.Volumes.Sweep(ctx); err != nil {
		return err
	}
	close(n.adopted)
	var running sync.WaitGroup
	defer running.Wait()
	for _, s := range n.background() {
		running.Go(func() { s.run(ctx) })
	}
	n.tasks.Run(ctx)
	return nil
}

// background returns the services that Run starts after adoption. Each logs its errors.
func (n *Node) background() []backgroundService {
	return []backgroundService{
		{"changes", func(ctx context.Context) { n.dirty.Forward(ctx, n.changes) }},
		{"spare disks", func(ctx context.Context) {
			if !n.cfg.Unbounded {
				n.disks.KeepSpares(ctx, n.cfg.DefaultDisk, n.log)
			}
		}},
		{"room for disks", func(ctx context.Context) { n.disks.KeepRoom(ctx, n.log) }},
		{"sweep", func(ctx context.Context) {
			if lifecycle.Sleep(ctx, n.sweepAfter) {
				_ = lifecycle.Every(ctx, n.sweepEvery, func() { n.Sweep(ctx) })
			}
		}},
		{"sweep of builds", func(ctx context.Context) {
			_ = lifecycle.Every(ctx, sweepBuildsEvery, func() { n.runtimes.Sweep(ctx, n.needsBuild) })
		}},
		{"reconcile of addresses", func(ctx context.Context) { _ = n.reconciler.Run(ctx) }},
		{"network", func(ctx context.Context) { _ = n.network.Run(ctx) }},
		{"firewall", n.watchFirewall},
		{"processor shares", n.shareCPU},
		{"builds of running sandboxes", func(ctx context.Context) { n.runtimes.Identify(ctx) }},
		{"resolver", func(ctx context.Context) { _ = n.resolver.Run(ctx) }},
	}
}

func (n *Node) shareCPU(ctx context.Context) {
	if !n.cfg.EqualCPU {
		cpushare.New(cpushare.Config{Registry: n.handles, Cgroup: n.host.Cgroup, Lowered: n.lowered, Log: n.log}).Run(ctx)
	}
}

// backgroundService is named for tests.
type backgroundService struct {
	name string
	run  func(ctx context.Context)
}

// Adopted is closed when existing sandboxes have been adopted.
func (n *Node) Adopted() <-chan struct{} { return n.adopted }

// Changes returns a channel of sandboxes that changed without a request. It may merge changes of one sandbox; it loses none.
func (n *Node) Changes() <-chan sandbox.Ref { return n.changes }

// Recheck sends an unchanged sandbox to Changes, because something it lacked may exist now, such as its image.
func (n *Node) Recheck(ref sandbox.Ref) { n.dirty.Mark(ref) }

// Observe returns the last observed state of a sandbox.
func (n *Node) Observe(ctx context.Context, ref sandbox.Ref) (sandbox.Observed, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return sandbox.Observed{}, err
	}
	if err := n.find(ctx, ref); err != nil {
		return n.absent(), err
	}
	if u := n.handles.Lookup(ref.UID); u != nil {
		u.SetDesired()
		return u.Observed(), nil
	}
	return n.absent(), nil
}

// planOf returns the plan of an object with the node's defaults.
func (n *Node) planOf(s *agents.Sandbox) (plan.Plan, error) {
	return plan.New(s, plan.Defaults{
		Class: n.cfg.DefaultClass, Limits: n.cfg.DefaultLimits, Offers: n.runtimes.Offers,
	})
}

func (n *Node) runtimesDir() string { return filepath.Join(n.cfg.DataDir, "runtimes") }

func (n *Node) awaitAdopted(ctx context.Context) error {
	select {
	case <-n.adopted:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the node to adopt sandboxes: %w: %w", context.Cause(ctx), errs.ErrUnavailable)
	}
}

func (n *Node) absent() sandbox.Observed {
	return sandbox.Observed{State: sandbox.ContainerAbsent, Node: n.cfg.Name}
}
