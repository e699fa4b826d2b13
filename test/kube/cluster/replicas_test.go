package cluster

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
)

// replicaPods returns the addresses of the replicas by the names of their Pods.
func (b *barchan) replicaPods() map[string]string {
	b.Helper()
	out := b.kubectl("get", "pods", "-n", system, "-l", "app.kubernetes.io/name=barchan-replica", "--field-selector=status.phase=Running", "-o", `jsonpath={range .items[*]}{.metadata.name} {.status.podIP}{"\n"}{end}`)
	pods := map[string]string{}
	for line := range strings.Lines(out) {
		name, address, _ := strings.Cut(strings.TrimSpace(line), " ")
		pods[name] = address
	}
	return pods
}

// metric returns the value of a metric without labels.
func (b *barchan) metric(url, name string) (n float64) {
	b.Helper()
	out := b.curl(strings.Replace(url, ":7700", ":7790", 1) + "/metrics")
	value := regexp.MustCompile(`(?m)^` + name + ` (\S+)$`).FindStringSubmatch(out)
	if value == nil {
		b.Fatalf("%s has no metric %s", url, name)
	}
	n, err := strconv.ParseFloat(value[1], 64)
	must(b.T, err)
	return n
}

func (b *barchan) curl(args ...string) string {
	b.Helper()
	out, err := b.Command(b.Context(), "curl", append([]string{"-sS", "--max-time", "30"}, args...)...).CombinedOutput()
	if err != nil {
		b.Fatalf("curl %q: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// status returns the status of a list of sandboxes with a key.
func (b *barchan) status(url, key string) string {
	b.Helper()
	return b.curl("-o", "/dev/null", "-w", "%{http_code}", "-H", "X-API-KEY: "+key, url+"/v2/sandboxes")
}

// peers has the replicas find each other, and one lead requests to a sandbox that the other has just claimed and that its own watch
// cannot have brought.
func (b *barchan) peers() {
	pods := b.replicaPods()
	if len(pods) != 2 {
		b.Fatalf("replicas %v", pods)
	}
	names := slices.Sorted(maps.Keys(pods))
	for i, name := range names {
		eventually.NoError(b, name+" has a peer", func() error {
			var s struct {
				Peers []struct{ Name string }
			}
			out := b.kubectl("exec", "-n", system, name, "--", "/barchan", "status", "--json", "--data-dir=/data")
			if err := json.Unmarshal([]byte(out), &s); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			if len(s.Peers) != 1 || s.Peers[0].Name != names[1-i] {
				return fmt.Errorf("peers %v", s.Peers)
			}
			return nil
		})
	}
	from, to := "http://"+pods[names[0]]+":7700", "http://"+pods[names[1]]+":7700"
	for _, url := range []string{from, to} {
		if n := b.metric(url, "barchan_peers_members"); n != 1 {
			b.Errorf("%s has %v members", url, n)
		}
	}
	b.apply(`
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: base, namespace: default}
spec: {replicas: 2, sandboxTemplateRef: {name: base}, barchan: {templateNamespace: ` + system + `}}
`)
	b.kubectl("wait", "--for=jsonpath={.status.readyReplicas}=2", "--timeout=60s", "sandboxwarmpool/base")
	received := b.metric(to, "barchan_peers_received_total")

	heal := b.cutOff(pods[names[1]])
	// What no replica has written is pushed by none: the one that is cut off does not find it.
	b.apply(`
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxClaim
metadata: {name: unpushed, namespace: default}
spec: {warmPoolRef: {name: base}}
`)
	b.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "sandboxclaim/unpushed")
	id := b.kubectl("get", "sandbox", b.kubectl("get", "sandboxclaim", "unpushed", "-o", "jsonpath={.status.sandbox.name}"), "-o", "jsonpath={.status.barchan.id}")
	health := func(url string) string {
		return b.curl("-o", "/dev/null", "-w", "%{http_code}", url+"/sandbox/"+id+"/49983/health")
	}
	eventually.True(b, "the other replica serves the claimed sandbox", func() bool { return health(from) == "204" })
	if got := health(to); got != "502" {
		b.Errorf("status %s for a sandbox that the replica cannot know: its watch is not cut off", got)
	}
	out := b.sdkAt(from, to, `
import { Sandbox } from 'e2b'
const sbx = await Sandbox.create()
console.log((await sbx.commands.run('echo by a hint')).stdout.trim())
`)
	if out != "by a hint\n" {
		b.Errorf("the SDK printed %q", out)
	}
	if n := b.metric(to, "barchan_peers_received_total"); n <= received {
		b.Errorf("%v routes received, before %v", n, received)
	}
	heal()
	eventually.True(b, "the watch brings the claimed sandbox", func() bool { return health(to) == "204" })
	b.kubectl("delete", "sandboxclaim", "unpushed", "--timeout=60s")
	b.kubectl("delete", "sandboxwarmpool", "base", "--timeout=60s")
	b.sdk("import { Sandbox } from 'e2b'\nfor (const s of await Sandbox.list().nextItems()) await Sandbox.kill(s.sandboxId)")
}

// cutOff drops all packets from the API server to a Pod until heal, or the end of the test.
func (b *barchan) cutOff(pod string) (heal func()) {
	b.Helper()
	rule := func(verb string) error {
		out, err := b.Command(b.Context(), "ip", "rule", verb, "from", kubecluster.ServiceIP, "to", pod, "blackhole").CombinedOutput()
		if err != nil {
			return fmt.Errorf("ip rule %s: %w: %s", verb, err, out)
		}
		return nil
	}
	must(b.T, rule("add"))
	heal = sync.OnceFunc(func() {
		if err := rule("del"); err != nil {
			b.Error(err)
		}
	})
	b.Cleanup(heal)
	return heal
}

// tokens uses tokens of the cluster as keys of the E2B API.
func (b *barchan) tokens() {
	url := b.replicas()[0]
	own := b.token("bot")
	refused := func(key, status, want string) {
		b.Helper()
		out := b.curl("-w", " %{http_code}", "-H", "X-API-KEY: "+key, url+"/v2/sandboxes")
		if !strings.HasSuffix(out, " "+status) || !strings.Contains(out, want) {
			b.Errorf("got %s, want %s with %q", out, status, want)
		}
	}
	refused(own, "403", "system:serviceaccount:default:bot may not list sandboxes.agents.x-k8s.io in namespace default")
	b.kubectl("create", "rolebinding", "bot", "--clusterrole=edit", "--serviceaccount=default:bot")
	eventually.True(b, "the right is there", func() bool { return b.status(url, own) == "200" }) // refusals are kept too
	const program = `
import { Sandbox } from 'e2b'
const sbx = await Sandbox.create({ timeoutMs: 120_000 })
console.log((await sbx.commands.run('echo by a token')).stdout.trim(), (await Sandbox.list().nextItems()).filter(s => s.sandboxId == sbx.sandboxId).length)
await sbx.kill()
`
	for name, key := range map[string]string{"for the API server": own, "for barchan": b.token("bot", "--audience=barchan"), "with a namespace": own + "@default"} {
		b.T.Run(name, func(t *testing.T) {
			b := b.in(t)
			b.key = key
			if out := b.sdk(program); out != "by a token 1\n" {
				b.Errorf("the SDK printed %q", out)
			}
		})
	}
	refused(b.token("bot", "--audience=elsewhere"), "401", "audience")
	refused(own+"@kube-system", "403", "may not list sandboxes.agents.x-k8s.io in namespace kube-system")
	refused("abc.def.ghi", "401", "does not accept it as a token")

	b.kubectl("create", "namespace", "untenanted")
	b.kubectl("create", "rolebinding", "bot", "-n", "untenanted", "--clusterrole=view", "--serviceaccount=default:bot")
	refused(own+"@untenanted", "403", "kubectl label namespace untenanted barchan.dev/tenant=")
	b.kubectl("label", "namespace", "untenanted", "barchan.dev/tenant=")
	eventually.True(b, "the namespace is open", func() bool { return b.status(url, own+"@untenanted") == "200" })
	out := b.curl("-w", " %{http_code}", "-H", "X-API-KEY: "+own+"@untenanted", "-H", "Content-Type: application/json", "-d", "{}", url+"/v2/sandboxes")
	if !strings.HasSuffix(out, " 403") || !strings.Contains(out, "may not create sandboxes.agents.x-k8s.io in namespace untenanted") {
		b.Errorf("a create by a viewer: %s", out)
	}
	b.kubectl("delete", "namespace", "untenanted", "--timeout=60s")
	b.kubectl("delete", "serviceaccount,rolebinding", "bot")
	eventually.True(b, "the token has ended with its ServiceAccount", func() bool { return b.status(url, own) == "401" })
}

// token returns a token of a ServiceAccount of the namespace default, which is made if it is not there.
func (b *barchan) token(account string, flags ...string) string {
	b.Helper()
	b.apply("apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: " + account + ", namespace: default}\n")
	return strings.TrimSpace(b.kubectl(append([]string{"create", "token", account}, flags...)...))
}
