package cluster

import (
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubeinstall"
)

// agentSandboxSystem is the namespace of agent-sandbox's controller.
const agentSandboxSystem = "agent-sandbox-system"

// pythonRuntime is the image of agent-sandbox's runtime in Python.
const pythonRuntime = "kind.local/python-runtime-sandbox:latest"

// TestAgentSandbox runs agent-sandbox's own end-to-end tests, and those of its clients in Go and Python, unmodified. The first look for its controller's
// Deployment by name.
func TestAgentSandbox(t *testing.T) {
	b := &barchan{T: t, bin: kubeinstall.Build(t)}
	b.Cluster = kubecluster.Start(t, kubecluster.Config{Nodes: 1})
	suites := []string{kubecluster.FindProgram(t, "agent-sandbox-e2e"), kubecluster.FindProgram(t, "agent-sandbox-e2e-extensions")}
	files := shell(t)
	b.ImportImage(t, kubecluster.WriteImage(t, kubecluster.Image{Name: shellImage, Files: files}))
	b.ImportImage(t, kubecluster.WriteImage(t, kubecluster.Image{Name: "docker.io/library/busybox:1.36", Files: files}))
	b.ImportImage(t, kubecluster.WriteImage(t, kubecluster.Image{
		Name: "registry.k8s.io/pause:3.10", Files: files, Config: ocispec.ImageConfig{Entrypoint: []string{"/bin/bash", "-c", "trap exit TERM; sleep infinity & wait"}},
	}))
	b.pythonImage()
	b.registry()
	b.install("--registry", registryAt+"/team", "--template-image", shellImage, "--system-namespace", agentSandboxSystem, "--set", "controller.name=agent-sandbox-controller")
	for _, suite := range suites {
		t.Run(filepath.Base(suite), func(t *testing.T) { b.in(t).upstream(suite) })
	}
	t.Run("Go client", func(t *testing.T) { b.in(t).goClient() })
	t.Run("Python client", func(t *testing.T) { b.in(t).pythonClient() })
}

// upstream runs each test of a program of tests.
func (b *barchan) upstream(program string) {
	list, err := b.Command(b.Context(), program, "-test.list", "^Test").Output()
	must(b.T, err)
	for name := range strings.FieldsSeq(string(list)) {
		b.T.Run(name, func(t *testing.T) {
			if name == "TestRunChromeSandbox" {
				t.Skip("SKIPPED: it asks Docker for the logs of its node, which is a container there")
			}
			b.in(t).test(program, "-test.run=^"+name+"$")
		})
	}
}

