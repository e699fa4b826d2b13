package apiserver

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	// DefaultEtcdPrefix is where keys begin in etcd. It differs from that of Kubernetes, so
	// that an etcd may serve both.
	DefaultEtcdPrefix = "/barchan"
	// DefaultQuotaBackendBytes bounds the embedded etcd's file.
	DefaultQuotaBackendBytes = 8 << 30
	// minQuotaBackendBytes is less than which etcd is full before long.
	minQuotaBackendBytes = 16 << 20
	minTokenLength       = 16
	// DefaultEtcdLease is how long an existing etcd keeps other servers away from the objects
	// of one that has ended without a word.
	DefaultEtcdLease = time.Minute
)

// AdmissionFunc says what cannot be honoured of an object whose form is valid. It is called on
// create, with a nil old, and on update when the spec has changed. Each error names its field.
type AdmissionFunc func(ctx context.Context, obj, old runtime.Object) field.ErrorList

// WatchCache says how the server keeps objects in memory.
type WatchCache struct {
	// Disabled reads every list and watch from etcd: less memory, more work per read.
	Disabled bool
}

// Config says how to run a server. DataDir and Log are needed; all else has a default.
type Config struct {
	// DataDir holds etcd's files, the certificates and the kubeconfig. One server uses it at a time.
	DataDir string
	// Listen is the host:port to serve TLS at. Empty: no listener, in-process clients only.
	Listen string
	// PublicNames and PublicIPs go into the server's certificate, beside localhost and Listen's host.
	PublicNames []string
	PublicIPs   []net.IP
	// AdminToken is the admin's bearer token. Empty: a random one is made and kept in DataDir.
	AdminToken string

	// EtcdEndpoints are the URLs of an existing etcd. Empty: etcd runs inside the process.
	EtcdEndpoints []string
	// EtcdCAFile, EtcdCertFile and EtcdKeyFile are for https endpoints.
	EtcdCAFile, EtcdCertFile, EtcdKeyFile string
	// EtcdPrefix is where keys begin. In an existing etcd one server at a time uses it: a second
	// one does not start. Default: DefaultEtcdPrefix.
	EtcdPrefix string
	// EtcdLease is after how long another server may use the prefix of one that no longer
	// answers, in whole seconds. Default: DefaultEtcdLease.
	EtcdLease time.Duration
	// NodeName is how others know this server. Default: the host's name.
	NodeName string
	// QuotaBackendBytes bounds the embedded etcd's file. Default: DefaultQuotaBackendBytes.
	QuotaBackendBytes int64

	// Keys makes tenants' API keys good for their namespace, as bearer tokens; nil: they are not.
	Keys KeyFunc
	// Pods serves Pods and their subresources, which are views of Sandboxes; nil: there are none.
	Pods Pods
	// Admission may be nil.
	Admission AdmissionFunc
	// Gate is told when storage is short of room, or away. While it is closed, nothing new can
	// be made but namespaces and events. Nil: nobody is told, and nothing refused.
	Gate       *health.Gate
	WatchCache WatchCache
	Log        *slog.Logger
}

// withDefaults returns a copy with what was left out filled in.
func (c Config) withDefaults() Config {
	if c.EtcdPrefix == "" {
		c.EtcdPrefix = DefaultEtcdPrefix
	}
	if c.EtcdLease == 0 {
		c.EtcdLease = DefaultEtcdLease
	}
	if c.NodeName == "" {
		c.NodeName, _ = os.Hostname() // a name for people
	}
	if c.QuotaBackendBytes == 0 {
		c.QuotaBackendBytes = DefaultQuotaBackendBytes
	}
	if c.Log == nil {
		c.Log = telemetry.Discard()
	}
	return c
}

// validate says what is wrong with a configuration that has its defaults.
func (c *Config) validate() error {
	bad := func(field, why string) error { return fmt.Errorf("%s: %w: %s", field, errs.ErrInvalid, why) }
	if c.DataDir == "" || !filepath.IsAbs(c.DataDir) {
		return bad("data directory", "must be an absolute path")
	}
	if c.Listen != "" {
		if _, _, err := net.SplitHostPort(c.Listen); err != nil {
			return bad("listen address "+c.Listen, "must be host:port, as in 127.0.0.1:7764")
		}
	}
	if c.AdminToken != "" && (len(c.AdminToken) < minTokenLength || strings.ContainsAny(c.AdminToken, " \t\r\n")) {
		return bad("admin token", fmt.Sprintf("must be at least %d characters without blanks", minTokenLength))
	}
	if c.QuotaBackendBytes < minQuotaBackendBytes {
		return bad("etcd quota", fmt.Sprintf("must be at least %d bytes", minQuotaBackendBytes))
	}
	if !strings.HasPrefix(c.EtcdPrefix, "/") || c.EtcdPrefix == "/" || path.Clean(c.EtcdPrefix) != c.EtcdPrefix {
		return bad("etcd prefix "+c.EtcdPrefix, "must be a path such as /barchan")
	}
	if c.EtcdLease < minEtcdLease || c.EtcdLease%time.Second != 0 {
		return bad("etcd lease "+c.EtcdLease.String(), fmt.Sprintf("must be %s or more, in whole seconds", minEtcdLease))
	}
	return c.validateEndpoints(bad)
}

func (c *Config) validateEndpoints(bad func(field, why string) error) error {
	for _, e := range c.EtcdEndpoints {
		u, err := url.Parse(e)
		if err != nil || (u.Scheme != "http" && u.Scheme != "https" && u.Scheme != "unix" && u.Scheme != "unixs") {
			return bad("etcd endpoint "+e, "must be a URL as in https://127.0.0.1:2379 or unix:///run/etcd.sock")
		}
	}
	if (c.EtcdCertFile == "") != (c.EtcdKeyFile == "") {
		return bad("etcd certificate", "certificate and key files go together")
	}
	return nil
}
