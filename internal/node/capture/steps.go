package capture

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

// work is one checkpoint being made.
type work struct {
	*operation.Operation // of the source
	m                    *Maker
	u                    *registry.Handle
	k                    *checkpoint.Handle
	c                    *checkpoint.Row
	// filesOnly leaves out the memory.
	filesOnly bool
	// entered means that it has a slot.
	entered bool

	files   []*ctrd.SnapshotCopy // of each container
	volumes []*filetree.Copy
	durable errgroup.Group // syncs the files while the source runs
}

// do makes the checkpoint. The row comes first, so that what follows can be found and removed.
func (p *work) do(ctx context.Context) (err error) {
	if err := p.note(checkpoint.Writing); err != nil {
		return err
	}
	if err := p.After("capture_row"); err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, p.durable.Wait()) // it uses the files that are closed next
		if !errors.Is(err, operation.ErrCrash) {
			err = errors.Join(err, p.end(ctx))
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
	return p.After("capture_ready")
}

// end closes the copies, and unmounts the disks of a source on disk, which were mounted for it.
func (p *work) end(ctx context.Context) (err error) {
	if p.Row.OnDisk() {
		err = p.m.cfg.Host.Disks(p.Row).Unmount()
	}
	for _, files := range p.files {
		err = errors.Join(err, files.Close(ctx))
	}
	return err
}

// begin does the work that needs no paused source, and copies most of the data.
func (p *work) begin(ctx context.Context) (err error) {
	dir := p.m.cfg.Checkpoints.Dir(p.c.Ref.UID)
	if err := os.MkdirAll(filepath.Join(dir, "volumes"), 0o700); err != nil {
		return fmt.Errorf("make directory of the checkpoint: %w", err)
	}
	if !p.filesOnly {
		if err := p.keepAgent(); err != nil {
			return fmt.Errorf("keep the agent: %w", err)
		}
	}
	if err := p.m.cfg.Host.Disks(p.Row).Mount(ctx); err != nil { // of a source on disk it is not
		return err
	}
	for _, name := range p.c.Plan.Names() {
		if err := p.beginFiles(ctx, name); err != nil {
			return err
		}
	}
	for _, v := range p.c.Plan.DataVolumes() {
		to := filepath.Join(dir, "volumes", v.DataPath())
		if err := os.MkdirAll(to, 0o700); err != nil {
			return fmt.Errorf("make directory of a volume: %w", err)
		}
		p.volumes = append(p.volumes, filetree.NewCopy(to, p.VolumeSource(v)))
	}
	if p.Row.Stage != journal.Live {
		return nil
	}
	for _, files := range p.files {
		if err := files.PreCopy(ctx); err != nil {
			return err
		}
	}
	for _, v := range p.volumes {
		if err := v.PreCopy(ctx); err != nil {
			return fmt.Errorf("copy volume: %w", err)
		}
	}
	return nil
}

// beginFiles begins the copy of the files of a container.
func (p *work) beginFiles(ctx context.Context, name string) error {
	part, from := ctrd.ContainerPart(name), ""
	if root := p.m.cfg.Host.Disks(p.Row).Writes(part); root != "" {
		from = ctrd.UpperIn(root)
	}
	files, err := p.m.cfg.Containerd.BeginCopy(ctx, ctrd.PartKey(p.ID(), part), from, checkpoint.Snapshot(p.c.Ref.UID, name))
	if err == nil {
		p.files = append(p.files, files)
	}
	return err
}

// keepAgent keeps the agent program of the source, because the memory needs exactly that one. All containers have the same.
func (p *work) keepAgent() error {
	from, to := p.Path(filepath.Join("agent", filepath.Base(oci.AgentPath))), p.m.cfg.Checkpoints.AgentFile(p.c.Ref.UID)
	if err := os.Link(from, to); !isOtherDisk(err) {
		return err
	}
	running, err := os.Open(from)
	if err != nil {
		return err
	}
	return errors.Join(durable.CopyProgram(running, to), running.Close())
}

