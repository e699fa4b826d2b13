package images

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

const (
	imageLayers = 10
	layerFiles  = 50 // of 1 MiB each
	imageBar    = 1.5
	imageName   = "bench.local/image:1"
)

// Import takes images of 500 MiB from a tar, as `docker save` makes one, and runs a program in a sandbox of each.
func Import(ctx context.Context, b *harness.Bench) error {
	dir, err := os.MkdirTemp(b.Server.Dir, "image-")
	if err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	archive, files := filepath.Join(dir, "image.tar"), filepath.Join(dir, "files")
	layers := imageLayers
	if b.Quick {
		layers /= 5
	}
	var bare, imports, firsts report.Samples
	for range b.Rounds(5) + 1 { // the first meets cold caches
		if err := writeImage(archive, filepath.Join(b.Server.Dir, "barchan-agent"), layers); err != nil {
			return err
		}
		began := time.Now()
		if err := untar(ctx, archive, files); err != nil {
			return err
		}
		bare = append(bare, report.Millis(time.Since(began)))
		if err := os.RemoveAll(files); err != nil {
			return err
		}
		began = time.Now()
		if _, err := b.Server.Command(ctx, "image", "import", archive); err != nil {
			return err
		}
		imports = append(imports, report.Millis(time.Since(began)))
		if _, err := b.Server.Command(ctx, "run", "--image", imageName, "--", "/program", "--version"); err != nil {
			return err
		}
		firsts = append(firsts, report.Millis(time.Since(began)))
		if _, err := b.Server.Command(ctx, "image", "rm", imageName); err != nil {
			return err
		}
	}
	const floor = "untar it and its layers"
	size := fmt.Sprintf("image of %d layers, %d MiB: ", layers, layers*layerFiles)
	untarred := bare[1:].At(0.5)
	b.Report.Add("image", size+"import", "ms", imports[1:]).Over(floor, untarred)
	b.Report.Add("image", size+"import, until a program has run in a sandbox", "ms", firsts[1:]).Over(floor, untarred).AtMost(imageBar * untarred)
	return nil
}

// writeImage writes a tar of an image whose layers no store has: random files, and a program in the first.
func writeImage(archive, program string, layers int) error {
	binary, err := os.ReadFile(program)
	if err != nil {
		return fmt.Errorf("read a program for the image: %w", err)
	}
	image := empty.Image
	for i := range layers {
		var content bytes.Buffer
		w := tar.NewWriter(&content)
		err := error(nil)
		if i == 0 {
			err = tarFile(w, "program", binary)
		}
		data := make([]byte, 1<<20)
		for j := range layerFiles {
			_, _ = rand.Read(data) // it never fails
			err = errors.Join(err, tarFile(w, fmt.Sprintf("layer-%d/file-%d", i, j), data))
		}
		if err := errors.Join(err, w.Close()); err != nil {
			return fmt.Errorf("write a layer: %w", err)
		}
		if image, err = mutate.AppendLayers(image, static.NewLayer(content.Bytes(), types.DockerUncompressedLayer)); err != nil {
			return fmt.Errorf("make image: %w", err)
		}
	}
	config, err := image.ConfigFile()
	if err != nil {
		return fmt.Errorf("make image: %w", err)
	}
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	if image, err = mutate.ConfigFile(image, config); err != nil {
		return fmt.Errorf("make image: %w", err)
	}
	tag, err := name.NewTag(imageName)
	if err != nil {
		return err
	}
	return tarball.WriteToFile(archive, tag, image)
}

func tarFile(w *tar.Writer, path string, content []byte) error {
	if err := w.WriteHeader(&tar.Header{Name: path, Mode: 0o755, Size: int64(len(content))}); err != nil {
		return err
	}
	_, err := w.Write(content)
	return err
}

// untar unpacks the tar of an image, and then its layers over one another, by tar(1).
func untar(ctx context.Context, archive, dir string) error {
	const script = `mkdir "$2" "$2/layers" "$2/root" && tar -xf "$1" -C "$2/layers" && for l in "$2"/layers/*.tar*; do tar -xf "$l" -C "$2/root" || exit; done`
	if out, err := exec.CommandContext(ctx, "sh", "-c", script, "sh", archive, dir).CombinedOutput(); err != nil {
		return fmt.Errorf("untar an image: %w: %s", err, out)
	}
	return nil
}
