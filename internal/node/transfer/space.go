package transfer

import (
	"errors"
	"fmt"
	"io"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// size is the number of bytes to write; of the base image its compressed size.
func (p *importOp) size() (sum int64) {
	for _, d := range p.in.Layers {
		sum += d.Size
	}
	return sum
}

func (p *importOp) checkSpace(bytes int64) error {
	if err := p.x.cfg.CheckSpace(p.x.cfg.Checkpoints.Root(), bytes); err != nil {
		return errs.Public(err, "no disk space for the import: "+errs.Text(err))
	}
	return nil
}

// spaceCheckInterval is the number of bytes between two checks for spaceMargin more: a directory takes eight times its bytes
// in a tar.
const (
	spaceCheckInterval = 2 << 20
	spaceMargin        = 16 << 20
)

// limited returns a reader that fails when the disk has no space for more.
func (p *importOp) limited(r io.Reader) io.Reader { return &spaceReader{p: p, r: r} }

type spaceReader struct {
	p    *importOp
	r    io.Reader
	left int64 // bytes until the next check
}

func (h *spaceReader) Read(b []byte) (int, error) {
	if h.left <= 0 {
		if err := h.p.checkSpace(spaceMargin); err != nil {
			return 0, err
		}
		h.left = spaceCheckInterval
	}
	n, err := h.r.Read(b)
	h.left -= int64(n)
	return n, err
}

// diskError returns that the disk is full if it is, since the error of a writer may not reveal
// that.
func (p *importOp) diskError(err error) error {
	if errors.Is(err, errs.ErrInvalid) || errors.Is(err, errs.ErrExhausted) {
		return err
	}
	if full := p.checkSpace(spaceMargin); errors.Is(full, errs.ErrExhausted) {
		return fmt.Errorf("%w: %w", full, err)
	}
	return err
}
