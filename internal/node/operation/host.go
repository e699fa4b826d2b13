package operation

import (
	"context"
	"log/slog"
	"net/netip"
	"path"
	"path/filepath"
	"slices"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/agentconn"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/disk"
	"github.com/barchan-dev/barchan/internal/node/images"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/memstore"
	"github.com/barchan-dev/barchan/internal/node/netdev"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/operation/timing"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/programs"
	"github.com/barchan-dev/barchan/internal/node/references"
	"github.com/barchan-dev/barchan/internal/node/volumes"
)

// HostConfig configures a Host. Only Subnet6 and AgentToken are optional.
type HostConfig struct {
	// Name is the node's name; DataDir, MemoryDir and CgroupParent are as in the node's configuration.
	Name, DataDir, MemoryDir, CgroupParent string
	// Memory has the images of memory.
	Memory *memstore.Store

	Containerd *ctrd.Client
	Images     *images.Store
	Network    *netdev.Network
	Subnet6    netip.Prefix
	// Resolvers are the DNS servers of sandboxes besides the node's own.
	Resolvers   []netip.Addr
	Allocator   *ipam.Allocator
	Runtimes    *programs.Runtimes
	Checkpoints *checkpoint.Store
	Volumes     *volumes.Store
	Disks       *disk.Store

	// Objects reads Secrets and ConfigMaps; nil: there are none.
	Objects podsource.Objects
	// AgentToken is the access token of a sandbox's agent; nil means none.
	AgentToken func(sandbox.ID) string
	// StartTimeout bounds the wait for an agent.
	StartTimeout time.Duration
	// ReleaseAddresses releases the addresses of stored sandboxes.
	ReleaseAddresses bool
	// Holder returns the user of an address other than a sandbox; empty if there is none.
	Holder func(ctx context.Context, addr netip.Addr, own sandbox.ID) (string, error)
	// CheckSpace returns why as many more bytes may not be written below a directory.
	CheckSpace func(dir string, bytes int64) error
	// AfterStep is called after each step, and BeforeUndo before each undo; an error fails it.
	AfterStep, BeforeUndo func(step string) error
	// ObserveStep receives the duration of each step, by class.
	ObserveStep func(class, step string, took time.Duration)
	Log         *slog.Logger
}

// Host is the part of the host that operations change. It is safe for concurrent use.
type Host struct {
	cfg    HostConfig
	Agents *agentconn.Agents
	// AgentFile is the node's copy of the agent; it is set before the first operation.
	AgentFile string
	restores  chan struct{} // bounds the concurrent restores of checkpoints' memory
}

// NewHost starts nothing.
func NewHost(cfg HostConfig) *Host {
	if cfg.Objects == nil {
		cfg.Objects = references.None{}
	}
	return &Host{
		cfg: cfg, restores: make(chan struct{}, checkpoint.MaxConcurrentRestores()),
		Agents: agentconn.New(cfg.AgentToken, cfg.StartTimeout),
	}
}

// Close closes idle connections to agents.
func (h *Host) Close() { h.Agents.Close() }

// Operation returns an operation on the sandbox of a row, which it changes.
func (h *Host) Operation(r *journal.Row) *Operation {
	return &Operation{host: h, Row: r, Steps: timing.New()}
}

// AgentOf returns a client of the agent at an address.
func (h *Host) AgentOf(id sandbox.ID, addr netip.Addr) (*envd.Client, error) {
	return h.Agents.Client(agentconn.Container{ID: id, Address: addr})
}

// SidecarOf returns a client of the agent of a sidecar.
func (h *Host) SidecarOf(id sandbox.ID, addr netip.Addr, name string) (*envd.Client, error) {
	return h.Agents.Client(agentconn.Container{ID: id, Address: addr, Sidecar: name})
}

// ClaimsDir has the volume claims of a sandbox.
func (h *Host) ClaimsDir(id string) string { return filepath.Join(h.cfg.DataDir, "claims", id) }