// copy copies the files of a paused source, and starts to sync them.
func (p *work) copy(ctx context.Context) error {
	p.c.Created, p.c.Exit = time.Now().UTC(), p.u.Observed().EntrypointExit
	for _, files := range p.files {
		if err := files.FinalCopy(ctx); err != nil {
			return err
		}
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

// keepFiles syncs the copies and measures them.
func (p *work) keepFiles(ctx context.Context) error {
	for _, files := range p.files {
		one, err := files.Commit(ctx)
		if err != nil {
			return err
		}
		p.c.FilesSize += one.Size
	}
	if len(p.volumes) == 0 {
		return durable.SyncDirs(p.m.cfg.Checkpoints.Dir(p.c.Ref.UID), p.m.cfg.Checkpoints.Root())
	}
	size, err := durable.Usage(ctx, filepath.Join(p.m.cfg.Checkpoints.Dir(p.c.Ref.UID), "volumes"))
	p.c.FilesSize += size
	return errors.Join(err, durable.SyncFilesystem(p.m.cfg.Checkpoints.Root()))
}

// withMemory keeps memory and files of a source with processes, running or frozen.
func (p *work) withMemory(ctx context.Context) error {
	return p.whilePaused(ctx, func(runtime *oci.Runtime) error {
		img, err := p.Checkpoint(ctx, runtime, p.m.cfg.Checkpoints.MemoryDir(p.c.Ref.UID), oci.CheckpointOptions{
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

// withoutMemory keeps the files of a source with processes.
func (p *work) withoutMemory(ctx context.Context) error {
	if p.Row.Stage == journal.Paused && p.Row.Plan.Class == oci.GVisor {
		return p.frozenFiles(ctx)
	}
	if p.Row.Stage == journal.Paused { // of class runc: its writes are in the host's page cache
		return p.copy(ctx)
	}
	p.leave() // an agent that a tenant has replaced may be silent

	// Most is written before the pause.
	if err := p.Sync(ctx); err != nil {
		return err
	}
	if err := p.enter(ctx); err != nil {
		return err
	}
	return p.whilePaused(ctx, func(runtime *oci.Runtime) error {
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

// frozenFiles keeps the files of a frozen sandbox. Its kernel flushes the rest only for a checkpoint, whose memory is
// then removed.
func (p *work) frozenFiles(ctx context.Context) error {
	runtime, err := p.m.cfg.Runtimes.Driving(p.Row.Plan.Class, p.Row.Build)
	if err != nil {
		return err
	}
	memory := p.m.cfg.Checkpoints.MemoryDir(p.c.Ref.UID)
	if _, err := p.Checkpoint(ctx, runtime, memory, oci.CheckpointOptions{Written: p.copy}); err != nil {
		return err
	}
	return memimage.Remove(memory)
}

// whilePaused does work that pauses a source. The journal has the stage Capturing meanwhile: after a crash, the next process
// may find the container paused.
func (p *work) whilePaused(ctx context.Context, do func(*oci.Runtime) error) error {
	runtime, err := p.m.cfg.Runtimes.Driving(p.Row.Plan.Class, p.Row.Build)
	if err != nil {
		return err
	}
	if p.Row.Stage != journal.Live {
		return do(runtime)
	}
	if err := p.m.cfg.Registry.Write(p.Row, journal.Capturing); err != nil { // the handle's row stays live
		return err
	}
	err = p.After("capture_held")
	if err == nil {
		err = do(runtime)
	}
	if errors.Is(err, operation.ErrCrash) {
		return err
	}
	p.m.resume(context.WithoutCancel(ctx), p.u, p.Row, err == nil)
	return err
}

// thaw resumes the source if it is paused.
func (p *work) thaw(ctx context.Context, runtime *oci.Runtime) error {
	return thaw(ctx, runtime, p.ID())
}

// thaw resumes a container if it is paused.
func thaw(ctx context.Context, runtime *oci.Runtime, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if status, err := runtime.State(ctx, id); err != nil || status != oci.Paused {
		return err
	}
	return runtime.Resume(ctx, id)
}

// fromDisk keeps memory and files of a source without a container.
func (p *work) fromDisk(ctx context.Context) error {
	if p.Row.Stage != journal.Stored { // parts of a container may be left
		if err := p.m.cfg.Release(ctx, p.Operation, p.u); err != nil {
			return err
		}
		if err := p.m.cfg.Host.Disks(p.Row).Mount(ctx); err != nil {
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

// linkMemory links the files of the source's memory, which never change, or copies them from another file system. It
// verifies them first, so that a damaged one makes no checkpoint.
func (p *work) linkMemory(ctx context.Context) error {
	from, to := p.m.cfg.Host.MemoryDir(p.ID()), p.m.cfg.Checkpoints.MemoryDir(p.c.Ref.UID)
	if err := memimage.Verify(ctx, from); errors.Is(err, errs.ErrInvalid) || errors.Is(err, errs.ErrNotFound) {
		return fmt.Errorf("the memory of its sandbox on disk is damaged: %s; a checkpoint of the files alone is possible "+
			"(spec.content: Files, --files-only, memory: false): %w", errs.Text(err), errs.ErrInvalid)
	} else if err != nil {
		return err
	}
	err := memimage.Link(ctx, from, to)
	if isOtherDisk(err) {
		if err = os.Mkdir(to, 0o700); err == nil {
			err = filetree.NewCopy(to, from).FinalCopy(ctx)
		}
		if err == nil {
			err = durable.SyncFilesystem(to)
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
