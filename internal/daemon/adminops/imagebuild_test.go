package adminops

import (
	"errors"
	"slices"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/guest/interpreter"
)

func TestImagesThatAreBuilt(t *testing.T) {
	for image, want := range map[string]string{"": "a.test/base:1", adminclient.ImageBase: "a.test/base:1", interpreter.Image: interpreter.Repository + ":latest"} {
		cfg, err := imageConfig(adminclient.BuildImageRequest{Image: image, Force: true}, "a.test/base:1")
		if err != nil || cfg.Ref != want || !cfg.Rebuild {
			t.Errorf("%q: %+v, %v", image, cfg, err)
		}
		if code := slices.Contains(cfg.Packages, "python3-ipykernel"); code != (image == interpreter.Image) || code != (cfg.Files != nil) {
			t.Errorf("%q has packages %v and files %v", image, cfg.Packages, cfg.Files)
		}
	}
	if _, err := imageConfig(adminclient.BuildImageRequest{Image: "other"}, "a.test/base:1"); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("another image: %v, want ErrInvalid", err)
	}
}

func TestTagDiffersForEachContent(t *testing.T) {
	if a, b := tagOf("sha256:0123456789abcdef"), tagOf("sha256:1123456789abcdef"); a != "0123456789ab" || a == b {
		t.Errorf("tags %q and %q", a, b)
	}
}
