package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/config/setting"
)

func env(pairs ...string) func(string) (string, bool) {
	m := map[string]string{EnvFile: ""}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
	}
	return func(k string) (string, bool) { v, ok := m[k]; return v, ok }
}

func write(t *testing.T, content string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "barchan.yaml")
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// load reads a file that is always named, so that the machine's own cannot disturb.
func load(t *testing.T, file string, lookup func(string) (string, bool), args ...string) (*Resolved, error) {
	t.Helper()
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	flags := AddFlags(fs, func(string) bool { return true })
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	return Load(Options{File: write(t, file), LookupEnv: lookup, Flags: []*setting.Flags{flags}})
}

func TestEveryFieldIsASetting(t *testing.T) {
	var c Config
	inTable := map[any]string{}
	for _, s := range c.table() {
		if s.Doc == "" {
			t.Errorf("%s has no doc", s.Key)
		}
		inTable[s.Ptr] = s.Key
	}
	v := reflect.ValueOf(&c).Elem()
	for i := range v.NumField() {
		name := v.Type().Field(i).Name
		key, ok := inTable[v.Field(i).Addr().Interface()]
		if !ok {
			t.Errorf("field %s is not in the table", name)
			continue
		}
		if !strings.EqualFold(key, name) {
			t.Errorf("field %s has the key %s", name, key)
		}
	}
	if v.NumField() != len(inTable) {
		t.Errorf("%d fields and %d settings", v.NumField(), len(inTable))
	}
}

func TestPrecedence(t *testing.T) {
	file := "httpAddr: 127.0.0.1:1001\ntlsAddr: 127.0.0.1:1002\nkubeAddr: 127.0.0.1:1003\n"
	r, err := load(t, file,
		env("BARCHAN_TLS_ADDR", "127.0.0.1:2002", "BARCHAN_KUBE_ADDR", "127.0.0.1:2003"),
		"--kube-addr", "127.0.0.1:3003")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []struct{ key, got, value, kind, source string }{
		{"nftTable", r.NftTable, "barchan", FromDefault, "default"},
		{"httpAddr", r.HTTPAddr, "127.0.0.1:1001", FromFile, r.File + ":1"},
		{"tlsAddr", r.TLSAddr, "127.0.0.1:2002", FromEnv, "BARCHAN_TLS_ADDR"},
		{"kubeAddr", r.KubeAddr, "127.0.0.1:3003", FromFlag, "--kube-addr"},
	} {
		src := r.Source(want.key)
		if want.got != want.value || src.Kind != want.kind || src.String() != want.source {
			t.Errorf("%s = %s from %s %s, want %s from %s %s", want.key, want.got, src.Kind, src, want.value, want.kind, want.source)
		}
	}
}

func TestDerived(t *testing.T) {
	r, err := load(t, "dataDir: /srv/b\nnodeName: n1\n", env())
	if err != nil {
		t.Fatal(err)
	}
	if r.RunDir != "/srv/b/run" || r.AdminSocket() != "/srv/b/run/admin.sock" {
		t.Errorf("runDir %s, socket %s", r.RunDir, r.AdminSocket())
	}
	if got := r.Domain(); got != "barchan.localhost:7743" {
		t.Errorf("domain %s", got)
	}
	r.Domains = []string{"sbx.example.org:8443"}
	if got := r.Domain(); got != "sbx.example.org:8443" {
		t.Errorf("domain with port %s", got)
	}
}

func TestLists(t *testing.T) {
	r, err := load(t, "dnsResolvers: [9.9.9.9, 1.1.1.1]\n", env(),
		"--domains", "a.test,b.test", "--domains", "c.test", "--access-log")
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(r.DNSResolvers, r.Domains, r.AccessLog); got != "[9.9.9.9 1.1.1.1] [a.test b.test c.test] true" {
		t.Error(got)
	}
}

