package cluster

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/npm"
)

const (
	agentImage = "barchan.test/agent:1"
	shellImage = "barchan.test/shell:1"
	apiKey     = "e2b_0123456789abcdef0123456789abcdef01234567"
)

// barchan is our software on a cluster: programs in the cluster's network namespace, as Pods of a Deployment would be.
type barchan struct {
	*testing.T
	*kubecluster.Cluster
	bin, dir string
}

// TestSandboxes goes from a cluster without anything of ours to the first command of the unmodified SDK in a sandbox, and on.
func TestSandboxes(t *testing.T) {
	b := &barchan{T: t, bin: build(t), dir: t.TempDir()}
	b.Cluster = kubecluster.Start(t, kubecluster.Config{Nodes: 1, Install: func(cfg *rest.Config) { installCRDs(t, cfg) }})
	b.ImportImage(t, kubecluster.WriteImage(t, kubecluster.Image{Name: agentImage, Files: map[string]string{"/barchan-agent": filepath.Join(b.bin, "barchan-agent")}}))
	b.ImportImage(t, kubecluster.WriteImage(t, kubecluster.Image{Name: shellImage, Files: shell(t)}))
	began := time.Now()
	secret := filepath.Join(b.dir, "token-secret")
	must(t, os.WriteFile(secret, bytes.Repeat([]byte("s"), 32), 0o600))
	sum := sha256.Sum256([]byte(apiKey))
	b.applyFile("../../../packaging/kubernetes/rbac.yaml")
	b.apply(`
apiVersion: barchan.dev/v1alpha1
kind: APIKey
metadata: {name: test, namespace: default}
spec: {sha256: ` + hex.EncodeToString(sum[:]) + `}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: base, namespace: default}
spec:
  envVarsInjectionPolicy: Allowed
  podTemplate:
    spec:
      runtimeClassName: ` + kubecluster.RuntimeClassGVisor + `
      terminationGracePeriodSeconds: 1
      containers:
      - {name: main, image: "` + shellImage + `", command: [/bin/bash, -c, "sleep infinity & wait"], env: [{name: OF_THE_TEMPLATE, value: "yes"}]}
`)
	b.start("controller", secret, "--agent-image", agentImage)
	b.start("replica", secret, "--http-addr", kubecluster.NodeIP+":7700")
	out := b.sdk(`
import { Sandbox } from 'e2b'
const sbx = await Sandbox.create({ envs: { GREETING: 'hello' }, timeoutMs: 120_000 })
console.log((await sbx.commands.run('echo $GREETING $OF_THE_TEMPLATE $((6*7))')).stdout.trim())
await sbx.files.write('/tmp/f', 'written')
console.log(await sbx.files.read('/tmp/f'), (await sbx.commands.run('cat /tmp/f')).stdout)
await sbx.kill()
`)
	t.Logf("first program after %v", time.Since(began))
	if out != "hello yes 42\nwritten written\n" {
		t.Errorf("the SDK printed %q", out)
	}
	eventually.NoError(t, "the killed sandbox is gone", func() error {
		if out := b.kubectl("get", "sandboxes,pods", "-o", "name"); out != "" {
			return fmt.Errorf("left: %s", out)
		}
		return nil
	})
	t.Run("upstream's manifest", func(t *testing.T) { b.in(t).plainSandbox() })
	t.Run("pool and claim", func(t *testing.T) { b.in(t).pool() })
	t.Run("leader", func(t *testing.T) { b.in(t).anotherLeader(secret) })
	t.Run("stranger", func(t *testing.T) { b.in(t).stranger(secret) })
}

func (b *barchan) in(t *testing.T) *barchan {
	c := *b
	c.T = t
	return &c
}

