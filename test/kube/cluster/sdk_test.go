package cluster

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/barchan-dev/barchan/internal/node/baseimage"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubeinstall"
	"github.com/barchan-dev/barchan/internal/testkit/npm"
)

// TestSDK runs the suites of the unmodified SDK and CLI that a machine passes, with its image, but for what Pods cannot do. Mastra
// wants sandboxes that pause with their memory.
func TestSDK(t *testing.T) {
	b := &barchan{T: t, bin: kubeinstall.Build(t)}
	b.Cluster = kubecluster.Start(t, kubecluster.Config{Nodes: 1})
	image, err := baseimage.Build(t.Context(), baseimage.Config{}, func(baseimage.Progress) {})
	must(t, err)
	const name = "barchan.test/base:1" // the image's own ends with :latest, which kubelets pull always
	b.ImportImageAs(t, image.Path, name)
	b.registry()
	b.install("--registry", registryAt+"/team", "--template-image", name, "--runtime-class", kubecluster.RuntimeClassGVisor)
	suites := filepath.Join(kubeinstall.Root(t), "test", "e2e", "sdk")
	npm.Link(t, suites)
	url := b.replicas()[0]
	for _, suite := range []string{"main", "behaviour", "methods", "base", "computesdk", "cli"} {
		t.Run(suite, func(t *testing.T) {
			cmd := b.Command(t.Context(), "node", "--import", "./resolve.mjs", "--test", "--test-reporter", "spec", suite+".test.mjs")
			cmd.Dir = suites
			cmd.Env = append(os.Environ(), "E2B_API_KEY="+b.key, "E2B_API_URL="+url, "E2B_SANDBOX_URL="+url, "PODS=1", "AT_ONCE=8")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v\n%s\n%s", err, out, b.State(t))
			}
			t.Logf("%s", out)
		})
	}
}
