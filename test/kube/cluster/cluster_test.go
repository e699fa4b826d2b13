package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	"sigs.k8s.io/yaml"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
)

const port = "8080"

// TestControlPlane: without a node, controllers delete the content of a namespace and what a deleted
// owner owned, and a program in the network namespace reaches the API server.
func TestControlPlane(t *testing.T) {
	began := time.Now()
	c := kubecluster.Start(t, kubecluster.Config{Install: func(cfg *rest.Config) { installKind(t, cfg) }})
	t.Logf("started in %v", time.Since(began))
	ctx := t.Context()

	maps := c.Client.CoreV1().ConfigMaps("default")
	owners := newDynamic(t, c.REST).Resource(schema.GroupVersionResource{Group: "barchan.test", Version: "v1", Resource: "owners"}).Namespace("default")
	owner, err := owners.Create(ctx, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "barchan.test/v1", "kind": "Owner", "metadata": map[string]any{"name": "owner"},
	}}, metav1.CreateOptions{})
	must(t, err)
	_, err = maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
		Name: "owned", OwnerReferences: []metav1.OwnerReference{{APIVersion: "barchan.test/v1", Kind: "Owner", Name: "owner", UID: owner.GetUID()}},
	}}, metav1.CreateOptions{})
	must(t, err)
	must(t, owners.Delete(ctx, "owner", metav1.DeleteOptions{}))
	awaitGone(t, "owned ConfigMap", func() error {
		_, err := maps.Get(ctx, "owned", metav1.GetOptions{})
		return err
	})
	t.Logf("collected after %v", time.Since(began))

	c.Namespace(t, "passing")
	must(t, c.Client.CoreV1().Namespaces().Delete(ctx, "passing", metav1.DeleteOptions{}))
	awaitGone(t, "namespace", func() error {
		_, err := c.Client.CoreV1().Namespaces().Get(ctx, "passing", metav1.GetOptions{})
		return err
	})

	out, err := c.Command(ctx, kubecluster.FindProgram(t, "kubectl"), "get", "namespaces", "-o", "name").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "namespace/kube-system") {
		t.Errorf("kubectl in the network namespace: %v\n%s", err, out)
	}
	t.Logf("done after %v", time.Since(began))
}

// installKind installs a CRD, and waits until the API server serves it.
func installKind(t *testing.T, cfg *rest.Config) {
	t.Helper()
	crd := map[string]any{}
	must(t, yaml.Unmarshal([]byte(`apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: owners.barchan.test}
spec:
  group: barchan.test
  names: {kind: Owner, plural: owners}
  scope: Namespaced
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}
`), &crd))
	crds := newDynamic(t, cfg).Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	_, err := crds.Create(t.Context(), &unstructured.Unstructured{Object: crd}, metav1.CreateOptions{})
	must(t, err)
	eventually.NoError(t, "CRD established", func() error {
		got, err := crds.Get(t.Context(), "owners.barchan.test", metav1.GetOptions{})
		if err != nil {
			return err
		}
		conditions, _, err := unstructured.NestedSlice(got.Object, "status", "conditions")
		for _, c := range conditions {
			if c, ok := c.(map[string]any); ok && c["type"] == "Established" && c["status"] == "True" {
				return nil
			}
		}
		return errors.Join(fmt.Errorf("conditions %v", conditions), err)
	})
}

func newDynamic(t *testing.T, cfg *rest.Config) dynamic.Interface {
	t.Helper()
	c, err := dynamic.NewForConfig(cfg)
	must(t, err)
	return c
}

// TestNode: a node runs Pods.
func TestNode(t *testing.T) {
	began := time.Now()
	before := readKernel(t)
	c := kubecluster.Start(t, kubecluster.Config{Nodes: 1})
	t.Logf("started in %v", time.Since(began))
	t.Run("runc", func(t *testing.T) { runs(t, c, newPod("runc", "")) })
	t.Run("gVisor", func(t *testing.T) { runs(t, c, newPod("gvisor", kubecluster.RuntimeClassGVisor)) })
	t.Run("volume", func(t *testing.T) { keeps(t, c) })
	t.Run("deployment", func(t *testing.T) { collects(t, c) })
	if after := readKernel(t); after != before {
		t.Errorf("settings of the machine's kernel changed:\n%s\nwere:\n%s", after, before)
	}
}

