package cluster

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubeinstall"
	"github.com/barchan-dev/barchan/internal/testkit/npm"
)

const (
	shellImage = "barchan.test/shell:1"
	registryAt = "127.0.0.1:5000" // in the cluster's network
	system     = "barchan-system"
	// firstProgram is what is promised from an empty cluster to the first program.
	firstProgram = 2 * time.Minute
)

// barchan is our software on a cluster, as its administrator and its users reach it.
type barchan struct {
	*testing.T
	*kubecluster.Cluster
	bin string
	key string // of the REST API
}

// TestSandboxes goes from an empty cluster, by one command, to the first command of the unmodified SDK in a sandbox, and on until
// nothing of ours is left.
func TestSandboxes(t *testing.T) {
	b := &barchan{T: t, bin: kubeinstall.Build(t)}
	b.Cluster = kubecluster.Start(t, kubecluster.Config{Nodes: 1})
	b.ImportImage(t, kubecluster.WriteImage(t, kubecluster.Image{Name: shellImage, Files: shell(t)}))
	b.registry()
	began := time.Now()
	b.install("--registry", registryAt+"/team", "--template-image", shellImage, "--runtime-class", kubecluster.RuntimeClassGVisor)
	t.Logf("installed after %v", time.Since(began))
	out := b.sdk(`
import { Sandbox } from 'e2b'
const sbx = await Sandbox.create({ envs: { GREETING: 'hello', LITERAL: '$5 $$ $(HOME)' }, timeoutMs: 120_000 })
console.log((await sbx.commands.run('echo $GREETING $((6*7)) "$LITERAL"')).stdout.trim())
await sbx.files.write('/tmp/f', 'written')
console.log(await sbx.files.read('/tmp/f'), (await sbx.commands.run('cat /tmp/f')).stdout)
await sbx.kill()
`)
	if took := time.Since(began); took > firstProgram {
		t.Errorf("the first program ran after %v, want %v", took, firstProgram)
	} else {
		t.Logf("first program after %v", took)
	}
	if out != "hello 42 $5 $$ $(HOME)\nwritten written\n" {
		t.Errorf("the SDK printed %q", out)
	}
	eventually.NoError(t, "the killed sandbox is gone", func() error {
		if out := b.kubectl("get", "sandboxes,pods", "-o", "name"); out != "" {
			return fmt.Errorf("left: %s", out)
		}
		return nil
	})
	t.Run("doctor", func(t *testing.T) { b.in(t).doctor() })
	t.Run("helm test", func(t *testing.T) { b.in(t).helmTest() })
	t.Run("upstream's manifest", func(t *testing.T) { b.in(t).plainSandbox() })
	t.Run("pool and claim", func(t *testing.T) { b.in(t).pool() })
	t.Run("missing image", func(t *testing.T) { b.in(t).missingImage() })
	t.Run("rules of a namespace", func(t *testing.T) { b.in(t).rules() })
	t.Run("commands", func(t *testing.T) { b.in(t).commands() })
	t.Run("leader", func(t *testing.T) { b.in(t).anotherLeader() })
	t.Run("two replicas", func(t *testing.T) { b.in(t).twoReplicas() })
	t.Run("peers", func(t *testing.T) { b.in(t).peers() })
	t.Run("tokens of the cluster", func(t *testing.T) { b.in(t).tokens() })
	t.Run("stranger", func(t *testing.T) { b.in(t).stranger() })
	t.Run("API server away", func(t *testing.T) { b.in(t).outage() })
	t.Run("kubelet stopped", func(t *testing.T) { b.in(t).stoppedKubelet() })
	t.Run("policies", func(t *testing.T) { b.in(t).policies() })
	t.Run("upgrade", func(t *testing.T) { b.in(t).upgrade() })
	b.checkRights()
	t.Run("purge", func(t *testing.T) { b.in(t).purge() })
}

func (b *barchan) in(t *testing.T) *barchan {
	c := *b
	c.T = t
	return &c
}

