package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sync/errgroup"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
)

// importBase names the artifact's image, unless the name is taken here.
func (p *importOp) importBase(ctx context.Context) (ctrd.Image, error) {
	ref, err := ctrd.Normalize(p.in.Config.Image.Reference)
	if err != nil {
		return ctrd.Image{}, err
	}
	if _, err := p.x.cfg.Containerd.Resolve(ctx, ref); err == nil {
		if ref, err = ctrd.WithDigest(ref, p.in.Image.Descriptor.Digest); err != nil {
			return ctrd.Image{}, err
		}
	} else if !errors.Is(err, errs.ErrNotFound) {
		return ctrd.Image{}, err
	}
	// The row names what to remove, before it exists.
	p.c.Base = &checkpoint.Base{Ref: ref, Digest: p.in.Image.Descriptor.Digest.String()}
	if err := p.x.cfg.Checkpoints.Move(p.k, p.c, checkpoint.Writing); err != nil {
		return ctrd.Image{}, err
	}
	out, into := io.Pipe()
	var writer errgroup.Group
	writer.Go(func() error {
		err := p.in.CopyImage(ctx, into)
		_ = into.CloseWithError(err)
		return err
	})
	image, err := p.x.cfg.Containerd.ImportUnder(ctx, checkpoint.ImportLease(p.c.Ref.UID), p.limited(out), ref)
	if err == nil {
		_, err = io.Copy(io.Discard, out) // bytes after the end of a tar
	}
	_ = out.CloseWithError(errors.New("rest of the image is not needed"))
	if wrong := writer.Wait(); errors.Is(wrong, errs.ErrInvalid) { // the more precise error
		err = wrong
	}
	if err != nil {
		return ctrd.Image{}, fmt.Errorf("base image: %w", p.diskError(err))
	}
	return image, nil
}
