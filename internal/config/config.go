// Package config has every setting of Barchan in one struct, and reads it from
// flags, BARCHAN_* environment variables and one YAML file, in this order of
// precedence. It remembers where each value came from. It opens nothing that
// the settings name, and it changes nothing on the machine but for Save.
package config

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/barchan-dev/barchan/internal/config/setting"
	"github.com/barchan-dev/barchan/internal/edge/acme"
)

// Config is all settings, resolved. The key of a field, as files have it, is its
// name in lower camel case; see table. Start from Default or Load: the zero
// value is not valid.
type Config struct {
	DataDir  string // what must survive a restart
	RunDir   string // sockets and PIDs
	CacheDir string // what can be built again: runtimes, packages, images
	NodeName string // this machine in Sandbox objects
	Role     string // server, controller, replica or node
	// Privileges of a server: together, one process as root; apart, the node as root and all else in a child without root.
	Privileges string

	// Of a controller, replica or node alone.
	APIKubeconfig string // of the API server that it uses; empty: that of the cluster whose Pod it is
	TokenSecret   string // file with the secret of all replicas; empty: in the data directory

	// NodeSocket is where a node answers its server, and of a server that of its node; empty: the server is the node too.
	NodeSocket string
	// NodeSocketGroup is of a node alone: the group that may open its socket; empty: root alone.
	NodeSocketGroup string

	// Of a controller alone.
	AgentImage     string // has the agent of Pods
	ImageVolumes   bool   // AgentImage is mounted, not copied
	RuntimeClass   string // of Pods whose template names none; empty: the cluster's default
	ClusterDomain  string // ends the names of Services
	LeaseNamespace string // of the Lease that one controller holds

	KubeTokens bool // of a replica: tokens of the Kubernetes cluster are keys of the REST API

	PeerAddr     string   // gossip with other replicas; empty: there are none
	PeerPushAddr string   // routes from them
	PeerSeeds    []string // gossip of others
	PeerDir      string   // key and authority that all replicas share; empty: derived from TokenSecret on a cluster, otherwise in the data directory

	HTTPAddr string   // REST API and sandbox traffic, plain
	TLSAddr  string   // the same over TLS; empty: not served
	KubeAddr string   // Kubernetes API
	Domains  []string // below which hosts are <port>-<id>; clients receive the first
	TLSCert  string   // PEM files; both empty: a local CA in the data directory
	TLSKey   string

	MetricsAddr string // metrics and readiness with details; empty: not served

	SSHAddr    string // SSH into sandboxes; empty: not served
	SSHHostKey string // private key of SSHAddr; empty: one in the data directory

	ACME                bool   // certificates of Domains by ACME; TLSCert wins
	ACMEDirectory       string // URL of the authority
	ACMECA              string // PEM file of the roots that it is trusted by; empty: the system's
	ACMEEmail           string
	ACMEAgree           bool   // to its terms of service
	ACMEUpdateServer    string // DNS server (host:port) that takes signed updates; empty: see ACMEHook
	ACMEUpdateZone      string
	ACMEUpdateKeyName   string
	ACMEUpdateKeyFile   string // file with the TSIG secret, in base64
	ACMEUpdateAlgorithm string
	ACMEHook            string        // program that changes DNS records; empty, and no server: no wildcards
	ACMEWait            time.Duration // until a changed record is seen everywhere

	EtcdEndpoints []string // empty: etcd inside this process
	EtcdPrefix    string
	EtcdCA        string
	EtcdCert      string
	EtcdKey       string
	// MemoryEncryption encrypts stored memory: true, false, or auto, where that is cheap. The keys are in MemoryKey; empty: a file in
	// the data directory.
	MemoryEncryption string
	MemoryKey        string
	SecretsKey       string // file with the key of Secrets in the etcd inside; empty: one in the data directory

	ContainerdAddress   string // socket of one that runs already; empty: our own is started
	ContainerdBinary    string // this and those below: empty: found, see package toolchain
	ContainerdNamespace string
	RunscBinary         string
	RunscPlatform       string
	RuncBinary          string
	AgentBinary         string

	WebhookAllow  []netip.Prefix // ranges beside public addresses that webhooks may reach
	BridgeName    string
	Subnet        netip.Prefix
	Subnet6       netip.Prefix // invalid: no IPv6
	NetnsPrefix   string
	NftTable      string
	CgroupParent  string
	DNSResolvers  []netip.Addr   // empty: the machine's
	InternalZones []string       // names that sandboxes may look up although their addresses are private; ".": all
	Reachable     []netip.Prefix // private ranges that sandboxes may reach
	// AdaptiveCPU lowers the priority of sandboxes that use more than their share of contended processors.
	AdaptiveCPU bool
	// SandboxConnections bounds the tracked connections of one sandbox; 0: any number.
	SandboxConnections int
	// SandboxBandwidth and SandboxPackets bound what one sandbox sends, and what it receives, in a second; 0: any number.
	SandboxBandwidth resource.Quantity // bits
	SandboxPackets   int
	SpareNetworks    int // network namespaces made ahead

	DefaultTemplate string
	BaseImageRef    string
	DefaultRuntime  string            // gvisor or runc
	RegistryMirrors []string          // REGISTRY=URL; see Registries
	RegistryCAs     []string          // HOST=FILE
	ImageStore      resource.Quantity // disk space of images; zero: any
	MaxImage        resource.Quantity // compressed bytes of one that is pulled
	SandboxCPU      resource.Quantity
	SandboxMemory   resource.Quantity
	SandboxDisk     resource.Quantity
	SandboxPids     int
	MaxTimeout      time.Duration // longest lifetime that a client may request
	PoolSize        int           // of the default template's pool, when it is made
	StoreAfter      time.Duration // for which a paused sandbox stays in RAM; 0: no limit
	ForkSecrets     bool          // forks may have the variables that their source was created with
	PausedAddresses string        // keep or release

	EtcdQuota     resource.Quantity // largest size of the embedded etcd's file
	ReserveDisk   resource.Quantity // free space below which new work is refused; zero: none
	ReserveMemory resource.Quantity // free memory below which new work is refused; zero: none
	IdleMemory    resource.Quantity // free memory below which idle sandboxes are paused early; zero: never

	QuotaSandboxes int               // of each namespace that does not set its own; 0: none, QuotaByMachine
	QuotaCreates   int               // new sandboxes a second; 0: any number
	QuotaContents  resource.Quantity // of the objects of a namespace, in bytes; zero: any
	QuotaStored    resource.Quantity // of snapshots and memory of paused sandboxes, in bytes; zero: any, QuotaByMachine
	QuotaCPU       resource.Quantity // zero: none
	QuotaMemory    resource.Quantity // zero: none
	QuotaCounts    string            // running or all
	// QuotaVolumes and QuotaVolumeCapacity are of each namespace that does not set its own; 0: none.
	QuotaVolumes        int
	QuotaVolumeCapacity resource.Quantity
	// The numbers of other objects that each namespace may have that does not set its own; 0: any number.
	QuotaTemplates, QuotaSnapshots, QuotaBuilds, QuotaWebhooks, QuotaKeys int
	// VolumeEndpoints are object stores, as host:port, at addresses that are not public.
	VolumeEndpoints []string

	ClientIdle  time.Duration // of connections without requests
	StreamIdle  time.Duration // of exchanges without data; 0: no limit
	SandboxRate int           // requests a second; 0: any number
	KeyRate     int           // requests a second; 0: any number
	// SandboxRequests and ClientConnections bound what is open at once; 0: any number.
	SandboxRequests, ClientConnections int
	// GatewayFastPath proxies simple requests without net/http.
	GatewayFastPath bool

	// AuditLog is the file of who did what; empty: audit.log of DataDir, AuditOff: none. AuditLogSize bounds each of its
	// AuditLogFiles files.
	AuditLog      string
	AuditLogSize  resource.Quantity
	AuditLogFiles int

	LogLevel     string
	LogFormat    string
	AccessLog    bool
	OTLPEndpoint string
	// OTLPSamplePercent is the share of traces that are recorded, of requests without a trace of the client's.
	OTLPSamplePercent int
}

