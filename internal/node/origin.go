package node

import (
	"context"
	"errors"
	"fmt"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/node/plan"
)

// originOf returns the checkpoint that a sandbox is to be restored from, held against removal; nil: none. Errors are those of
// Ensure.
func (n *Node) originOf(ctx context.Context, s *agents.Sandbox, p *plan.Plan) (*checkpoint.Origin, error) {
	if s.Spec.Barchan == nil || s.Spec.Barchan.Restore == nil {
		return nil, nil
	}
	ask := s.Spec.Barchan.Restore
	const at = "spec.barchan.restore.checkpointName"
	k := n.checkpoints.Named(s.Namespace, ask.CheckpointName)
	if k == nil {
		return nil, fmt.Errorf("%s: checkpoint %q is not on this node: %w", at, ask.CheckpointName, errs.ErrNotFound)
	}
	c, release, ok := k.Open()
	if !ok {
		return nil, fmt.Errorf("%s: checkpoint %q is being made or removed: %w", at, ask.CheckpointName, errs.ErrUnavailable)
	}
	o := &checkpoint.Origin{Row: c, Release: release, WithMemory: c.Memory != nil && !ask.FilesOnly, ReleaseSlot: func() {}}
	p.Restore = &plan.Restoring{Checkpoint: c.Ref.UID, FilesOnly: !o.WithMemory}
	err := p.Fits(&c.Plan, o.WithMemory)
	if err == nil && o.WithMemory {
		err = n.checkRestores(ctx, o.Memory.Build)
	}
	if err != nil {
		release()
		return nil, fmt.Errorf("spec.barchan.restore: checkpoint %q: %w", ask.CheckpointName, err)
	}
	return o, nil
}

// checkRestores checks whether memory of a runtime build can be restored here.
func (n *Node) checkRestores(ctx context.Context, was memimage.Build) error {
	program, err := n.runtimes.ForBuild(was)
	if errors.Is(err, errs.ErrConflict) { // its error names both builds
		program, err = n.runtimes.Of(oci.GVisor)
	}
	if err == nil {
		var build memimage.Build
		if build, err = program.Build(ctx); err == nil {
			err = build.Restores(was)
		}
	}
	if errors.Is(err, errs.ErrConflict) {
		return fmt.Errorf("its memory cannot be restored here: %s; %s: %w", errs.Text(err), operation.RestoreFilesHint, errs.ErrInvalid)
	}
	return errs.Retryable(err)
}

// ImageDigest returns the digest of an image, which it pulls if the node lacks it.
func (n *Node) ImageDigest(ctx context.Context, ref string) (string, error) {
	image, err := n.host.FindImage(ctx, &plan.Plan{Image: ref})
	return image.Digest, err
}

// imageFor returns the image of a new sandbox: that of its checkpoint if both name the same, even if the name now belongs to
// another image.
func (n *Node) imageFor(ctx context.Context, p *plan.Plan, o *checkpoint.Origin) (ctrd.Image, error) {
	if o == nil {
		return n.host.FindImage(ctx, p)
	}
	if o.ImageRun != nil && p.Image == o.Plan.Image {
		return o.Image(), nil
	}
	image, err := n.host.FindImage(ctx, p)
	if err == nil && image.Digest != o.Digest {
		err = fmt.Errorf("spec.podTemplate.spec.containers[0].image: %q is %s here, the checkpoint's is %q, %s: %w",
			p.Image, image.Digest, o.Plan.Image, o.Digest, errs.ErrInvalid)
	}
	return image, err
}