// registry serves an empty registry on each node.
func (b *barchan) registry() {
	handler := registry.New(registry.Logger(slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)))
	server := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
	listeners, err := b.ListenOnNodes(b.Context(), "tcp", registryAt)
	must(b.T, err)
	var served sync.WaitGroup
	for _, listener := range listeners {
		served.Go(func() { _ = server.Serve(listener) }) // until Close
	}
	b.Cleanup(func() {
		_ = server.Close()
		served.Wait()
	})
}

// cluster runs `barchan cluster` as an administrator of the cluster.
func (b *barchan) cluster(args ...string) string {
	b.Helper()
	out, err := b.tryCluster(args...)
	if err != nil {
		b.Fatalf("barchan cluster %s: %v\n%s\n%s", strings.Join(args, " "), err, out, b.State(b))
	}
	return out
}

func (b *barchan) tryCluster(args ...string) (string, error) {
	cmd := b.Command(b.Context(), filepath.Join(b.bin, "barchan"), append([]string{"cluster"}, args...)...)
	cmd.Env = append(cmd.Env, "HOME="+b.TempDir()) // no kubeconfig, and no passwords of registries
	var messages bytes.Buffer
	cmd.Stderr = &messages
	out, err := cmd.Output()
	return string(out) + messages.String(), err
}

// install installs, and finds the key.
func (b *barchan) install(args ...string) {
	b.Helper()
	out := b.cluster(append([]string{"install"}, args...)...)
	b.Logf("install printed:\n%s", out)
	if key := regexp.MustCompile(`E2B_API_KEY=(\S+)`).FindStringSubmatch(out); key != nil {
		b.key = key[1]
	}
}

// doctor has nothing to report, and status shows what runs.
func (b *barchan) doctor() {
	b.Logf("doctor printed:\n%s", b.cluster("doctor"))
	var s struct {
		Roles []struct {
			Name           string
			Ready, Desired int
		}
		Leader  string
		Objects map[string]int
	}
	must(b.T, json.Unmarshal([]byte(b.cluster("status", "--json")), &s))
	if len(s.Roles) != 2 || s.Roles[0].Ready != 2 || s.Roles[1].Ready != 2 || !strings.HasPrefix(s.Leader, "barchan-controller-") || s.Objects["apikeys"] != 1 || s.Objects["sandboxtemplates"] != 1 {
		b.Errorf("status %+v", s)
	}
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
	b.evict("plain")
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

// evict verifies that the disruption controller counts the Pods of sandboxes, and then allows no eviction.
func (b *barchan) evict(pod string) {
	b.Helper()
	eventually.NoError(b, "status of the PodDisruptionBudget", func() error {
		pdb, err := b.Client.PolicyV1().PodDisruptionBudgets("default").Get(b.Context(), "barchan-claimed", metav1.GetOptions{})
		if err == nil && (pdb.Status.ObservedGeneration != pdb.Generation || pdb.Status.CurrentHealthy == 0) {
			err = fmt.Errorf("%+v", pdb.Status)
		}
		return err
	})
	err := b.Client.PolicyV1().Evictions("default").Evict(b.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: pod}})
	if !apierrors.IsTooManyRequests(err) || !strings.Contains(err.Error(), "disruption budget") {
		b.Errorf("eviction of %s: %v", pod, err)
	}
}

