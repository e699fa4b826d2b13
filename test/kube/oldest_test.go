package kube

import (
	"os"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"

	"github.com/barchan-dev/barchan/internal/client/cluster"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
	"github.com/barchan-dev/barchan/internal/testkit/poolsuite"
)

// TestOldest: the oldest release of Kubernetes that we support takes all that an installation consists of, and the controllers
// work there.
func TestOldest(t *testing.T) {
	if part := os.Getenv("TEST_PART"); part != "" && part != "kube" {
		t.Skip("SKIPPED: make test-kube runs it")
	}
	cfg := oldest.start(t)
	info, err := discovery.NewDiscoveryClientForConfigOrDie(cfg).ServerVersion()
	if err != nil || info.Major != "1" || info.Minor != "32" {
		t.Fatalf("version %+v, %v", info, err)
	}
	t.Run("objects", func(t *testing.T) {
		objects, err := cluster.Render(cluster.Release{Namespace: cluster.DefaultNamespace, Version: "v1.0.0"}, cluster.Values{
			"image": "-", "agentImage": "-", "kubernetesTokens": true, "replica": cluster.Values{"autoscaling": cluster.Values{"enabled": true}},
		})
		if err != nil {
			t.Fatal(err)
		}
		client, err := kubeobjects.New(cfg, dynamic.NewForConfigOrDie(cfg), cluster.DefaultNamespace)
		if err != nil {
			t.Fatal(err)
		}
		namespace := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": cluster.DefaultNamespace}}}
		for _, u := range slices.Insert(objects, 0, namespace) {
			if _, err := client.Apply(t.Context(), u, kubeobjects.Options{Force: true}); err != nil {
				t.Errorf("apply %s: %v", kubeobjects.ID(u), err)
			}
		}
		t.Logf("%d objects", len(objects))
	})
	t.Run("pools", func(t *testing.T) { poolsuite.Run(t, poolsuite.Config{REST: cfg, Start: startPools}) })
	t.Run("claims", func(t *testing.T) { runClaims(t, cfg, false) })
}
