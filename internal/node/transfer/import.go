// Package transfer exports checkpoints of the node as artifacts, and imports artifacts as checkpoints. An import
// writes a row first, so that an interruption leaves nothing, and validates everything in an artifact that the host acts on.
// The package creates no checkpoint of a sandbox and restores none.
//
// An import holds the lock of its checkpoint and no other.
package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ctrd/filetree"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

// Config configures a Transfer. All fields are required.
type Config struct {
	Checkpoints *checkpoint.Store
	Containerd  *ctrd.Client
	// Offers reports whether the node has a runtime of a class.
	Offers func(oci.Class) bool
	// CheckMemory returns an errs.ErrInvalid for memory of a build that this node cannot restore.
	CheckMemory func(ctx context.Context, build memimage.Build) error
	// Refuse returns why new work is refused, an errs.ErrUnavailable.
	Refuse func() error
	// CheckSpace returns why as many more bytes may not be written below a directory, an errs.ErrExhausted.
	CheckSpace func(dir string, bytes int64) error
	// ObserveStep receives the duration of an import.
	ObserveStep func(class oci.Class, step string, took time.Duration)
	Log         *slog.Logger
}

// eraseTimeout bounds the removal of a failed import after its request has ended.
const eraseTimeout = time.Minute

// Transfer exports and imports checkpoints.
type Transfer struct{ cfg Config }

// New starts nothing.
func New(cfg Config) *Transfer { return &Transfer{cfg} }

type importOp struct {
	x  *Transfer
	k  *checkpoint.Handle
	c  *checkpoint.Row
	in *portable.Reader
}

// CheckImport refuses an artifact that is unusable here, and returns warnings about memory that may not be
// restorable; its files remain usable. It changes nothing. The error is an errs.ErrInvalid.
func (x *Transfer) CheckImport(ctx context.Context, h *portable.Head) (warnings []string, err error) {
	c, err := x.readImport(h)
	if err != nil {
		return nil, err
	}
	if c.Memory != nil {
		if err := x.cfg.CheckMemory(ctx, c.Memory.Build); errors.Is(err, errs.ErrInvalid) {
			warnings = append(warnings, errs.Text(err))
		} else if err != nil {
			return nil, err
		}
	}
	return warnings, nil
}

// readImport reads and validates the row of another node.
func (x *Transfer) readImport(h *portable.Head) (*checkpoint.Row, error) {
	c := &checkpoint.Row{}
	wrong := func(format string, args ...any) (*checkpoint.Row, error) {
		return nil, fmt.Errorf("checkpoint artifact: "+format+": %w", append(args, errs.ErrInvalid)...)
	}
	if err := json.Unmarshal(h.Config.Node, c); err != nil {
		return wrong("config.node: %v", err)
	}
	class := oci.Class(h.Config.Class)
	switch {
	case h.Config.Architecture != runtime.GOARCH:
		return wrong("config.architecture: %q, this host's is %s", h.Config.Architecture, runtime.GOARCH)
	case class != c.Plan.Class || !x.cfg.Offers(class):
		return wrong("config.class: this node does not offer %q", class)
	case c.ImageRun == nil || c.Plan.Image == "":
		return wrong("config.node: no image")
	case len(c.Plan.Sidecars)+len(c.Sidecars) > 0:
		return wrong("config.node: it has several containers")
	case c.Memory != nil && class != oci.GVisor:
		return wrong("config.node: class %q has no memory", class)
	}
	for _, v := range c.Plan.Volumes {
		if name, ok := nameOf(v); !ok {
			return wrong("config.node: %q is not a volume", name)
		}
	}
	if err := checkLayers(c, h); err != nil {
		return wrong("%w", err)
	}
	c.Plan.Restore, c.Paused, c.Base = nil, 0, nil
	return c, nil
}

// nameOf returns the name of a volume; it is not ok if it has several, or one that is no file's.
func nameOf(v plan.Volume) (name string, ok bool) {
	name = v.Claim + v.Scratch + v.Volume + v.Projected
	one := name == v.Claim || name == v.Scratch || name == v.Volume || name == v.Projected
	return name, one && (name == "" || portable.IsName(name))
}

