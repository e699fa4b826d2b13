// Package node runs sandboxes on one machine: it takes each through the steps of its life,
// finds again what runs after a restart, and notices what ends by itself. It knows no API
// server; whoever calls it decides what should run.
//
// # Steps
//
// A sandbox is made of steps (steps.go), each with a do and an undo that works without its do:
//
//	address → network ┐                ┌ bundle ┐         ┌ agent answers ┐
//	                  ├ both finished →┤        ├ start → ┤               ├ noted as live
//	snapshot → mount  ┘                └ record ┘         └ address held  ┘
//
// Before the first of them acts, one row of the journal, synced to disk, names the sandbox
// and all that its steps need; every name on the machine is derived from it. So one write
// stands for all steps: wherever the process dies, the next one finds the row, undoes all
// steps and lets the caller begin again, or finds it noted as live and adopts it. The row is
// deleted last.
//
// # Sleep
//
// A sandbox that is suspended is frozen at once. Later its memory is moved to disk (store.go),
// and it comes back from wherever its memory is (wake.go):
//
//	live → pausing → paused → storing → stored → waking → live
//	         paused → resuming → live     ↑         ┘ failed
//
// The journal has the truth: until it says storing, the frozen processes are the sandbox, and
// what is on disk is litter; until it says live again, the memory on disk is the sandbox, and
// what is left or made of a container is litter.
//
// # Locks
//
// Each sandbox has one turn ([unit.turn]) that whoever changes it holds; turns are taken
// before Node.mu and unit.mu, and neither of those two is held while taking the other.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/ctrd"
	"github.com/barchan-dev/barchan/internal/envd"
	"github.com/barchan-dev/barchan/internal/errs"
	"github.com/barchan-dev/barchan/internal/ipam"
	"github.com/barchan-dev/barchan/internal/netdev"
	"github.com/barchan-dev/barchan/internal/oci"
	"github.com/barchan-dev/barchan/internal/sandbox"
)

// Defaults where a Config leaves a field empty.
const (
	DefaultCPU          = 2000    // thousandths of a processor
	DefaultMemory       = 1 << 30 // bytes
	DefaultPids         = 4096
	DefaultStartTimeout = 30 * time.Second
	DefaultCoolDown     = time.Minute
)

// Config says what a node runs with. All names and directories are the instance's own.
type Config struct {
	// Name is the machine's name in what is observed.
	Name string
	// DataDir keeps what must survive a restart, RunDir what need not survive a reboot.
	DataDir, RunDir string
	// MemoryDir keeps the memory of sandboxes that sleep; empty means below DataDir. It should
	// be on the disk that DataDir is on, or one as durable.
	MemoryDir string
	// StoreAfter is how long a sandbox of the class gVisor is frozen before its memory is moved
	// to disk, which frees the machine's; zero means never.
	StoreAfter time.Duration
	// Containerd has images, snapshots and records.
	Containerd *ctrd.Client
	// Runtimes are the classes that the node offers, at least one.
	Runtimes []oci.Config
	// DefaultClass runs what names no class; empty means gVisor.
	DefaultClass oci.Class
	// AgentBinary is the path of the static agent.
	AgentBinary string
	// Network is the instance's network; its logger may be empty.
	Network netdev.Config
	// CoolDown is how long an address rests after use; zero means DefaultCoolDown.
	CoolDown time.Duration
	// CgroupParent is the path below which sandboxes are; it begins with a slash.
	CgroupParent string
	// DefaultLimits are a sandbox's that sets none; zero fields mean the defaults above.
	DefaultLimits oci.Limits
	// StartTimeout bounds the wait for an agent to answer; zero means DefaultStartTimeout.
	StartTimeout time.Duration
	// AgentToken is the access token of a sandbox's agent; nil means none.
	AgentToken func(sandbox.ID) string
	// Credentials for registries; nil means none.
	Credentials ctrd.Credentials
	// Exists asks the source of truth, not a cache, whether a sandbox exists. Only a clear no
	// lets the node remove what nobody asks for. Nil keeps everything.
	Exists func(ctx context.Context, ref sandbox.Ref) (bool, error)
	// ObserveStep gets the time of each step, by class; nil is fine.
	ObserveStep func(class, step string, took time.Duration)
	// AfterStep is called after each step's do, for tests that break things: its error fails
	// the step. Nil in production.
	AfterStep func(step string) error
	Log       *slog.Logger
}