// readKernel reads settings that a kubelet changes.
func readKernel(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	for _, name := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward"} {
		b, err := os.ReadFile(filepath.Join("/proc/sys", name))
		must(t, err)
		fmt.Fprintf(&all, "%s %s", name, b)
	}
	return all.String()
}

// runs verifies that a Pod becomes ready, answers at its address, and serves exec and port-forward, and
// reaches the API server.
func runs(t *testing.T, c *kubecluster.Cluster, pod *corev1.Pod) {
	ctx := t.Context()
	pods := c.Client.CoreV1().Pods(pod.Namespace)
	began := time.Now()
	_, err := pods.Create(ctx, pod, metav1.CreateOptions{})
	must(t, err)
	pod = awaitReady(t, c, pod.Name)
	t.Logf("ready after %v", time.Since(began))

	client := &http.Client{Transport: &http.Transport{DialContext: c.Dial, DisableKeepAlives: true}}
	if got := get(t, client, "http://"+net.JoinHostPort(pod.Status.PodIP, port)); got != pod.Name {
		t.Errorf("the Pod's address answers %q, want %q", got, pod.Name)
	}
	if got := execute(t, c, pod.Name, nil, "/pod", "echo", "a", "b"); got != "a b\n" {
		t.Errorf("exec printed %q", got)
	}
	if got := execute(t, c, pod.Name, strings.NewReader("input"), "/pod", "cat"); got != "input" {
		t.Errorf("exec copied %q", got)
	}
	if got := execute(t, c, pod.Name, nil, "/pod", "api", "/version"); !strings.Contains(got, "gitVersion") {
		t.Errorf("the API server responds %q to the Pod", got)
	}
	if pod.Spec.RuntimeClassName == nil { // containerd connects in the Pod's namespace, where gVisor does not listen
		forwarded := forward(t, c, pod.Name)
		if got := get(t, http.DefaultClient, "http://"+forwarded); got != pod.Name {
			t.Errorf("the forwarded port answers %q, want %q", got, pod.Name)
		}
	}
	must(t, pods.Delete(ctx, pod.Name, metav1.DeleteOptions{}))
	awaitGone(t, "Pod", func() error {
		_, err := pods.Get(ctx, pod.Name, metav1.GetOptions{})
		return err
	})
	t.Logf("gone after %v", time.Since(began))
}

// keeps verifies that a PersistentVolumeClaim gets a volume that a Pod can mount.
func keeps(t *testing.T, c *kubecluster.Cluster) {
	ctx := t.Context()
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "data"},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Mi")}},
		},
	}
	_, err := c.Client.CoreV1().PersistentVolumeClaims("default").Create(ctx, claim, metav1.CreateOptions{})
	must(t, err)
	pod := newPod("volume", "")
	pod.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
		PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim.Name},
	}}}
	pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/data"}}
	_, err = c.Client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{})
	must(t, err)
	awaitReady(t, c, pod.Name)
}

// collects verifies that the Pods of a deleted Deployment are deleted.
func collects(t *testing.T, c *kubecluster.Cluster) {
	ctx := t.Context()
	labels := map[string]string{"app": "web"}
	replicas := int32(2)
	deployments := c.Client.AppsV1().Deployments("default")
	_, err := deployments.Create(ctx, &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: newPod("", "").Spec},
		},
	}, metav1.CreateOptions{})
	must(t, err)
	eventually.NoError(t, "Deployment ready", func() error {
		d, err := deployments.Get(ctx, "web", metav1.GetOptions{})
		if err == nil && d.Status.ReadyReplicas != replicas {
			err = fmt.Errorf("status %+v", d.Status)
		}
		return err
	})
	must(t, deployments.Delete(ctx, "web", metav1.DeleteOptions{}))
	eventually.NoError(t, "Pods collected", func() error {
		list, err := c.Client.CoreV1().Pods("default").List(ctx, metav1.ListOptions{LabelSelector: "app=web"})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("%d Pods are left", len(list.Items))
		}
		return err
	})
}