// pool has a SandboxClaim get a member that runs already.
func (b *barchan) pool() {
	b.apply(`
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
      - {name: main, image: "` + shellImage + `", command: [/bin/bash, -c, "echo begun; sleep infinity & wait"], env: [{name: OF_THE_TEMPLATE, value: "yes"}]}
---
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
	leader := b.kubectl("get", "lease", "-n", system, "barchan-controller", "-o", "jsonpath={.spec.holderIdentity}")
	metrics := b.curl("http://" + net.JoinHostPort(b.kubectl("get", "pod", "-n", system, leader, "-o", "jsonpath={.status.podIP}"), "7790") + "/metrics")
	if want := `agent_sandbox_claim_controller_startup_latency_ms_count{launch_type="warm",sandbox_template="base"} 1`; !strings.Contains(metrics, want) {
		b.Errorf("the leader's metrics lack %s", want)
	}
	id := b.kubectl("get", "sandbox", name, "-o", "jsonpath={.status.barchan.id}")
	out := b.sdk(`
import { Sandbox } from 'e2b'
const sbx = await Sandbox.connect('` + id + `')
console.log((await sbx.commands.run('echo $CLAIMED $OF_THE_TEMPLATE')).stdout.trim())
`)
	if out != "1 yes\n" {
		b.Errorf("the claimed sandbox printed %q", out)
	}
	b.logs(id)
	b.memory(name)
	b.kubectl("delete", "sandboxclaim,sandboxwarmpool", "--all", "--timeout=60s")
	eventually.NoError(b, "all Pods are collected", func() error {
		if out := b.kubectl("get", "pods", "-o", "name"); out != "" {
			return fmt.Errorf("left: %s", out)
		}
		return nil
	})
}

// missingImage has a create not wait for an image that nobody has.
func (b *barchan) missingImage() {
	b.apply(`
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: broken, namespace: default}
spec: {podTemplate: {spec: {containers: [{name: main, image: "` + registryAt + `/none:1"}]}}}
`)
	out := b.sdk("import { Sandbox } from 'e2b'\nawait Sandbox.create('broken').catch((e) => console.log(String(e)))")
	if !strings.Contains(out, "the sandbox cannot start: container main: ImagePullBackOff: ") {
		b.Errorf("the SDK printed %q", out)
	}
	b.kubectl("delete", "sandboxtemplate", "broken")
}

// rules has a sandbox in a namespace that admits only Pods that are restricted and have limits. A template without is refused at once.
func (b *barchan) rules() {
	b.kubectl("create", "namespace", "strict")
	b.kubectl("label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
	b.apply(`
apiVersion: v1
kind: ResourceQuota
metadata: {name: limits, namespace: strict}
spec: {hard: {requests.cpu: "1", limits.cpu: "2", requests.memory: 1Gi, limits.memory: 1Gi}}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: restricted, namespace: strict}
spec:
  podTemplate:
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: main
        image: "` + shellImage + `"
        command: [/bin/bash, -c, "sleep infinity & wait"]
        resources: {requests: {cpu: 200m, memory: 128Mi}, limits: {cpu: 200m, memory: 128Mi}}
        securityContext: {runAsUser: 1000, runAsNonRoot: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, seccompProfile: {type: RuntimeDefault}}
`)
	create := b.cli("key", "create", "-n", "strict")
	create.Env = append(create.Env, "BARCHAN_KUBECONFIG="+b.Kubeconfig)
	out, err := create.CombinedOutput()
	must(b.T, err)
	tenant := *b
	tenant.key = regexp.MustCompile(`e2b_\w+`).FindString(string(out))
	text := tenant.sdk(`
import { Sandbox } from 'e2b'
const sbx = await Sandbox.create('restricted', { timeoutMs: 600_000 })
console.log((await sbx.commands.run('echo $UID', { cwd: '/' })).stdout.trim())
await Sandbox.create().catch((e) => console.log(String(e)))
`)
	if !strings.HasPrefix(text, "1000\n") || !strings.Contains(text, "the sandbox cannot start: pods ") || !strings.Contains(text, "violates PodSecurity") {
		b.Errorf("the SDK printed %q", text)
	}
	if class := b.kubectl("get", "pods", "-n", "strict", "-o", "jsonpath={.items[*].status.qosClass}"); class != "Guaranteed" {
		b.Errorf("the sandbox's Pod is %q", class)
	}
	b.kubectl("delete", "namespace", "strict", "--timeout=60s")
}

// logs verifies that the output of a sandbox's program is read where a replica may, and that its log says so where it may not.
func (b *barchan) logs(id string) {
	b.Helper()
	read := func(want string) {
		b.Helper()
		eventually.NoError(b, "the log has "+want, func() error {
			if text := b.curl(b.replicas()[0]+"/v2/sandboxes/"+id+"/logs", "-H", "X-API-Key: "+b.key); !strings.Contains(text, want) {
				return fmt.Errorf("got %s", text)
			}
			return nil
		})
	}
	read("bind the ClusterRole barchan-logs")
	b.kubectl("create", "rolebinding", "barchan-logs", "--clusterrole=barchan-logs", "--serviceaccount="+system+":barchan-replica")
	read(`"message":"begun"`)
	b.kubectl("delete", "rolebinding", "barchan-logs")
}

// memory asks for what only memory makes possible, and pauses without.
func (b *barchan) memory(sandbox string) {
	b.Helper()
	out := b.sdk(`