// Node runs sandboxes. It is safe for concurrent use. Its methods wait until Run has adopted
// what already runs.
type Node struct {
	cfg      Config
	log      *slog.Logger
	runtimes map[oci.Class]*oci.Runtime
	network  *netdev.Network
	db       *bolt.DB
	journal  *journal
	books    *ipam.Books
	agents   *http.Client
	adopted  chan struct{}
	changes  chan sandbox.Ref
	tasks    *tasks
	dirty    *dirty
	stores   chan struct{} // has a place for each memory that may be moved to disk at the same time
	// agentFile is the node's copy of the agent; Run sets it before anything else.
	agentFile string

	mu    sync.Mutex
	units map[types.UID]*unit // +checklocks:mu
}

// New checks the configuration and opens the journal, which only one process can have at a
// time. It starts nothing and changes nothing else on the machine.
func New(cfg Config) (*Node, error) {
	if err := complete(&cfg); err != nil {
		return nil, err
	}
	n := &Node{
		cfg: cfg, log: cfg.Log.With("component", "node"), runtimes: map[oci.Class]*oci.Runtime{},
		adopted: make(chan struct{}), changes: make(chan sandbox.Ref), tasks: newTasks(), dirty: newDirty(),
		stores: make(chan struct{}, storesAtOnce), units: map[types.UID]*unit{},
		agents: &http.Client{Transport: &http.Transport{
			DialContext:        agentDialer().DialContext,
			DisableCompression: true, MaxIdleConnsPerHost: 4, IdleConnTimeout: 5 * time.Minute,
		}},
	}
	for _, c := range cfg.Runtimes {
		r, err := oci.New(c)
		if err != nil {
			return nil, err
		}
		n.runtimes[r.Class()] = r
	}
	if n.runtimes[cfg.DefaultClass] == nil {
		return nil, fmt.Errorf("node: no runtime for the default class %s: %w", cfg.DefaultClass, errs.ErrInvalid)
	}
	network, err := netdev.New(cfg.Network)
	if err != nil {
		return nil, err
	}
	n.network = network
	if err := n.open(); err != nil {
		network.Close()
		return nil, err
	}
	return n, nil
}

func complete(cfg *Config) error {
	switch {
	case cfg.Log == nil || cfg.Containerd == nil:
		return fmt.Errorf("node: a logger and containerd are needed: %w", errs.ErrInvalid)
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
	setDefault(&cfg.MemoryDir, filepath.Join(cfg.DataDir, "memory"))
	setDefault(&cfg.DefaultClass, oci.GVisor)
	setDefault(&cfg.CoolDown, DefaultCoolDown)
	setDefault(&cfg.StartTimeout, DefaultStartTimeout)
	setDefault(&cfg.DefaultLimits.MilliCPU, DefaultCPU)
	setDefault(&cfg.DefaultLimits.Memory, DefaultMemory)
	setDefault(&cfg.DefaultLimits.Pids, DefaultPids)
	if len(cfg.Network.Resolvers) == 0 {
		cfg.Network.Resolvers = hostResolvers()
	}
	return nil
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
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
		return fmt.Errorf("open %s, which only one server at a time can have: %w", path, err)
	}
	n.db = db
	if n.journal, err = openJournal(db); err == nil {
		n.books, err = n.openBooks()
	}
	if err != nil {
		return errors.Join(err, db.Close())
	}
	return nil
}

func (n *Node) openBooks() (*ipam.Books, error) {
	store, err := ipam.NewBoltStore(n.db)
	if err != nil {
		return nil, err
	}
	return ipam.Open(ipam.Config{
		Subnet: n.network.Subnet(), Excluded: []netip.Addr{n.network.Gateway()}, CoolDown: n.cfg.CoolDown, Store: store, Log: n.cfg.Log,
	})
}

