package checkpoint

import (
	"context"

	"github.com/opencontainers/go-digest"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Base is an image that was made for an import, which goes with the import if that fails.
type Base struct {
	Ref string `json:"ref"`
	// Digest is of what the name was given to: it may be another's by then.
	Digest string `json:"digest"`
}

// ImportLease is the ID of the lease that keeps an image that is coming.
func ImportLease(uid types.UID) string { return "import-" + string(uid) }

// dropBase removes the image that an import was bringing, whole or not, unless somebody uses it by now.
func (s *Store) dropBase(ctx context.Context, k *Handle) error {
	c := k.Row()
	if c == nil || c.Base == nil {
		return nil
	}
	if err := s.cfg.Containerd.EndLease(ctx, ImportLease(c.Ref.UID)); err != nil {
		return err
	}
	if s.cfg.ImageUsed(c.Base.Digest) || len(s.OfImage(c.Base.Digest, k)) > 0 {
		return nil
	}
	return s.cfg.Containerd.RemoveImageOf(ctx, c.Base.Ref, digest.Digest(c.Base.Digest))
}

// OfImage are the checkpoints, except one, that were made from the image of a digest.
func (s *Store) OfImage(digest string, but *Handle) (refs []sandbox.CheckpointRef) {
	for _, k := range s.All() {
		if c := k.Row(); k != but && c != nil && (c.Digest == digest || (c.Base != nil && c.Base.Digest == digest)) {
			refs = append(refs, c.Ref)
		}
	}
	return refs
}
