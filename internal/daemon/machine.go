package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/node"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ctrd/supervisor"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/netdev"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/toolchain"
)

// machine is what runs sandboxes here: containerd, the OCI runtimes, the node over them.
type machine struct {
	finder     *toolchain.Finder
	supervisor *supervisor.Supervisor // nil where containerd is the operator's
	containers *ctrd.Client
	node       *node.Node
	adopted    func(ctx context.Context, n *node.Node) error

	mu       sync.Mutex
	versions map[string]toolchain.Program // +checklocks:mu
}

// hooks are what a machine is told by the server around it; all of them may be left out.
type hooks struct {
	exists   func(ctx context.Context, ref sandbox.Ref) (bool, error)
	tokens   *sandbox.Tokens
	metrics  prometheus.Registerer
	health   *health.Gate
	written  func(error)
	repaired func(ctx context.Context, r ipam.Repair)
	// adopted is called when running sandboxes are adopted; its error ends the node.
	adopted func(ctx context.Context, n *node.Node) error
}

func finderOf(cfg *config.Config) (*toolchain.Finder, error) {
	return toolchain.New(toolchain.Config{Paths: map[string]string{
		toolchain.Runsc: cfg.RunscBinary, toolchain.Runc: cfg.RuncBinary,
		toolchain.Containerd: cfg.ContainerdBinary, toolchain.Agent: cfg.AgentBinary,
	}, CacheDir: cfg.CacheDir})
}

// newMachine checks the configuration and finds the programs. It starts nothing.
func newMachine(cfg *config.Config, log *slog.Logger, h hooks) (_ *machine, err error) {
	m := &machine{adopted: h.adopted, versions: map[string]toolchain.Program{}}
	if m.finder, err = finderOf(cfg); err != nil {
		return nil, err
	}
	address := cfg.ContainerdAddress
	if address == "" {
		binary, err := m.finder.Find(toolchain.Containerd)
		if err != nil {
			return nil, err
		}
		m.supervisor, err = supervisor.New(supervisor.Config{Binary: binary, Dir: filepath.Join(cfg.DataDir, "containerd"), Log: log})
		if err != nil {
			return nil, err
		}
		address = m.supervisor.Address()
	}
	if m.containers, err = ctrd.NewClient(ctrd.Config{Address: address, Namespace: cfg.ContainerdNamespace}); err != nil {
		return nil, err
	}
	nodeConfig, err := m.nodeConfig(cfg, log, h)
	if err == nil {
		m.node, err = node.New(nodeConfig)
	}
	if err != nil {
		return nil, errors.Join(err, m.containers.Close())
	}
	return m, nil
}

func (m *machine) nodeConfig(cfg *config.Config, log *slog.Logger, h hooks) (node.Config, error) {
	runtimes, err := m.runtimes(cfg)
	if err != nil {
		return node.Config{}, err
	}
	agent, err := m.finder.Find(toolchain.Agent)
	if err != nil {
		return node.Config{}, err
	}
	out := node.Config{
		Name: cfg.NodeName, DataDir: filepath.Join(cfg.DataDir, "node"), RunDir: filepath.Join(cfg.RunDir, "node"),
		Containerd: m.containers, Runtimes: runtimes, DefaultClass: oci.Class(cfg.DefaultRuntime), AgentBinary: agent,
		Network: netdev.Config{
			Bridge: cfg.BridgeName, Subnet: cfg.Subnet, Subnet6: cfg.Subnet6, Table: cfg.NftTable, NetnsPrefix: cfg.NetnsPrefix,
			Spares: cfg.SpareNetworks, Resolvers: cfg.DNSResolvers, Reachable: cfg.Reachable, Log: log,
		},
		CgroupParent: cfg.CgroupParent,
		DefaultLimits: oci.Limits{
			MilliCPU: cfg.SandboxCPU.MilliValue(), Memory: cfg.SandboxMemory.Value(), Pids: int64(cfg.SandboxPids),
		},
		StoreAfter: cfg.StoreAfter, ReleaseAddresses: cfg.PausedAddresses == config.AddressesReleased, Exists: h.exists, Log: log, Refuse: h.health.Err, CheckSpace: room(cfg), Journalled: h.written, OnRepair: h.repaired, Metrics: h.metrics,
	}
	if failpoint.Enabled {
		out.AfterStep = func(step string) error { return failpoint.Err("node/" + step) }
	}
	if h.tokens != nil {
		out.AgentToken = h.tokens.Agent
	}
	if h.metrics != nil {
		steps := prometheus.NewHistogramVec(telemetry.DurationOpts("node", "step", "Time of one step in the making of a sandbox."), []string{"runtime", "step"})
		if err := h.metrics.Register(steps); err != nil {
			return out, fmt.Errorf("register the node's metrics: %w", err)
		}
		out.ObserveStep = func(class, step string, took time.Duration) {
			steps.WithLabelValues(class, step).Observe(took.Seconds())
		}
	}
	return out, nil
}

