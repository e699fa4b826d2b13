// Package machine makes what runs sandboxes on this host: containerd, the OCI runtimes and the node, with their settings.
//
// It has no objects: the server passes what depends on them as [Hooks].
//
// Locks: Machine.mu only; no call is made while it is held.
package machine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/hostcheck"
	"github.com/barchan-dev/barchan/internal/node"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ctrd/pull"
	"github.com/barchan-dev/barchan/internal/node/ctrd/supervisor"
	"github.com/barchan-dev/barchan/internal/node/disk"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/memstore"
	"github.com/barchan-dev/barchan/internal/node/netdev"
	"github.com/barchan-dev/barchan/internal/node/netdev/rates"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/toolchain"
	"github.com/barchan-dev/barchan/internal/node/volumes/remote"
)

// spaceMargin is what a disk must still take while images are unpacked, in bytes.
const spaceMargin = 16 << 20

// Machine is what runs sandboxes here: containerd, the OCI runtimes, the node over them.
type Machine struct {
	finder     *toolchain.Finder
	remote     *remote.Mounter
	Supervisor *supervisor.Supervisor // nil: containerd is not ours
	Containers *ctrd.Client
	Node       *node.Node
	adopted    func(ctx context.Context, n *node.Node) error

	mu       sync.Mutex
	versions map[string]toolchain.Program // +checklocks:mu
}

// Hooks connect a machine to the server around it; each is optional.
type Hooks struct {
	Exists   func(ctx context.Context, ref sandbox.Ref) (bool, error)
	Objects  podsource.Objects
	Tokens   *sandbox.Tokens
	Metrics  prometheus.Registerer
	Health   *health.Gate
	Written  func(error)
	Repaired func(ctx context.Context, r ipam.Repair)
	// ImageRoom, ImagePulled and Event are those of node.Config.
	ImageRoom   func(ctx context.Context, bytes int64) error
	ImagePulled func()
	Event       func(ref sandbox.Ref, kind, reason, text string)
	// Adopted is called when running sandboxes are adopted; its error ends the node.
	Adopted func(ctx context.Context, n *node.Node) error
}

// FinderOf returns the finder of the programs that the settings name or the machine has.
func FinderOf(cfg *config.Config) (*toolchain.Finder, error) {
	return toolchain.New(toolchain.Config{Paths: map[string]string{
		toolchain.Runsc: cfg.RunscBinary, toolchain.Runc: cfg.RuncBinary,
		toolchain.Containerd: cfg.ContainerdBinary, toolchain.Agent: cfg.AgentBinary,
	}, CacheDir: cfg.CacheDir})
}

// New checks the configuration and finds the programs. It starts nothing.
func New(cfg *config.Config, log *slog.Logger, h Hooks) (_ *Machine, err error) {
	m := &Machine{adopted: h.Adopted, versions: map[string]toolchain.Program{}}
	if m.finder, err = FinderOf(cfg); err != nil {
		return nil, err
	}
	address := cfg.ContainerdAddress
	if address == "" {
		binary, err := m.finder.Find(toolchain.Containerd)
		if err != nil {
			return nil, err
		}
		m.Supervisor, err = supervisor.New(supervisor.Config{Binary: binary, Dir: filepath.Join(cfg.DataDir, "containerd"), Log: log})
		if err != nil {
			return nil, err
		}
		address = m.Supervisor.Address()
	}
	registries := pull.Registries{}
	if registries.Mirrors, registries.CAs, err = cfg.Registries(); err != nil {
		return nil, err
	}
	m.Containers, err = ctrd.NewClient(ctrd.Config{
		Address: address, Namespace: cfg.ContainerdNamespace, Pull: pull.Config{Registries: registries, MaxBytes: cfg.MaxImage.Value()},
		Space: func() error { return hostcheck.CheckSpace(cfg)(cfg.DataDir, spaceMargin) },
	})
	if err != nil {
		return nil, err
	}
	m.remote, err = remote.New(remote.Config{
		Program: func() (string, error) { return m.finder.Find(toolchain.VolumeFS) }, Endpoints: cfg.VolumeEndpoints, Log: log,
	})
	if err != nil {
		return nil, errors.Join(err, m.Containers.Close())
	}
	nodeConfig, err := m.nodeConfig(cfg, log, h)
	if err == nil {
		m.Node, err = node.New(nodeConfig)
	}
	if err != nil {
		return nil, errors.Join(err, m.Containers.Close())
	}
	return m, nil
}

