// Package kubeinstall installs Barchan in a cluster of package kubecluster and runs its roles there, for tests. The
// roles are programs in the cluster's network namespace, with the rights of their ServiceAccounts, as Pods of a
// Deployment would have them. What the sandboxes run is the test's matter.
package kubeinstall

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"github.com/barchan-dev/barchan/internal/client/cluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
)

const (
	// APIKey is a key of the namespace default in each cluster with Barchan.
	APIKey = "e2b_0123456789abcdef0123456789abcdef01234567"
	// APIAddress is where the replica that [Barchan.StartReplica] starts serves the E2B API, in the cluster's network namespace.
	APIAddress = kubecluster.NodeIP + ":7700"
)

// Barchan is our software on a cluster.
type Barchan struct {
	testing.TB
	*kubecluster.Cluster
	bin, secret string
	program     string              // that runs the roles
	env         map[string][]string // of Go's runtime in the roles' containers, by Deployment
}

// TokenSecret is what the tokens of all sandboxes derive from.
func TokenSecret() []byte { return bytes.Repeat([]byte("s"), 32) }

// Build brings our programs up to date, and returns their directory.
func Build(t testing.TB) (bin string) {
	t.Helper()
	root := Root(t)
	if out, err := exec.CommandContext(t.Context(), filepath.Join(root, "scripts", "build.sh")).CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return filepath.Join(root, "bin")
}

// Ahead returns our software as a program runs it whose clock is a minute ahead; it is built if need be, which takes minutes the first
// time.
func (b *Barchan) Ahead() *Barchan {
	b.Helper()
	script := exec.CommandContext(b.Context(), filepath.Join(Root(b), "scripts", "build.sh"), "ahead")
	if out, err := script.CombinedOutput(); err != nil {
		b.Fatalf("build: %v\n%s", err, out)
	}
	ahead := *b
	ahead.program = "barchan-ahead"
	return &ahead
}

// Root returns the directory of the module, above that of the test.
func Root(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	must(t, err)
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	t.Fatal("no go.mod above the test's directory")
	return ""
}

// CRDs returns the directory of our CRDs.
func CRDs(t testing.TB) string {
	t.Helper()
	return filepath.Join(Root(t), "api", "crds")
}

// InstallCRDs creates the CRDs in the YAML files of a directory. It is for the Install of a [kubecluster.Config].
func InstallCRDs(t testing.TB, cfg *rest.Config, dir string) {
	t.Helper()
	c, err := dynamic.NewForConfig(cfg)
	must(t, err)
	crds := c.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no CRDs in %s: %v", dir, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(t, err)
		crd := &unstructured.Unstructured{}
		must(t, yaml.Unmarshal(text, &crd.Object))
		_, err = crds.Create(t.Context(), crd, metav1.CreateOptions{})
		must(t, err)
	}
}

// New gives Barchan its rights in a cluster that has its CRDs, and the namespace default [APIKey]. It starts no role. The programs are in bin.
func New(t testing.TB, c *kubecluster.Cluster, bin string) *Barchan {
	t.Helper()
	b := &Barchan{TB: t, Cluster: c, bin: bin, program: "barchan", secret: filepath.Join(t.TempDir(), "token-secret"), env: map[string][]string{}}
	must(t, os.WriteFile(b.secret, TokenSecret(), 0o600))
	c.Apply(t, b.rights())
	sum := sha256.Sum256([]byte(APIKey))
	c.Apply(t, `
apiVersion: barchan.dev/v1alpha1
kind: APIKey
metadata: {name: test, namespace: default}
spec: {sha256: `+hex.EncodeToString(sum[:])+`}
`)
	return b
}

// rights returns what the chart has but for the roles' Pods: their accounts, and what those may do. Of the Pods it keeps the
// variables of Go's runtime.
func (b *Barchan) rights() string {
	b.Helper()
	objects, err := cluster.Render(cluster.Release{Namespace: cluster.DefaultNamespace}, cluster.Values{"image": "-", "agentImage": "-", "crds": false, "tenantLabel": false})
	must(b, err)
	var text strings.Builder
	text.WriteString("apiVersion: v1\nkind: Namespace\nmetadata: {name: " + cluster.DefaultNamespace + "}\n")
	for _, u := range objects {
		if u.GetKind() == "Deployment" {
			d := &appsv1.Deployment{}
			must(b, runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, d))
			for _, v := range d.Spec.Template.Spec.Containers[0].Env {
				if strings.HasPrefix(v.Name, "GO") { // the rest is of a Pod
					b.env[d.Name] = append(b.env[d.Name], v.Name+"="+v.Value)
				}
			}
			continue
		}
		object, err := yaml.Marshal(u.Object)
		must(b, err)
		text.WriteString("---\n" + string(object))
	}
	return text.String()
}

// In returns the same for a subtest, to which roles that it starts belong.
func (b *Barchan) In(t testing.TB) *Barchan {
	c := *b
	c.TB = t
	return &c
}

// StartController runs a controller until the test ends, and waits until it is ready. agentImage is that of the sandboxes.
func (b *Barchan) StartController(agentImage string, flags ...string) *Process {
	b.Helper()
	return b.Controller("controller", agentImage, flags...)
}

// StartReplica runs a replica at [APIAddress] until the test ends, and waits until it is ready.
func (b *Barchan) StartReplica() *Process {
	b.Helper()
	return b.Replica("replica", APIAddress)
}

// account returns a kubeconfig with the rights of a role's ServiceAccount, as its Pod would have them.
func (b *Barchan) account(role string) string {
	b.Helper()
	admin, err := clientcmd.LoadFromFile(b.Kubeconfig)
	must(b, err)
	token := strings.TrimSpace(b.Kubectl(b, "create", "token", "-n", "barchan-system", "barchan-"+role))
	for name := range admin.AuthInfos {
		admin.AuthInfos[name] = &api.AuthInfo{Token: token}
	}
	path := filepath.Join(b.TempDir(), "kubeconfig")
	must(b, clientcmd.WriteToFile(*admin, path))
	return path
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