import { Sandbox } from 'e2b'
const told = async (what) => { try { await what(); console.log('done') } catch (e) { console.log(/not available[^,]*/.exec(String(e))?.[0] ?? e) } }
const sbx = await Sandbox.create()
await told(() => sbx.createSnapshot())
await told(() => sbx.pause())
await told(() => Sandbox.create({ lifecycle: { onTimeout: 'pause' } }))
console.log(await sbx.pause({ keepMemory: false }))
await Sandbox.connect(sbx.sandboxId)
console.log((await sbx.commands.run('echo again')).stdout.trim())
await sbx.kill()
`)
	if want := "not available on a Kubernetes cluster\n" + strings.Repeat("not available with memory on a Kubernetes cluster\n", 2) + "true\nagain\n"; out != want {
		b.Errorf("the SDK printed %q, want %q", out, want)
	}
	b.apply("apiVersion: barchan.dev/v1alpha1\nkind: Checkpoint\nmetadata: {name: kept, namespace: default, finalizers: [barchan.dev/node]}\nspec: {sandboxName: " + sandbox + "}\n")
	b.kubectl("wait", "--for=jsonpath={.status.phase}=Failed", "--timeout=60s", "checkpoint/kept")
	b.kubectl("delete", "checkpoint", "kept", "--timeout=60s")
}

// anotherLeader has a second controller follow the first, whose Pod is killed.
func (b *barchan) anotherLeader() {
	holder := func() string {
		return b.kubectl("get", "lease", "-n", system, "barchan-controller", "-o", "jsonpath={.spec.holderIdentity}")
	}
	first := holder()
	b.kubectl("delete", "pod", "-n", system, first, "--grace-period=0", "--force", "--wait=false")
	eventually.True(b, "another leads", func() bool { now := holder(); return now != first && now != "" })
	b.apply(`
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: later, namespace: default}
spec: {podTemplate: {spec: {terminationGracePeriodSeconds: 1, containers: [{name: main, image: "` + kubecluster.PodImage + `"}]}}}
`)
	b.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "sandbox/later")
	b.kubectl("delete", "sandbox", "later", "--timeout=60s")
}

// twoReplicas claims warm sandboxes at one replica, and uses each at once through the other.
func (b *barchan) twoReplicas() {
	urls := b.replicas()
	if len(urls) != 2 {
		b.Fatalf("ready replicas: %v", urls)
	}
	b.apply(`
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: base, namespace: default}
spec: {replicas: 4, sandboxTemplateRef: {name: base}, barchan: {templateNamespace: ` + system + `}}
`)
	b.kubectl("wait", "--for=jsonpath={.status.readyReplicas}=4", "--timeout=60s", "sandboxwarmpool/base")
	out := b.sdkAt(urls[0], urls[1], `
