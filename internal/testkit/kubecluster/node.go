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
	// NodeName is the name of the only node.
	NodeName = "node-1"
	// RuntimeClassGVisor is the RuntimeClass of Pods that gVisor isolates; runc is the default.
	RuntimeClassGVisor = "gvisor"

	nodeUser = "system:node:" + NodeName
	// volumePlugins is in a directory that is the cluster's own.
	volumePlugins = "/var/lib/kubelet/volume-plugins"
)

// nodePrograms are what a node needs besides the control plane's programs, and runc.
var nodePrograms = []string{
	"kubelet", "containerd-cri", "containerd-shim-runc-v2", "containerd-shim-runsc-v1", "runsc", "cni-bridge", "cni-host-local", "cni-loopback", "coredns",
}

// node is a kubelet with its containerd.
type node struct {
	containerd *ctrd.Client
	cgroup     string // parent of those of Pods, in each hierarchy
}

// startNode starts containerd, kubelet and the cluster's DNS, and gives the node its image.
func (c *Cluster) startNode(t testing.TB) error {
	t.Helper()
	cgroup := "/" + filepath.Base(c.dir)
	c.node = &node{cgroup: cgroup}
	// Run after all programs have ended.
	c.undo = append(undo{c.undo[0], func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), stopTime)
		defer cancel()
		return cgroups.RemoveIdle(ctx, cgroup)
	}}, c.undo[1:]...)
	if err := makeCgroups(cgroup); err != nil {
		return err
	}
	if err := c.writeNodeFiles(); err != nil {
		return err
	}
	if _, err := c.run("containerd-cri", "--config", filepath.Join(c.dir, "containerd.toml")); err != nil {
		return err
	}
	client, err := ctrd.NewClient(ctrd.Config{Address: c.containerdSocket(), Namespace: "k8s.io", CallTimeout: startTime})
	if err != nil {
		return err
	}
	c.node.containerd = client
	c.undo.add(client.Close)
	c.ImportImage(t, WriteImage(t, Image{
		Name: PodImage, Files: map[string]string{"/pod": filepath.Join(c.dir, "pod")},
		Config: ocispec.ImageConfig{Entrypoint: []string{"/pod"}, Env: []string{"PATH=/"}},
	}))
	if _, err := c.run("coredns", "-quiet", "-conf", filepath.Join(c.dir, "Corefile")); err != nil {
		return err
	}
	kubeconfig, err := c.writeKubeconfig(nodeUser, "system:nodes")
	if err != nil {
		return err
	}
	_, err = c.run("kubelet", "--config="+filepath.Join(c.dir, "kubelet.yaml"), "--kubeconfig="+kubeconfig,
		"--hostname-override="+NodeName, "--node-ip="+NodeIP, "--root-dir=/var/lib/kubelet", "--cert-dir=/var/lib/kubelet/pki")
	return err
}

func (c *Cluster) containerdSocket() string { return filepath.Join(c.dir, "containerd.sock") }

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
	"Corefile": `.:53 {
	errors
	kubernetes cluster.local {
		kubeconfig {{.Kubeconfig}}
	}
}
`,
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

func (c *Cluster) writeNodeFiles() error {
	pair, err := c.ca.server(nodeUser, NodeIP)
	if err != nil {
		return err
	}
	if err := pair.write(c.dir, "kubelet"); err != nil {
		return err
	}
	data := map[string]string{"Dir": c.dir, "Image": PodImage, "PodCIDR": podCIDR, "NodeIP": NodeIP, "Cgroup": c.node.cgroup, "VolumePlugins": volumePlugins, "DNS": dnsIP, "Kubeconfig": c.Kubeconfig}
	for name, text := range nodeFiles {
		parsed, err := template.New(name).Parse(text)
		if err != nil {
			return err
		}
		var out bytes.Buffer
		if err := parsed.Execute(&out, data); err != nil {
			return err
		}
		path := filepath.Join(c.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, out.Bytes(), 0o600); err != nil {
			return err
		}
	}
	plugins := filepath.Join(c.dir, "cni", "bin")
	if err := os.MkdirAll(plugins, 0o755); err != nil {
		return err
	}
	for _, name := range []string{"bridge", "host-local", "loopback"} {
		if err := os.Symlink(filepath.Join(c.dir, "bin", "cni-"+name), filepath.Join(plugins, name)); err != nil {
			return err
		}
	}
	return nil
}

// awaitNode waits until the node takes Pods, and creates what Pods may refer to.
func (c *Cluster) awaitNode(t testing.TB) {
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
	eventually.NoError(t, "node ready", func() error {
		n, err := c.Client.CoreV1().Nodes().Get(ctx, NodeName, metav1.GetOptions{})
		if err != nil {
			return errors.Join(err, c.alive())
		}
		for _, condition := range n.Status.Conditions {
			if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue && len(n.Spec.Taints) == 0 {
				return nil
			}
		}
		status, err := json.Marshal(n.Status.Conditions)
		return errors.Join(fmt.Errorf("conditions %s, taints %v", status, n.Spec.Taints), err, c.alive())
	})
}

// ImportImage gives the node an image from an OCI layout in a tar. Pods that name it need no registry.
func (c *Cluster) ImportImage(t testing.TB, ociTar string) {
	t.Helper()
	if c.node == nil {
		t.Fatal("import image: the cluster has no node")
	}
	file, err := os.Open(ociTar)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	imported, err := c.node.containerd.Import(t.Context(), file, 0, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	// The CRI adds a record by the digest of the config once it knows the image.
	for _, img := range imported {
		eventually.NoError(t, "image "+img.Ref+" known to the CRI", func() error {
			all, err := c.node.containerd.Images(t.Context())
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
