package cluster

import (
	"bytes"
	"net/url"
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/barchan-dev/barchan/internal/client/cluster"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubeinstall"
)

// TestHelm has the real Helm install, upgrade, roll back and uninstall the chart, on a control plane without a node.
func TestHelm(t *testing.T) {
	b := &barchan{T: t, bin: kubeinstall.Build(t)}
	b.Cluster = kubecluster.Start(t, kubecluster.Config{})
	chart := strings.TrimSpace(b.cluster("chart", t.TempDir()))
	set := "image=r.test/barchan:1,agentImage=r.test/agent:1"
	b.sameObjects(chart, set+",tokenSecret=mine,replica.autoscaling.enabled=true,serviceMonitor.enabled=true,prometheusRule.enabled=true,grafanaDashboard.enabled=true,sandbox.runtimeClass=gvisor,controller.name=other")

	b.helm("install", "barchan", chart, "--namespace", system, "--create-namespace", "--set", set)
	secret := func() string {
		return b.kubectl("get", "secret", "-n", system, "barchan-token", "-o", "jsonpath={.data.token-secret}")
	}
	replicas := func() string {
		return b.kubectl("get", "deployment", "-n", system, "barchan-replica", "-o", "jsonpath={.spec.replicas}")
	}
	before := secret()
	if len(before) != 44 { // 32 bytes in base64
		t.Errorf("the token's secret has %d characters", len(before))
	}
	if out, err := b.tryCluster("install", "--set", set); err == nil || !strings.Contains(out, "belongs to the Helm release barchan of namespace "+system) {
		t.Errorf("barchan cluster install over Helm's: %v\n%s", err, out)
	}
	b.knowsHelm()
	b.helm("upgrade", "barchan", chart, "--namespace", system, "--set", set+",replica.replicas=3")
	if got := replicas(); got != "3" {
		t.Errorf("%s replicas after the upgrade", got)
	}
	b.helm("rollback", "barchan", "1", "--namespace", system)
	if got := replicas(); got != "2" {
		t.Errorf("%s replicas after the rollback", got)
	}
	b.helm("uninstall", "barchan", "--namespace", system)
	if got := b.kubectl("get", "deployments", "-n", system, "-o", "name"); got != "" {
		t.Errorf("left: %s", got)
	}
	if secret() != before {
		t.Error("upgrade, rollback or uninstallation changed the token's secret")
	}
	b.kubectl("get", "crd", "sandboxes.agents.x-k8s.io", "sandboxtemplates.extensions.agents.x-k8s.io")
	for field, want := range map[string]string{"sandbox.spec.shutdownTime": "when the sandbox ends", "sandboxtemplate.spec.barchan.aliases": "further names"} {
		if out := b.kubectl("explain", field); !strings.Contains(out, want) {
			t.Errorf("kubectl explain %s has no %q:\n%s", field, want, out)
		}
	}
	// Helm takes up what it has kept.
	b.helm("install", "barchan", chart, "--namespace", system, "--set", set)
	if secret() != before {
		t.Error("a second installation changed the token's secret")
	}
}

// knowsHelm: the commands tell that Helm has made the installation.
func (b *barchan) knowsHelm() {
	b.Helper()
	if out := b.cluster("status"); !strings.Contains(out, ", by Helm") || !strings.Contains(out, "0 of 2 ready") {
		b.Errorf("status of Helm's installation:\n%s", out)
	}
	if out, err := b.tryCluster("doctor"); err == nil || !strings.Contains(out, "in namespace "+system+", by Helm") || !strings.Contains(out, "barchan-replica") {
		b.Errorf("doctor of Helm's installation, whose Pods have no node: %v\n%s", err, out)
	}
	if out, err := b.tryCluster("purge", "--yes"); err == nil || !strings.Contains(out, "is by Helm, which must remove it") {
		b.Errorf("a purge of Helm's installation: %v\n%s", err, out)
	}
}

// helmTest runs the Pod that `helm test` runs. There is no kube-proxy: the name of the Service is that of a replica to it.
func (b *barchan) helmTest() {
	chart := strings.TrimSpace(b.cluster("chart", b.TempDir()))
	image := b.kubectl("get", "deployment", "-n", system, "barchan-replica", "-o", "jsonpath={.spec.template.spec.containers[0].image}")
	objects := b.decode(b.helm("template", "barchan", chart, "--namespace", system, "--show-only", "templates/tests.yaml", "--set", "replica.service.port=7700,agentImage=none,image="+image))
	pod := objects[system+"/Pod/barchan-test"]
	address, err := url.Parse(b.replicas()[0])
	must(b.T, err)
	must(b.T, unstructured.SetNestedSlice(pod.Object, []any{map[string]any{"ip": address.Hostname(), "hostnames": []any{"barchan." + system + ".svc.cluster.local"}}}, "spec", "hostAliases"))
	text, err := yaml.Marshal(pod.Object)
	must(b.T, err)
	b.apply(string(text))
	b.kubectl("wait", "-n", system, "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s", "pod/"+pod.GetName())
	b.kubectl("delete", "-n", system, "pod", pod.GetName())
}

func (b *barchan) helm(args ...string) []byte {
	b.Helper()
	cmd := b.Command(b.Context(), kubecluster.FindProgram(b, "helm"), args...)
	home := b.TempDir()
	cmd.Env = append(cmd.Env, "HOME="+home, "XDG_CACHE_HOME="+home, "XDG_CONFIG_HOME="+home, "XDG_DATA_HOME="+home)
	var messages bytes.Buffer
	cmd.Stderr = &messages
	out, err := cmd.Output()
	if err != nil {
		b.Fatalf("helm %s: %v\n%s%s", strings.Join(args, " "), err, out, messages.Bytes())
	}
	return out
}

// sameObjects verifies that our program renders the chart as Helm does. It adds the namespace, which Helm makes by a flag.
func (b *barchan) sameObjects(chart, set string) {
	b.Helper()
	theirs := b.decode(b.helm("template", "barchan", chart, "--namespace", system, "--no-hooks", "--set", set))
	ours := b.decode([]byte(b.cluster("manifests", "--set", set)))
	for id, u := range theirs {
		if !reflect.DeepEqual(ours[id], u) {
			b.Errorf("%s is\n%v\nand by Helm\n%v", id, ours[id], u)
		}
		delete(ours, id)
	}
	delete(ours, kubeobjects.ID(cluster.Namespace(system)))
	for id := range ours {
		b.Errorf("Helm has no %s", id)
	}
	if len(theirs) < 20 {
		b.Errorf("Helm has %d objects", len(theirs))
	}
}

// decode returns objects without the label of who has rendered them.
func (b *barchan) decode(text []byte) map[string]*unstructured.Unstructured {
	b.Helper()
	text = bytes.ReplaceAll(text, []byte("app.kubernetes.io/managed-by: Helm"), []byte("app.kubernetes.io/managed-by: barchan"))
	list, err := kubeobjects.Decode(bytes.NewReader(text))
	if err != nil {
		b.Fatalf("%v in\n%s", err, text)
	}
	objects := map[string]*unstructured.Unstructured{}
	for _, u := range list {
		objects[kubeobjects.ID(u)] = u
	}
	return objects
}