import { Sandbox } from 'e2b'
for (let i = 0; i < 4; i++) {
  const sbx = await Sandbox.create()
  console.log((await sbx.commands.run('echo used')).stdout.trim())
  await sbx.kill()
}
`)
	if out != strings.Repeat("used\n", 4) {
		b.Errorf("the SDK printed %q", out)
	}
	b.kubectl("delete", "sandboxwarmpool", "base", "--timeout=60s")
}

// stranger has the route of a sandbox lead to the Pod of another, as where the network gives away an address before the
// gateway knows. No controller runs meanwhile, for it would correct the status.
func (b *barchan) stranger() {
	for _, name := range []string{"one", "two"} {
		b.apply(`
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: ` + name + `, namespace: default}
spec: {podTemplate: {spec: {terminationGracePeriodSeconds: 1, containers: [{name: main, image: "` + kubecluster.PodImage + `", args: [serve, ":8080"]}]}}}
`)
	}
	b.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "sandbox/one", "sandbox/two")
	url := b.replicas()[0]
	get := func(path string) string { return b.curl(url + path) }
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
	b.kubectl("scale", "deployment", "-n", system, "barchan-controller", "--replicas=0")
	b.kubectl("wait", "-n", system, "--for=delete", "--timeout=60s", "pod", "-l", "app.kubernetes.io/name=barchan-controller")
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
	if text := b.curl(strings.Replace(url, ":7700", ":7790", 1) + "/metrics"); !strings.Contains(text, `barchan_gateway_dials_total{result="unproved"}`) {
		b.Error("no connection is counted as unproved")
	}
	b.kubectl("scale", "deployment", "-n", system, "barchan-controller", "--replicas=2")
	b.kubectl("delete", "sandbox", "one", "two", "--timeout=60s")
}

// outage verifies that sandboxes are served while the API server does not answer, that new work is refused meanwhile, and that both
// roles go on afterwards.
func (b *barchan) outage() {
	url := b.replicas()[0]
	token := b.token("rest")
	b.kubectl("create", "rolebinding", "rest", "--clusterrole=edit", "--serviceaccount=default:rest")
	const away = 50 * time.Second // longer than what a replica of one machine allows
	id := strings.TrimSpace(b.sdk("import { Sandbox } from 'e2b'\nconsole.log((await Sandbox.create({ timeoutMs: 600_000 })).sandboxId)"))
	var traffic sync.WaitGroup
	traffic.Go(func() {
		out, err := b.trySDK(url, url, `
