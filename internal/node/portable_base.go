package node

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/opencontainers/go-digest"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/journal"
)

// importBase gives the image of the artifact its name, unless another one has that here.
func (p *importing) importBase(ctx context.Context) (ctrd.Image, error) {
	ref, err := ctrd.Normalize(p.in.Config.Image.Reference)
	if err != nil {
		return ctrd.Image{}, err
	}
	if _, err := p.n.cfg.Containerd.Resolve(ctx, ref); err == nil {
		if ref, err = ctrd.WithDigest(ref, p.in.Image.Descriptor.Digest); err != nil {
			return ctrd.Image{}, err
		}
	} else if !errors.Is(err, errs.ErrNotFound) {
		return ctrd.Image{}, err
	}
	// The row says what to remove before there is anything.
	p.c.Base = &importedBase{Ref: ref, Digest: p.in.Image.Descriptor.Digest.String()}
	if err := p.n.noteCheckpoint(p.k, p.c, checkpointWriting); err != nil {
		return ctrd.Image{}, err
	}
	out, into := io.Pipe()
	var writer errgroup.Group
	writer.Go(func() error {
		err := p.in.CopyImage(ctx, into)
		_ = into.CloseWithError(err)
		return err
	})
	image, err := p.n.cfg.Containerd.ImportUnder(ctx, importLease(p.c.Ref.UID), p.heeding(out), ref)
	if err == nil {
		_, err = io.Copy(io.Discard, out) // what follows the end of a tar
	}
	_ = out.CloseWithError(errors.New("the image is read no further"))
	if wrong := writer.Wait(); errors.Is(wrong, errs.ErrInvalid) { // it knows better
		err = wrong
	}
	if err != nil {
		return ctrd.Image{}, fmt.Errorf("its base image: %w", p.fuller(err))
	}
	return image, nil
}

// importedBase is an image that was made for an import, which goes with the import if that fails.
type importedBase struct {
	Ref string `json:"ref"`
	// Digest is of what the name was given to: it may be another's by then.
	Digest string `json:"digest"`
}

// importLease is the ID of the lease that keeps an image that is coming.
func importLease(uid types.UID) string { return "import-" + string(uid) }

// dropBase removes the image that an import was bringing, whole or not, unless somebody uses it by now.
func (n *Node) dropBase(ctx context.Context, k *checkpointHandle) error {
	c := k.current()
	if c == nil || c.Base == nil {
		return nil
	}
	if err := n.cfg.Containerd.EndLease(ctx, importLease(c.Ref.UID)); err != nil {
		return err
	}
	if n.usesImage(c.Base.Digest, k) {
		return nil
	}
	return n.cfg.Containerd.RemoveImageOf(ctx, c.Base.Ref, digest.Digest(c.Base.Digest))
}

// usesImage reports whether a sandbox, or a checkpoint but one, is of an image.
func (n *Node) usesImage(of string, but *checkpointHandle) bool {
	sandboxes, checkpoints := n.imageUsers(of, but)
	return len(sandboxes)+len(checkpoints) > 0
}

// ImageUsers are the sandboxes and checkpoints of the node that were made from the image of a digest,
// and that need it: those that have ended do not.
func (n *Node) ImageUsers(ctx context.Context, of string) ([]sandbox.Ref, []sandbox.CheckpointRef, error) {
	if err := n.awaitAdopted(ctx); err != nil {
		return nil, nil, err
	}
	sandboxes, checkpoints := n.imageUsers(of, nil)
	return sandboxes, checkpoints, nil
}

func (n *Node) imageUsers(of string, but *checkpointHandle) (sandboxes []sandbox.Ref, checkpoints []sandbox.CheckpointRef) {
	for _, k := range n.shelf.all() {
		if c := k.current(); k != but && c != nil && (c.Digest == of || (c.Base != nil && c.Base.Digest == of)) {
			checkpoints = append(checkpoints, c.Ref)
		}
	}
	for _, u := range n.handles.All() {
		if r := u.Row(); r != nil && r.Digest == of && r.Stage != journal.Ended {
			sandboxes = append(sandboxes, u.Ref)
		}
	}
	return sandboxes, checkpoints
}