// plainSandbox applies a Sandbox as agent-sandbox's users do.
func (b *barchan) plainSandbox() {
	b.apply(`
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: plain, namespace: default}
spec:
  service: true
  podTemplate:
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: main, image: "` + kubecluster.PodImage + `", args: [serve, ":8080"]}]
`)
	b.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "sandbox/plain")
	if got := b.kubectl("get", "sandbox", "plain", "-o", "jsonpath={.status.conditions[?(@.type=='Ready')].message} {.status.service} {.status.nodeName}"); !strings.HasPrefix(got, "Pod is Ready; Service Exists plain ") {
		b.Errorf("status %q", got)
	}
	b.kubectl("exec", "plain", "--", "/pod", "echo", "entrypoint", "stays")
	pod := b.kubectl("get", "pod", "plain", "-o", "jsonpath={.metadata.uid}")
	b.kubectl("patch", "sandbox", "plain", "--type=merge", "-p", `{"spec":{"operatingMode":"Suspended"}}`)
	b.kubectl("wait", "--for=condition=Suspended", "--timeout=60s", "sandbox/plain")
	b.kubectl("patch", "sandbox", "plain", "--type=merge", "-p", `{"spec":{"operatingMode":"Running"}}`)
	b.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "sandbox/plain")
	if now := b.kubectl("get", "pod", "plain", "-o", "jsonpath={.metadata.uid}"); now == pod {
		b.Error("resumed with the same Pod")
	}
	b.kubectl("delete", "sandbox", "plain", "--cascade=foreground", "--timeout=60s")
	if out := b.kubectl("get", "pod,service", "-l", "agents.x-k8s.io/sandbox-name-hash", "-o", "name"); strings.Contains(out, "plain") {
		b.Errorf("left after the deletion: %s", out)
	}
}

// pool has a SandboxClaim get a member that runs already.
func (b *barchan) pool() {
	b.apply(`
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: pool, namespace: default}
spec: {replicas: 1, sandboxTemplateRef: {name: base}}
`)
	b.kubectl("wait", "--for=jsonpath={.status.readyReplicas}=1", "--timeout=60s", "sandboxwarmpool/pool")
	began := time.Now()
	b.apply(`
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxClaim
metadata: {name: claim, namespace: default}
spec: {warmPoolRef: {name: pool}, env: [{name: CLAIMED, value: "1"}]}
`)
	b.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "sandboxclaim/claim")
	b.Logf("claim ready after %v, by kubectl", time.Since(began))
	name := b.kubectl("get", "sandboxclaim", "claim", "-o", "jsonpath={.status.sandbox.name}")
	if !strings.HasPrefix(name, "pool-") {
		b.Errorf("the claim got %q, which is no member", name)
	}
	id := b.kubectl("get", "sandbox", name, "-o", "jsonpath={.status.barchan.id}")
	out := b.sdk(`
import { Sandbox } from 'e2b'
const sbx = await Sandbox.connect('` + id + `')
console.log((await sbx.commands.run('echo $CLAIMED')).stdout.trim())
`)
	if out != "1\n" {
		b.Errorf("the claimed sandbox printed %q", out)
	}
	b.kubectl("delete", "sandboxclaim,sandboxwarmpool", "--all", "--timeout=60s")
	eventually.NoError(b, "all Pods are collected", func() error {
		if out := b.kubectl("get", "pods", "-o", "name"); out != "" {
			return fmt.Errorf("left: %s", out)
		}
		return nil
	})
}

// anotherLeader has a second controller follow the first, which is killed.
func (b *barchan) anotherLeader(secret string) {
	holder := func() string {
		return b.kubectl("get", "lease", "-n", "barchan-system", "barchan-controller", "-o", "jsonpath={.spec.holderIdentity}")
	}
	if got := holder(); got != "controller" {
		b.Fatalf("the leader is %q", got)
	}
	b.start("controller", secret, "--agent-image", agentImage, "--node-name", "second", "--http-addr", "127.0.0.1:7799")
	b.kubectl("patch", "lease", "-n", "barchan-system", "barchan-controller", "--type=merge", "-p", `{"spec":{"holderIdentity":"second"}}`)
	eventually.True(b, "the second leads", func() bool { return holder() == "second" })
	b.apply(`
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: later, namespace: default}
spec: {podTemplate: {spec: {terminationGracePeriodSeconds: 1, containers: [{name: main, image: "` + kubecluster.PodImage + `"}]}}}
`)
	b.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "sandbox/later")
	b.kubectl("delete", "sandbox", "later", "--timeout=60s")
}

