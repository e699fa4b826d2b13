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
		{Key: "role", ptr: &c.Role, Doc: "server: everything on this machine; controller: the controllers of a Kubernetes cluster; replica: a manager and gateway for an API server that runs elsewhere; node: the sandboxes of a server that has nodeSocket"},

		{Key: "privileges", ptr: &c.Privileges, Doc: "of a server: together, one process as root; apart, two processes: the node as root, and all else as the user barchan (or the ID 60700 where that does not exist)"},
		{Key: "apiKubeconfig", ptr: &c.APIKubeconfig, Doc: "kubeconfig of the API server that a controller, replica or node uses (default that of the cluster whose Pod it is); a server writes that of its node to <dataDir>/credentials/node.kubeconfig"},
		{Key: "tokenSecret", ptr: &c.TokenSecret, Doc: "file with the secret of sandboxes' tokens, the same for all replicas (default <dataDir>/credentials/token-secret)"},
		{Key: "nodeSocket", ptr: &c.NodeSocket, Doc: "socket at which a node answers its server (default of a node /run/barchan/node.sock); a server that has it set runs no sandboxes itself, and needs no root"},
		{Key: "nodeSocketGroup", ptr: &c.NodeSocketGroup, Doc: "name or ID of the group that may open a node's socket (default root alone)"},
		{Key: "agentImage", ptr: &c.AgentImage, Doc: "image that has /barchan-agent, which a controller puts into Pods"},
		{Key: "imageVolumes", ptr: &c.ImageVolumes, Doc: "mount agentImage as a volume instead of copying the agent in an init container (needs Kubernetes' image volumes)"},
		{Key: "runtimeClass", ptr: &c.RuntimeClass, Doc: "RuntimeClass of Pods whose template names none (default the cluster's)"},
		{Key: "clusterDomain", ptr: &c.ClusterDomain, Doc: "domain that the names of a cluster's Services end with"},
		{Key: "leaseNamespace", ptr: &c.LeaseNamespace, Doc: "namespace of the Lease that the leading controller holds"},
		{Key: "kubeTokens", ptr: &c.KubeTokens, Doc: "accept tokens of the Kubernetes cluster as keys of the REST API, where a replica uses one"},
		{Key: "peerAddr", ptr: &c.PeerAddr, Doc: "address of the gossip with other replicas, TCP and UDP; empty: there are none"},
		{Key: "peerPushAddr", ptr: &c.PeerPushAddr, Doc: "address at which other replicas push routes, TLS (default any port beside peerAddr)"},
		{Key: "peerSeeds", ptr: &c.PeerSeeds, Doc: "gossip addresses (host:port) of other replicas to begin with"},
		{Key: "peerDir", ptr: &c.PeerDir, Doc: "directory of the gossip key and the replicas' authority, the same for all replicas (default: on a Kubernetes cluster none, they derive from tokenSecret; otherwise <dataDir>/peers)"},

		{Key: "httpAddr", ptr: &c.HTTPAddr, Doc: "address of the REST API and of sandbox traffic, plain HTTP; of a controller: of its health; of a node: of its metrics (default 127.0.0.1:7701)"},
		{Key: "tlsAddr", ptr: &c.TLSAddr, Doc: "the same over TLS; empty: not served"},
		{Key: "kubeAddr", ptr: &c.KubeAddr, Doc: "address of the Kubernetes API"},
		{Key: "domains", ptr: &c.Domains, Doc: "domains whose hosts <port>-<id>.<domain> are sandboxes; clients receive the first"},
		{Key: "tlsCert", ptr: &c.TLSCert, Doc: "PEM certificate for tlsAddr (default one of a local CA)"},
		{Key: "tlsKey", ptr: &c.TLSKey, Doc: "PEM key of tlsCert"},

		{Key: "metricsAddr", ptr: &c.MetricsAddr, Doc: "address of the metrics and of readiness with its details, plain HTTP without authentication; empty: not served"},
		{Key: "sshAddr", ptr: &c.SSHAddr, Doc: "address of SSH into sandboxes; empty: not served"},
		{Key: "sshHostKey", ptr: &c.SSHHostKey, Doc: "private host key of sshAddr in OpenSSH's form, the same for all replicas behind one name (default <dataDir>/credentials/ssh-host-key, which is made)"},

		{Key: "acme", ptr: &c.ACME, Doc: "have certificates of domains issued by an ACME authority; tlsCert, where set, wins"},
		{Key: "acmeDirectory", ptr: &c.ACMEDirectory, Doc: "directory URL of the authority"},
		{Key: "acmeCA", ptr: &c.ACMECA, Doc: "PEM roots that acmeDirectory is trusted by (default the machine's)"},
		{Key: "acmeEmail", ptr: &c.ACMEEmail, Doc: "e-mail address for the authority, if any"},
		{Key: "acmeAgree", ptr: &c.ACMEAgree, Doc: "agree to the authority's terms of service"},
		{Key: "acmeUpdateServer", ptr: &c.ACMEUpdateServer, Doc: "DNS server (host:port) that takes signed updates (RFC 2136), for certificates of *.<domain>"},
		{Key: "acmeUpdateZone", ptr: &c.ACMEUpdateZone, Doc: "zone at acmeUpdateServer that the domains are in"},
		{Key: "acmeUpdateKeyName", ptr: &c.ACMEUpdateKeyName, Doc: "name of the TSIG key for the updates"},
		{Key: "acmeUpdateKeyFile", ptr: &c.ACMEUpdateKeyFile, Doc: "file with the TSIG key's secret, in base64"},
		{Key: "acmeUpdateAlgorithm", ptr: &c.ACMEUpdateAlgorithm, Doc: "algorithm of the TSIG key"},
		{Key: "acmeHook", ptr: &c.ACMEHook, Doc: "program that changes DNS records instead: run with present or cleanup, the record's name and its value"},
		{Key: "acmeWait", ptr: &c.ACMEWait, Doc: "time for a record to reach the domain's DNS servers before the authority queries them"},

		{Key: "etcdEndpoints", ptr: &c.EtcdEndpoints, Doc: "an existing etcd, instead of the one inside"},
		{Key: "etcdPrefix", ptr: &c.EtcdPrefix, Doc: "start of the keys in etcdEndpoints; servers that share an etcd need one each"},
		{Key: "etcdCA", ptr: &c.EtcdCA, Doc: "PEM file of the CA of etcdEndpoints"},
		{Key: "etcdCert", ptr: &c.EtcdCert, Doc: "PEM client certificate for etcdEndpoints"},
		{Key: "etcdKey", ptr: &c.EtcdKey, Doc: "PEM key of etcdCert"},

		{Key: "secretsKey", ptr: &c.SecretsKey, Doc: "file with the 32 bytes of the key that encrypts Secrets in the etcd inside (default <dataDir>/apiserver/secrets.key, which is made)"},
		{Key: "memoryEncryption", ptr: &c.MemoryEncryption, Doc: "encrypt the memory of paused sandboxes and of snapshots on disk; slow on a kernel without AES instructions"},
		{Key: "memoryKey", ptr: &c.MemoryKey, Doc: "file with one or more keys of 32 bytes that encrypt memory, the first of them new memory (default <dataDir>/node/memory.key, which is made)"},
		{Key: "containerdAddress", ptr: &c.ContainerdAddress, Doc: "socket of an existing containerd, instead of our own"},
		{Key: "containerdBinary", ptr: &c.ContainerdBinary, Doc: "containerd v2 (default <cacheDir>/bin, then PATH)"},
		{Key: "containerdNamespace", ptr: &c.ContainerdNamespace, Doc: "containerd namespace of our images and containers"},
		{Key: "registryMirrors", ptr: &c.RegistryMirrors, Doc: "mirrors of registries, as REGISTRY=URL, or *=URL for all others; tried in this order, the registry last"},
		{Key: "registryCAs", ptr: &c.RegistryCAs, Doc: "PEM files of authorities that a registry or mirror is trusted by besides the machine's, as HOST=FILE"},
		{Key: "imageStore", ptr: &c.ImageStore, Doc: "disk space that images may take; beyond it, pulled ones that nothing uses are removed, the least recently used first (default 1Ti, or 40% of a smaller disk); 0: any"},
		{Key: "maxImage", ptr: &c.MaxImage, Doc: "largest image that is pulled, in bytes of its compressed content"},
		{Key: "runscBinary", ptr: &c.RunscBinary, Doc: "gVisor's runsc (default <cacheDir>/bin, then PATH)"},
		{Key: "runscPlatform", ptr: &c.RunscPlatform, Doc: "gVisor platform: systrap or kvm"},
		{Key: "runcBinary", ptr: &c.RuncBinary, Doc: "runc (default <cacheDir>/bin, then PATH)"},
		{Key: "agentBinary", ptr: &c.AgentBinary, Doc: "barchan-agent (default beside barchan, then <cacheDir>/bin, then PATH)"},

		{Key: "bridgeName", ptr: &c.BridgeName, Doc: "network bridge that joins the sandboxes"},
		{Key: "subnet", ptr: &c.Subnet, Doc: "IPv4 subnet of sandbox addresses"},
		{Key: "subnet6", ptr: &c.Subnet6, Doc: "IPv6 subnet beside it, such as fd87::/64; empty: sandboxes have no IPv6"},
		{Key: "netnsPrefix", ptr: &c.NetnsPrefix, Doc: "start of the names of network namespaces"},
		{Key: "nftTable", ptr: &c.NftTable, Doc: "nftables table of our rules"},
		{Key: "cgroupParent", ptr: &c.CgroupParent, Doc: "cgroup that the sandboxes' cgroups are in"},
		{Key: "dnsResolvers", ptr: &c.DNSResolvers, Doc: "DNS servers that sandboxes' questions go to (default the machine's)"},
		{Key: "internalZones", ptr: &c.InternalZones, Doc: "zones whose names are answered to sandboxes although they lead to private addresses, such as corp.example; \".\": all names"},
		{Key: "webhookAllow", ptr: &c.WebhookAllow, Doc: "ranges beside public addresses that webhooks of any namespace may reach, such as 10.0.0.0/8"},
		{Key: "sandboxConnections", ptr: &c.SandboxConnections, Doc: "connections of one sandbox that the kernel tracks at once, UDP included; 0: any number"},
		{Key: "sandboxBandwidth", ptr: &c.SandboxBandwidth, Doc: "bits that one sandbox may send, and as many that it may receive, in a second, through the gateway too; 0: any number"},
		{Key: "sandboxPackets", ptr: &c.SandboxPackets, Doc: "packets that one sandbox may send, and as many that it may receive, in a second; 0: any number"},
		{Key: "reachable", ptr: &c.Reachable, Doc: "private ranges that sandboxes may reach; all others are closed to them, regardless of their policies"},
		{Key: "spareNetworks", ptr: &c.SpareNetworks, Doc: "network namespaces to make ahead, so that a new sandbox need not wait for one; 0: none"},

		{Key: "defaultTemplate", ptr: &c.DefaultTemplate, Doc: "template of sandboxes that name none"},
		{Key: "baseImageRef", ptr: &c.BaseImageRef, Doc: "name of the image that the default template runs"},
		{Key: "defaultRuntime", ptr: &c.DefaultRuntime, Doc: "runtime of templates that name none: gvisor or runc"},
		{Key: "sandboxCPU", ptr: &c.SandboxCPU, Doc: "CPU limit of sandboxes whose template sets none"},
		{Key: "sandboxMemory", ptr: &c.SandboxMemory, Doc: "memory limit of sandboxes whose template sets none"},
		{Key: "sandboxDisk", ptr: &c.SandboxDisk, Doc: "limit of the files of sandboxes whose template sets none: what they write to the root and to emptyDir"},
		{Key: "sandboxPids", ptr: &c.SandboxPids, Doc: "limit of processes and threads of a sandbox"},
		{Key: "maxTimeout", ptr: &c.MaxTimeout, Doc: "longest lifetime that a client may request"},
		{Key: "poolSize", ptr: &c.PoolSize, Doc: "ready sandboxes of the default template to hold, as its pool begins; 0: no pool"},
		{Key: "storeAfter", ptr: &c.StoreAfter, Doc: "time after which the memory of a paused sandbox is moved to disk (gVisor); 0: it stays in RAM"},
		{Key: "forkSecrets", ptr: &c.ForkSecrets, Doc: "sandboxes may start from the memory of others that hold variables which they were created with, without a word in the request"},
		{Key: "pausedAddresses", ptr: &c.PausedAddresses, Doc: "addresses of sandboxes stored on disk: keep, or release: they resume with others"},
		{Key: "etcdQuota", ptr: &c.EtcdQuota, Doc: "largest size of the file of the etcd inside; from 80% of it on, new work is refused"},
		{Key: "reserveDisk", ptr: &c.ReserveDisk, Doc: "free disk space below which new work is refused (default 1Gi, or 5% of a smaller disk); 0: not checked"},
		{Key: "reserveMemory", ptr: &c.ReserveMemory, Doc: "free memory below which new work is refused (default 256Mi, or 5% of a smaller one); 0: not checked"},

		{Key: "quotaSandboxes", ptr: &c.QuotaSandboxes, Doc: "sandboxes that a namespace may have without a quota of its own; -1: one for each 16 MiB of the machine's memory, on a cluster any number; 0: any number"},
		{Key: "quotaCreates", ptr: &c.QuotaCreates, Doc: "new sandboxes a second that a namespace may have, with bursts of five seconds' worth; 0: any number"},
		{Key: "quotaStored", ptr: &c.QuotaStored, Doc: "sum of the sizes of a namespace's snapshots and of the memory of its paused sandboxes on disk; -1: 1Ti, or half of a smaller disk; 0: any"},
		{Key: "quotaCPU", ptr: &c.QuotaCPU, Doc: "CPUs that a namespace's sandboxes may have together; 0: any number"},
		{Key: "quotaMemory", ptr: &c.QuotaMemory, Doc: "memory that a namespace's sandboxes may have together; 0: any amount"},
		{Key: "quotaVolumes", ptr: &c.QuotaVolumes, Doc: "volumes that a namespace may have without a quota of its own; 0: any number"},
		{Key: "volumeEndpoints", ptr: &c.VolumeEndpoints, Doc: "object stores and NFS servers (host:port) that volumes may use although their addresses are not public, or are this machine's"},
		{Key: "quotaVolumeCapacity", ptr: &c.QuotaVolumeCapacity, Doc: "sum of the capacities of a namespace's volumes; 0: any"},
		{Key: "quotaTemplates", ptr: &c.QuotaTemplates, Doc: "templates that a namespace may have, each tag being one; 0: any number"},
		{Key: "quotaSnapshots", ptr: &c.QuotaSnapshots, Doc: "snapshots that a namespace may have, the layers of builds included; 0: any number"},
		{Key: "quotaBuilds", ptr: &c.QuotaBuilds, Doc: "template builds of a namespace that have not ended; 0: any number"},
		{Key: "quotaWebhooks", ptr: &c.QuotaWebhooks, Doc: "webhooks that a namespace may have; 0: any number"},
		{Key: "quotaKeys", ptr: &c.QuotaKeys, Doc: "API keys that a namespace may have; 0: any number"},
		{Key: "quotaCounts", ptr: &c.QuotaCounts, Doc: "which sandboxes count: running, or all (paused ones too)"},

		{Key: "clientIdle", ptr: &c.ClientIdle, Doc: "time after which a client's connection without requests is closed"},
		{Key: "streamIdle", ptr: &c.StreamIdle, Doc: "time after which an exchange with a sandbox is ended in which nothing moves, WebSockets too; 0: never"},
		{Key: "sandboxRate", ptr: &c.SandboxRate, Doc: "requests a second to a sandbox without a limit in its access policy; 0: any number"},
		{Key: "sandboxRequests", ptr: &c.SandboxRequests, Doc: "requests to a sandbox in progress at once, streams and WebSockets included; 0: any number"},
		{Key: "clientConnections", ptr: &c.ClientConnections, Doc: "open connections of one client address to httpAddr and tlsAddr each; 0: any number"},
		{Key: "keyRate", ptr: &c.KeyRate, Doc: "requests a second that the REST API takes of one key; 0: any number"},
		{Key: "gatewayFastPath", ptr: &c.GatewayFastPath, Doc: "proxy simple requests to sandboxes without net/http; false: all on the main path, which costs more"},

		{Key: "logLevel", ptr: &c.LogLevel, Doc: "debug, info, warn or error"},
		{Key: "logFormat", ptr: &c.LogFormat, Doc: "text or json"},
		{Key: "auditLog", ptr: &c.AuditLog, Doc: "file of who did what, JSON lines (default <dataDir>/audit.log); off: nothing is recorded"},
		{Key: "auditLogSize", ptr: &c.AuditLogSize, Doc: "largest size of one file of auditLog; then the next one begins"},
		{Key: "auditLogFiles", ptr: &c.AuditLogFiles, Doc: "files of auditLog that are kept, the current one included"},
		{Key: "accessLog", ptr: &c.AccessLog, Doc: "log each request"},
		{Key: "otlpEndpoint", ptr: &c.OTLPEndpoint, Doc: "OTLP gRPC collector of traces (default none)"},
		{Key: "otlpSamplePercent", ptr: &c.OTLPSamplePercent, Doc: "share of the traces that begin here which are recorded, from 1 to 100; a client's traceparent decides for its own"},
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
	case *[]netip.Prefix:
		out := make([]string, 0, len(*p))
		for _, x := range *p {
			out = append(out, x.String())
		}
		return out
	case *netip.Prefix:
		if !p.IsValid() {
			return ""
		}
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
	case *time.Duration:
		if *p, err = time.ParseDuration(text); err != nil {
			return invalid(s.Key, "%q is not a duration such as 90s or 24h", text)
		}
	case *resource.Quantity:
		if *p, err = resource.ParseQuantity(text); err != nil {
			return invalid(s.Key, "%q is not a quantity such as 500m, 2 or 512Mi", text)
		}
	default:
		return s.setNetwork(text)
	}
	return nil
}