// Roles.
const (
	// RoleServer is all in one: API server, controllers, manager, gateway, and this machine as node.
	RoleServer = "server"
	// RoleController is the controllers of a Kubernetes cluster, where sandboxes are Pods. One of several leads.
	RoleController = "controller"
	// RoleReplica is one more manager and gateway for an API server that runs elsewhere.
	RoleReplica = "replica"
	// RoleNode runs the sandboxes of a server that has NodeSocket set, on the same machine.
	RoleNode = "node"
)

// QuotaByMachine as QuotaSandboxes allows one sandbox for each MachineShare bytes of the machine's memory, as QuotaStored
// MachineStored bytes or half of a smaller disk.
const (
	QuotaByMachine = -1
	MachineShare   = 16 << 20
	MachineStored  = 1 << 40
)

// AuditOff is the AuditLog of a server that records nothing.
const AuditOff = "off"

// What Privileges may be.
const (
	PrivilegesTogether = "together"
	PrivilegesApart    = "apart"
)

// What MemoryEncryption may be.
const (
	EncryptionAuto = "auto"
	EncryptionOn   = "true"
	EncryptionOff  = "false"
)

// Runtimes of DefaultRuntime.
const (
	RuntimeGVisor = "gvisor"
	RuntimeRunc   = "runc"
)