// stranger has the route of a sandbox lead to the Pod of another, as where the network gives away an address before the
// gateway knows. No controller runs meanwhile, for it would correct the status.
func (b *barchan) stranger(secret string) {
	dir := b.start("controller", secret, "--agent-image", agentImage, "--node-name", "third", "--http-addr", "127.0.0.1:7798")
	for _, name := range []string{"one", "two"} {
		b.apply(`
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: ` + name + `, namespace: default}
spec: {podTemplate: {spec: {terminationGracePeriodSeconds: 1, containers: [{name: main, image: "` + kubecluster.PodImage + `", args: [serve, ":8080"]}]}}}
`)
	}
	b.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "sandbox/one", "sandbox/two")
	get := func(path string) string {
		out, err := b.Command(b.Context(), "curl", "-sS", "--max-time", "30", "http://"+kubecluster.NodeIP+":7700"+path).CombinedOutput()
		if err != nil {
			b.Fatalf("curl %s: %v\n%s", path, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	of := func(name, field string) string {
		return b.kubectl("get", "sandbox", name, "-o", "jsonpath={.status."+field+"}")
	}
	path := "/sandbox/" + of("one", "barchan.id") + "/8080/"
	eventually.NoError(b, "the first sandbox is served", func() error {
		if text := get(path); text != "one" {
			return fmt.Errorf("got %q", text)
		}
		return nil
	})
	b.kubectl("patch", "lease", "-n", "barchan-system", "barchan-controller", "--type=merge", "-p", `{"spec":{"holderIdentity":"none"}}`)
	eventually.True(b, "the controller ends", func() bool {
		return b.Command(b.Context(), filepath.Join(b.bin, "barchan"), "status", "--data-dir", dir).Run() != nil
	})
	b.kubectl("patch", "sandbox", "one", "--subresource=status", "--type=merge", "-p", `{"status":{"podIPs":["`+of("two", "podIPs[0]")+`"]}}`)
	eventually.NoError(b, "the gateway refuses the other sandbox's address", func() error {
		text := get(path)
		if text == "two" {
			b.Error("a request reached the other sandbox")
		}
		if !strings.Contains(text, "The sandbox did not answer") {
			return fmt.Errorf("got %q", text)
		}
		return nil
	})
	if text := get("/metrics"); !strings.Contains(text, `barchan_gateway_dials_total{result="unproved"}`) {
		b.Error("no connection is counted as unproved")
	}
}

// start runs a role until the test ends, and waits until it is ready. It returns its data directory.
func (b *barchan) start(role, secret string, flags ...string) string {
	b.Helper()
	dir := b.TempDir()
	args := append([]string{
		"up", "--role", role, "--data-dir", dir, "--node-name", role, "--api-kubeconfig", b.account(role), "--token-secret", secret, "--tls-addr", "",
	}, flags...)
	cmd := b.Command(context.WithoutCancel(b.Context()), filepath.Join(b.bin, "barchan"), args...)
	log := &bytes.Buffer{}
	cmd.Stdout, cmd.Stderr = log, log
	must(b.T, cmd.Start())
	b.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil && !strings.Contains(log.String(), "Lease was lost") {
			b.Errorf("%s: %v", role, err)
		}
		if b.Failed() {
			b.Logf("%s:\n%s", role, log)
		}
		if strings.Contains(log.String(), "is forbidden") {
			b.Errorf("%s lacks a right:\n%s", role, log)
		}
	})
	eventually.NoError(b, role+" is ready", func() error {
		out, err := b.Command(b.Context(), filepath.Join(b.bin, "barchan"), "status", "--data-dir", dir).CombinedOutput()
		if err != nil || !regexp.MustCompile(`(?m)^ready`).Match(out) && !bytes.Contains(out, []byte("ready")) {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	return dir
}

// sdk runs a program with the unmodified E2B SDK in the cluster's network.
func (b *barchan) sdk(program string) string {
	b.Helper()
	dir := npm.Package(b, "e2b@2.51.0")
	file := filepath.Join(b.TempDir(), "program.mjs")
	must(b.T, os.WriteFile(file, []byte(program), 0o600))
	must(b.T, os.Symlink(filepath.Join(dir, "node_modules"), filepath.Join(filepath.Dir(file), "node_modules")))
	cmd := b.Command(b.Context(), "node", file)
	url := "http://" + kubecluster.NodeIP + ":7700"
	cmd.Env = append(os.Environ(), "E2B_API_KEY="+apiKey, "E2B_API_URL="+url, "E2B_SANDBOX_URL="+url)
	out, err := cmd.CombinedOutput()
	if err != nil {
		b.Fatalf("the SDK: %v\n%s", err, out)
	}
	return string(out)
}

func (b *barchan) kubectl(args ...string) string {
	b.Helper()
	out, err := b.Command(b.Context(), kubecluster.FindProgram(b, "kubectl"), args...).CombinedOutput()
	if err != nil {
		b.Fatalf("kubectl %s: %v\n%s\n%s", strings.Join(args, " "), err, out, b.state())
	}
	return string(out)
}

// state is what a reader of a failure wants to see.
func (b *barchan) state() []byte {
	out, err := b.Command(b.Context(), kubecluster.FindProgram(b, "kubectl"), "get", "pods,sandboxes,sandboxclaims,events", "-A", "-o", "wide").CombinedOutput()
	if err != nil {
		return fmt.Append(out, err)
	}
	return out
}

func (b *barchan) applyFile(path string) {
	b.Helper()
	text, err := os.ReadFile(path)
	must(b.T, err)
	b.apply(string(text))
}

// account returns a kubeconfig with the rights of a role's ServiceAccount, as its Pod would have them.
func (b *barchan) account(role string) string {
	b.Helper()
	admin, err := clientcmd.LoadFromFile(b.Kubeconfig)
	must(b.T, err)
	token := strings.TrimSpace(b.kubectl("create", "token", "-n", "barchan-system", "barchan-"+role))
	for name := range admin.AuthInfos {
		admin.AuthInfos[name] = &api.AuthInfo{Token: token}
	}
	path := filepath.Join(b.TempDir(), "kubeconfig")
	must(b.T, clientcmd.WriteToFile(*admin, path))
	return path
}

func (b *barchan) apply(text string) {
	b.Helper()
	cmd := b.Command(b.Context(), kubecluster.FindProgram(b, "kubectl"), "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		b.Fatalf("kubectl apply: %v\n%s", err, out)
	}
}

// build brings our programs up to date.
func build(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs("../../..")
	must(t, err)
	if out, err := exec.CommandContext(t.Context(), filepath.Join(root, "scripts", "build.sh")).CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return filepath.Join(root, "bin")
}

// shell is the files of an image with bash and what the SDK's commands need.
func shell(t *testing.T) map[string]string {
	t.Helper()
	files := map[string]string{}
	for _, program := range []string{"/bin/bash", "/bin/sleep", "/bin/cat"} {
		files[program] = program
		out, err := exec.CommandContext(t.Context(), "ldd", program).CombinedOutput()
		if err != nil {
			t.Fatalf("ldd: %v\n%s", err, out)
		}
		for _, path := range regexp.MustCompile(`/\S+`).FindAllString(string(out), -1) {
			files[path] = path
		}
	}
	return files
}

// installCRDs installs our kinds as users do.
func installCRDs(t *testing.T, cfg *rest.Config) {
	t.Helper()
	crds := newDynamic(t, cfg).Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	files, err := filepath.Glob("../../../api/crds/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no CRDs: %v", err)
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