// setNetwork is set for addresses and ranges.
func (s Setting) setNetwork(text string) error {
	switch p := s.ptr.(type) {
	case *[]netip.Addr:
		return s.setAddrs(p, text)
	case *[]netip.Prefix:
		return s.setPrefixes(p, text)
	case *netip.Prefix:
		if text == "" { // where a subnet is needed, Validate reports it
			*p = netip.Prefix{}
			return nil
		}
		subnet, err := netip.ParsePrefix(text)
		if err != nil {
			return invalid(s.Key, "%q is not a subnet such as 10.87.0.0/16", text)
		}
		*p = subnet
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

func (s Setting) setPrefixes(p *[]netip.Prefix, text string) error {
	var out []netip.Prefix
	for _, item := range splitList(text) {
		x, err := netip.ParsePrefix(item)
		if err != nil {
			return invalid(s.Key, "%q is not a range such as 10.1.0.0/16", item)
		}
		out = append(out, x)
	}
	*p = out
	return nil
}

// Kind names the type of the setting's value, as the help shows it: bool, int, list, duration, CIDR, quantity or string.
func (s Setting) Kind() string {
	switch s.ptr.(type) {
	case *bool:
		return "bool"
	case *int:
		return "int"
	case *[]string, *[]netip.Addr, *[]netip.Prefix:
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