// runtimes finds the classes that this machine offers. gVisor is a must; runc is not.
func (m *machine) runtimes(cfg *config.Config) ([]oci.Config, error) {
	runsc, err := m.finder.Find(toolchain.Runsc)
	if err != nil {
		return nil, err
	}
	out := []oci.Config{{Class: oci.GVisor, Binary: runsc, Root: filepath.Join(cfg.RunDir, "runsc"), ExtraArgs: []string{"--platform=" + cfg.RunscPlatform}}}
	runc, err := m.finder.Find(toolchain.Runc)
	if err == nil {
		out = append(out, oci.Config{Class: oci.Runc, Binary: runc, Root: filepath.Join(cfg.RunDir, "runc")})
	} else if cfg.DefaultRuntime == config.RuntimeRunc {
		return nil, err
	}
	return out, nil
}

// makeNode configures containerd and the node.
func (d *Daemon) makeNode(ctx context.Context) (err error) {
	d.machine, err = newMachine(&d.cfg.Config, d.cfg.Log, hooks{
		exists: d.exists, tokens: d.tokens, metrics: d.metrics, health: d.health, written: d.journalWritten, repaired: d.repaired,
		adopted: func(ctx context.Context, n *node.Node) error { return checkNodeName(ctx, d.cfg.NodeName, n, d.cache) },
	})
	if err != nil {
		return err
	}
	return d.machine.checkExternal(ctx)
}

// nodeServices are ready when running sandboxes are adopted.
func (d *Daemon) nodeServices() services {
	return append(d.machine.services(), boot.Background("containerd health", d.watchContainerd))
}

// inventory is what a node has; package node has it.
type inventory interface {
	List(ctx context.Context) ([]node.Status, error)
	Checkpoints(ctx context.Context) ([]sandbox.Captured, error)
}

// named reads objects by name; package cache has it.
type named interface {
	Sandbox(ctx context.Context, key types.NamespacedName) (*agents.Sandbox, error)
	Checkpoint(ctx context.Context, key types.NamespacedName) (*barchan.Checkpoint, error)
}

// checkNodeName refuses a name under which this machine's own sandboxes and checkpoints would be those of
// another node: their objects name the machine as it was called when they were made.
func checkNodeName(ctx context.Context, name string, has inventory, objects named) error {
	boxes, err := has.List(ctx)
	if err != nil {
		return err
	}
	for _, b := range boxes {
		s, err := objects.Sandbox(ctx, types.NamespacedName{Namespace: b.Ref.Namespace, Name: b.Ref.Name})
		if err == nil && s.UID == b.Ref.UID {
			err = sameNode(name, s.Status.NodeName, "sandbox "+full(s))
		}
		if err != nil && !errors.Is(err, errs.ErrNotFound) {
			return err
		}
	}
	kept, err := has.Checkpoints(ctx)
	if err != nil {
		return err
	}
	for i := range kept {
		ref := kept[i].Checkpoint
		c, err := objects.Checkpoint(ctx, types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name})
		if err == nil && c.UID == ref.UID && c.Status.Source != nil {
			err = sameNode(name, c.Status.Source.Node, "checkpoint "+full(c))
		}
		if err != nil && !errors.Is(err, errs.ErrNotFound) {
			return err
		}
	}
	return nil
}