// ApplyEgress applies the policy of a row, if its sandbox has a network.
func (h *Host) ApplyEgress(ctx context.Context, r *journal.Row) error {
	if (r.OnDisk() && r.Stage != journal.Waking) || !r.Address.IsValid() {
		return nil
	}
	p, err := r.Plan.Egress()
	if err != nil {
		return err
	}
	return errs.Retryable(h.cfg.Network.SetEgress(ctx, h.Operation(r).Endpoint(), p))
}

// sandboxResolvers are the servers in a sandbox's resolv.conf: ours first, then those that it may query
// itself, so that names resolve while the server is down.
func (h *Host) sandboxResolvers() []netip.Addr {
	all := []netip.Addr{h.cfg.Network.Gateway()}
	for _, a := range h.cfg.Resolvers {
		if !a.IsLoopback() && h.cfg.Network.HostRules().Offers(a.Unmap()) && !slices.Contains(all, a) {
			all = append(all, a)
		}
	}
	return all
}

// findImage finds the image, and pulls it as its policy requires. progress receives the steps of a pull; nil: none.
func (h *Host) findImage(ctx context.Context, p *plan.Plan, progress func(ctrd.Progress)) (ctrd.Image, error) {
	return h.cfg.Images.Find(ctx, images.Ask{
		Ref: p.Image, Policy: p.PullPolicy, Namespace: p.Ref.Namespace, Secrets: p.PullSecrets, Progress: progress,
	})
}

// Beside returns the IPv6 address that goes with an IPv4 one; zero without IPv6.
func (h *Host) Beside(addr netip.Addr) netip.Addr {
	if !h.cfg.Subnet6.IsValid() || !addr.Is4() {
		return netip.Addr{}
	}
	return ipam.Beside(h.cfg.Subnet6, addr)
}

// checkMemorySpace returns why the memory of a frozen sandbox may not be written now: the write would use the
// space reserved for the others.
func (h *Host) checkMemorySpace(r *journal.Row) error {
	memory, err := h.MemoryOf(r)
	if err != nil {
		return err
	}
	return h.cfg.CheckSpace(h.cfg.MemoryDir, memory)
}

// MemoryOf returns an upper bound of the bytes of a sandbox's memory if it is written now: its RAM, including
// the cache of its files.
func (h *Host) MemoryOf(r *journal.Row) (int64, error) {
	used, err := cgroups.ReadUsage(h.Cgroup(string(r.Plan.ID)))
	if err != nil {
		return 0, errs.Retryable(err)
	}
	return int64(used.Memory), nil //nolint:gosec // below 8 EiB
}

// Runtime is what drives a sandbox's containers.
func (h *Host) Runtime(r *journal.Row) (*oci.Runtime, error) {
	return h.cfg.Runtimes.Driving(r.Plan.Class, r.Build)
}

// Dir is the sandbox's directory: bundle, root filesystem's mount point, scratch volumes.
func (h *Host) Dir(id string) string { return filepath.Join(h.cfg.DataDir, "sandboxes", id) }

// Disks are the disks of a row's sandbox.
func (h *Host) Disks(r *journal.Row) *disk.Sandbox {
	id := string(r.Plan.ID)
	return &disk.Sandbox{Store: h.cfg.Disks, Dir: h.Dir(id), ClaimsDir: h.ClaimsDir(id), Bytes: r.Disk, Sizes: r.Plan.ClaimSizes}
}

// DiskUsed is the bytes that a sandbox has written to the roots of its containers and, if it has a disk, to scratch volumes.
func (h *Host) DiskUsed(ctx context.Context, r *journal.Row) (sum int64, err error) {
	if r.Disk > 0 {
		return h.Disks(r).Used()
	}
	for _, name := range r.Plan.Names() {
		bytes, err := h.cfg.Containerd.SnapshotUsage(ctx, ctrd.PartKey(string(r.Plan.ID), ctrd.ContainerPart(name)))
		if err != nil {
			return 0, err
		}
		sum += bytes
	}
	return sum, nil
}

// Cgroup is the path of a sandbox's cgroup.
func (h *Host) Cgroup(id string) string { return path.Join(h.cfg.CgroupParent, id) }

// MemoryDir has the stored memory of a sandbox.
func (h *Host) MemoryDir(id string) string { return h.cfg.Memory.Sandbox(id) }