// encryptsMemory reports whether new stored memory is encrypted.
func encryptsMemory(cfg *config.Config) bool {
	return cfg.MemoryEncryption == config.EncryptionOn || cfg.MemoryEncryption == config.EncryptionAuto && memstore.Cheap()
}

func (m *Machine) nodeConfig(cfg *config.Config, log *slog.Logger, h Hooks) (node.Config, error) {
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
		Containerd: m.Containers, Runtimes: runtimes, DefaultClass: oci.Class(cfg.DefaultRuntime), AgentBinary: agent,
		Network: netdev.Config{
			Bridge: cfg.BridgeName, Subnet: cfg.Subnet, Subnet6: cfg.Subnet6, Table: cfg.NftTable, NetnsPrefix: cfg.NetnsPrefix,
			Spares: cfg.SpareNetworks, Resolvers: cfg.DNSResolvers, Reachable: cfg.Reachable,
			Connections: uint32(cfg.SandboxConnections),
			Rates:       rates.Limits{Bytes: uint64(cfg.SandboxBandwidth.Value()) / 8, Packets: uint64(cfg.SandboxPackets)}, Log: log,
		},
		InternalZones: cfg.InternalZones, CgroupParent: cfg.CgroupParent, EqualCPU: !cfg.AdaptiveCPU, DefaultDisk: cfg.SandboxDisk.Value(),
		EncryptMemory: encryptsMemory(cfg), MemoryKey: cfg.MemoryKey,
		DefaultLimits: oci.Limits{
			MilliCPU: cfg.SandboxCPU.MilliValue(), Memory: cfg.SandboxMemory.Value(), Pids: int64(cfg.SandboxPids),
		},
		StoreAfter: cfg.StoreAfter, MemoryLow: hostcheck.MemoryLow(cfg.IdleMemory.Value()), ReleaseAddresses: cfg.PausedAddresses == config.AddressesReleased, Exists: h.Exists, Objects: h.Objects, Log: log, Refuse: h.Health.Err, CheckSpace: hostcheck.CheckSpace(cfg), Journalled: h.Written, OnRepair: h.Repaired, Metrics: h.Metrics,
		ImageRoom: h.ImageRoom, ImagePulled: h.ImagePulled, Event: h.Event, RemoteVolumes: m.remote,
	}
	if failpoint.Enabled {
		out.AfterStep = func(step string) error { return failpoint.Err("node/" + step) }
	}
	if h.Tokens != nil {
		out.AgentToken = h.Tokens.Agent
	}
	return out, nil
}