func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		name, file string
		args       []string
		want       string
	}{
		{"unknown key", "# hello\nhttpAdr: x\n", nil, `barchan.yaml:2: httpAdr: unknown key`},
		{"key of another spelling", "http_addr: x\n", nil, `it is written httpAddr`},
		{"twice", "nodeName: a\nnodeName: b\n", nil, `nodeName`},
		{"not a mapping", "- a\n", nil, `barchan.yaml:1: want a list of`},
		{"broken YAML", "a: [", nil, `barchan.yaml`},
		{"nested", "domains:\n  a: b\n", nil, `domains: want a plain value`},
		{"list for one", "nodeName: [a]\n", nil, `nodeName: is a list`},
		{"relative directory", "dataDir: var\n", nil, `dataDir: "var" is not absolute`},
		{"run directory too long", "runDir: /" + strings.Repeat("x", 90) + "\n", nil, `runDir:`},
		{"same directory", "dataDir: /a\ncacheDir: /a/\n", nil, `cacheDir: is the same`},
		{"no port", "", []string{"--http-addr", "127.0.0.1"}, `httpAddr: "127.0.0.1" is not an address`},
		{"port too high", "", []string{"--http-addr", "127.0.0.1:70000"}, `httpAddr: port "70000"`},
		{"port twice", "", []string{"--http-addr", "127.0.0.1:7764"}, `kubeAddr: port 7764 is also that of httpAddr`},
		{"host name to listen on", "", []string{"--http-addr", "example.org:1"}, `httpAddr: "example.org" is not an IP address`},
		{"no HTTP", "httpAddr: ''\n", nil, `httpAddr: "" is not an address`},
		{"key without certificate", "tlsKey: /k\n", nil, `tlsCert: is missing`},
		{"certificate without key", "tlsCert: /k\n", nil, `tlsKey: is missing`},
		{"relative certificate", "tlsCert: c\ntlsKey: /k\n", nil, `tlsCert: "c" is not absolute`},
		{"ACME without TLS", "acme: true\nacmeAgree: true\ndomains: [box.example.org]\ntlsAddr: ''\n", nil, `acme: is on, but tlsAddr`},
		{"ACME without consent", "acme: true\ndomains: [box.example.org]\n", nil, `acmeAgree: is false`},
		{"ACME by HTTP", "acme: true\nacmeAgree: true\ndomains: [box.example.org]\nacmeDirectory: http://a/dir\n", nil, `acmeDirectory: "http://a/dir" is not`},
		{"ACME without a public domain", "acme: true\nacmeAgree: true\n", nil, `domains: none of barchan.localhost`},
		{"ACME e-mail", "acme: true\nacmeAgree: true\ndomains: [box.example.org]\nacmeEmail: ops\n", nil, `acmeEmail: "ops" is not`},
		{"ACME in a replica", "acme: true\nacmeAgree: true\ndomains: [box.example.org]\nrole: replica\napiKubeconfig: /k\n", nil, `acme: is on in a replica`},
		{"ACME wait", "acme: true\nacmeAgree: true\ndomains: [box.example.org]\nacmeWait: 1h\n", nil, `acmeWait: 1h0m0s is out of range`},
		{"relative hook", "acme: true\nacmeAgree: true\ndomains: [box.example.org]\nacmeHook: hook\n", nil, `acmeHook: "hook" is not absolute`},
		{"updates without a server", "acme: true\nacmeAgree: true\ndomains: [box.example.org]\nacmeUpdateZone: example.org\n", nil, `acmeUpdateServer: is empty, but a zone`},
		{"updates and a hook", "acme: true\nacmeAgree: true\ndomains: [box.example.org]\nacmeHook: /h\nacmeUpdateServer: a:53\n", nil, `acmeHook: is set beside`},
		{"updates by name", "acme: true\nacmeAgree: true\ndomains: [box.example.org]\nacmeUpdateServer: a\n", nil, `acmeUpdateServer: "a" is not host:port`},
		{"updates without a key", "acme: true\nacmeAgree: true\ndomains: [box.example.org]\nacmeUpdateServer: a:53\nacmeUpdateZone: example.org\n", nil, `acmeUpdateKeyName: is missing`},
		{"updates of another zone", "acme: true\nacmeAgree: true\ndomains: [box.example.org]\nacmeUpdateServer: a:53\nacmeUpdateZone: example.com\nacmeUpdateKeyName: k\nacmeUpdateKeyFile: /k\n", nil, `acmeUpdateZone: box.example.org is not in the zone example.com`},
		{"algorithm", "acme: true\nacmeAgree: true\ndomains: [box.example.org]\nacmeUpdateServer: a:53\nacmeUpdateZone: example.org\nacmeUpdateKeyName: k\nacmeUpdateKeyFile: /k\nacmeUpdateAlgorithm: md5\n", nil, `acmeUpdateAlgorithm: "md5" is none of`},
		{"domain", "domains: [Foo_Bar]\n", nil, `domains: "Foo_Bar" is not`},
		{"address as domain", "domains: [10.0.0.1]\n", nil, `domains: "10.0.0.1" is not`},
		{"etcd", "etcdEndpoints: [10.0.0.1]\n", nil, `etcdEndpoints: "10.0.0.1" is not`},
		{"prefix", "etcdEndpoints: ['http://10.0.0.1:2379']\netcdPrefix: barchan/\n", nil, `etcdPrefix: "barchan/" is not`},
		{"root as prefix", "etcdEndpoints: ['http://10.0.0.1:2379']\netcdPrefix: /\n", nil, `etcdPrefix: "/" is not`},
		{"prefix without etcd", "etcdPrefix: /other\n", nil, `etcdPrefix: is set, but etcdEndpoints is empty`},
		{"CA without etcd", "etcdCA: /ca\n", nil, `etcdEndpoints: is empty`},
		{"platform", "runscPlatform: vmware\n", nil, `runscPlatform: "vmware"`},
		{"two containerds", "containerdBinary: /a\ncontainerdAddress: /b\n", nil, `containerdBinary: is set beside`},
		{"bridge", "bridgeName: a-name-that-is-too-long\n", nil, `bridgeName:`},
		{"node", "nodeName: A\n", nil, `nodeName:`},
		{"cgroup", "cgroupParent: a\n", nil, `cgroupParent:`},
		{"table", "nftTable: 'a b'\n", nil, `nftTable:`},
		{"subnet text", "subnet: x\n", nil, `subnet: "x" is not a subnet`},
		{"subnet bits", "subnet: 10.87.1.1/16\n", nil, `want 10.87.0.0/16`},
		{"subnet small", "subnet: 10.87.1.0/30\n", nil, `subnet: 10.87.1.0/30 has 30 bits`},
		{"subnet v6", "subnet: fd00::/64\n", nil, `subnet: fd00::/64 is not an IPv4`},
		{"subnet over address", "httpAddr: 10.87.0.1:80\n", nil, `subnet: 10.87.0.0/16 overlaps httpAddr`},
		{"subnet loopback", "subnet: 127.0.0.0/8\n", nil, `subnet: 127.0.0.0/8 is a special range`},
		{"no subnet", "subnet: ''\n", nil, `subnet: is empty`},
		{"subnet6 text", "subnet6: fd00::x/64\n", nil, `subnet6: "fd00::x/64" is not a subnet`},
		{"subnet6 v4", "subnet6: 10.1.0.0/16\n", nil, `subnet6: 10.1.0.0/16 is not an IPv6`},
		{"subnet6 bits", "subnet6: fd87::1/64\n", nil, `want fd87::/64`},
		{"subnet6 small", "subnet6: fd87::/112\n", nil, `subnet6: fd87::/112 has 112 bits`},
		{"subnet6 special", "subnet6: fe80::/64\n", nil, `subnet6: fe80::/64 is a special range`},
		{"reachable text", "reachable: [10.1.0.0]\n", nil, `reachable: "10.1.0.0" is not a range`},
		{"reachable bits", "reachable: [10.1.0.1/16]\n", nil, `reachable: 10.1.0.1/16 has bits set behind its mask`},
		{"reachable of our own", "reachable: [10.87.3.0/24]\n", nil, `reachable: 10.87.3.0/24 overlaps`},
		{"spares", "spareNetworks: -1\n", nil, `spareNetworks: -1`},
		{"least free disk", "reserveDisk: -1Gi\n", nil, `reserveDisk: -1Gi`},
		{"least free memory", "reserveMemory: -1Gi\n", nil, `reserveMemory: -1Gi`},
		{"role", "role: boss\n", nil, `role: "boss" is none of`},
		{"replica of nothing", "role: replica\n", nil, `apiKubeconfig: is missing`},
		{"node of nothing", "role: node\n", nil, `apiKubeconfig: is missing; a node needs`},
		{"socket of a replica", "role: replica\napiKubeconfig: /k\nnodeSocket: /s\n", nil, `nodeSocket: is set, but the role is replica`},
		{"group of a server's socket", "nodeSocket: /s\nnodeSocketGroup: g\n", nil, `nodeSocketGroup: is set, but`},
		{"relative socket", "nodeSocket: s\n", nil, `nodeSocket: "s" is not absolute`},
		{"peers of a node", "role: node\napiKubeconfig: /k\npeerAddr: 10.0.0.5:7701\n", nil, `peerAddr: is set, but a node has no peers`},
		{"controller of nothing", "role: controller\nagentImage: a\n", nil, `apiKubeconfig: is missing`},
		{"controller without an agent", "role: controller\napiKubeconfig: /k\n", nil, `agentImage: is missing`},
		{"lease in no namespace", "role: controller\napiKubeconfig: /k\nagentImage: a\nleaseNamespace: A\n", nil, `leaseNamespace: "A" is not`},
		{"no cluster domain", "role: controller\napiKubeconfig: /k\nagentImage: a\nclusterDomain: '-'\n", nil, `clusterDomain: "-" is not`},
		{"no runtime class", "role: controller\napiKubeconfig: /k\nagentImage: a\nruntimeClass: '/'\n", nil, `runtimeClass: "/" is not`},
		{"server of another", "apiKubeconfig: /k\n", nil, `apiKubeconfig: is set, but`},
		{"relative kubeconfig", "role: replica\napiKubeconfig: k\n", nil, `apiKubeconfig: "k" is not absolute`},
		{"gossip on all addresses", "peerAddr: 0.0.0.0:1\n", nil, `peerAddr: "0.0.0.0:1" is not an address`},
		{"pushes by name", "peerAddr: 10.0.0.1:1\npeerPushAddr: a:1\n", nil, `peerPushAddr: "a:1" is not an address`},
		{"seed", "peerAddr: 10.0.0.1:1\npeerSeeds: [a]\n", nil, `peerSeeds: "a" is not host:port`},
		{"tokens of no cluster", "kubeTokens: true\n", nil, `kubeTokens: is set, but the role is server`},
		{"seeds without gossip", "peerSeeds: [a:1]\n", nil, `peerAddr: is empty`},
		{"resolver in subnet", "dnsResolvers: 10.87.0.3\n", nil, `dnsResolvers: 10.87.0.3`},
		{"zone", "internalZones: [corp.example, Corp.]\n", nil, `internalZones: "Corp."`},
		{"resolver text", "dnsResolvers: dns\n", nil, `dnsResolvers: "dns" is not an IP`},
		{"runtime", "defaultRuntime: docker\n", nil, `defaultRuntime: "docker"`},
		{"memory text", "sandboxMemory: lots\n", nil, `sandboxMemory: "lots" is not a quantity`},
		{"memory", "sandboxMemory: 1Mi\n", nil, `sandboxMemory: 1Mi is too little`},
		{"CPU", "sandboxCPU: 1m\n", nil, `sandboxCPU: 1m`},
		{"pids", "sandboxPids: few\n", nil, `sandboxPids: "few"`},
		{"pool size", "poolSize: 1001\n", nil, `poolSize: 1001`},
		{"time in RAM", "storeAfter: -1s\n", nil, `storeAfter: -1s`},
		{"encryption", "memoryEncryption: maybe\n", nil, `memoryEncryption: "maybe" is neither auto, true nor false`},
		{"memory of idle ones", "idleMemory: -1Gi\n", nil, "idleMemory: -1Gi is negative, want 0 for never, or more"},
		{"addresses", "pausedAddresses: lose\n", nil, `pausedAddresses: "lose" is neither keep nor release`},
		{"quota of etcd", "etcdQuota: 1Mi\n", nil, `etcdQuota: 1Mi is too little`},
		{"quota of sandboxes", "quotaSandboxes: -2\n", nil, `quotaSandboxes: -2`},
		{"quota of stored bytes", "quotaStored: -1Gi\n", nil, `quotaStored: -1Gi is negative, want -1 for the machine's own`},
		{"quota of templates", "quotaTemplates: -1\n", nil, `quotaTemplates: -1`},
		{"quota of objects", "quotaContents: -1Gi\n", nil, `quotaContents: -1Gi is negative`},
		{"quota of keys", "quotaKeys: -1\n", nil, `quotaKeys: -1`},
		{"quota of CPUs", "quotaCPU: \"-1\"\n", nil, `quotaCPU: -1`},
		{"quota of memory", "quotaMemory: -1Gi\n", nil, `quotaMemory: -1Gi`},
		{"what a quota counts", "quotaCounts: some\n", nil, `quotaCounts: "some"`},
		{"idle clients", "clientIdle: 1ms\n", nil, `clientIdle: 1ms`},
		{"idle streams", "streamIdle: -1s\n", nil, `streamIdle: -1s`},
		{"rate of a sandbox", "sandboxRate: -1\n", nil, `sandboxRate: -1`},
		{"slow bandwidth", "sandboxBandwidth: 1M\n", nil, `sandboxBandwidth: 1M bits a second`},
		{"negative bandwidth", "sandboxBandwidth: -4G\n", nil, `sandboxBandwidth: -4G`},
		{"fast bandwidth", "sandboxBandwidth: 65G\n", nil, `sandboxBandwidth: 65G`},
		{"few packets", "sandboxPackets: 99\n", nil, `sandboxPackets: 99 a second`},
		{"negative packets", "sandboxPackets: -1\n", nil, `sandboxPackets: -1`},
		{"rate of a key", "keyRate: -1\n", nil, `keyRate: -1`},
		{"timeout", "maxTimeout: 1\n", nil, `maxTimeout: "1" is not a duration`},
		{"bool", "accessLog: si\n", nil, `accessLog: "si" is neither`},
		{"level", "logLevel: loud\n", nil, `logLevel: "loud"`},
		{"format", "", []string{"--log-format", "xml"}, `(set by --log-format)`},
		{"bad flag at once", "", []string{"--sandbox-pids", "x"}, `sandboxPids: "x"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := load(t, c.file, env(), c.args...)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %s", err, c.want)
			}
			if !strings.HasPrefix(err.Error(), "invalid argument") && !errors.Is(err, errs.ErrInvalid) {
				t.Errorf("%v is not an ErrInvalid", err)
			}
		})
	}
}

func TestFileThatIsNotThere(t *testing.T) {
	if _, err := Load(Options{File: "/nonexistent/b.yaml"}); !errors.Is(err, errs.ErrInvalid) {
		t.Errorf("named by flag: %v", err)
	}
	if _, err := Load(Options{LookupEnv: env(EnvFile, "/nonexistent/b.yaml")}); err == nil {
		t.Error("named by environment: no error")
	}
	if _, err := load(t, "", env()); err != nil {
		t.Errorf("empty file: %v", err)
	}
}

func TestWhatIsPrintedCanBeRead(t *testing.T) {
	first, err := load(t, "subnet: 10.99.0.0/24\ndomains: [a.test, b.test]\n", env("BARCHAN_CACHE", "/c"), "--sandbox-memory=1Gi", "--reachable=10.1.0.0/16,10.2.0.0/16")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := first.WriteYAML(&out); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		"cacheDir: /c # BARCHAN_CACHE", "sandboxMemory: 1Gi # --sandbox-memory", "nftTable: barchan # default",
		`subnet6: "" # default`, "reachable: [10.1.0.0/16, 10.2.0.0/16] # --reachable",
		"subnet: 10.99.0.0/24 # " + first.File + ":1", "domains: [a.test, b.test] # " + first.File + ":2",
	} {
		if !strings.Contains(out.String(), line+"\n") {
			t.Errorf("no line %q in\n%s", line, out.String())
		}
	}
	second, err := load(t, out.String(), env())
	if err != nil {
		t.Fatal(err)
	}
	a, b := first.Settings(), second.Settings()
	for i := range a {
		if fmt.Sprint(a[i].Value()) != fmt.Sprint(b[i].Value()) {
			t.Errorf("%s: %v became %v", a[i].Key, a[i].Value(), b[i].Value())
		}
	}
}

