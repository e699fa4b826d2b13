package adminops

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/daemon/defaults"
	"github.com/barchan-dev/barchan/internal/daemon/machine"
	"github.com/barchan-dev/barchan/internal/guest/interpreter"
	"github.com/barchan-dev/barchan/internal/node/baseimage"
	"github.com/barchan-dev/barchan/internal/node/toolchain"
)

// BuildImage makes an image from the distribution's packages, or takes the one that was made before, and imports it. With the
// interpreter's image it makes the template and a pool, or has them use the image.
func (s imageStore) BuildImage(ctx context.Context, req adminclient.BuildImageRequest, progress func(adminclient.Event)) (adminclient.Image, error) {
	cfg, err := imageConfig(req, s.cfg.Config.BaseImageRef)
	if err != nil {
		return adminclient.Image{}, err
	}
	p, err := s.receiver(ctx)
	if err != nil {
		return adminclient.Image{}, err
	}
	cfg.Dir = filepath.Join(s.cfg.Config.CacheDir, "images")
	if finder, err := machine.FinderOf(s.cfg.Config); err == nil {
		cfg.Mmdebstrap, _ = finder.Find(toolchain.Mmdebstrap) // the build reports it if needed
	}
	built, err := baseimage.Build(ctx, cfg, func(p baseimage.Progress) {
		progress(adminclient.Event{Step: p.Step, Done: int64(p.Percent), Total: 100})
	})
	if err != nil {
		return adminclient.Image{}, err
	}
	if built.Warning != "" {
		s.log.WarnContext(ctx, "image with Debian's Node.js", telemetry.Image, built.Ref, telemetry.Error, built.Warning)
	}
	if req.Image != adminclient.ImageInterpreter {
		return s.importBuilt(ctx, p, built, built.Ref, progress)
	}
	img, err := s.importBuilt(ctx, p, built, interpreter.Repository+":"+tagOf(built.Digest), progress)
	if err != nil {
		return adminclient.Image{}, err
	}
	progress(adminclient.Event{Step: "make template " + interpreter.Template, Done: 100, Total: 100})
	if err := defaults.MakeInterpreter(ctx, s.cfg.Config, p.Cache.Live(), img.Ref); err != nil {
		return adminclient.Image{}, fmt.Errorf("image %s is there; make its template and pool: %w", img.Ref, err)
	}
	return img, nil
}

// imageConfig returns how a requested image is built.
func imageConfig(req adminclient.BuildImageRequest, baseRef string) (baseimage.Config, error) {
	cfg := baseimage.Config{Name: cmp.Or(req.Image, adminclient.ImageBase), Rebuild: req.Force}
	switch cfg.Name {
	case adminclient.ImageBase:
		cfg.Ref = baseRef
	case adminclient.ImageInterpreter:
		cfg.Ref, cfg.Files = interpreter.Repository+":latest", interpreter.Files()
		cfg.Packages = append(baseimage.DefaultPackages(), interpreter.Packages()...)
	default:
		return baseimage.Config{}, errs.Public(errs.ErrInvalid, fmt.Sprintf("image: %q is neither %s nor %s", req.Image, adminclient.ImageBase, adminclient.ImageInterpreter))
	}
	return cfg, nil
}

// tagOf returns a tag that differs for each content: members of a pool start from memory of the image that their template
// names, so that another image needs another name.
func tagOf(digest string) string {
	_, hex, _ := strings.Cut(digest, ":")
	return hex[:min(12, len(hex))]
}

// importBuilt puts a built image among the others, unless it is there.
func (s imageStore) importBuilt(ctx context.Context, p Parts, built baseimage.Result, ref string, progress func(adminclient.Event)) (adminclient.Image, error) {
	if have, err := p.Machine.Containers.Resolve(ctx, ref); err == nil && have.Digest == built.Digest {
		return s.described(ctx, have)
	}
	tar, err := os.Open(built.Path)
	if err != nil {
		return adminclient.Image{}, fmt.Errorf("open the built image: %w", err)
	}
	defer func() { _ = tar.Close() }() // it was only read
	imported, err := p.Machine.Containers.Import(ctx, tar, built.Size, ref, imageProgress(progress))
	if err != nil {
		return adminclient.Image{}, err
	}
	s.recheck(ctx, p, imported...)
	return s.described(ctx, imported[0])
}