// runtimes finds the classes that this machine offers. gVisor is a must; runc is not.
func (m *Machine) runtimes(cfg *config.Config) ([]oci.Config, error) {
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

// inventory is what a node has; package node has it.
type inventory interface {
	List(ctx context.Context) ([]node.Status, error)
	Checkpoints(ctx context.Context) ([]sandbox.Captured, error)
}

// objects reads objects; package cache has it.
type objects interface {
	Sandboxes(ctx context.Context, namespace string) ([]*agents.Sandbox, error)
	Checkpoint(ctx context.Context, key types.NamespacedName) (*barchan.Checkpoint, error)
}

// CheckNodeName refuses a name under which this machine's own sandboxes and checkpoints would be those of
// another node: their objects name the machine as it was called when they were made.
func CheckNodeName(ctx context.Context, name string, has inventory, from objects) error {
	boxes, err := has.List(ctx)
	if err != nil {
		return err
	}
	own := sets.New[types.UID]()
	for _, b := range boxes {
		own.Insert(b.Ref.UID)
	}
	all, err := from.Sandboxes(ctx, "")
	if err != nil {
		return err
	}
	for _, s := range all {
		if !own.Has(s.UID) {
			continue
		}
		if err := sameNode(name, s.Status.NodeName, "sandbox "+fullName(s)); err != nil {
			return err
		}
	}
	kept, err := has.Checkpoints(ctx)
	if err != nil {
		return err
	}
	for i := range kept {
		ref := kept[i].Checkpoint
		c, err := from.Checkpoint(ctx, types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name})
		if err == nil && c.UID == ref.UID && c.Status.Source != nil {
			err = sameNode(name, c.Status.Source.Node, "checkpoint "+fullName(c))
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

// CheckExternal reports whether a containerd that is not ours answers. After an error m is closed.
func (m *Machine) CheckExternal(ctx context.Context) error {
	if m.Supervisor != nil {
		return nil
	}
	if err := m.Containers.Check(ctx); err != nil {
		return fmt.Errorf("containerdAddress: %w", err)
	}
	return nil
}

// Files is the service below all others: it closes m after them. Until they start, it reads ahead what the node adopts.
func (m *Machine) Files() boot.Service {
	return boot.Service{Name: "node files", Run: func(ctx context.Context, ready func()) error {
		await := m.Node.ReadAhead(ctx)
		ready()
		<-ctx.Done()
		await()
		return m.Close()
	}}
}

// Services are containerd, if it is ours, and the node, which is ready when running sandboxes are adopted.
func (m *Machine) Services() (list []boot.Service) {
	if m.Supervisor != nil {
		list = append(list, boot.Service{Name: "containerd", Run: m.Supervisor.Run})
	}
	return append(list, boot.Awaited("node", m.Node.Run, func(ctx context.Context) error {
		err := boot.Closed(m.Node.Adopted())(ctx)
		if err == nil && m.adopted != nil {
			err = m.adopted(ctx, m.Node)
		}
		return err
	}))
}

// Close closes the files of the node and the connection to containerd. It stops neither.
func (m *Machine) Close() error { return errors.Join(m.Node.Close(), m.Containers.Close()) }

// program returns a program that the server needs. It is run once for its version, not for each status request.
func (m *Machine) program(ctx context.Context, name string) (toolchain.Program, error) {
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

// Components returns the programs that the server needs, with their states.
func (m *Machine) Components(ctx context.Context) (out []adminclient.Component) {
	for _, name := range []string{toolchain.Containerd, toolchain.Runsc, toolchain.Runc, toolchain.Agent} {
		c := adminclient.Component{Name: name, State: "found"}
		if p, err := m.program(ctx, name); err != nil {
			c.State = "missing"
		} else {
			c.Version, c.Path = p.Version, p.Path
		}
		if name == toolchain.Containerd {
			c.State = "running"
			if err := m.Containers.Check(ctx); err != nil {
				c.State = "away"
			}
		}
		out = append(out, c)
	}
	disks := adminclient.Component{Name: "disks", State: "bounded", Version: "ext4 on loop devices"}
	if mke2fs, err := disk.Check(); err != nil {
		disks.State, disks.Version = "unbounded", errs.Text(err)
	} else {
		disks.Path = mke2fs
	}
	memory := adminclient.Component{Name: "stored memory"}
	memory.State, memory.Version = m.Node.StoredMemory()
	return append(out, disks, memory)
}

// RemoveLeftovers removes all host resources of a data directory.
func (m *Machine) RemoveLeftovers(ctx context.Context, removed func(string)) error {
	list, err := m.Node.List(ctx)
	if err != nil {
		return err
	}
	var all error
	for _, x := range list {
		if err := m.Node.Remove(ctx, x.Ref); err != nil {
			all = errors.Join(all, err)
			continue
		}
		removed("sandbox " + x.Ref.Namespace + "/" + x.Ref.Name)
	}
	if all != nil {
		return all
	}
	return m.Node.Destroy(ctx)
}

// fullName is namespace and name of an object.
func fullName(o client.Object) string { return o.GetNamespace() + "/" + o.GetName() }