// checkLayers reports whether an artifact has exactly the parts in its row.
func checkLayers(c *checkpoint.Row, h *portable.Head) error {
	has := map[string][]string{}
	for _, d := range h.Layers {
		has[d.MediaType] = append(has[d.MediaType], portable.Title(d))
	}
	slices.Sort(has[portable.VolumeType])
	switch memory := c.Memory != nil; {
	case !slices.Equal(has[portable.VolumeType], c.Plan.DataPaths()):
		return fmt.Errorf("volumes are %q, want %q", has[portable.VolumeType], c.Plan.DataPaths())
	case memory != (len(has[portable.AgentType]) > 0), memory != slices.Contains(has[portable.MemoryType], imageFile), !memory && len(has[portable.MemoryType]) > 0:
		return errors.New("must have memory, its manifest and its agent, or none of them")
	}
	return nil
}

// Import creates a checkpoint from an artifact, or returns the existing one of the same UID. When it returns,
// the checkpoint is durable; an error or a crash leaves nothing. Errors: errs.ErrInvalid, the artifact is
// unusable or damaged; errs.ErrConflict, the checkpoint is being removed; errs.ErrNotFound, its base image is
// neither on this node nor part of it; errs.ErrExhausted, the disk is full; errs.ErrUnavailable.
func (x *Transfer) Import(ctx context.Context, ref sandbox.CheckpointRef, in *portable.Reader) (sandbox.Captured, error) {
	if err := errors.Join(checkpoint.CheckRef(ref), x.cfg.Checkpoints.CheckRead(ref), x.cfg.Refuse()); err != nil {
		return sandbox.Captured{}, err
	}
	c, err := x.readImport(in.Head)
	if err != nil {
		return sandbox.Captured{}, err
	}
	ctx, k, done, err := x.cfg.Checkpoints.Acquire(ctx, ref, false)
	if err != nil {
		return sandbox.Captured{}, err
	}
	defer done()
	switch was := k.Row(); {
	case was != nil && was.Stage == checkpoint.Ready:
		return x.cfg.Checkpoints.Captured(was), nil
	case was != nil:
		return sandbox.Captured{}, fmt.Errorf("checkpoint %s/%s is being removed: %w", ref.Namespace, ref.Name, errs.ErrConflict)
	}
	began := time.Now()
	c.Ref = ref
	p := &importOp{x: x, k: k, c: c, in: in}
	if err := p.do(ctx); err != nil {
		err = fmt.Errorf("import checkpoint %s/%s: %w", ref.Namespace, ref.Name, checkpoint.Fault(ctx, err))
		return sandbox.Captured{}, errors.Join(err, p.undo(ctx))
	}
	x.cfg.ObserveStep(c.Plan.Class, "import", time.Since(began))
	x.cfg.Log.InfoContext(ctx, "checkpoint imported", telemetry.Namespace, ref.Namespace, "checkpoint", ref.Name, "memory", c.Memory != nil,
		telemetry.Duration, time.Since(began))
	return x.cfg.Checkpoints.Captured(c), nil
}

func (p *importOp) undo(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), eraseTimeout)
	defer cancel()
	return p.x.cfg.Checkpoints.Erase(ctx, p.k)
}

// do writes the row first, so that everything after it can be found and removed.
func (p *importOp) do(ctx context.Context) error {
	if err := p.checkSpace(p.size()); err != nil {
		return err
	}
	if err := p.x.cfg.Checkpoints.Move(p.k, p.c, checkpoint.Writing); err != nil {
		return err
	}
	failpoint.Reach("import/writing")
	image, err := p.base(ctx)
	if err != nil {
		return err
	}
	failpoint.Reach("import/base")
	if err := os.MkdirAll(filepath.Join(p.x.cfg.Checkpoints.Dir(p.c.Ref.UID), "volumes"), 0o700); err != nil {
		return fmt.Errorf("create directory of checkpoint: %w", err)
	}
	for {
		b, err := p.in.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		if err := p.layer(ctx, image, b); err != nil {
			return p.diskError(err)
		}
		if err := b.Close(); err != nil {
			return err
		}
	}
	if err := p.finish(ctx); err != nil {
		return err
	}
	failpoint.Reach("import/data")
	p.c.Base = nil // from now on an ordinary image
	if err := p.x.cfg.Checkpoints.Move(p.k, p.c, checkpoint.Ready); err != nil {
		return err
	}
	failpoint.Reach("import/ready")
	return nil
}