// Close gives back what New opened. Sandboxes run on. Run must have returned.
func (n *Node) Close() error {
	n.agents.CloseIdleConnections()
	n.network.Close()
	if err := n.db.Close(); err != nil {
		return fmt.Errorf("close the journal: %w", err)
	}
	return nil
}

// Run opens the network, adopts what already runs and undoes what was left half done, then
// watches sandboxes until ctx ends. It leaves them running.
func (n *Node) Run(ctx context.Context) error {
	if err := n.installAgent(); err != nil {
		return err
	}
	if err := n.network.Open(ctx); err != nil {
		return err
	}
	if err := n.adopt(ctx); err != nil {
		return err
	}
	close(n.adopted)
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { n.dirty.forward(ctx, n.changes) })
	running.Go(func() { n.sweep(ctx) })
	running.Go(func() { n.identify(ctx) })
	n.tasks.run(ctx)
	return nil
}

// Adopted is closed when what already ran is known.
func (n *Node) Adopted() <-chan struct{} { return n.adopted }

// Changes tells of sandboxes that changed by themselves. Many changes of one may be told
// once; none is lost.
func (n *Node) Changes() <-chan sandbox.Ref { return n.changes }

// Recheck has Changes tell of a sandbox that did not change, because something it lacked may be
// there now, such as its image.
func (n *Node) Recheck(ref sandbox.Ref) { n.dirty.mark(ref) }

// Observe tells what the node last saw of a sandbox.
func (n *Node) Observe(ctx context.Context, ref sandbox.Ref) (sandbox.Observed, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return sandbox.Observed{}, err
	}
	if u := n.lookup(ref.UID); u != nil {
		u.claim()
		return u.observed(), nil
	}
	return n.absent(), nil
}

// Status is a sandbox and what was seen of it.
type Status struct {
	Ref      sandbox.Ref
	Observed sandbox.Observed
}

// List tells of all sandboxes on the node, in no order.
func (n *Node) List(ctx context.Context) ([]Status, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, err
	}
	var all []Status
	for _, u := range n.allUnits() {
		all = append(all, Status{Ref: u.ref, Observed: u.observed()})
	}
	return all, nil
}

// Agent is a client of a running sandbox's agent; none runs is an errs.ErrNotFound.
func (n *Node) Agent(ctx context.Context, ref sandbox.Ref) (*envd.Client, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, err
	}
	u := n.lookup(ref.UID)
	if u == nil {
		return nil, fmt.Errorf("sandbox %s/%s is not on this node: %w", ref.Namespace, ref.Name, errs.ErrNotFound)
	}
	seen := u.observed()
	if seen.State != sandbox.ContainerRunning {
		return nil, fmt.Errorf("sandbox %s/%s is %s: %w", ref.Namespace, ref.Name, seen.State, errs.ErrNotFound)
	}
	return n.agentOf(u.id, seen.Address)
}

func (n *Node) awaitAdopted(ctx context.Context) error {
	select {
	case <-n.adopted:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the node to adopt what runs: %w: %w", context.Cause(ctx), errs.ErrUnavailable)
	}
}

func (n *Node) absent() sandbox.Observed {
	return sandbox.Observed{State: sandbox.ContainerAbsent, Node: n.cfg.Name}
}

func (n *Node) lookup(uid types.UID) *unit {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.units[uid]
}

// unitOf finds or makes the unit of a sandbox.
func (n *Node) unitOf(ref sandbox.Ref) *unit {
	n.mu.Lock()
	defer n.mu.Unlock()
	u := n.units[ref.UID]
	if u == nil {
		u = newUnit(ref, n.absent())
		n.units[ref.UID] = u
	}
	return u
}

func (n *Node) drop(u *unit) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.units[u.ref.UID] == u {
		delete(n.units, u.ref.UID)
	}
}

func (n *Node) allUnits() []*unit {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := make([]*unit, 0, len(n.units))
	for _, u := range n.units {
		all = append(all, u)
	}
	return all
}
