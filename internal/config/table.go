package config

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"
	"unicode"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Setting is one field of Config as people see it.
type Setting struct {
	Key string // in files, for example httpAddr
	Doc string
	env string // if not derived from the key
	ptr any
}

// Flag is the name of the setting's flag, without dashes before it.
func (s Setting) Flag() string { return flagName(s.Key) }

// Env is the name of the setting's environment variable.
func (s Setting) Env() string {
	if s.env != "" {
		return s.env
	}
	return "BARCHAN_" + strings.ToUpper(strings.ReplaceAll(s.Flag(), "-", "_"))
}

// table is the one list of settings: files, environment, flags and what
// `barchan config` prints are all read off it.
func (c *Config) table() []Setting {
	return []Setting{
		{Key: "dataDir", ptr: &c.DataDir, Doc: "directory of what must survive a restart"},
		{Key: "runDir", ptr: &c.RunDir, Doc: "directory of sockets (default <dataDir>/run)"},
		{Key: "cacheDir", ptr: &c.CacheDir, env: "BARCHAN_CACHE", Doc: "directory of what can be built again: runtimes, packages, images"},
		{Key: "nodeName", ptr: &c.NodeName, Doc: "name of this machine in objects (default the host's name)"},

		{Key: "httpAddr", ptr: &c.HTTPAddr, Doc: "address of the REST API and of sandbox traffic, plain HTTP"},
		{Key: "tlsAddr", ptr: &c.TLSAddr, Doc: "the same over TLS; empty: not served"},
		{Key: "kubeAddr", ptr: &c.KubeAddr, Doc: "address of the Kubernetes API"},
		{Key: "domains", ptr: &c.Domains, Doc: "domains whose hosts <port>-<id>.<domain> are sandboxes; the first is told to clients"},
		{Key: "tlsCert", ptr: &c.TLSCert, Doc: "PEM certificate for tlsAddr (default one of a local CA)"},
		{Key: "tlsKey", ptr: &c.TLSKey, Doc: "PEM key of tlsCert"},

		{Key: "etcdEndpoints", ptr: &c.EtcdEndpoints, Doc: "an existing etcd, instead of the one inside"},
		{Key: "etcdCA", ptr: &c.EtcdCA, Doc: "PEM file of the CA of etcdEndpoints"},
		{Key: "etcdCert", ptr: &c.EtcdCert, Doc: "PEM client certificate for etcdEndpoints"},
		{Key: "etcdKey", ptr: &c.EtcdKey, Doc: "PEM key of etcdCert"},

		{Key: "containerdAddress", ptr: &c.ContainerdAddress, Doc: "socket of an existing containerd, instead of our own"},
		{Key: "containerdBinary", ptr: &c.ContainerdBinary, Doc: "containerd v2 (default <cacheDir>/bin, then PATH)"},
		{Key: "containerdNamespace", ptr: &c.ContainerdNamespace, Doc: "containerd namespace of our images and containers"},
		{Key: "runscBinary", ptr: &c.RunscBinary, Doc: "gVisor's runsc (default <cacheDir>/bin, then PATH)"},
		{Key: "runscPlatform", ptr: &c.RunscPlatform, Doc: "gVisor platform: systrap or kvm"},
		{Key: "runcBinary", ptr: &c.RuncBinary, Doc: "runc (default <cacheDir>/bin, then PATH)"},
		{Key: "agentBinary", ptr: &c.AgentBinary, Doc: "barchan-agent (default beside barchan, then <cacheDir>/bin, then PATH)"},

		{Key: "bridgeName", ptr: &c.BridgeName, Doc: "network bridge that joins the sandboxes"},
		{Key: "subnet", ptr: &c.Subnet, Doc: "IPv4 subnet of sandbox addresses"},
		{Key: "netnsPrefix", ptr: &c.NetnsPrefix, Doc: "start of the names of network namespaces"},
		{Key: "nftTable", ptr: &c.NftTable, Doc: "nftables table of our rules"},
		{Key: "cgroupParent", ptr: &c.CgroupParent, Doc: "cgroup that the sandboxes' cgroups are in"},
		{Key: "dnsResolvers", ptr: &c.DNSResolvers, Doc: "DNS servers of sandboxes (default the machine's)"},

		{Key: "defaultTemplate", ptr: &c.DefaultTemplate, Doc: "template of sandboxes that name none"},
		{Key: "baseImageRef", ptr: &c.BaseImageRef, Doc: "name of the image that the default template runs"},
		{Key: "defaultRuntime", ptr: &c.DefaultRuntime, Doc: "runtime of templates that name none: gvisor or runc"},
		{Key: "sandboxCPU", ptr: &c.SandboxCPU, Doc: "CPU limit of sandboxes whose template sets none"},
		{Key: "sandboxMemory", ptr: &c.SandboxMemory, Doc: "memory limit of sandboxes whose template sets none"},
		{Key: "sandboxPids", ptr: &c.SandboxPids, Doc: "limit of processes and threads of a sandbox"},
		{Key: "maxTimeout", ptr: &c.MaxTimeout, Doc: "longest life that a client may ask for"},
		{Key: "poolSize", ptr: &c.PoolSize, Doc: "ready sandboxes of the default template to hold, as its pool begins; 0: no pool"},
		{Key: "storeAfter", ptr: &c.StoreAfter, Doc: "time after which the memory of a sandbox that sleeps goes to disk (gVisor); 0: it stays in RAM"},

		{Key: "quotaSandboxes", ptr: &c.QuotaSandboxes, Doc: "sandboxes that a namespace may have, if it does not say itself; 0: any number"},
		{Key: "quotaCPU", ptr: &c.QuotaCPU, Doc: "CPUs that a namespace's sandboxes may have together; 0: any number"},
		{Key: "quotaMemory", ptr: &c.QuotaMemory, Doc: "memory that a namespace's sandboxes may have together; 0: any amount"},
		{Key: "quotaCounts", ptr: &c.QuotaCounts, Doc: "which sandboxes count: running, or all (paused ones too)"},

		{Key: "logLevel", ptr: &c.LogLevel, Doc: "debug, info, warn or error"},
		{Key: "logFormat", ptr: &c.LogFormat, Doc: "text or json"},
		{Key: "accessLog", ptr: &c.AccessLog, Doc: "log each request"},
		{Key: "otlpEndpoint", ptr: &c.OTLPEndpoint, Doc: "OTLP gRPC collector of traces (default none)"},
	}
}

