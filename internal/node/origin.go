package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/images"
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

// Images returns the node's images.
func (n *Node) Images() *images.Store { return n.images }

// ImageDigest returns the digest of an image for a namespace, which it pulls if the node lacks it, with the credentials of secrets.
func (n *Node) ImageDigest(ctx context.Context, namespace, ref string, secrets []string) (string, error) {
	image, err := n.images.Find(ctx, images.Ask{Ref: ref, Namespace: namespace, Secrets: secrets})
	return image.Digest, err
}

// pullEvery is how often the progress of a pull is reported.
const pullEvery = 10 * time.Second

// pullReports returns what reports the progress of a pull that a sandbox waits for.
func (n *Node) pullReports(ref sandbox.Ref) func(ctrd.Progress) {
	began, last := time.Now(), time.Time{}
	return func(p ctrd.Progress) {
		switch {
		case p.Step == "done":
			n.cfg.Event(ref, corev1.EventTypeNormal, "Pulled", fmt.Sprintf("image %s pulled in %s, %s", p.Ref, time.Since(began).Round(100*time.Millisecond), mebibytes(p.Total)))
		case time.Since(last) >= pullEvery:
			last = time.Now()
			text := fmt.Sprintf("pulling image %s", p.Ref)
			if p.Total > 0 {
				text += fmt.Sprintf(": %s of %s", mebibytes(p.Done), mebibytes(p.Total))
			}
			n.cfg.Event(ref, corev1.EventTypeNormal, "Pulling", text)
		}
	}
}

func mebibytes(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

// findImage finds the image of the first container of a new sandbox.
func (n *Node) findImage(ctx context.Context, w *operation.Operation) (err error) {
	ctx, end := telemetry.StartSpan(ctx, "step image")
	defer func() { end(err) }()
	return w.FindImage(ctx)
}