// What becomes of the addresses of sandboxes that sleep on disk, by PausedAddresses.
const (
	AddressesKept     = "keep"
	AddressesReleased = "release"
)

// What QuotaCounts counts.
const (
	QuotaRunning = "running"
	QuotaAll     = "all"
)

// Default returns the settings of a machine where nothing is set. RunDir and
// NodeName are still empty in it: Load derives them last.
func Default() Config {
	return Config{
		DataDir:             "/var/lib/barchan",
		CacheDir:            "/var/cache/barchan",
		Role:                RoleServer,
		Privileges:          PrivilegesTogether,
		MemoryEncryption:    EncryptionAuto,
		ClusterDomain:       "cluster.local",
		LeaseNamespace:      "barchan-system",
		HTTPAddr:            "127.0.0.1:7700",
		TLSAddr:             "127.0.0.1:7743",
		KubeAddr:            "127.0.0.1:7764",
		MetricsAddr:         "127.0.0.1:7790",
		SSHAddr:             "127.0.0.1:7722",
		Domains:             []string{"barchan.localhost"},
		ACMEDirectory:       acme.LetsEncrypt,
		ACMEUpdateAlgorithm: "hmac-sha256",
		ACMEWait:            10 * time.Second,
		ContainerdNamespace: "barchan",
		RunscPlatform:       "systrap",
		BridgeName:          "barchan0",
		Subnet:              netip.MustParsePrefix("10.87.0.0/16"),
		SpareNetworks:       8,
		NetnsPrefix:         "barchan-",
		NftTable:            "barchan",
		CgroupParent:        "/barchan",
		DefaultTemplate:     "base",
		BaseImageRef:        "barchan.local/base:latest",
		DefaultRuntime:      RuntimeGVisor,
		ImageStore:          resource.MustParse("1Ti"),
		MaxImage:            resource.MustParse("32Gi"),
		SandboxCPU:          resource.MustParse("2"),
		SandboxMemory:       resource.MustParse("512Mi"),
		SandboxDisk:         resource.MustParse("10Gi"),
		SandboxPids:         1024,
		MaxTimeout:          24 * time.Hour,
		PoolSize:            1,
		StoreAfter:          30 * time.Second,
		PausedAddresses:     AddressesKept,
		EtcdPrefix:          defaultEtcdPrefix,
		EtcdQuota:           resource.MustParse("8Gi"),
		ReserveDisk:         resource.MustParse("1Gi"),
		ReserveMemory:       resource.MustParse("256Mi"),
		QuotaSandboxes:      QuotaByMachine,
		QuotaCreates:        200,
		QuotaStored:         *resource.NewQuantity(QuotaByMachine, resource.DecimalSI),
		QuotaContents:       resource.MustParse("256Mi"),
		QuotaTemplates:      1000,
		QuotaSnapshots:      10_000,
		QuotaBuilds:         100,
		QuotaWebhooks:       50,
		QuotaKeys:           1000,
		QuotaCounts:         QuotaRunning,
		ClientIdle:          610 * time.Second,
		GatewayFastPath:     true,
		AdaptiveCPU:         true,
		SandboxConnections:  4096,
		SandboxBandwidth:    resource.MustParse("4G"),
		SandboxPackets:      200_000,
		SandboxRequests:     2000,
		ClientConnections:   2_000,
		AuditLogSize:        resource.MustParse("100Mi"),
		AuditLogFiles:       10,
		OTLPSamplePercent:   100,
		LogLevel:            "info",
		LogFormat:           "text",
	}
}