func TestJSON(t *testing.T) {
	r, err := load(t, "", env("BARCHAN_SANDBOX_PIDS", "99"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]struct {
		Value        any
		Source, From string
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if p := got["sandboxPids"]; p.Value != 99.0 || p.Source != FromEnv || p.From != "BARCHAN_SANDBOX_PIDS" {
		t.Errorf("%+v", p)
	}
}

func TestParsePeer(t *testing.T) {
	for text, want := range map[string]string{"10.0.0.5:1": "10.0.0.5:1", "[10.0.0.5]:1": "10.0.0.5:1", "[fd00::5]:1": "[fd00::5]:1"} {
		if got, err := ParsePeer(text); err != nil || got.String() != want {
			t.Errorf("%s: %s, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "10.0.0.5", "fd00::5:1", "[]:1", "a:1"} {
		if got, err := ParsePeer(text); err == nil {
			t.Errorf("%s: %s", text, got)
		}
	}
}

func TestSaveAndLoadSaved(t *testing.T) {
	dir := t.TempDir()
	if _, ok, err := LoadSaved(dir); ok || err != nil {
		t.Fatalf("before: %v %v", ok, err)
	}
	r, err := load(t, "dataDir: "+dir+"\nbridgeName: br7\nrunDir: /run/b7\n", env())
	if err != nil {
		t.Fatal(err)
	}
	if err := Save(r.Config); err != nil {
		t.Fatal(err)
	}
	got, ok, err := LoadSaved(dir)
	if err != nil || !ok {
		t.Fatalf("after: %v %v", ok, err)
	}
	if got.BridgeName != "br7" || got.RunDir != "/run/b7" || got.DataDir != dir {
		t.Errorf("%+v", got)
	}
}

func TestCheckHost(t *testing.T) {
	c := Default()
	if err := c.Subnet.UnmarshalText([]byte("127.0.0.0/16")); err != nil {
		t.Fatal(err)
	}
	if err := c.CheckHost(); err == nil || !strings.Contains(err.Error(), "interface lo") {
		t.Errorf("got %v", err)
	}
	c.BridgeName = "lo" // our own bridge never counts
	if err := c.CheckHost(); err != nil {
		t.Error(err)
	}
}