import { Sandbox } from 'e2b'
const sbx = await Sandbox.connect('`+id+`', { timeoutMs: 600_000 })
const failed = []
for (const end = Date.now() + `+strconv.FormatInt((away+20*time.Second).Milliseconds(), 10)+`; Date.now() < end; await new Promise(r => setTimeout(r, 200))) {
  try { await sbx.commands.run('true') } catch (e) { failed.push(String(e)) }
}
console.log(failed.length, failed[0] ?? '')
`)
		if err != nil || strings.TrimSpace(out) != "0" {
			b.Errorf("commands in a running sandbox: %v: %s", err, out)
		}
	})
	time.Sleep(5 * time.Second) // traffic before the outage
	resume := b.Freeze(b, "kube-apiserver")
	time.Sleep(away) // an outage has no end to wait for
	refused, _ := b.trySDK(url, url, "import { Sandbox } from 'e2b'\nawait Sandbox.create({ requestTimeoutMs: 30_000 })")
	unknown := b.status(url, token)
	resume()
	if !strings.Contains(refused, "503") {
		b.Errorf("a create while the API server is away: %s", refused)
	}
	if unknown != "503" {
		b.Errorf("status %s for a token of the cluster while the API server is away", unknown)
	}
	traffic.Wait()
	eventually.NoError(b, "a create after the outage", func() error {
		out, err := b.trySDK(url, url, "import { Sandbox } from 'e2b'\nconst s = await Sandbox.create(); await s.kill()")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	b.sdkAt(url, url, "import { Sandbox } from 'e2b'\nawait Sandbox.kill('"+id+"')") // the Pods of replicas may not be Ready again yet
}

// stoppedKubelet verifies that the sandboxes of a node whose kubelet stops run on and are served, that their condition says what the
// Pod's does, and that the same Pod is ready again afterwards.
func (b *barchan) stoppedKubelet() {
	b.apply(`
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: kept, namespace: default}
spec: {podTemplate: {spec: {terminationGracePeriodSeconds: 1, containers: [{name: main, image: "` + kubecluster.PodImage + `", args: [serve, ":8080"]}]}}}
`)
	b.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "sandbox/kept")
	url := b.replicas()[0] + "/sandbox/" + b.kubectl("get", "sandbox", "kept", "-o", "jsonpath={.status.barchan.id}") + "/8080/"
	served := func() {
		b.Helper()
		out, err := b.Command(b.Context(), "curl", "-sS", "--max-time", "30", url).CombinedOutput()
		if err != nil || strings.TrimSpace(string(out)) != "kept" {
			b.Errorf("the sandbox answers %q, %v", out, err)
		}
	}
	pod := b.kubectl("get", "pod", "kept", "-o", "jsonpath={.metadata.uid}")
	resume := b.Freeze(b, "kubelet")
	b.kubectl("wait", "--for=condition=Ready=false", "--timeout=120s", "sandbox/kept")
	if message := b.kubectl("get", "sandbox", "kept", "-o", "jsonpath={.status.conditions[?(@.type=='Ready')].message}"); message != "Pod is Running but not Ready" {
		b.Errorf("condition Ready: %q", message)
	}
	served()
	resume()
	b.kubectl("wait", "--for=condition=Ready", "--timeout=120s", "sandbox/kept")
	served()
	if now := b.kubectl("get", "pod", "kept", "-o", "jsonpath={.metadata.uid}"); now != pod {
		b.Error("the sandbox has another Pod")
	}
	b.kubectl("delete", "sandbox", "kept", "--timeout=60s")
}

// policies verifies that the accounts of the roles are held to what they need.
func (b *barchan) policies() {
	as := func(role string) string { return "--as=system:serviceaccount:" + system + ":barchan-" + role }
	b.refused("what a Sandbox controls", "run", "stray", "--image="+kubecluster.PodImage, as("controller"))
	b.kubectl("run", "foreign", "--image="+kubecluster.PodImage)
	b.refused("what a Sandbox controls", "delete", "pod", "foreign", as("controller"))
	b.kubectl("delete", "pod", "foreign", "--grace-period=1")
	b.kubectl("create", "namespace", "untenanted")
	sandbox := "apiVersion: agents.x-k8s.io/v1beta1\nkind: Sandbox\nmetadata: {name: x, namespace: untenanted}\n" +
		"spec: {podTemplate: {spec: {containers: [{name: main, image: x}]}}}\n"
	file := filepath.Join(b.TempDir(), "sandbox.yaml")
	must(b.T, os.WriteFile(file, []byte(sandbox), 0o600))
	b.refused("has no label barchan.dev/tenant", "create", "-f", file, as("replica"))
	b.kubectl("label", "namespace", "untenanted", "barchan.dev/tenant=")
	b.kubectl("create", "-f", file, as("replica"), "--dry-run=server")
	b.kubectl("delete", "namespace", "untenanted", "--timeout=60s")
}

// refused runs a kubectl that must fail with a text.
func (b *barchan) refused(want string, args ...string) {
	b.Helper()
	out, err := b.Command(b.Context(), kubecluster.FindProgram(b, "kubectl"), args...).CombinedOutput()
	if err == nil || !strings.Contains(string(out), want) {
		b.Errorf("kubectl %s: %v, want a refusal with %q:\n%s", strings.Join(args, " "), err, want, out)
	}
}

// upgrade changes values: what was given before stays, and what another set of values lacks goes.
func (b *barchan) upgrade() {
	if out, err := b.tryCluster("install", "--set", "replica.replica=1"); err == nil || !strings.Contains(out, "value replica.replica:") {
		b.Errorf("a misspelt value: %v\n%s", err, out)
	}
	key := b.key
	b.install("--set", "replica.replicas=1,flowControl=false")
	if b.key != key {
		b.Error("an upgrade made another key")
	}
	if out := b.kubectl("get", "deployment", "-n", system, "barchan-replica", "-o", "jsonpath={.spec.replicas} {.spec.template.spec.containers[0].image}"); !strings.HasPrefix(out, "1 "+registryAt+"/team/barchan@sha256:") {
		b.Errorf("the replicas are %s", out)
	}
	b.refused("not found", "get", "flowschema", "barchan")
	if out := b.sdk("import { Sandbox } from 'e2b'\nconst s = await Sandbox.create(); console.log((await s.commands.run('echo upgraded')).stdout.trim()); await s.kill()"); out != "upgraded\n" {
		b.Errorf("the SDK printed %q", out)
	}
}

// unallowed is what RBAC and our own policies say of a request. A Pod that the rules of its namespace forbid is the template's matter.
var unallowed = regexp.MustCompile(`is forbidden: (User|ValidatingAdmissionPolicy) `)

// checkRights looks for requests that the roles may not send.
func (b *barchan) checkRights() {
	for _, role := range []string{"controller", "replica"} {
		if log := b.kubectl("logs", "-n", system, "-l", "app.kubernetes.io/name=barchan-"+role, "--tail=-1"); unallowed.MatchString(log) {
			b.Errorf("a %s lacks a right:\n%s", role, log)
		}
	}
}

// purge ends sandboxes and leaves nothing.
func (b *barchan) purge() {
	b.sdk("import { Sandbox } from 'e2b'\nawait Sandbox.create()")
	if out, err := b.tryCluster("purge"); err == nil || !strings.Contains(out, "1 sandboxes") {
		b.Errorf("a purge of a cluster in use, without --yes: %v\n%s", err, out)
	}
	b.Logf("purge printed:\n%s", b.cluster("purge", "--yes"))
	for _, kind := range []string{"crds", "pods -A", "clusterroles", "validatingadmissionpolicies", "networkpolicies -A", "poddisruptionbudgets -A", "namespaces"} {
		for name := range strings.FieldsSeq(b.kubectl(append([]string{"get", "-o", "name"}, strings.Fields(kind)...)...)) {
			if strings.Contains(name, "barchan") || strings.Contains(name, "x-k8s.io") || strings.HasPrefix(name, "pod/") {
				b.Errorf("left: %s", name)
			}
		}
	}
	if labels := b.kubectl("get", "namespace", "default", "-o", "jsonpath={.metadata.labels}"); strings.Contains(labels, "tenant") {
		b.Errorf("left: labels %s", labels)
	}
	if out, err := b.tryCluster("status"); err == nil || !strings.Contains(out, "not installed") {
		b.Errorf("status without an installation: %v\n%s", err, out)
	}
	if out, err := b.tryCluster("purge", "--yes"); err == nil || !strings.Contains(out, "not installed") {
		b.Errorf("a second purge: %v\n%s", err, out)
	}
}

// sdk runs a program with the unmodified E2B SDK in the cluster's network.
func (b *barchan) sdk(program string) string {
	b.Helper()
	url := b.replicas()[0]
	return b.sdkAt(url, url, program)
}

// sdkAt has the program use one replica's REST API, and reach sandboxes through another.
func (b *barchan) sdkAt(api, gateway, program string) string {
	b.Helper()
	out, err := b.trySDK(api, gateway, program)
	if err != nil {
		b.Fatalf("the SDK: %v\n%s", err, out)
	}
	return out
}

func (b *barchan) trySDK(api, gateway, program string) (string, error) {
	b.Helper()
	dir := npm.Package(b, "e2b@2.51.0")
	file := filepath.Join(b.TempDir(), "program.mjs")
	must(b.T, os.WriteFile(file, []byte(program), 0o600))
	must(b.T, os.Symlink(filepath.Join(dir, "node_modules"), filepath.Join(filepath.Dir(file), "node_modules")))
	cmd := b.Command(b.Context(), "node", file)
	cmd.Env = append(os.Environ(), "E2B_API_KEY="+b.key, "E2B_API_URL="+api, "E2B_SANDBOX_URL="+gateway)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// replicas returns the URLs of ready replicas, to which the Service leads. After a fault it may take a while until there is one.
func (b *barchan) replicas() (urls []string) {
	b.Helper()
	eventually.True(b, "a replica is ready", func() bool {
		ips := b.kubectl("get", "endpointslices", "-A", "-l", "kubernetes.io/service-name=barchan", "-o", "jsonpath={.items[0].endpoints[?(@.conditions.ready==true)].addresses[0]}")
		for ip := range strings.FieldsSeq(ips) {
			urls = append(urls, "http://"+net.JoinHostPort(ip, "7700")) // there is no kube-proxy
		}
		return len(urls) > 0
	})
	return urls
}

func (b *barchan) kubectl(args ...string) string {
	b.Helper()
	return b.Kubectl(b.T, args...)
}

func (b *barchan) apply(manifests string) {
	b.Helper()
	b.Apply(b.T, manifests)
}

// shell is the files of an image with bash and what the SDK's commands need.
func shell(t *testing.T) map[string]string {
	t.Helper()
	files := map[string]string{"/bin/sh": "/bin/bash"}
	for _, program := range []string{"/bin/bash", "/bin/cat", "/bin/echo", "/bin/sleep"} {
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
