package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// capture is one checkpoint in the making.
type capture struct {
	*operation.Operation // of the source
	n                    *Node
	u                    *registry.Handle
	k                    *checkpoint.Handle
	c                    *checkpoint.Row
	// filesOnly is what is kept, whatever the source has.
	filesOnly bool

	files   *ctrd.SnapshotCopy
	volumes []*filetree.Copy
	durable errgroup.Group // makes the files durable while the source goes on
}

// do makes the checkpoint. The row comes first, so that whatever follows can be found and removed.
func (p *capture) do(ctx context.Context) (err error) {
	if err := p.note(checkpoint.Writing); err != nil {
		return err
	}
	if err := p.After("capture_row"); err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, p.durable.Wait()) // it uses what is closed next
		if p.files != nil && !errors.Is(err, operation.ErrCrash) {
			err = errors.Join(err, p.files.Close(ctx))
		}
	}()
	if err := p.begin(ctx); err != nil {
		return err
	}
	if err := p.After("capture_ahead"); err != nil {
		return err
	}
	switch {
	case p.Row.OnDisk():
		err = p.fromDisk(ctx)
	case p.filesOnly:
		err = p.withoutMemory(ctx)
	default:
		err = p.withMemory(ctx)
	}
	if err != nil {
		return err
	}
	if err := p.durable.Wait(); err != nil {
		return err
	}
	if err := p.After("capture_files"); err != nil {
		return err
	}
	if err := p.note(checkpoint.Ready); err != nil {
		return err
	}
	if p.c.Memory != nil {
		p.n.checkpoints.MarkVerified(p.c.Ref.UID)
	}
	return p.After("capture_ready")
}

// prepare does all that needs no source that stands still, and copies what is much.
func (p *capture) begin(ctx context.Context) (err error) {
	dir := p.n.checkpoints.Dir(p.c.Ref.UID)
	if err := os.MkdirAll(filepath.Join(dir, "volumes"), 0o700); err != nil {
		return fmt.Errorf("make directory of the checkpoint: %w", err)
	}
	if !p.filesOnly {
		if err := p.keepAgent(); err != nil {
			return fmt.Errorf("keep the agent: %w", err)
		}
	}
	if p.files, err = p.n.cfg.Containerd.BeginCopy(ctx, p.ID(), checkpoint.Snapshot(p.c.Ref.UID)); err != nil {
		return err
	}
	made := map[string]bool{}
	for _, v := range p.Row.Plan.Volumes {
		rel := v.DataPath()
		if rel == "" || made[rel] {
			continue
		}
		made[rel] = true
		to := filepath.Join(dir, "volumes", rel)
		if err := os.MkdirAll(to, 0o700); err != nil {
			return fmt.Errorf("make directory of a volume: %w", err)
		}
		p.volumes = append(p.volumes, filetree.NewCopy(to, p.VolumeSource(v)))
	}
	if p.Row.Stage != journal.Live {
		return nil
	}
	if err := p.files.PreCopy(ctx); err != nil {
		return err
	}
	for _, v := range p.volumes {
		if err := v.PreCopy(ctx); err != nil {
			return fmt.Errorf("copy volume: %w", err)
		}
	}
	return nil
}

// keepAgent keeps the agent that the source runs, which its memory needs as it is.
func (p *capture) keepAgent() error {
	from, to := p.Path(filepath.Join("agent", filepath.Base(oci.AgentPath))), p.n.checkpoints.AgentFile(p.c.Ref.UID)
	if err := os.Link(from, to); !isOtherDisk(err) {
		return err
	}
	running, err := os.Open(from)
	if err != nil {
		return err
	}
	return errors.Join(durable.CopyProgram(running, to), running.Close())
}

// copy copies the files of a source that stands still, and has them made durable while it goes on.
func (p *capture) copy(ctx context.Context) error {
	p.c.Created, p.c.Exit = time.Now().UTC(), p.u.Observed().EntrypointExit
	if err := p.files.FinalCopy(ctx); err != nil {
		return err
	}
	for _, v := range p.volumes {
		if err := v.FinalCopy(ctx); err != nil {
			return fmt.Errorf("copy volume: %w", err)
		}
	}
	if err := p.After("capture_copied"); err != nil {
		return err
	}
	p.durable.Go(func() error { return p.keepFiles(context.WithoutCancel(ctx)) })
	return nil
}

// keepFiles makes the copies durable and measures them.
func (p *capture) keepFiles(ctx context.Context) error {
	one, err := p.files.Commit(ctx)
	if err != nil {
		return err
	}
	p.c.FilesSize = one.Size
	if len(p.volumes) == 0 {
		return durable.SyncDirs(p.n.checkpoints.Dir(p.c.Ref.UID), p.n.checkpoints.Root())
	}
	size, err := durable.Usage(filepath.Join(p.n.checkpoints.Dir(p.c.Ref.UID), "volumes"))
	p.c.FilesSize += size
	return errors.Join(err, durable.SyncFilesystem(p.n.checkpoints.Root()))
}

// withMemory keeps memory and files of a source whose processes are there, running or frozen.
func (p *capture) withMemory(ctx context.Context) error {
	return p.heldStill(ctx, func(runtime *oci.Runtime) error {
		img, err := runtime.Checkpoint(ctx, p.ID(), p.n.checkpoints.MemoryDir(p.c.Ref.UID), oci.CheckpointOptions{
			LeaveRunning: true, Written: p.copy, Digest: true,
		})
		if err != nil {
			return err
		}
		p.c.Paused = img.Paused
		p.c.Memory = &checkpoint.Memory{Build: img.Build, Digest: img.Digest, Size: img.Size()}
		return p.After("capture_memory")
	})
}