// complete derives what has no fixed default.
func (c *Config) complete() error {
	if c.RunDir == "" {
		c.RunDir = filepath.Join(c.DataDir, "run")
	}
	if c.TokenSecret == "" {
		c.TokenSecret = filepath.Join(c.DataDir, "credentials", "token-secret")
	}
	if c.NodeName == "" {
		name, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("nodeName: read the host's name: %w", err)
		}
		c.NodeName = strings.Trim(strings.ToLower(strings.ReplaceAll(name, "_", "-")), ".-")
	}
	return nil
}

// Registries returns the mirrors by registry and the files of authorities by host. An error names the setting.
func (c *Config) Registries() (mirrors map[string][]string, authorities map[string]string, err error) {
	mirrors, authorities = map[string][]string{}, map[string]string{}
	for _, text := range c.RegistryMirrors {
		host, address, ok := hostAnd(text)
		if !ok || !isMirror(address) {
			return nil, nil, setting.Invalid("registryMirrors", "%q is not a mirror such as docker.io=https://mirror.example.com", text)
		}
		mirrors[host] = append(mirrors[host], address)
	}
	for _, text := range c.RegistryCAs {
		host, file, ok := hostAnd(text)
		if !ok || !filepath.IsAbs(file) {
			return nil, nil, setting.Invalid("registryCAs", "%q is not a file of a host such as registry.example.com=/etc/barchan/ca.pem", text)
		}
		if _, twice := authorities[host]; twice {
			return nil, nil, setting.Invalid("registryCAs", "%s has two files, want one", host)
		}
		authorities[host] = file
	}
	return mirrors, authorities, nil
}

// hostAnd splits HOST=VALUE.
func hostAnd(text string) (host, value string, ok bool) {
	host, value, ok = strings.Cut(text, "=")
	return host, value, ok && host != "" && !strings.Contains(host, "/")
}

func isMirror(address string) bool {
	u, err := url.Parse(address)
	return err == nil && (u.Scheme == "https" || u.Scheme == "http") && u.Host != "" && u.User == nil && u.RawQuery == ""
}

// AdminSocket is where a running server is administered.
func (c *Config) AdminSocket() string { return filepath.Join(c.RunDir, "admin.sock") }

// AuditFile is the path of the audit log; empty: there is none.
func (c *Config) AuditFile() string {
	if c.AuditLog == AuditOff {
		return ""
	}
	return cmp.Or(c.AuditLog, filepath.Join(c.DataDir, "audit.log"))
}

// RunsSandboxes reports whether the process runs sandboxes on this machine.
func (c *Config) RunsSandboxes() bool {
	return c.Role == RoleNode || (c.Role == RoleServer && c.NodeSocket == "")
}

// ServesTraffic reports whether the process serves the E2B API and requests to sandboxes.
func (c *Config) ServesTraffic() bool { return c.Role == RoleServer || c.Role == RoleReplica }

// APIKeyFile holds the key that the local command line uses; only its owner may read it.
func (c *Config) APIKeyFile() string {
	return filepath.Join(c.DataDir, "credentials", "api-key")
}

// HostKeyFile is the private key of the SSH server.
func (c *Config) HostKeyFile() string {
	return cmp.Or(c.SSHHostKey, filepath.Join(c.DataDir, "credentials", "ssh-host-key"))
}

// Kubeconfig is the administrator's way to the Kubernetes API.
func (c *Config) Kubeconfig() string {
	return filepath.Join(c.DataDir, "credentials", "admin.kubeconfig")
}

// NodeKubeconfig is the way of a node in a process of its own to the Kubernetes API.
func (c *Config) NodeKubeconfig() string {
	return filepath.Join(c.DataDir, "credentials", "node.kubeconfig")
}

// LogFile takes the log of a server in the background.
func (c *Config) LogFile() string { return filepath.Join(c.DataDir, "log", "barchan.log") }

// Domain is what E2B calls a domain: the first of Domains, with the port of
// TLSAddr unless it names one itself or that port is 443.
func (c *Config) Domain() string {
	return DomainWithPort(c.Domains[0], c.TLSAddr)
}

// DomainWithPort adds the port of a listening address to a domain that needs it.
func DomainWithPort(domain, tlsAddr string) string {
	if _, _, err := net.SplitHostPort(domain); err == nil {
		return domain
	}
	_, port, err := net.SplitHostPort(tlsAddr)
	if err != nil || port == "443" {
		return domain
	}
	return net.JoinHostPort(domain, port)
}
