package config

import (
	"cmp"
	"math"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/config/setting"
)

// defaultEtcdPrefix is where the embedded etcd's keys begin, always.
const defaultEtcdPrefix = "/barchan"

// minEtcdQuota is the least size of etcd's file, in bytes.
const minEtcdQuota = 16 << 20

// Limits of the audit log.
const (
	minAuditSize  = 64 << 10 // bytes
	maxAuditFiles = 1000
)

// maxPoolSize is the greatest size of a pool.
const maxPoolSize = 1000

// Limits that Linux sets.
const (
	maxSocketPath = 107 // bytes in sockaddr_un
	maxLinkName   = 15
	// longestSocket is the longest path of a socket below RunDir.
	longestSocket = "containerd/containerd.sock.ttrpc"
)

var (
	dnsName  = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	plain    = regexp.MustCompile(`^[A-Za-z0-9][-A-Za-z0-9_.]*$`)
	imageRef = regexp.MustCompile(`^[a-z0-9][-a-z0-9._/:]*(@sha256:[0-9a-f]{64})?$`)
)

// Validate returns the first setting that cannot be right, by its key.
func (c *Config) Validate() error {
	for _, check := range []func() error{
		c.checkDirs, c.checkRole, c.checkPeers, c.checkAddrs, c.checkDomains, c.checkTLS, c.checkACME, c.checkEtcd, c.checkPrograms,
		c.checkNames, c.checkSubnet, c.checkReach, c.checkSandbox, c.checkPools, c.checkTraffic, c.checkRates, c.checkTelemetry,
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func (c *Config) checkRole() error {
	switch {
	case !slices.Contains([]string{RoleServer, RoleController, RoleReplica, RoleNode}, c.Role):
		return setting.Invalid("role", "%q is none of %s, %s, %s and %s", c.Role, RoleServer, RoleController, RoleReplica, RoleNode)
	case c.Role == RoleNode && c.APIKubeconfig == "":
		return setting.Invalid("apiKubeconfig", "is missing; a node needs the one that its server wrote to <dataDir>/credentials/node.kubeconfig")
	case c.Role != RoleServer && c.APIKubeconfig == "" && os.Getenv("KUBERNETES_SERVICE_HOST") == "":
		return setting.Invalid("apiKubeconfig", "is missing; outside of a cluster a %s needs the kubeconfig of the API server that it uses", c.Role)
	case c.Role == RoleServer && c.APIKubeconfig != "":
		return setting.Invalid("apiKubeconfig", "is set, but the role is %s, which has an API server of its own", c.Role)
	case c.KubeTokens && c.Role != RoleReplica:
		return setting.Invalid("kubeTokens", "is set, but the role is %s; a replica of a Kubernetes cluster accepts its tokens", c.Role)
	}
	if err := cmp.Or(c.checkController(), c.checkNode(), c.checkPrivileges()); err != nil {
		return err
	}
	return absolute("apiKubeconfig", c.APIKubeconfig, "tokenSecret", c.TokenSecret, "peerDir", c.PeerDir, "nodeSocket", c.NodeSocket)
}

// checkNode is of a node and of its server.
func (c *Config) checkNode() error {
	switch {
	case c.Role != RoleServer && c.Role != RoleNode && c.NodeSocket != "":
		return setting.Invalid("nodeSocket", "is set, but the role is %s; only a server has a node beside it", c.Role)
	case c.Role != RoleNode && c.NodeSocketGroup != "":
		return setting.Invalid("nodeSocketGroup", "is set, but the role is %s, which has no such socket", c.Role)
	case c.Role == RoleNode && c.PeerAddr != "":
		return setting.Invalid("peerAddr", "is set, but a node has no peers")
	}
	return nil
}

func (c *Config) checkPrivileges() error {
	switch {
	case c.Privileges != PrivilegesTogether && c.Privileges != PrivilegesApart:
		return setting.Invalid("privileges", "%q is neither %s nor %s", c.Privileges, PrivilegesTogether, PrivilegesApart)
	case c.Privileges == PrivilegesApart && c.Role != RoleServer:
		return setting.Invalid("privileges", "is %s, but the role is %s; only a server has privileges to divide", c.Privileges, c.Role)
	case c.Privileges == PrivilegesApart && c.NodeSocket != "":
		return setting.Invalid("privileges", "is %s, but nodeSocket is set; the server starts its own node", c.Privileges)
	case c.Privileges == PrivilegesApart && c.KubeAddr == "":
		return setting.Invalid("kubeAddr", "is empty, but privileges is %s; the node reaches the server by it", c.Privileges)
	}
	return nil
}

func (c *Config) checkController() error {
	switch {
	case c.Role != RoleController:
		return nil
	case c.AgentImage == "":
		return setting.Invalid("agentImage", "is missing; it is the image that has the agent of Pods")
	case len(validation.IsDNS1123Label(c.LeaseNamespace)) > 0:
		return setting.Invalid("leaseNamespace", "%q is not the name of a namespace", c.LeaseNamespace)
	case len(validation.IsDNS1123Subdomain(c.ClusterDomain)) > 0:
		return setting.Invalid("clusterDomain", "%q is not a domain", c.ClusterDomain)
	case c.RuntimeClass != "" && len(validation.IsDNS1123Subdomain(c.RuntimeClass)) > 0:
		return setting.Invalid("runtimeClass", "%q is not the name of a RuntimeClass", c.RuntimeClass)
	}
	return nil
}

func (c *Config) checkPeers() error {
	for _, a := range []struct{ key, addr string }{{"peerAddr", c.PeerAddr}, {"peerPushAddr", c.PeerPushAddr}} {
		if a.addr == "" {
			continue
		}
		ap, err := ParsePeer(a.addr)
		if err != nil || ap.Addr().IsUnspecified() || ap.Addr().Zone() != "" {
			return setting.Invalid(a.key, "%q is not an address that other replicas reach, such as 10.0.0.5:7701", a.addr)
		}
	}
	for _, s := range c.PeerSeeds {
		host, port, err := net.SplitHostPort(s)
		if _, bad := strconv.ParseUint(port, 10, 16); err != nil || bad != nil || host == "" {
			return setting.Invalid("peerSeeds", "%q is not host:port", s)
		}
	}
	if c.PeerAddr == "" && (len(c.PeerSeeds) > 0 || c.PeerPushAddr != "") {
		return setting.Invalid("peerAddr", "is empty, but peerSeeds or peerPushAddr is set")
	}
	return nil
}

// ParsePeer parses an address of peers. Brackets may also enclose an IPv4 address: the manifest of a Pod does not know of which family
// its address will be.
func ParsePeer(text string) (netip.AddrPort, error) {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		return netip.AddrPort{}, err
	}
	return netip.ParseAddrPort(net.JoinHostPort(host, port))
}

func (c *Config) checkDirs() error {
	for _, d := range []struct{ key, path string }{
		{"dataDir", c.DataDir}, {"runDir", c.RunDir}, {"cacheDir", c.CacheDir},
	} {
		switch {
		case d.path == "":
			return setting.Invalid(d.key, "is empty, want an absolute directory")
		case !filepath.IsAbs(d.path):
			return setting.Invalid(d.key, "%q is not absolute, want a path that begins with /", d.path)
		case filepath.Clean(d.path) == "/":
			return setting.Invalid(d.key, "is the root directory, want one of its own")
		}
	}
	if n := len(filepath.Join(c.RunDir, longestSocket)); n > maxSocketPath {
		return setting.Invalid("runDir", "%q is %d bytes too long for the sockets in it; set a shorter one",
			c.RunDir, n-maxSocketPath)
	}
	if filepath.Clean(c.DataDir) == filepath.Clean(c.CacheDir) {
		return setting.Invalid("cacheDir", "is the same as dataDir, want another")
	}
	return nil
}

func (c *Config) checkAddrs() error {
	used := map[string]string{}
	for _, a := range []struct {
		key, addr string
		optional  bool
	}{{"httpAddr", c.HTTPAddr, false}, {"tlsAddr", c.TLSAddr, true}, {"kubeAddr", c.KubeAddr, false}, {"sshAddr", c.SSHAddr, true}, {"metricsAddr", c.MetricsAddr, true}} {
		if a.addr == "" && a.optional {
			continue
		}
		host, port, err := net.SplitHostPort(a.addr)
		if err != nil {
			return setting.Invalid(a.key, "%q is not an address such as 127.0.0.1:7700", a.addr)
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil {
			return setting.Invalid(a.key, "port %q is not a number from 0 to 65535", port)
		} else if n == 0 {
			continue // any free one
		}
		if host != "" && host != "localhost" {
			if _, err := netip.ParseAddr(host); err != nil {
				return setting.Invalid(a.key, "%q is not an IP address of this machine", host)
			}
		}
		if other, taken := used[port]; taken {
			return setting.Invalid(a.key, "port %s is also that of %s, want another", port, other)
		}
		used[port] = a.key
	}
	return nil
}

func (c *Config) checkDomains() error {
	if len(c.Domains) == 0 {
		return setting.Invalid("domains", "is empty, want at least one such as barchan.localhost")
	}
	for _, d := range c.Domains {
		host, port, err := net.SplitHostPort(d)
		if err != nil {
			host, port = d, "443"
		}
		if _, err := strconv.ParseUint(port, 10, 16); err != nil {
			return setting.Invalid("domains", "port %q of %q is not a number from 1 to 65535", port, d)
		}
		if _, err := netip.ParseAddr(host); err == nil || !dnsName.MatchString(host) {
			return setting.Invalid("domains", "%q is not a lower-case domain name such as sandbox.example.org", d)
		}
	}
	return nil
}

func (c *Config) checkTLS() error {
	if (c.TLSCert == "") != (c.TLSKey == "") {
		return setting.Invalid(either(c.TLSCert == "", "tlsCert", "tlsKey"), "is missing: tlsCert and tlsKey come together")
	}
	return absolute("tlsCert", c.TLSCert, "tlsKey", c.TLSKey, "sshHostKey", c.SSHHostKey)
}

func (c *Config) checkEtcd() error {
	if c.EtcdQuota.Value() < minEtcdQuota {
		return setting.Invalid("etcdQuota", "%s is too little, want at least 16Mi", c.EtcdQuota.String())
	}
	for _, e := range c.EtcdEndpoints {
		u, err := url.Parse(e)
		if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
			return setting.Invalid("etcdEndpoints", "%q is not an address such as https://10.0.0.1:2379", e)
		}
	}
	if (c.EtcdCert == "") != (c.EtcdKey == "") {
		return setting.Invalid(either(c.EtcdCert == "", "etcdCert", "etcdKey"), "is missing: etcdCert and etcdKey come together")
	}
	if len(c.EtcdEndpoints) == 0 && c.EtcdCA+c.EtcdCert != "" {
		return setting.Invalid("etcdEndpoints", "is empty, but etcdCA or etcdCert is set; name the etcd they are for")
	}
	if len(c.EtcdEndpoints) == 0 && c.EtcdPrefix != defaultEtcdPrefix {
		return setting.Invalid("etcdPrefix", "is set, but etcdEndpoints is empty; name the etcd it is for")
	}
	if !filepath.IsAbs(c.EtcdPrefix) || c.EtcdPrefix != filepath.Clean(c.EtcdPrefix) || c.EtcdPrefix == "/" {
		return setting.Invalid("etcdPrefix", "%q is not a prefix such as /barchan", c.EtcdPrefix)
	}
	return absolute("etcdCA", c.EtcdCA, "etcdCert", c.EtcdCert, "etcdKey", c.EtcdKey)
}

func (c *Config) checkPrograms() error {
	if c.RunscPlatform != "systrap" && c.RunscPlatform != "kvm" && c.RunscPlatform != "ptrace" {
		return setting.Invalid("runscPlatform", "%q is not a platform, want systrap or kvm", c.RunscPlatform)
	}
	if c.ContainerdAddress != "" && c.ContainerdBinary != "" {
		return setting.Invalid("containerdBinary", "is set beside containerdAddress; either use an existing containerd or name one to start")
	}
	return absolute(
		"containerdAddress", strings.TrimPrefix(c.ContainerdAddress, "unix://"), "containerdBinary", c.ContainerdBinary,
		"runscBinary", c.RunscBinary, "runcBinary", c.RuncBinary, "agentBinary", c.AgentBinary)
}

func (c *Config) checkNames() error {
	if !dnsName.MatchString(c.NodeName) || len(c.NodeName) > 63 {
		return setting.Invalid("nodeName", "%q is not a name of up to 63 lower-case letters, digits, dots and dashes", c.NodeName)
	}
	if !plain.MatchString(c.BridgeName) || len(c.BridgeName) > maxLinkName {
		return setting.Invalid("bridgeName", "%q is not a name of up to %d letters, digits and dashes", c.BridgeName, maxLinkName)
	}
	for _, n := range []struct{ key, name string }{
		{"netnsPrefix", c.NetnsPrefix},
		{"nftTable", c.NftTable},
		{"containerdNamespace", c.ContainerdNamespace},
	} {
		if !plain.MatchString(n.name) || len(n.name) > 63 {
			return setting.Invalid(n.key, "%q is not a name of up to 63 letters, digits, dots, dashes and underscores", n.name)
		}
	}
	if !filepath.IsAbs(c.CgroupParent) || c.CgroupParent != filepath.Clean(c.CgroupParent) || c.CgroupParent == "/" {
		return setting.Invalid("cgroupParent", "%q is not a cgroup such as /barchan", c.CgroupParent)
	}
	return nil
}

func (c *Config) checkSandbox() error {
	switch {
	case !dnsName.MatchString(c.DefaultTemplate):
		return setting.Invalid("defaultTemplate", "%q is not a template's name", c.DefaultTemplate)
	case !imageRef.MatchString(c.BaseImageRef):
		return setting.Invalid("baseImageRef", "%q is not an image such as barchan.local/base:latest", c.BaseImageRef)
	case c.DefaultRuntime != RuntimeGVisor && c.DefaultRuntime != RuntimeRunc:
		return setting.Invalid("defaultRuntime", "%q is not a runtime, want %s or %s", c.DefaultRuntime, RuntimeGVisor, RuntimeRunc)
	case c.SandboxCPU.MilliValue() < 10:
		return setting.Invalid("sandboxCPU", "%s is too little, want at least 10m", c.SandboxCPU.String())
	case c.SandboxMemory.Value() < 32<<20:
		return setting.Invalid("sandboxMemory", "%s is too little, want at least 32Mi", c.SandboxMemory.String())
	case c.SandboxDisk.Value() < sandbox.MinDisk || c.SandboxDisk.Value() > sandbox.MaxDisk:
		return setting.Invalid("sandboxDisk", "%s, want from 16Mi to 8Ti", c.SandboxDisk.String())
	case c.SandboxPids < 16:
		return setting.Invalid("sandboxPids", "%d is too few, want at least 16", c.SandboxPids)
	case c.MaxTimeout < time.Second:
		return setting.Invalid("maxTimeout", "%s is too short, want at least 1s", c.MaxTimeout)
	case c.ImageStore.Sign() < 0:
		return setting.Invalid("imageStore", "%s is negative, want 0 for any space, or more", &c.ImageStore)
	case c.MaxImage.Sign() <= 0:
		return setting.Invalid("maxImage", "%s is too little, want more than 0", &c.MaxImage)
	}
	_, _, err := c.Registries()
	return err
}

func (c *Config) checkPools() error {
	switch {
	case c.PoolSize < 0 || c.PoolSize > maxPoolSize:
		return setting.Invalid("poolSize", "%d is out of range, want 0 to %d", c.PoolSize, maxPoolSize)
	case c.StoreAfter < 0:
		return setting.Invalid("storeAfter", "%s is negative, want 0 for never, or more", c.StoreAfter)
	case c.PausedAddresses != AddressesKept && c.PausedAddresses != AddressesReleased:
		return setting.Invalid("pausedAddresses", "%q is neither %s nor %s", c.PausedAddresses, AddressesKept, AddressesReleased)
	case !slices.Contains([]string{EncryptionAuto, EncryptionOn, EncryptionOff}, c.MemoryEncryption):
		return setting.Invalid("memoryEncryption", "%q is neither %s, %s nor %s", c.MemoryEncryption, EncryptionAuto, EncryptionOn, EncryptionOff)
	case c.ReserveDisk.Sign() < 0:
		return setting.Invalid("reserveDisk", "%s is negative, want 0 for none, or more", &c.ReserveDisk)
	case c.IdleMemory.Sign() < 0:
		return setting.Invalid("idleMemory", "%s is negative, want 0 for never, or more", &c.IdleMemory)
	case c.ReserveMemory.Sign() < 0:
		return setting.Invalid("reserveMemory", "%s is negative, want 0 for none, or more", &c.ReserveMemory)
	}
	return c.checkQuotas()
}

func (c *Config) checkQuotas() error {
	for _, number := range []struct {
		key  string
		most int
	}{
		{"quotaTemplates", c.QuotaTemplates},
		{"quotaSnapshots", c.QuotaSnapshots},
		{"quotaBuilds", c.QuotaBuilds},
		{"quotaWebhooks", c.QuotaWebhooks},
		{"quotaKeys", c.QuotaKeys},
	} {
		if number.most < 0 {
			return setting.Invalid(number.key, "%d is negative, want 0 for any number, or more", number.most)
		}
	}
	switch {
	case c.QuotaSandboxes < QuotaByMachine:
		return setting.Invalid("quotaSandboxes", "%d is negative, want -1 for the machine's own, 0 for none, or more", c.QuotaSandboxes)
	case c.QuotaCreates < 0:
		return setting.Invalid("quotaCreates", "%d is negative, want 0 for none, or more", c.QuotaCreates)
	case c.QuotaStored.Sign() < 0 && c.QuotaStored.CmpInt64(QuotaByMachine) != 0:
		return setting.Invalid("quotaStored", "%s is negative, want -1 for the machine's own, 0 for any, or more", &c.QuotaStored)
	case c.QuotaContents.Sign() < 0:
		return setting.Invalid("quotaContents", "%s is negative, want 0 for any, or more", &c.QuotaContents)
	case c.QuotaCPU.Sign() < 0:
		return setting.Invalid("quotaCPU", "%s is negative, want 0 for none, or more", &c.QuotaCPU)
	case c.QuotaVolumes < 0:
		return setting.Invalid("quotaVolumes", "%d is negative, want 0 for none, or more", c.QuotaVolumes)
	case c.QuotaVolumeCapacity.Sign() < 0:
		return setting.Invalid("quotaVolumeCapacity", "%s is negative, want 0 for none, or more", &c.QuotaVolumeCapacity)
	case c.QuotaMemory.Sign() < 0:
		return setting.Invalid("quotaMemory", "%s is negative, want 0 for none, or more", &c.QuotaMemory)
	case c.QuotaCounts != QuotaRunning && c.QuotaCounts != QuotaAll:
		return setting.Invalid("quotaCounts", "%q is neither %s nor %s", c.QuotaCounts, QuotaRunning, QuotaAll)
	}
	return nil
}

func validEndpoint(s string) bool {
	host, port, err := net.SplitHostPort(s)
	n, bad := strconv.ParseUint(port, 10, 16)
	return err == nil && bad == nil && n > 0 && host != "" && strings.ToLower(host) == host
}

func (c *Config) checkRates() error {
	switch {
	case c.SandboxBandwidth.Value() != 0 && (c.SandboxBandwidth.Value() < minBandwidth || c.SandboxBandwidth.Value() > maxBandwidth):
		return setting.Invalid("sandboxBandwidth", "%s bits a second: want 0 for any number, or 2M to 64G", &c.SandboxBandwidth)
	case c.SandboxPackets != 0 && (c.SandboxPackets < minPackets || c.SandboxPackets > maxPackets):
		return setting.Invalid("sandboxPackets", "%d a second: want 0 for any number, or %d to %d", c.SandboxPackets, minPackets, maxPackets)
	}
	return nil
}

// Bounds of the rates of a sandbox: lower ones would stop connections, and the kernel cannot count higher ones.
const (
	minBandwidth, maxBandwidth = 2_000_000, 64_000_000_000
	minPackets, maxPackets     = 100, 100_000_000
)

func (c *Config) checkTraffic() error {
	switch {
	case slices.ContainsFunc(c.VolumeEndpoints, func(e string) bool { return !validEndpoint(e) }):
		return setting.Invalid("volumeEndpoints", "%q has something other than host:port, such as minio.example:9000", c.VolumeEndpoints)
	case c.ClientIdle < time.Second:
		return setting.Invalid("clientIdle", "%s is too short, want at least 1s", c.ClientIdle)
	case c.StreamIdle < 0:
		return setting.Invalid("streamIdle", "%s is negative, want 0 for never, or more", c.StreamIdle)
	case c.SandboxRate < 0:
		return setting.Invalid("sandboxRate", "%d is negative, want 0 for any number, or more", c.SandboxRate)
	case c.SandboxConnections < 0 || c.SandboxConnections > math.MaxInt32:
		return setting.Invalid("sandboxConnections", "%d: want 0 for any number, or up to %d", c.SandboxConnections, math.MaxInt32)
	case c.SandboxRequests < 0:
		return setting.Invalid("sandboxRequests", "%d is negative, want 0 for any number, or more", c.SandboxRequests)
	case c.ClientConnections < 0:
		return setting.Invalid("clientConnections", "%d is negative, want 0 for any number, or more", c.ClientConnections)
	case c.KeyRate < 0:
		return setting.Invalid("keyRate", "%d is negative, want 0 for any number, or more", c.KeyRate)
	}
	return nil
}

func (c *Config) checkTelemetry() error {
	switch strings.ToLower(c.LogLevel) {
	case "debug", "info", "warn", "error":
	default:
		return setting.Invalid("logLevel", "%q is not a level, want debug, info, warn or error", c.LogLevel)
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		return setting.Invalid("logFormat", "%q is not a format, want text or json", c.LogFormat)
	}
	switch size := c.AuditLogSize.Value(); {
	case size < minAuditSize:
		return setting.Invalid("auditLogSize", "%s is too little, want %d or more bytes", c.AuditLogSize.String(), minAuditSize)
	case c.OTLPSamplePercent < 1 || c.OTLPSamplePercent > 100:
		return setting.Invalid("otlpSamplePercent", "%d is not from 1 to 100; leave otlpEndpoint empty for no traces", c.OTLPSamplePercent)
	case c.AuditLogFiles < 1 || c.AuditLogFiles > maxAuditFiles:
		return setting.Invalid("auditLogFiles", "%d is not from 1 to %d", c.AuditLogFiles, maxAuditFiles)
	case c.AuditLog != AuditOff:
		return absolute("auditLog", c.AuditLog, "secretsKey", c.SecretsKey, "memoryKey", c.MemoryKey)
	}
	return absolute("secretsKey", c.SecretsKey, "memoryKey", c.MemoryKey)
}

// absolute takes pairs of key and path; an empty path is fine.
func absolute(pairs ...string) error {
	for i := 0; i < len(pairs); i += 2 {
		if p := pairs[i+1]; p != "" && !filepath.IsAbs(p) {
			return setting.Invalid(pairs[i], "%q is not absolute, want a path that begins with /", p)
		}
	}
	return nil
}

func either(first bool, a, b string) string {
	if first {
		return a
	}
	return b
}
