package e2e

import (
	"bytes"
	"encoding/base64"
	"image/color"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/guest/interpreter"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestInterpreter makes the code interpreter, and drives it by E2B's own package.
func TestInterpreter(t *testing.T) {
	t.Parallel()
	skipInFastBut(t, 1)
	installSDK(t)
	s := newServer(t)
	s.set("BARCHAN_POOL_SIZE", "1")
	s.set("BARCHAN_STORE_AFTER", "10ms")
	s.start()
	s.must("pool", "rm", "base") // its image is not built here
	began := time.Now()
	s.must("image", "build", interpreter.Image) // it has the time that a build takes
	t.Logf("the image is there after %s", time.Since(began).Round(time.Second))
	ref := strings.TrimSpace(s.data("image", "build", interpreter.Image))
	if !strings.HasPrefix(ref, interpreter.Repository+":") || strings.HasSuffix(ref, ":latest") {
		t.Errorf("the image is %q", ref)
	}
	c, template := s.client(), &extensions.SandboxTemplate{}
	key := client.ObjectKey{Namespace: "barchan-system", Name: interpreter.Template}
	pool := &extensions.SandboxWarmPool{}
	eventually.True(t, "the pool is full", func() bool {
		if err := c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: interpreter.Template}, pool); err != nil {
			t.Fatal(err)
		}
		return pool.Status.ReadyReplicas == 1
	})
	t.Logf("the pool is full after %s", time.Since(began).Round(time.Second))

	t.Run("tutorial", func(t *testing.T) { s.in(t).follow(t, "tutorial-interpreter") })
	t.Run("Go client", func(t *testing.T) { testGoInterpreter(t, s.in(t)) })
	t.Run("again", func(t *testing.T) {
		s := s.in(t)
		if err := c.Get(t.Context(), key, template); err != nil {
			t.Fatal(err)
		}
		before := template.ResourceVersion
		if again := strings.TrimSpace(s.data("image", "build", interpreter.Image)); again != ref {
			t.Errorf("the image is %s after %s", again, ref)
		}
		if err := c.Get(t.Context(), key, template); err != nil || template.ResourceVersion != before || template.Spec.PodTemplate.Spec.Containers[0].Image != ref {
			t.Errorf("the template changed: %+v, %v", template, err)
		}
	})
	t.Run("of another version", func(t *testing.T) {
		s := s.in(t)
		template.Spec.PodTemplate.Spec.Containers[0].Image = interpreter.Repository + ":older"
		if err := c.Update(t.Context(), template); err != nil {
			t.Fatal(err)
		}
		s.must("image", "build", interpreter.Image)
		if err := c.Get(t.Context(), key, template); err != nil || template.Spec.PodTemplate.Spec.Containers[0].Image != ref {
			t.Errorf("the template runs %s, %v", template.Spec.PodTemplate.Spec.Containers[0].Image, err)
		}
	})
	t.Run("the unmodified SDK", func(t *testing.T) {
		plot := filepath.Join(t.TempDir(), "plot.png")
		runSDK(t, "interpreter.test.mjs", append(s.in(t).clientEnv(), "PLOT="+plot, "BARCHAN="+s.bin))
		data, err := os.ReadFile(plot)
		if err != nil {
			t.Fatal(err)
		}
		img, err := png.Decode(bytes.NewReader(data))
		if err != nil || img.Bounds().Dx() < 300 {
			t.Fatalf("the plot is no picture: %v: %s", err, base64.StdEncoding.EncodeToString(data))
		}
		// Axes, text and a coloured mark: a blank picture has one colour.
		colours := map[color.Color]int{}
		for y := range img.Bounds().Dy() {
			for x := range img.Bounds().Dx() {
				colours[img.At(x, y)]++
			}
		}
		coloured := 0
		for c, n := range colours {
			if r, g, b, _ := c.RGBA(); max(r, g, b)-min(r, g, b) > 0x4000 {
				coloured += n
			}
		}
		if len(colours) < 10 || coloured < 200 {
			t.Errorf("the plot has %d colours, and %d coloured pixels: %s", len(colours), coloured, base64.StdEncoding.EncodeToString(data))
		}
	})
	s.untilNothingWrong()
}
