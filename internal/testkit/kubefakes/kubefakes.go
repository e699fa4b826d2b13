// Package kubefakes gives a cluster of package kubecluster nodes on which no Pod runs. kwok plays their kubelets, and makes a Pod
// ready in one write of its status. One server at the addresses of all Pods answers what controllers, replicas and gateways send to the
// agents in them. What is left is the work of the API server and of the controllers.
//
// An address may be another Pod's as soon as its Pod is gone, as on real nodes; and like a real agent, one of these ends its connections with
// its Pod, knows its token only once it has received it, and belongs to one sandbox. A test fails if an agent receives what is another's.
package kubefakes

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
)

const (
	// Nodes is how many nodes there are: node-0 and so on.
	Nodes = 10
	// AnnotationNotReady is of a node that kwok leaves not ready, whatever its value.
	AnnotationNotReady = "barchan.test/not-ready"
	// podCIDR has the addresses of Pods; all of them are this machine's, in the cluster's network namespace.
	podCIDR = "10.244.0.0/16"
)

//go:embed stages.yaml
var stages []byte

// Play gives a cluster ten nodes, and the Pods on them agents, until the test ends. It returns when the nodes are ready.
func Play(t testing.TB, c *kubecluster.Cluster) {
	t.Helper()
	if out, err := c.Command(t.Context(), "ip", "route", "add", "local", podCIDR, "dev", "lo").CombinedOutput(); err != nil {
		t.Fatalf("ip route: %v: %s", err, out)
	}
	serveAgents(t, c)
	config := filepath.Join(t.TempDir(), "stages.yaml")
	must(t, os.WriteFile(config, stages, 0o600))
	c.Run(t, kubecluster.FindProgram(t, "kwok"), "--kubeconfig="+c.Kubeconfig, "--config="+config, "--manage-all-nodes=true",
		"--cidr="+podCIDR, "--node-lease-duration-seconds=40", "--server-address=")
	for i := range Nodes {
		_, err := c.Client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%d", i)}}, metav1.CreateOptions{})
		must(t, err)
	}
	eventually.NoError(t, "nodes ready", func() error {
		list, err := c.Client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, n := range list.Items {
			if len(n.Spec.Taints) > 0 || n.Status.Allocatable.Pods().IsZero() {
				return fmt.Errorf("%s: taints %v, status %+v", n.Name, n.Spec.Taints, n.Status.Conditions)
			}
		}
		return nil
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