// Settings lists all settings with c's values, in the order to show them.
func (c *Config) Settings() []Setting { return c.table() }

// Value is the setting as a string, bool, int or []string.
func (s Setting) Value() any {
	switch p := s.ptr.(type) {
	case *string:
		return *p
	case *bool:
		return *p
	case *int:
		return *p
	case *[]string:
		return append([]string{}, *p...)
	case *[]netip.Addr:
		out := make([]string, 0, len(*p))
		for _, a := range *p {
			out = append(out, a.String())
		}
		return out
	case *time.Duration:
		return p.String()
	case *netip.Prefix:
		return p.String()
	case *resource.Quantity:
		return p.String()
	default:
		return fmt.Sprint(p) // table_test.go: no setting gets here
	}
}

// set reads a value as people write it. Lists are separated by commas.
func (s Setting) set(text string) error {
	var err error
	switch p := s.ptr.(type) {
	case *string:
		*p = text
	case *bool:
		if *p, err = strconv.ParseBool(text); err != nil {
			return invalid(s.Key, "%q is neither true nor false", text)
		}
	case *int:
		if *p, err = strconv.Atoi(text); err != nil {
			return invalid(s.Key, "%q is not a whole number", text)
		}
	case *[]string:
		*p = splitList(text)
	case *[]netip.Addr:
		return s.setAddrs(p, text)
	case *time.Duration:
		if *p, err = time.ParseDuration(text); err != nil {
			return invalid(s.Key, "%q is not a duration such as 90s or 24h", text)
		}
	case *netip.Prefix:
		if *p, err = netip.ParsePrefix(text); err != nil {
			return invalid(s.Key, "%q is not a subnet such as 10.87.0.0/16", text)
		}
	case *resource.Quantity:
		if *p, err = resource.ParseQuantity(text); err != nil {
			return invalid(s.Key, "%q is not a quantity such as 500m, 2 or 512Mi", text)
		}
	}
	return nil
}

func (s Setting) setAddrs(p *[]netip.Addr, text string) error {
	var out []netip.Addr
	for _, item := range splitList(text) {
		a, err := netip.ParseAddr(item)
		if err != nil {
			return invalid(s.Key, "%q is not an IP address", item)
		}
		out = append(out, a)
	}
	*p = out
	return nil
}

// kind is how the help names the type of a setting's value.
func (s Setting) kind() string {
	switch s.ptr.(type) {
	case *bool:
		return "bool"
	case *int:
		return "int"
	case *[]string, *[]netip.Addr:
		return "list"
	case *time.Duration:
		return "duration"
	case *netip.Prefix:
		return "CIDR"
	case *resource.Quantity:
		return "quantity"
	default:
		return "string"
	}
}

func splitList(text string) []string {
	var out []string
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item != "" {
			out = append(out, item)
		}
	}
	return out
}

// flagName turns lower camel case into words with dashes: etcdCA is etcd-ca.
func flagName(key string) string {
	var b strings.Builder
	runes := []rune(key)
	for i, r := range runes {
		if i > 0 && unicode.IsUpper(r) && !unicode.IsUpper(runes[i-1]) {
			b.WriteByte('-')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
