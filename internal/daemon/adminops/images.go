package adminops

import (
	"context"
	"io"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ctrd/pull"
	"github.com/barchan-dev/barchan/internal/node/images"
)

// imageStore keeps the images that sandboxes run, for the admin API.
type imageStore struct{ Server }

// receiver returns the parts for what fills the disk; there are none while the server is degraded.
func (s imageStore) receiver(ctx context.Context) (Parts, error) {
	if err := s.cfg.Gate.Err(); err != nil {
		return Parts{}, err
	}
	return s.own(ctx)
}

// List returns every image.
func (s imageStore) List(ctx context.Context) ([]adminclient.Image, error) {
	p, err := s.own(ctx)
	if err != nil {
		return nil, err
	}
	list, err := p.Machine.Node.Images().List(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]adminclient.Image, len(list))
	for i := range list {
		out[i] = wireImage(&list[i])
	}
	return out, nil
}

// Pull fetches an image from its registry.
func (s imageStore) Pull(ctx context.Context, req adminclient.PullRequest, progress func(adminclient.Event)) (adminclient.Image, error) {
	p, err := s.receiver(ctx)
	if err != nil {
		return adminclient.Image{}, err
	}
	img, err := p.Machine.Node.Images().Find(ctx, images.Ask{
		Ref: req.Ref, Policy: corev1.PullAlways, Credentials: pull.Credentials{Username: req.Username, Password: req.Password}, Progress: imageProgress(progress),
	})
	if err != nil {
		return adminclient.Image{}, err
	}
	s.recheck(ctx, p, img)
	return s.described(ctx, img)
}

// Import reads images from a tar.
func (s imageStore) Import(ctx context.Context, tar io.Reader, name string, progress func(adminclient.Event)) ([]adminclient.Image, error) {
	p, err := s.receiver(ctx)
	if err != nil {
		return nil, err
	}
	imported, err := p.Machine.Containers.Import(ctx, tar, 0, name, imageProgress(progress))
	if err != nil {
		return nil, err
	}
	s.recheck(ctx, p, imported...)
	var out []adminclient.Image
	for _, img := range imported {
		described, err := s.described(ctx, img)
		if err != nil {
			return nil, err
		}
		out = append(out, described)
	}
	return out, nil
}

// recheck retries the sandboxes that lack an image. It deletes unclaimed pool members with an older image of the same name;
// their pools make others. Claimed sandboxes keep their image.
func (s imageStore) recheck(ctx context.Context, p Parts, arrived ...ctrd.Image) {
	all, err := p.Cache.Sandboxes(ctx, "")
	if err != nil {
		s.log.WarnContext(ctx, "cannot retry sandboxes that lack an image", telemetry.Error, err)
	}
	for _, x := range all {
		if _, lacks := sandbox.LacksImage(x); lacks {
			p.Machine.Node.Recheck(sandbox.Ref{Namespace: x.Namespace, Name: x.Name, UID: x.UID})
		}
		if !outdated(x, arrived) {
			continue
		}
		asSeen := client.Preconditions{UID: &x.UID, ResourceVersion: &x.ResourceVersion} // claimed since then, it stays
		if err := p.Cache.Live().Delete(ctx, x, asSeen); client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
			s.log.WarnContext(ctx, "cannot replace a pool member with an outdated image", telemetry.Sandbox, x.Name, telemetry.Error, err)
		}
	}
}

// outdated reports whether an unclaimed member of a pool runs another image than the one of
// that name that has arrived.
func outdated(s *agents.Sandbox, arrived []ctrd.Image) bool {
	if pool.MemberOf(s) == "" || s.Status.Barchan == nil || s.Status.Barchan.Image == "" || len(s.Spec.PodTemplate.Spec.Containers) == 0 {
		return false
	}
	ref, err := ctrd.Normalize(s.Spec.PodTemplate.Spec.Containers[0].Image)
	return err == nil && slices.ContainsFunc(arrived, func(img ctrd.Image) bool {
		return img.Ref == ref && img.Digest != s.Status.Barchan.Image
	})
}

// Remove removes an image. One that sandboxes or checkpoints need is an errs.ErrConflict; one that only
// templates name is too, unless force is set: they then pull it again or fail.
func (s imageStore) Remove(ctx context.Context, ref string, force bool) error {
	p, err := s.own(ctx)
	if err != nil {
		return err
	}
	users, err := p.Images.UsersOf(ctx, ref)
	if err != nil {
		return err
	}
	if err := users.Refusal(ref, force); err != nil {
		return err
	}
	return p.Machine.Node.Images().Remove(ctx, ref)
}

// Prune removes images that nothing uses: those that were pulled, and on request the others.
func (s imageStore) Prune(ctx context.Context, req adminclient.PruneRequest) ([]adminclient.Image, error) {
	p, err := s.own(ctx)
	if err != nil {
		return nil, err
	}
	gone, err := p.Images.Prune(ctx, req.All)
	out := make([]adminclient.Image, len(gone))
	for i := range gone {
		out[i] = wireImage(&gone[i])
	}
	return out, err
}

func (s imageStore) described(ctx context.Context, img ctrd.Image) (adminclient.Image, error) {
	p, err := s.own(ctx)
	if err != nil {
		return adminclient.Image{}, err
	}
	found, err := p.Machine.Node.Images().Named(ctx, img.Ref)
	if err != nil {
		return adminclient.Image{}, err
	}
	if len(found) == 0 { // removed meanwhile
		return adminclient.Image{Ref: img.Ref, Digest: img.Digest}, nil
	}
	return wireImage(&found[0]), nil
}

func wireImage(x *images.Info) adminclient.Image {
	return adminclient.Image{
		Ref: x.Ref, Digest: x.Digest, Size: x.Size, CreatedAt: x.Created, LastUsed: x.LastUsed, Pulled: x.Pulled, Private: x.Private,
	}
}

func imageProgress(progress func(adminclient.Event)) func(ctrd.Progress) {
	return func(p ctrd.Progress) {
		progress(adminclient.Event{Step: p.Step, Message: p.Ref, Done: p.Done, Total: p.Total, Bytes: true})
	}
}
