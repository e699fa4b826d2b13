package checkpoint

import (
	"context"

	"github.com/opencontainers/go-digest"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Base is an image of an import, which is removed if the import fails.
type Base struct {
	Ref string `json:"ref"`
	// Digest is of the image that got the name: the name may refer to another by now.
	Digest string `json:"digest"`
}

// ImportLease is the ID of the lease for an image being imported.
func ImportLease(uid types.UID) string { return "import-" + string(uid) }

// dropBase removes the image of an import, complete or not, unless it is in use.
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

// OfImage returns the checkpoints, except one, with a container of the image of a digest.
func (s *Store) OfImage(digest string, but *Handle) (refs []sandbox.CheckpointRef) {
	for _, k := range s.All() {
		if c := k.Row(); k != but && c != nil && (c.Uses(digest) || (c.Base != nil && c.Base.Digest == digest)) {
			refs = append(refs, c.Ref)
		}
	}
	return refs
}