// newPod is a Pod that answers HTTP.
func newPod(name, runtimeClass string) *corev1.Pod {
	grace := int64(1)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			Containers: []corev1.Container{{
				Name: "main", Image: kubecluster.PodImage, Args: []string{"serve", ":" + port},
				ReadinessProbe: &corev1.Probe{
					PeriodSeconds: 1, ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/", Port: intstr.Parse(port)}},
				},
			}},
		},
	}
	if runtimeClass != "" {
		pod.Spec.RuntimeClassName = &runtimeClass
	}
	return pod
}

func awaitReady(t *testing.T, c *kubecluster.Cluster, name string) (pod *corev1.Pod) {
	t.Helper()
	eventually.NoError(t, "Pod "+name+" ready", func() (err error) {
		if pod, err = c.Client.CoreV1().Pods("default").Get(t.Context(), name, metav1.GetOptions{}); err != nil {
			return err
		}
		for _, condition := range pod.Status.Conditions {
			if condition.Type == corev1.PodReady && condition.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("status %+v, events %v", pod.Status, events(t, c, name))
	})
	return pod
}

func events(t *testing.T, c *kubecluster.Cluster, name string) (all []string) {
	t.Helper()
	list, err := c.Client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + name})
	if err != nil {
		return []string{err.Error()}
	}
	for _, e := range list.Items {
		all = append(all, e.Reason+": "+e.Message)
	}
	return all
}

func awaitGone(t *testing.T, what string, get func() error) {
	t.Helper()
	eventually.NoError(t, what+" gone", func() error {
		err := get()
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(errors.New("it is still there"), err)
	})
}

func get(t *testing.T, client *http.Client, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	must(t, err)
	resp, err := client.Do(req)
	must(t, err)
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	must(t, err)
	return strings.TrimSpace(string(b))
}

// execute runs a command in a Pod and returns what it prints.
func execute(t *testing.T, c *kubecluster.Cluster, pod string, stdin io.Reader, command ...string) string {
	t.Helper()
	url := c.Client.CoreV1().RESTClient().Post().Resource("pods").Namespace("default").Name(pod).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Command: command, Stdin: stdin != nil, Stdout: true, Stderr: true}, scheme.ParameterCodec).URL()
	executor, err := remotecommand.NewWebSocketExecutor(c.REST, http.MethodGet, url.String())
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	var out, errors bytes.Buffer
	if err := executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: stdin, Stdout: &out, Stderr: &errors}); err != nil {
		t.Fatalf("exec: %v: %s", err, errors.String())
	}
	return out.String()
}

// forward forwards a free port of the loopback device to a Pod until the test ends.
func forward(t *testing.T, c *kubecluster.Cluster, pod string) (address string) {
	t.Helper()
	transport, upgrader, err := spdy.RoundTripperFor(c.REST)
	must(t, err)
	url := c.Client.CoreV1().RESTClient().Post().Resource("pods").Namespace("default").Name(pod).SubResource("portforward").URL()
	stop, ready := make(chan struct{}), make(chan struct{})
	dialer := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, url)
	f, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, []string{"0:" + port}, stop, ready, io.Discard, io.Discard)
	must(t, err)
	ended := make(chan error, 1)
	go func() { ended <- f.ForwardPorts() }()
	t.Cleanup(func() {
		close(stop)
		must(t, <-ended)
	})
	select {
	case <-ready:
	case err := <-ended:
		ended <- nil
		t.Fatalf("port-forward: %v", err)
	case <-time.After(eventually.Patience):
		t.Fatal("port-forward is not ready")
	}
	ports, err := f.GetPorts()
	must(t, err)
	return fmt.Sprintf("127.0.0.1:%d", ports[0].Local)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
