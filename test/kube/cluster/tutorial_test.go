package cluster

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubeinstall"
	"github.com/barchan-dev/barchan/internal/testkit/npm"
	"github.com/barchan-dev/barchan/internal/testkit/tutorial"
)

// TestTutorial does what the tutorial of clusters says, on an empty cluster.
func TestTutorial(t *testing.T) {
	b := &barchan{T: t, bin: kubeinstall.Build(t)}
	b.Cluster = kubecluster.Start(t, kubecluster.Config{Nodes: 1})
	b.ImportImage(t, kubecluster.WriteImage(t, kubecluster.Image{Name: shellImage, Files: shell(t)}))
	b.registry()
	path := b.bin + ":" + filepath.Dir(kubecluster.FindProgram(t, "kubectl")) + ":" + os.Getenv("PATH")
	home := t.TempDir() // no kubeconfig, and no passwords of registries
	modules := filepath.Join(npm.Package(t, "e2b@2.51.0"), "node_modules")
	tutorial.Follow(t, "../../../docs/tutorial-cluster.md", modules, func(ctx context.Context, name string, args ...string) *exec.Cmd {
		cmd := b.Command(ctx, name, args...)
		cmd.Env = append(cmd.Env, "HOME="+home, "PATH="+path, "REGISTRY="+registryAt+"/team", "IMAGE="+shellImage)
		return cmd
	})
}
