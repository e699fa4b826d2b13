package kubecluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"text/template"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const (
	// RuntimeClassGVisor is the RuntimeClass of Pods that gVisor isolates; runc is the default.
	RuntimeClassGVisor = "gvisor"

	// volumePlugins is in a directory that is the cluster's own.
	volumePlugins = "/var/lib/kubelet/volume-plugins"
)

// nodePrograms are what a node needs besides the control plane's programs, and runc.
var nodePrograms = []string{
	"kubelet", "containerd-cri", "containerd-shim-runc-v2", "containerd-shim-runsc-v1", "runsc", "cni-bridge", "cni-host-local", "cni-loopback", "coredns",
}

// node is a kubelet with its containerd.
type node struct {
	machine
	name, podCIDR string
	cgroup        string // parent of those of Pods, in each hierarchy
	kubeconfig    string
	containerd    *ctrd.Client
}

// NodeName is the name of a node; the first is 1. That one runs on the machine of the control plane.
func NodeName(n int) string { return fmt.Sprintf("node-%d", n) }

func (n *node) containerdSocket() string { return filepath.Join(n.dir, "containerd.sock") }

// startNodes starts the nodes, and the cluster's DNS on the first.
func (c *Cluster) startNodes(t testing.TB, count int) error {
	t.Helper()
	cgroup := "/" + filepath.Base(c.dir)
	// Run after all programs have ended.
	c.undo = append(undo{c.undo[0], func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), stopTime)
		defer cancel()
		return cgroups.RemoveIdle(ctx, cgroup)
	}}, c.undo[1:]...)
	for i := range count {
		n := &node{machine: c.machine, name: NodeName(i + 1), podCIDR: fmt.Sprintf("10.244.%d.0/24", i), cgroup: cgroup}
		if i > 0 {
			n.cgroup = filepath.Join(cgroup, n.name)
			if err := c.addMachine(t.Context(), n, fmt.Sprintf("172.30.0.%d", i+1)); err != nil {
				return fmt.Errorf("machine of %s: %w", n.name, err)
			}
		}
		c.nodes = append(c.nodes, n)
		if err := c.startNode(t, n); err != nil {
			return fmt.Errorf("%s: %w", n.name, err)
		}
	}
	if err := os.WriteFile(filepath.Join(c.dir, "Corefile"), []byte(".:53 {\n\terrors\n\tkubernetes cluster.local {\n\t\tkubeconfig "+c.Kubeconfig+"\n\t}\n}\n"), 0o600); err != nil {
		return err
	}
	_, err := c.run(c.machine, "coredns", "-quiet", "-conf", filepath.Join(c.dir, "Corefile"))
	return err
}

// startNode starts containerd, gives it the image of Pods, and starts the kubelet.
func (c *Cluster) startNode(t testing.TB, n *node) (err error) {
	t.Helper()
	if err := makeCgroups(n.cgroup); err != nil {
		return err
	}
	user := "system:node:" + n.name
	if n.kubeconfig, err = c.writeKubeconfig(n.dir, user, "system:nodes"); err != nil {
		return err
	}
	if err := c.writeNodeFiles(n, user); err != nil {
		return err
	}
	if _, err := c.run(n.machine, "containerd-cri", "--config", filepath.Join(n.dir, "containerd.toml")); err != nil {
		return err
	}
	n.containerd, err = ctrd.NewClient(ctrd.Config{Address: n.containerdSocket(), Namespace: "k8s.io", CallTimeout: startTime})
	if err != nil {
		return err
	}
	c.undo.add(n.containerd.Close)
	n.importImage(t, WriteImage(t, Image{
		Name: PodImage, Files: map[string]string{"/pod": filepath.Join(c.dir, "pod")},
		Config: ocispec.ImageConfig{Entrypoint: []string{"/pod"}, Env: []string{"PATH=/"}},
	}), "")
	_, err = c.run(n.machine, "kubelet", "--config="+filepath.Join(n.dir, "kubelet.yaml"), "--kubeconfig="+n.kubeconfig,
		"--hostname-override="+n.name, "--node-ip="+n.address, "--root-dir=/var/lib/kubelet", "--cert-dir=/var/lib/kubelet/pki")
	return err
}

// makeCgroups makes a cgroup in each hierarchy.
func makeCgroups(path string) error {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if len(f) < 3 || !strings.HasPrefix(f[2], "cgroup") || !strings.HasPrefix(f[1], "/sys/fs/cgroup") {
			continue
		}
		if err := os.Mkdir(filepath.Join(f[1], path), 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("make cgroup: %w", err)
		}
	}
	return nil
}