// test runs a program of tests of others. It skips where that does.
func (b *barchan) test(program string, args ...string) {
	b.Helper()
	cmd := b.Command(b.Context(), program, append([]string{"-test.v", "-test.timeout=10m"}, args...)...)
	cmd.Dir = b.TempDir()
	cmd.Env = append(cmd.Env, "SANDBOX_RUNTIME_CLASS="+kubecluster.RuntimeClassGVisor, "SANDBOX_POOL_SIZES=4", "ARTIFACTS="+cmd.Dir, "PATH="+filepath.Dir(kubecluster.FindProgram(b.T, "kubectl"))+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	text := string(out)
	switch {
	case strings.Contains(text, "\nPASS\ngoleak: "): // its client keeps the connection to the API server, of any cluster
	case err != nil:
		b.Fatalf("%s %s: %v\n%s", program, strings.Join(args, " "), err, text)
	case strings.Contains(text, "\n--- SKIP"):
		b.Skipf("SKIPPED: %s", text)
	case !strings.Contains(text, "\n--- PASS"):
		b.Errorf("no test ran:\n%s", text)
	}
}

// goClient has agent-sandbox's Go client use a claimed sandbox through a replica. The runtime API is that of our agent.
func (b *barchan) goClient() {
	b.apply(`
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: base, namespace: default}
spec: {replicas: 1, sandboxTemplateRef: {name: base}, barchan: {templateNamespace: ` + agentSandboxSystem + `}}
`)
	b.kubectl("wait", "--for=jsonpath={.status.readyReplicas}=1", "--timeout=60s", "sandboxwarmpool/base")
	b.test(kubecluster.FindProgram(b.T, "agent-sandbox-client"), "-test.run=^TestIntegration_", "-warmpool-name=base", "-server-port=49983", "-api-url="+b.urlWithKey())
}

// urlWithKey is the URL of a replica that brings the key with each request, as agent-sandbox's clients know none.
func (b *barchan) urlWithKey() string {
	b.Helper()
	api, err := url.Parse(b.replicas()[0])
	must(b.T, err)
	api.User = url.UserPassword("key", b.key)
	return api.String()
}

// pythonClient has agent-sandbox's Python client use claimed sandboxes with its runtime in Python through a replica. The client
// needs a Python newer than that of the machine.
func (b *barchan) pythonClient() {
	manifests := b.agentSandboxSource("clients/python/agentic-sandbox-client")
	for _, name := range []string{"python-sandbox-template.yaml", "python-sandbox-warmpool.yaml"} {
		text, err := os.ReadFile(filepath.Join(manifests, name))
		must(b.T, err)
		b.apply(strings.NewReplacer(
			"${SANDBOX_TEMPLATE_NAME}", "python", "${SANDBOX_WARMPOOL_NAME}", "python", "${SANDBOX_NAMESPACE}", "default",
			"us-central1-docker.pkg.dev/k8s-staging-images/agent-sandbox/python-runtime-sandbox:latest-main", pythonRuntime+"\n        imagePullPolicy: Never").Replace(string(text)))
	}
	root := filepath.Join(b.TempDir(), "root")
	out, err := exec.CommandContext(b.Context(), "mmdebstrap", "--variant=extract", "--include=base-files,python3-kubernetes,python3-prometheus-client,python3-pydantic,python3-requests", "trixie", root).CombinedOutput()
	if err != nil {
		b.Fatalf("mmdebstrap: %v\n%s", err, out)
	}
	must(b.T, os.CopyFS(filepath.Join(root, "client"), os.DirFS(manifests)))
	kubeconfig, err := os.ReadFile(b.Kubeconfig)
	must(b.T, err)
	must(b.T, os.WriteFile(filepath.Join(root, "kubeconfig"), kubeconfig, 0o600))
	must(b.T, os.MkdirAll(filepath.Join(root, "etc", "ssl", "certs"), 0o755))
	must(b.T, os.WriteFile(filepath.Join(root, "etc", "ssl", "certs", "ca-certificates.crt"), b.REST.CAData, 0o600)) // requests wants some
	cmd := b.Command(b.Context(), "chroot", root, "python3", "/client/test_client.py", "--warmpool-name=python", "--api-url="+b.urlWithKey())
	cmd.Env = append(cmd.Env, "KUBECONFIG=/kubeconfig", "PYTHONPATH=/client")
	if out, err := cmd.CombinedOutput(); err != nil || strings.Contains(string(out), "An error occurred") || !strings.Contains(string(out), "Retrieval Failure Verified") {
		b.Fatalf("test_client.py: %v\n%s\n%s", err, out, b.State(b))
	}
}

// TestTakeOver installs Barchan over agent-sandbox as that is installed, with its objects in use.
func TestTakeOver(t *testing.T) {
	b := &barchan{T: t, bin: kubeinstall.Build(t)}
	b.Cluster = kubecluster.Start(t, kubecluster.Config{Nodes: 1})
	controller := kubecluster.FindProgram(t, "agent-sandbox-controller")
	b.ImportImage(t, kubecluster.WriteImage(t, kubecluster.Image{Name: shellImage, Files: shell(t)}))
	b.registry()
	b.installAgentSandbox(controller)
	b.apply(`
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: base, namespace: default}
spec: {podTemplate: {spec: {terminationGracePeriodSeconds: 1, containers: [{name: main, image: "` + shellImage + `", command: [/bin/bash, -c, "trap exit TERM; sleep infinity & wait"]}]}}}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: pool, namespace: default}
spec: {replicas: 2, sandboxTemplateRef: {name: base}}
`)
	b.kubectl("wait", "--for=jsonpath={.status.readyReplicas}=2", "--timeout=60s", "sandboxwarmpool/pool")
	b.claimFrom("pool", "theirs")
	name := b.kubectl("get", "sandboxclaim", "theirs", "-o", "jsonpath={.status.sandbox.name}")
	pod := b.kubectl("get", "pod", name, "-o", "jsonpath={.metadata.uid}")

	args := []string{"install", "--registry", registryAt + "/team", "--template-image", shellImage}
	if out, err := b.tryCluster(args...); err == nil || !strings.Contains(out, "--take-over") {
		t.Errorf("installed over agent-sandbox without --take-over: %v\n%s", err, out)
	}
	crd := []string{"patch", "crd", "sandboxes.agents.x-k8s.io", "--subresource=status", "--type=merge", "-p"}
	b.kubectl(append(crd, `{"status":{"storedVersions":["v1alpha1","v1beta1"]}}`)...)
	if out, err := b.tryCluster(append(args, "--take-over")...); err == nil || !strings.Contains(out, "stored objects of sandboxes.agents.x-k8s.io as v1alpha1") {
		t.Errorf("installed over stored objects of another version: %v\n%s", err, out)
	}
	b.kubectl("wait", "-n", agentSandboxSystem, "--for=condition=Available", "--timeout=1s", "deployment/agent-sandbox-controller")
	b.kubectl(append(crd, `{"status":{"storedVersions":["v1beta1"]}}`)...)
	b.install(append(args[1:], "--take-over")...)
	t.Logf("doctor printed:\n%s", b.cluster("doctor"))
	if out := b.kubectl("get", "crd", "-o", `jsonpath={range .items[?(@.spec.group!="barchan.dev")]}{.spec.conversion.strategy} {.spec.versions[*].name},{end}`); out != strings.Repeat("None v1beta1,", 4) {
		t.Errorf("kinds are served as %q, want v1beta1 alone, without conversion", out)
	}
	if now := b.kubectl("get", "pod", name, "-o", "jsonpath={.metadata.uid}"); now != pod {
		t.Error("the Pod of a claimed sandbox was replaced")
	}
	// A new claim gets a member that the E2B API reaches, and the old sandbox is reached once its Pod is ours.
	b.claimFrom("pool", "ours")
	b.kubectl("patch", "sandbox", name, "--type=merge", "-p", `{"spec":{"operatingMode":"Suspended"}}`)
	b.kubectl("wait", "--for=condition=Suspended", "--timeout=60s", "sandbox/"+name)
	b.kubectl("patch", "sandbox", name, "--type=merge", "-p", `{"spec":{"operatingMode":"Running"}}`)
	b.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "sandbox/"+name)
	for _, of := range []string{name, b.kubectl("get", "sandboxclaim", "ours", "-o", "jsonpath={.status.sandbox.name}")} {
		id := b.kubectl("get", "sandbox", of, "-o", "jsonpath={.status.barchan.id}")
		if out := b.sdk("import { Sandbox } from 'e2b'\nconsole.log((await (await Sandbox.connect('" + id + "')).commands.run('echo reached')).stdout.trim())"); out != "reached\n" {
			t.Errorf("sandbox %s printed %q", of, out)
		}
	}
	b.kubectl("delete", "sandboxclaim,sandboxwarmpool", "--all", "--timeout=60s")
	eventually.NoError(b, "all Pods are collected", func() error {
		if out := b.kubectl("get", "pods", "-o", "name"); out != "" {
			return fmt.Errorf("left: %s", out)
		}
		return nil
	})
}