func sameNode(name, was, what string) error {
	if was == "" || was == name {
		return nil
	}
	return fmt.Errorf("nodeName: is %q, but %s on this machine is of node %q; set nodeName: %s, or delete what is of that node before the name changes: %w", name, what, was, was, errs.ErrInvalid)
}

// checkExternal reports whether a containerd that is not ours answers. After an error m is closed.
func (m *machine) checkExternal(ctx context.Context) error {
	if m.supervisor != nil {
		return nil
	}
	if err := m.containers.Check(ctx); err != nil {
		return errors.Join(fmt.Errorf("containerdAddress: %w", err), m.close())
	}
	return nil
}

// services are containerd, if it is ours, and the node, which is ready when running sandboxes are adopted. The first one
// closes m after the others.
func (m *machine) services() services {
	list := services{boot.Background("node files", func(ctx context.Context) error {
		<-ctx.Done()
		return m.close()
	})}
	if m.supervisor != nil {
		list = append(list, boot.Service{Name: "containerd", Run: m.supervisor.Run})
	}
	return append(list, boot.Awaited("node", m.node.Run, func(ctx context.Context) error {
		err := boot.Closed(m.node.Adopted())(ctx)
		if err == nil && m.adopted != nil {
			err = m.adopted(ctx, m.node)
		}
		return err
	}))
}

func (m *machine) close() error { return errors.Join(m.node.Close(), m.containers.Close()) }

// own is the machine of a server that is ready, for the admin API. A replica has none.
func (d *Daemon) own() (*machine, error) {
	if err := d.progress.Err(); err != nil {
		return nil, err
	}
	if d.machine == nil {
		return nil, errs.Public(errs.ErrNotFound, "a replica runs no sandboxes; ask the server whose API it serves")
	}
	return d.machine, nil
}

// exists asks the API server itself, not a cache: something living may hang on the answer.
func (d *Daemon) exists(ctx context.Context, ref sandbox.Ref) (bool, error) {
	s := &agents.Sandbox{}
	err := d.cache.Live().Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, s)
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("read sandbox %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	return s.UID == ref.UID, nil
}

// program tells of a program that the server relies on. It is run for its version once, not with
// each status that somebody asks for.
func (m *machine) program(ctx context.Context, name string) (toolchain.Program, error) {
	path, err := m.finder.Find(name)
	if err != nil {
		return toolchain.Program{}, err
	}
	m.mu.Lock()
	known, ok := m.versions[path]
	m.mu.Unlock()
	if ok {
		return known, nil
	}
	found, err := m.finder.Check(ctx, name)
	if err == nil {
		m.mu.Lock()
		m.versions[path] = found
		m.mu.Unlock()
	}
	return found, err
}

// components tells of the programs that the server relies on.
func (m *machine) components(ctx context.Context) (out []adminclient.Component) {
	for _, name := range []string{toolchain.Containerd, toolchain.Runsc, toolchain.Runc, toolchain.Agent} {
		c := adminclient.Component{Name: name, State: "found"}
		if p, err := m.program(ctx, name); err != nil {
			c.State = "missing"
		} else {
			c.Version, c.Path = p.Version, p.Path
		}
		if name == toolchain.Containerd {
			c.State = "running"
			if err := m.containers.Check(ctx); err != nil {
				c.State = "away"
			}
		}
		out = append(out, c)
	}
	return out
}

// removeLeftovers removes whatever runs or lies on this machine of a data directory.
func (m *machine) removeLeftovers(ctx context.Context, removed func(string)) error {
	list, err := m.node.List(ctx)
	if err != nil {
		return err
	}
	var all error
	for _, x := range list {
		if err := m.node.Remove(ctx, x.Ref); err != nil {
			all = errors.Join(all, err)
			continue
		}
		removed("sandbox " + x.Ref.Namespace + "/" + x.Ref.Name)
	}
	if all != nil {
		return all
	}
	return m.node.Destroy(ctx)
}