// nodeFiles are the files of a node below the cluster's directory.
var nodeFiles = map[string]string{
	"containerd.toml": `version = 4
root = "/var/lib/containerd"
state = "/run/containerd"
imports = []
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.tracing"]
[plugins.'io.containerd.server.v1.grpc']
address = "{{.Dir}}/containerd.sock"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{{.Image}}"
[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["{{.Dir}}/cni/bin"]
conf_dir = "{{.Dir}}/cni/conf"
[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = "runc"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runsc]
runtime_type = "io.containerd.runsc.v1"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runsc.options]
TypeUrl = "io.containerd.runsc.v1.options"
ConfigPath = "{{.Dir}}/runsc.toml"
`,
	"runsc.toml": `binary_name = "{{.Dir}}/bin/runsc"
[runsc_config]
platform = "systrap"
allow-suid = "true"
`,
	"cni/conf/10-pods.conflist": `{
	"cniVersion": "1.0.0", "name": "pods",
	"plugins": [{
		"type": "bridge", "bridge": "cni0", "isDefaultGateway": true,
		"ipam": {"type": "host-local", "ranges": [[{"subnet": "{{.PodCIDR}}"}]]}
	}]
}
`,
	"resolv.conf": "",
	// Thresholds of disks are left out, for those are the machine's.
	"kubelet.yaml": `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {{.NodeIP}}
tlsCertFile: {{.Dir}}/kubelet.crt
tlsPrivateKeyFile: {{.Dir}}/kubelet.key
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: {{.Dir}}/ca.crt}
authorization: {mode: Webhook}
clusterDNS: [{{.DNS}}]
clusterDomain: cluster.local
containerRuntimeEndpoint: unix://{{.Dir}}/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: {{.Cgroup}}
failCgroupV1: false
failSwapOn: false
makeIPTablesUtilChains: false
protectKernelDefaults: true
resolvConf: {{.Dir}}/resolv.conf
evictionHard: {memory.available: 100Mi}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
volumePluginDir: {{.VolumePlugins}}
`,
}

func (c *Cluster) writeNodeFiles(n *node, user string) error {
	pair, err := c.ca.server(user, n.address)
	if err != nil {
		return err
	}
	if err := pair.write(n.dir, "kubelet"); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(n.dir, "ca.crt"), c.ca.pem, 0o600); err != nil {
		return err
	}
	data := map[string]string{"Dir": n.dir, "Image": PodImage, "PodCIDR": n.podCIDR, "NodeIP": n.address, "Cgroup": n.cgroup, "VolumePlugins": volumePlugins, "DNS": dnsIP}
	for name, text := range nodeFiles {
		parsed, err := template.New(name).Parse(text)
		if err != nil {
			return err
		}
		var out bytes.Buffer
		if err := parsed.Execute(&out, data); err != nil {
			return err
		}
		path := filepath.Join(n.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, out.Bytes(), 0o600); err != nil {
			return err
		}
	}
	plugins := filepath.Join(n.dir, "cni", "bin")
	if err := os.MkdirAll(plugins, 0o755); err != nil {
		return err
	}
	for _, name := range []string{"bridge", "host-local", "loopback"} {
		if err := os.Symlink(filepath.Join(n.dir, "bin", "cni-"+name), filepath.Join(plugins, name)); err != nil {
			return err
		}
	}
	return nil
}

// awaitNodes waits until the nodes take Pods, and creates what Pods may refer to.
func (c *Cluster) awaitNodes(t testing.TB) {
	t.Helper()
	ctx := t.Context()
	class := &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: RuntimeClassGVisor}, Handler: "runsc"}
	if _, err := c.Client.NodeV1().RuntimeClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	storage := &storagev1.StorageClass{
		ObjectMeta:  metav1.ObjectMeta{Name: "host-path", Annotations: map[string]string{"storageclass.kubernetes.io/is-default-class": "true"}},
		Provisioner: "kubernetes.io/host-path",
	}
	if _, err := c.Client.StorageV1().StorageClasses().Create(ctx, storage, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, n := range c.nodes {
		eventually.NoError(t, n.name+" ready", func() error { return errors.Join(c.nodeReady(ctx, n.name), c.alive()) })
	}
}

func (c *Cluster) nodeReady(ctx context.Context, name string) error {
	n, err := c.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	for _, condition := range n.Status.Conditions {
		if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue && len(n.Spec.Taints) == 0 {
			return nil
		}
	}
	status, err := json.Marshal(n.Status.Conditions)
	return errors.Join(fmt.Errorf("conditions %s, taints %v", status, n.Spec.Taints), err)
}

// ImportImage gives the nodes an image from an OCI layout in a tar. Pods that name it need no registry.
func (c *Cluster) ImportImage(t testing.TB, ociTar string) {
	t.Helper()
	c.ImportImageAs(t, ociTar, "")
}

// ImportImageAs is ImportImage under another name than the tar's; empty keeps that.
func (c *Cluster) ImportImageAs(t testing.TB, ociTar, name string) {
	t.Helper()
	if len(c.nodes) == 0 {
		t.Fatal("import image: the cluster has no node")
	}
	for _, n := range c.nodes {
		n.importImage(t, ociTar, name)
	}
}

func (n *node) importImage(t testing.TB, ociTar, name string) {
	t.Helper()
	file, err := os.Open(ociTar)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	imported, err := n.containerd.Import(t.Context(), file, 0, name, nil)
	if err != nil {
		t.Fatal(err)
	}
	// The CRI adds a record by the digest of the config once it knows the image.
	for _, img := range imported {
		eventually.NoError(t, "image "+img.Ref+" known to the CRI", func() error {
			all, err := n.containerd.Images(t.Context())
			if err != nil {
				return err
			}
			for _, known := range all {
				if known.Digest == img.Digest && strings.HasPrefix(known.Ref, "sha256:") {
					return nil
				}
			}
			return fmt.Errorf("only %v are known", all)
		})
	}
}

func namespace(name string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
}