// installAgentSandbox applies the manifests of agent-sandbox's release as its documentation says, with an image of the program.
func (b *barchan) installAgentSandbox(controller string) {
	b.Helper()
	const image = "barchan.test/agent-sandbox-controller:1"
	b.ImportImage(b.T, kubecluster.WriteImage(b.T, kubecluster.Image{
		Name: image, Files: map[string]string{"/controller": controller}, Config: ocispec.ImageConfig{Entrypoint: []string{"/controller"}},
	}))
	manifests := b.agentSandboxSource("k8s")
	b.kubectl("apply", "--server-side", "-f", filepath.Join(manifests, "crds"))
	for _, name := range []string{"controller.yaml", "rbac.generated.yaml", "extensions.yaml", "extensions-rbac.generated.yaml", "extensions.controller.yaml"} {
		text, err := os.ReadFile(filepath.Join(manifests, name))
		must(b.T, err)
		b.apply(strings.ReplaceAll(string(text), "ko://sigs.k8s.io/agent-sandbox/cmd/agent-sandbox-controller", image))
	}
	b.kubectl("wait", "-n", agentSandboxSystem, "--for=condition=Available", "--timeout=60s", "deployment/agent-sandbox-controller")
}

// agentSandboxSource is the path of something in agent-sandbox's module, at the version of its programs.
func (b *barchan) agentSandboxSource(path string) string {
	b.Helper()
	list := exec.CommandContext(b.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/agent-sandbox")
	list.Dir = filepath.Join(kubeinstall.Root(b), "tools", "agent-sandbox")
	module, err := list.Output()
	must(b.T, err)
	return filepath.Join(strings.TrimSpace(string(module)), path)
}

// pythonImage gives the node agent-sandbox's image of a runtime in Python, whose packages are Debian's.
func (b *barchan) pythonImage() {
	b.Helper()
	root := filepath.Join(b.TempDir(), "root.tar")
	out, err := exec.CommandContext(b.Context(), "mmdebstrap", "--variant=extract", "--include=bash,coreutils,python3-fastapi,python3-multipart,python3-uvicorn", "bookworm", root).CombinedOutput()
	if err != nil {
		b.Fatalf("mmdebstrap: %v\n%s", err, out)
	}
	b.ImportImage(b.T, kubecluster.WriteImage(b.T, kubecluster.Image{
		Name: pythonRuntime, Root: root, Files: map[string]string{"/app/main.py": b.agentSandboxSource("examples/python-runtime-sandbox/main.py")},
		Config: ocispec.ImageConfig{
			WorkingDir: "/app", Env: []string{"PATH=/usr/bin:/bin"}, Cmd: []string{"python3", "-m", "uvicorn", "main:app", "--host=0.0.0.0", "--port=8888"},
		},
	}))
}

// claimFrom claims a sandbox of a pool and waits for it.
func (b *barchan) claimFrom(pool, name string) {
	b.Helper()
	b.apply("apiVersion: extensions.agents.x-k8s.io/v1beta1\nkind: SandboxClaim\nmetadata: {name: " + name + ", namespace: default}\nspec: {warmPoolRef: {name: " + pool + "}}\n")
	b.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "sandboxclaim/"+name)
}
