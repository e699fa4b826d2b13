package cluster

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubeinstall"
)

// TestTwoNodes has sandboxes on two nodes be reached by replicas on either, and then one node lose its power: with the leader, a replica and a
// claimed sandbox.
func TestTwoNodes(t *testing.T) {
	b := &barchan{T: t, bin: kubeinstall.Build(t)}
	b.Cluster = kubecluster.Start(t, kubecluster.Config{Nodes: 2})
	b.ImportImage(t, kubecluster.WriteImage(t, kubecluster.Image{Name: shellImage, Files: shell(t)}))
	b.registry()
	b.install("--registry", registryAt+"/team", "--template-image", shellImage)
	kept, lost := kubecluster.NodeName(1), kubecluster.NodeName(2)
	for _, role := range []string{"controller", "replica"} {
		if out := b.kubectl("get", "pods", "-n", system, "-l", "app.kubernetes.io/name=barchan-"+role, "-o", "jsonpath={.items[*].spec.nodeName}"); !strings.Contains(out, kept) || !strings.Contains(out, lost) {
			t.Fatalf("the Pods of the %s are on %s", role, out)
		}
	}
	replicas := map[string]string{kept: b.replicaOn(kept), lost: b.replicaOn(lost)}
	b.apply(`
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: base, namespace: default}
spec: {replicas: 4, sandboxTemplateRef: {name: base}, barchan: {templateNamespace: ` + system + `}}
`)
	b.kubectl("wait", "--for=jsonpath={.status.readyReplicas}=4", "--timeout=60s", "sandboxwarmpool/base")
	sandboxes := map[string]string{kept: b.sandboxOn(kept), lost: b.sandboxOn(lost)}
	for node, id := range sandboxes {
		for at, url := range replicas {
			if err := b.runs(url, id); err != nil {
				t.Errorf("a sandbox on %s by the replica on %s: %v", node, at, err)
			}
		}
	}
	b.leadOn(lost)

	began := time.Now()
	b.PowerOff(t, lost)
	if err := b.runs(replicas[kept], sandboxes[kept]); err != nil {
		t.Errorf("a sandbox on %s after %s lost its power: %v", kept, lost, err)
	}
	b.kubectl("wait", "--for=condition=Ready=Unknown", "--timeout=120s", "node/"+lost)
	t.Logf("the node is unknown after %v", time.Since(began))
	eventually.True(t, "another leads", func() bool { return b.leaderNode() == kept })
	name := b.nameOf(sandboxes[lost])
	b.kubectl("wait", "--for=condition=Ready=false", "--timeout=60s", "sandbox/"+name)
	t.Logf("the lost sandbox: %s", b.kubectl("get", "sandbox", name, "-o", "jsonpath={.status.conditions[?(@.type=='Ready')]}"))
	for range 6 { // more than the pool has on the lost node
		if id := b.create(replicas[kept]); b.nodeOf(id) != kept {
			t.Errorf("a create got a sandbox on the lost node: %s", id)
		} else if err := b.runs(replicas[kept], id); err != nil {
			t.Errorf("a sandbox created after the loss: %v", err)
		}
	}
	// What an administrator does who knows that the machine is off: https://kubernetes.io/docs/concepts/cluster-administration/node-shutdown/#non-graceful-node-shutdown
	b.kubectl("taint", "node", lost, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")
	eventually.True(t, "the lost sandbox has a Pod elsewhere", func() bool { return b.nodeOf(sandboxes[lost]) == kept })
	b.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "sandbox/"+name)
	if err := b.runs(replicas[kept], sandboxes[lost]); err != nil {
		t.Errorf("the lost sandbox in its new Pod: %v", err)
	}
	b.kubectl("wait", "--for=jsonpath={.status.readyReplicas}=4", "--timeout=60s", "sandboxwarmpool/base")
	t.Logf("all is whole after %v", time.Since(began))
}

// replicaOn returns the URL of the replica on a node.
func (b *barchan) replicaOn(node string) string {
	b.Helper()
	address := b.kubectl("get", "pods", "-n", system, "-l", "app.kubernetes.io/name=barchan-replica", "--field-selector=spec.nodeName="+node, "-o", "jsonpath={.items[0].status.podIP}")
	return "http://" + address + ":7700"
}

// create returns the ID of a new sandbox of the default template.
func (b *barchan) create(url string) string {
	b.Helper()
	return strings.TrimSpace(b.sdkAt(url, url, "import { Sandbox } from 'e2b'\nconsole.log((await Sandbox.create({ timeoutMs: 1_800_000 })).sandboxId)"))
}

// runs runs a command in a sandbox.
func (b *barchan) runs(url, id string) error {
	b.Helper()
	out, err := b.trySDK(url, url, "import { Sandbox } from 'e2b'\nconsole.log((await (await Sandbox.connect('"+id+"', { timeoutMs: 1_800_000 })).commands.run('echo $((6*7))')).stdout.trim())")
	if err == nil && out != "42\n" {
		err = errors.New("not what the command prints")
	}
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// nameOf returns the name of the Sandbox with an ID.
func (b *barchan) nameOf(id string) string {
	b.Helper()
	return b.kubectl("get", "sandboxes", "-o", "jsonpath={.items[?(@.status.barchan.id=='"+id+"')].metadata.name}")
}

// nodeOf returns the node of a sandbox's Pod.
func (b *barchan) nodeOf(id string) string {
	b.Helper()
	return b.kubectl("get", "pods", "--ignore-not-found", b.nameOf(id), "-o", "jsonpath={.spec.nodeName}")
}

// sandboxOn returns the ID of a new sandbox on a node.
func (b *barchan) sandboxOn(node string) string {
	b.Helper()
	for range 8 {
		if id := b.create(b.replicas()[0]); b.nodeOf(id) == node {
			return id
		}
	}
	b.Fatalf("no sandbox comes to %s", node)
	return ""
}

// leaderNode returns the node of the controller that leads.
func (b *barchan) leaderNode() string {
	b.Helper()
	leader := b.kubectl("get", "lease", "-n", system, "barchan-controller", "-o", "jsonpath={.spec.holderIdentity}")
	return b.kubectl("get", "pods", "-n", system, "--field-selector=metadata.name="+leader, "-o", "jsonpath={.items[*].spec.nodeName}")
}

// leadOn has the controller on a node lead: any other that does is deleted until then.
func (b *barchan) leadOn(node string) {
	b.Helper()
	for b.leaderNode() != node {
		leader := b.kubectl("get", "lease", "-n", system, "barchan-controller", "-o", "jsonpath={.spec.holderIdentity}")
		b.kubectl("delete", "pod", "-n", system, leader, "--wait=true")
		b.kubectl("rollout", "status", "deployment/barchan-controller", "-n", system, "--timeout=60s")
		eventually.True(b, "one leads", func() bool { return b.leaderNode() != "" })
	}
}
