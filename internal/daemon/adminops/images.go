package adminops

import (
	"context"
	"fmt"
	"io"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
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
	list, err := p.Machine.Containers.Images(ctx)
	if err != nil {
		return nil, err
	}
	out := make([]adminclient.Image, len(list))
	for i, x := range list {
		out[i] = adminclient.Image{Ref: x.Ref, Digest: x.Digest, Size: x.Size, CreatedAt: x.Created}
	}
	return out, nil
}

// Pull fetches an image from its registry.
func (s imageStore) Pull(ctx context.Context, req adminclient.PullRequest, progress func(adminclient.Event)) (adminclient.Image, error) {
	p, err := s.receiver(ctx)
	if err != nil {
		return adminclient.Image{}, err
	}
	var creds ctrd.Credentials
	if req.Username != "" {
		creds = func(string) (string, string, error) { return req.Username, req.Password, nil }
	}
	img, err := p.Machine.Containers.Pull(ctx, req.Ref, creds, imageProgress(progress))
	if err != nil {
		return adminclient.Image{}, err
	}
	s.recheck(ctx, p, img)
	return s.described(ctx, p, img)
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
		described, err := s.described(ctx, p, img)
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
	users, err := s.imageUsers(ctx, p, ref)
	if err != nil {
		return err
	}
	if err := users.refusal(ref, force); err != nil {
		return err
	}
	return p.Machine.Containers.RemoveImage(ctx, ref)
}

// imageUsers finds what would miss an image of a name. What was made from it needs its content, which
// has other names perhaps; the rest goes by the name.
func (s imageStore) imageUsers(ctx context.Context, p Parts, ref string) (imageUsers, error) {
	full, err := ctrd.Normalize(ref)
	if err != nil {
		return imageUsers{}, err
	}
	images, err := p.Machine.Containers.Images(ctx)
	if err != nil {
		return imageUsers{}, err
	}
	i := slices.IndexFunc(images, func(x ctrd.ImageInfo) bool { return x.Ref == full })
	if i < 0 {
		return imageUsers{}, nil // its removal returns that it does not exist
	}
	digest := images[i].Digest
	var running []sandbox.Ref
	var checkpoints []sandbox.CheckpointRef
	if !slices.ContainsFunc(images, func(x ctrd.ImageInfo) bool { return x.Ref != full && x.Digest == digest }) {
		if running, checkpoints, err = p.Machine.Node.ImageUsers(ctx, digest); err != nil {
			return imageUsers{}, err
		}
	}
	var objects agents.SandboxList
	if err := p.Cache.Live().List(ctx, &objects); err != nil { // the cache may lack a deletion of a moment ago
		return imageUsers{}, fmt.Errorf("list sandboxes: %w", err)
	}
	templates, err := p.Cache.Templates(ctx, "")
	if err != nil {
		return imageUsers{}, err
	}
	return newImageUsers(full, running, checkpoints, objects.Items, templates), nil
}

func (s imageStore) described(ctx context.Context, p Parts, img ctrd.Image) (adminclient.Image, error) {
	list, err := p.Machine.Containers.Images(ctx)
	if err != nil {
		return adminclient.Image{}, err
	}
	for _, x := range list {
		if x.Ref == img.Ref {
			return adminclient.Image{Ref: x.Ref, Digest: x.Digest, Size: x.Size, CreatedAt: x.Created}, nil
		}
	}
	return adminclient.Image{Ref: img.Ref, Digest: img.Digest}, nil
}

func imageProgress(progress func(adminclient.Event)) func(ctrd.Progress) {
	return func(p ctrd.Progress) {
		progress(adminclient.Event{Step: p.Step, Message: p.Ref, Done: p.Done, Total: p.Total, Bytes: true})
	}
}
