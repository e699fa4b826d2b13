package transfer

import (
	"errors"
	"fmt"
	"io"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// size is what will be written, in bytes; of the base image what comes, and not what it becomes.
func (p *importOp) size() (sum int64) {
	for _, d := range p.in.Layers {
		sum += d.Size
	}
	return sum
}

// checkSpace says why so many more bytes may not be written, if so.
func (p *importOp) checkSpace(bytes int64) error {
	if err := p.x.cfg.CheckSpace(p.x.cfg.Checkpoints.Root(), bytes); err != nil {
		return errs.Public(err, "there is no room for what is imported: "+errs.Text(err))
	}
	return nil
}

// spaceCheckInterval is after how many bytes an import looks whether there is room for as many more.
const spaceCheckInterval = 16 << 20

// spaceReader ends what is read once there is no room for it.
func (p *importOp) limited(r io.Reader) io.Reader { return &spaceReader{p: p, r: r} }

type spaceReader struct {
	p    *importOp
	r    io.Reader
	left int64 // bytes until the next look
}

func (h *spaceReader) Read(b []byte) (int, error) {
	if h.left <= 0 {
		if err := h.p.checkSpace(spaceCheckInterval); err != nil {
			return 0, err
		}
		h.left = spaceCheckInterval
	}
	n, err := h.r.Read(b)
	h.left -= int64(n)
	return n, err
}

// diskError is an error, or that the disk is full, which whoever wrote to it may not have said so that it
// can be told from others.
func (p *importOp) diskError(err error) error {
	if errors.Is(err, errs.ErrInvalid) || errors.Is(err, errs.ErrExhausted) {
		return err
	}
	if full := p.checkSpace(spaceCheckInterval); errors.Is(full, errs.ErrExhausted) {
		return fmt.Errorf("%w: %w", full, err)
	}
	return err
}
