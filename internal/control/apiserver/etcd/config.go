// Package etcd gives the API server its storage: an etcd in this process, or a prefix of an
// existing one. It keeps the embedded one below its quota, and lets one server at a time use a
// prefix of an existing one.
//
// It does not know the stored kinds, and it neither backs up nor repairs files. The embedded
// etcd has no listener: only this process can use it.
//
// Locks: watchHandlers has the only mutex, and nothing is called under it.
package etcd

import (
	"cmp"
	"fmt"
	"net/url"
	"os"
	"path"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

const minQuotaBackendBytes = 16 << 20 // a smaller one fills soon

// Config selects an etcd. The zero value is an embedded one with defaults.
type Config struct {
	// Endpoints are the URLs of an existing etcd. Empty: etcd runs inside the process.
	Endpoints []string
	// CAFile, CertFile and KeyFile are for https endpoints.
	CAFile, CertFile, KeyFile string
	// Prefix is where keys begin. In an existing etcd one server at a time uses it: a second
	// one does not start. Default: /barchan, so that Kubernetes may use the same etcd.
	Prefix string
	// Lease is the time after which another server may use the prefix of one that no longer
	// answers, in whole seconds. Default: a minute.
	Lease time.Duration
	// NodeName is this server's name in other servers' errors. Default: the host's name.
	NodeName string
	// QuotaBackendBytes bounds the embedded etcd's file. Default: 8 GiB.
	QuotaBackendBytes int64
	// SecretsKey is the file with the key of Secrets in the embedded etcd, which is made if it is missing. Default: in the
	// server's directory.
	SecretsKey string
	// Share is called with each object before a watch cache over the embedded etcd holds it, to have it share parts with others.
	// Nil: nothing is shared.
	Share func(runtime.Object)
}

// Complete sets the defaults and validates the rest.
func (c *Config) Complete() error {
	c.Prefix, c.Lease, c.QuotaBackendBytes = cmp.Or(c.Prefix, "/barchan"), cmp.Or(c.Lease, time.Minute), cmp.Or(c.QuotaBackendBytes, 8<<30)
	if c.NodeName == "" {
		c.NodeName, _ = os.Hostname() // only for people
	}
	bad := func(field, why string) error { return fmt.Errorf("%s: %w: %s", field, errs.ErrInvalid, why) }
	if c.QuotaBackendBytes < minQuotaBackendBytes {
		return bad("etcd quota", fmt.Sprintf("must be at least %d bytes", minQuotaBackendBytes))
	}
	if !strings.HasPrefix(c.Prefix, "/") || c.Prefix == "/" || path.Clean(c.Prefix) != c.Prefix {
		return bad("etcd prefix "+c.Prefix, "must be a path such as /barchan")
	}
	if c.Lease < minLease || c.Lease%time.Second != 0 {
		return bad("etcd lease "+c.Lease.String(), fmt.Sprintf("must be %s or more, in whole seconds", minLease))
	}
	for _, e := range c.Endpoints {
		u, err := url.Parse(e)
		if err != nil || (u.Scheme != "http" && u.Scheme != "https" && u.Scheme != "unix" && u.Scheme != "unixs") {
			return bad("etcd endpoint "+e, "must be a URL as in https://127.0.0.1:2379 or unix:///run/etcd.sock")
		}
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		return bad("etcd certificate", "certificate and key files go together")
	}
	return nil
}