// base finds the base image here, or imports it from the artifact.
func (p *importOp) base(ctx context.Context) (ctrd.Image, error) {
	is := p.in.Config.Image
	image, err := p.x.cfg.Containerd.ImageOf(ctx, is.Chain, is.Reference)
	switch {
	case err == nil && p.in.Image != nil:
		err = p.in.Skip(ctx, len(p.in.Image.Blobs))
	case errors.Is(err, errs.ErrNotFound) && p.in.Image != nil:
		image, err = p.importBase(ctx)
	case errors.Is(err, errs.ErrNotFound):
		err = fmt.Errorf("base image %s (%s) is neither on this node nor in the artifact; pull it first: %w", is.Reference, is.Digest, err)
	}
	if err != nil {
		return ctrd.Image{}, err
	}
	if image.Chain() != is.Chain {
		return ctrd.Image{}, fmt.Errorf("base image is %s, but files are based on %s: %w", image.Chain(), is.Chain, errs.ErrInvalid)
	}
	p.c.Digest = image.Digest
	return image, p.x.cfg.Checkpoints.Move(p.k, p.c, checkpoint.Writing) // so that another import does not remove the image
}

func (p *importOp) layer(ctx context.Context, image ctrd.Image, b *portable.Blob) error {
	uid := p.c.Ref.UID
	in := p.limited(portable.WithContext(ctx, b))
	switch b.MediaType {
	case portable.FilesType:
		one, err := p.x.cfg.Containerd.ImportCommitted(ctx, checkpoint.Snapshot(uid, ""), image, in)
		p.c.FilesSize = one.Size
		return err
	case portable.AgentType:
		return writeBlob(p.x.cfg.Checkpoints.AgentFile(uid), 0o755, in)
	case portable.VolumeType:
		dir := filepath.Join(p.x.cfg.Checkpoints.Dir(uid), "volumes", portable.Title(b.Descriptor))
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("create volume directory: %w", err)
		}
		return filetree.ReadTree(ctx, dir, in)
	default:
		if err := os.MkdirAll(p.x.cfg.Checkpoints.MemoryDir(uid), 0o700); err != nil {
			return fmt.Errorf("create memory directory: %w", err)
		}
		return writeBlob(filepath.Join(p.x.cfg.Checkpoints.MemoryDir(uid), portable.Title(b.Descriptor)), 0o600, in)
	}
}

func writeBlob(path string, mode os.FileMode, in io.Reader) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return fmt.Errorf("write checkpoint: %w", err)
	}
	_, err = io.Copy(f, in)
	return errors.Join(err, f.Close())
}

func (p *importOp) finish(ctx context.Context) error {
	dir := p.x.cfg.Checkpoints.Dir(p.c.Ref.UID)
	size, err := durable.Usage(ctx, filepath.Join(dir, "volumes"))
	if err != nil {
		return err
	}
	p.c.FilesSize += size
	if p.c.Memory != nil {
		img, err := memimage.Read(p.x.cfg.Checkpoints.MemoryDir(p.c.Ref.UID))
		if err != nil {
			return err
		}
		if have := len(p.in.Layers); have != 2+len(p.c.Plan.DataPaths())+len(img.Files)+1 {
			return fmt.Errorf("memory has files that its manifest does not name: %w", errs.ErrInvalid)
		}
		if img.Digest != p.c.Memory.Digest || img.Build.SHA256 != p.c.Memory.Build.SHA256 {
			return fmt.Errorf("memory is %s of build %s, config has %s and %s: %w",
				img.Digest, img.Build.SHA256, p.c.Memory.Digest, p.c.Memory.Build.SHA256, errs.ErrInvalid)
		}
		p.c.Memory = &checkpoint.Memory{Build: img.Build, Digest: img.Digest, Size: img.Size()}
		if err := durable.SyncFilesystem(p.x.cfg.Checkpoints.MemoryDir(p.c.Ref.UID)); err != nil { // maybe another than the rest's
			return err
		}
	}
	return durable.SyncFilesystem(p.x.cfg.Checkpoints.Root())
}
