package daemon

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/daemon/machine"
	"github.com/barchan-dev/barchan/internal/node/baseimage"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/toolchain"
)

// imageStore keeps the images that sandboxes run, for the admin API.
type imageStore struct{ *Daemon }

func (s imageStore) client() (*ctrd.Client, error) {
	m, err := s.own()
	if err != nil {
		return nil, err
	}
	return m.Containers, nil
}

// receiver is the client for what puts more on the disk; while something is wrong, there is none.
func (s imageStore) receiver() (*ctrd.Client, error) {
	if err := s.health.Err(); err != nil {
		return nil, err
	}
	return s.client()
}

// List returns every image.
func (s imageStore) List(ctx context.Context) ([]adminclient.Image, error) {
	c, err := s.client()
	if err != nil {
		return nil, err
	}
	list, err := c.Images(ctx)
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
	c, err := s.receiver()
	if err != nil {
		return adminclient.Image{}, err
	}
	var creds ctrd.Credentials
	if req.Username != "" {
		creds = func(string) (string, string, error) { return req.Username, req.Password, nil }
	}
	img, err := c.Pull(ctx, req.Ref, creds, tellImage(progress))
	if err != nil {
		return adminclient.Image{}, err
	}
	s.recheck(ctx, img)
	return s.described(ctx, c, img)
}

// Import reads images from a tar.
func (s imageStore) Import(ctx context.Context, tar io.Reader, name string, progress func(adminclient.Event)) ([]adminclient.Image, error) {
	c, err := s.receiver()
	if err != nil {
		return nil, err
	}
	imported, err := c.Import(ctx, tar, 0, name, tellImage(progress))
	if err != nil {
		return nil, err
	}
	s.recheck(ctx, imported...)
	var out []adminclient.Image
	for _, img := range imported {
		described, err := s.described(ctx, c, img)
		if err != nil {
			return nil, err
		}
		out = append(out, described)
	}
	return out, nil
}

// recheck has the sandboxes that lack an image tried again now, and not when their turn comes.
// Members of pools that wait with what a name stood for before are deleted, and their pools make
// others. What is claimed keeps what it runs.
func (s imageStore) recheck(ctx context.Context, arrived ...ctrd.Image) {
	all, err := s.cache.Sandboxes(ctx, "")
	if err != nil {
		s.log.WarnContext(ctx, "sandboxes that wait for an image are not told of it", telemetry.Error, err)
	}
	for i := range all {
		x := &all[i]
		if _, lacks := sandbox.LacksImage(x); lacks {
			s.machine.Node.Recheck(sandbox.Ref{Namespace: x.Namespace, Name: x.Name, UID: x.UID})
		}
		if !outdated(x, arrived) {
			continue
		}
		asSeen := client.Preconditions{UID: &x.UID, ResourceVersion: &x.ResourceVersion} // claimed since then, it stays
		if err := s.cache.Live().Delete(ctx, x, asSeen); client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
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
// templates name is too, unless force says that they may pull it again or fail.
func (s imageStore) Remove(ctx context.Context, ref string, force bool) error {
	c, err := s.client()
	if err != nil {
		return err
	}
	users, err := s.imageUsers(ctx, c, ref)
	if err != nil {
		return err
	}
	if err := users.refusal(ref, force); err != nil {
		return err
	}
	return c.RemoveImage(ctx, ref)
}

// imageUsers finds what would miss an image of a name. What was made from it needs its content, which
// has other names perhaps; the rest goes by the name.
func (s imageStore) imageUsers(ctx context.Context, c *ctrd.Client, ref string) (imageUsers, error) {
	full, err := ctrd.Normalize(ref)
	if err != nil {
		return imageUsers{}, err
	}
	images, err := c.Images(ctx)
	if err != nil {
		return imageUsers{}, err
	}
	i := slices.IndexFunc(images, func(x ctrd.ImageInfo) bool { return x.Ref == full })
	if i < 0 {
		return imageUsers{}, nil // its removal says that it is not here
	}
	digest := images[i].Digest
	var running []sandbox.Ref
	var checkpoints []sandbox.CheckpointRef
	if !slices.ContainsFunc(images, func(x ctrd.ImageInfo) bool { return x.Ref != full && x.Digest == digest }) {
		if running, checkpoints, err = s.machine.Node.ImageUsers(ctx, digest); err != nil {
			return imageUsers{}, err
		}
	}
	objects, err := s.cache.Sandboxes(ctx, "")
	if err != nil {
		return imageUsers{}, err
	}
	templates, err := s.cache.Templates(ctx, "")
	if err != nil {
		return imageUsers{}, err
	}
	return newImageUsers(full, running, checkpoints, objects, templates), nil
}

// BuildBase makes the base image from the distribution's packages, or takes the one that was
// made before, and imports it.
func (s imageStore) BuildBase(ctx context.Context, req adminclient.BuildBaseRequest, progress func(adminclient.Event)) (adminclient.Image, error) {
	c, err := s.receiver()
	if err != nil {
		return adminclient.Image{}, err
	}
	cfg := baseimage.Config{Dir: filepath.Join(s.cfg.CacheDir, "images"), Ref: s.cfg.BaseImageRef, Rebuild: req.Force}
	if finder, err := machine.FinderOf(&s.cfg.Config); err == nil {
		cfg.Mmdebstrap, _ = finder.Find(toolchain.Mmdebstrap) // the build says what is missing, if it needs it
	}
	built, err := baseimage.Build(ctx, cfg, func(p baseimage.Progress) {
		progress(adminclient.Event{Step: p.Step, Done: int64(p.Percent), Total: 100})
	})
	if err != nil {
		return adminclient.Image{}, err
	}
	if have, err := c.Resolve(ctx, built.Ref); err == nil && have.Digest == built.Digest {
		return s.described(ctx, c, have)
	}
	if built.Warning != "" {
		s.log.WarnContext(ctx, "base image with Debian's Node.js", telemetry.Error, built.Warning)
	}
	tar, err := os.Open(built.Path)
	if err != nil {
		return adminclient.Image{}, fmt.Errorf("open the base image: %w", err)
	}
	defer func() { _ = tar.Close() }() // it was only read
	imported, err := c.Import(ctx, tar, built.Size, built.Ref, tellImage(progress))
	if err != nil {
		return adminclient.Image{}, err
	}
	s.recheck(ctx, imported...)
	return s.described(ctx, c, imported[0])
}

func (s imageStore) described(ctx context.Context, c *ctrd.Client, img ctrd.Image) (adminclient.Image, error) {
	list, err := c.Images(ctx)
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

func tellImage(progress func(adminclient.Event)) func(ctrd.Progress) {
	return func(p ctrd.Progress) {
		progress(adminclient.Event{Step: p.Step, Message: p.Ref, Done: p.Done, Total: p.Total, Bytes: true})
	}
}
