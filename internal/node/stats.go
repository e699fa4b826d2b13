package node

import (
	"context"
	"fmt"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// Usage is the resource usage of a sandbox, including its runtime.
type Usage struct {
	Time time.Time
	// CPU is in nanoseconds since the start, CPULimit in thousandths of a CPU.
	CPU      uint64
	CPULimit int64
	// Memory is in bytes, without reclaimable cache.
	Memory, MemoryCache, MemoryLimit uint64
	// Disk is in bytes: those written to the root file system, and its memory if that is on disk.
	Disk uint64
	Pids uint64
}

// Usage returns the resource usage of a running or paused sandbox, without a call to its agent. One that is not on the node,
// or has ended, is an errs.ErrNotFound.
func (n *Node) Usage(ctx context.Context, ref sandbox.Ref) (Usage, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return Usage{}, err
	}
	u := n.handles.Lookup(ref.UID)
	var r *journal.Row
	if u != nil {
		r = u.Row()
	}
	if r == nil || u.Observed().State == sandbox.ContainerExited {
		return Usage{}, fmt.Errorf("sandbox %s/%s does not run on this node: %w", ref.Namespace, ref.Name, errs.ErrNotFound)
	}
	if r.OnDisk() {
		return n.storedUsage(ctx, r)
	}
	used, err := cgroups.ReadUsage(n.host.Cgroup(string(u.ID)))
	if err != nil {
		return Usage{}, errs.Retryable(err)
	}
	result := Usage{
		Time: time.Now(), CPU: used.CPU, CPULimit: r.Plan.Limits.MilliCPU,
		Memory: used.Memory, MemoryCache: used.MemoryCache, MemoryLimit: uint64(r.Plan.Limits.Memory), Pids: used.Pids,
	}
	disk, err := n.host.DiskUsed(ctx, r)
	if err != nil {
		return Usage{}, err
	}
	result.Disk = uint64(disk)
	return result, nil
}

// storedUsage returns the usage of a sandbox on disk.
func (n *Node) storedUsage(ctx context.Context, r *journal.Row) (Usage, error) {
	result := Usage{Time: time.Now(), CPULimit: r.Plan.Limits.MilliCPU, MemoryLimit: uint64(r.Plan.Limits.Memory)}
	switch {
	case r.Memory != nil:
		result.Disk = uint64(r.Memory.Disk + r.Memory.Size)
	case !r.KeepsClaims():
		disk, err := n.host.DiskUsed(ctx, r)
		if err != nil {
			return Usage{}, err
		}
		result.Disk = uint64(disk)
	}
	return result, nil
}

// A measurement of disk usage walks all files that a sandbox has written. It is reused for diskFresh, and for diskRest times
// its duration.
const (
	diskFresh = 5 * time.Second
	diskRest  = 10
)

// DiskUsed returns the bytes that a sandbox has written to its root file system, up to some seconds old. One that is not on
// the node is an errs.ErrNotFound.
func (n *Node) DiskUsed(ctx context.Context, ref sandbox.Ref) (int64, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return 0, err
	}
	u := n.handles.Lookup(ref.UID)
	var r *journal.Row
	if u != nil {
		r = u.Row()
	}
	if r == nil {
		return 0, fmt.Errorf("sandbox %s/%s is not on this node: %w", ref.Namespace, ref.Name, errs.ErrNotFound)
	}
	if r.Disk > 0 {
		return n.host.DiskUsed(ctx, r)
	}
	if known := u.DiskUse(); time.Now().Before(known.Until) {
		return known.Bytes, nil
	}
	_, err, _ := n.measuring.Do(string(u.ID), func() (any, error) {
		began := time.Now()
		bytes, err := n.cfg.Containerd.SnapshotUsage(context.WithoutCancel(ctx), string(u.ID)) // it has its own timeout
		if err == nil {
			u.SetDiskUse(registry.DiskUse{Bytes: bytes, Until: time.Now().Add(max(diskFresh, diskRest*time.Since(began)))})
		}
		return nil, err
	})
	return u.DiskUse().Bytes, err
}

// Status is a sandbox and its observed state.
type Status struct {
	Ref      sandbox.Ref
	Observed sandbox.Observed
}

// List returns all sandboxes of the node, in no order.
func (n *Node) List(ctx context.Context) ([]Status, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, err
	}
	var all []Status
	for _, u := range n.handles.All() {
		all = append(all, Status{Ref: u.Ref, Observed: u.Observed()})
	}
	return all, nil
}

// JournalSummary returns the rows of the journal without their content, also before Run has adopted them.
func (n *Node) JournalSummary() ([]journal.Summary, error) { return n.journal.Summaries() }

// observeStep records the duration of a step.
func (n *Node) observeStep(class oci.Class, step string, took time.Duration) {
	n.cfg.ObserveStep(string(class), step, took)
}