// withoutMemory keeps the files of a source whose processes are there.
func (p *capture) withoutMemory(ctx context.Context) error {
	if p.Row.Stage == journal.Paused && p.Row.Plan.Class == oci.GVisor {
		return p.frozenFiles(ctx)
	}
	if p.Row.Stage == journal.Paused { // of class runc: what it wrote is the machine's
		return p.copy(ctx)
	}
	agent, err := p.n.host.AgentOf(p.u.ID, p.Row.Address)
	if err != nil {
		return err
	}
	if err := agent.Freeze(ctx); err != nil { // once to have little to write while it stands still
		return errs.Retryable(fmt.Errorf("have the sandbox write its files: %w", err))
	}
	return p.heldStill(ctx, func(runtime *oci.Runtime) error {
		began := time.Now()
		if err := runtime.Pause(ctx, p.ID()); err != nil {
			return errors.Join(err, p.thaw(ctx, runtime))
		}
		err := p.copy(ctx)
		if errors.Is(err, operation.ErrCrash) {
			return err
		}
		err = errors.Join(err, p.thaw(ctx, runtime))
		p.c.Paused = time.Since(began)
		return err
	})
}

// frozenFiles keeps the files of a frozen sandbox. What its kernel has not written yet it writes only
// for a checkpoint, whose memory is then thrown away.
func (p *capture) frozenFiles(ctx context.Context) error {
	runtime, err := p.n.runtimes.Driving(p.Row.Plan.Class, p.Row.Build)
	if err != nil {
		return err
	}
	memory := p.n.checkpoints.MemoryDir(p.c.Ref.UID)
	if _, err := runtime.Checkpoint(ctx, p.ID(), memory, oci.CheckpointOptions{Written: p.copy}); err != nil {
		return err
	}
	return memimage.Remove(memory)
}

// heldStill does what holds a source still. The journal says so while a source that runs may be found
// paused by the next process.
func (p *capture) heldStill(ctx context.Context, do func(*oci.Runtime) error) error {
	runtime, err := p.n.runtimes.Driving(p.Row.Plan.Class, p.Row.Build)
	if err != nil {
		return err
	}
	if p.Row.Stage != journal.Live {
		return do(runtime)
	}
	if err := p.n.handles.Write(p.Row, journal.Capturing); err != nil { // others see it live, and it is
		return err
	}
	err = p.After("capture_held")
	if err == nil {
		err = do(runtime)
	}
	if errors.Is(err, operation.ErrCrash) {
		return err
	}
	p.n.goesOn(context.WithoutCancel(ctx), p.u, p.Row, err == nil)
	return err
}

// thaw lets a source go on that stands still.
func (p *capture) thaw(ctx context.Context, runtime *oci.Runtime) error {
	return thaw(ctx, runtime, p.ID())
}

// thaw lets a container go on if it stands still.
func thaw(ctx context.Context, runtime *oci.Runtime, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if status, err := runtime.State(ctx, id); err != nil || status != oci.Paused {
		return err
	}
	return runtime.Resume(ctx, id)
}

// fromDisk keeps what is on disk of a source of which nothing runs.
func (p *capture) fromDisk(ctx context.Context) error {
	if p.Row.Stage != journal.Stored { // something of a container may be there
		if err := p.n.releaseResources(ctx, p.Operation, p.u); err != nil {
			return err
		}
	}
	if p.Row.Memory != nil && !p.filesOnly {
		if err := p.linkMemory(ctx); err != nil {
			return err
		}
		if err := p.After("capture_memory"); err != nil {
			return err
		}
	}
	created := p.Row.PausedAt
	err := p.copy(ctx)
	if p.Row.Memory != nil {
		created, p.c.Exit = p.Row.Memory.Created, p.Row.Memory.Exit
	}
	if !created.IsZero() {
		p.c.Created = created.UTC()
	}
	return err
}

// linkMemory shares the files of the source's memory, which never change, or copies them where the
// sandboxes' memory is on another disk. They are read through before: what is damaged is no checkpoint, and
// those that start from one trust it without another look.
func (p *capture) linkMemory(ctx context.Context) error {
	from, to := p.n.host.MemoryDir(p.ID()), p.n.checkpoints.MemoryDir(p.c.Ref.UID)
	if err := memimage.Verify(ctx, from); errors.Is(err, errs.ErrInvalid) || errors.Is(err, errs.ErrNotFound) {
		return fmt.Errorf("the memory of its sandbox on disk is damaged: %s; a checkpoint of the files alone can be made "+
			"(spec.content: Files, --files-only, memory: false): %w", errs.Text(err), errs.ErrInvalid)
	} else if err != nil {
		return err
	}
	err := memimage.Link(ctx, from, to)
	if isOtherDisk(err) {
		if err = os.Mkdir(to, 0o700); err == nil {
			err = filetree.NewCopy(to, from).FinalCopy(ctx)
		}
	}
	if err != nil {
		return err
	}
	img, err := memimage.Read(to)
	if err != nil {
		return err
	}
	if img.Digest == "" {
		if img.Digest, err = memimage.Digest(ctx, to); err != nil {
			return err
		}
	}
	p.c.Memory = &checkpoint.Memory{Build: img.Build, Digest: img.Digest, Size: img.Size()}
	return nil
}

// isOtherDisk reports whether files cannot be shared because they are on different file systems.
func isOtherDisk(err error) bool { return errors.Is(err, syscall.EXDEV) }
