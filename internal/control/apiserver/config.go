package apiserver

import (
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"

	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver/etcd"
	"github.com/barchan-dev/barchan/internal/control/apiserver/pods"
	"github.com/barchan-dev/barchan/internal/control/apiserver/registry"
	"github.com/barchan-dev/barchan/internal/control/apiserver/tenancy"
)

// Config configures a server. DataDir is required.
type Config struct {
	// DataDir holds etcd's files, the certificates and the kubeconfig. One server uses it at a time.
	DataDir string
	// Listen is the host:port to serve TLS at. Empty: no listener, in-process clients only.
	Listen string
	// Limit bounds what one client has open of the listener; nil: nothing does.
	Limit func(net.Listener) net.Listener
	// Etcd stores the objects.
	Etcd etcd.Config
	// Node writes credentials of UserNode too, for a node in a process of its own.
	Node bool
	// Keys authenticates tenants' API keys as bearer tokens for their namespace; nil: none is valid.
	Keys tenancy.KeyFunc
	// Pods does the work of Pods, which are views of Sandboxes; nil: there are no Pods.
	Pods pods.Runtime
	// Forwarded is the REST API, for requests that a replica forwards with the administrator's credentials; nil: there are none.
	Forwarded http.Handler
	// Audit records what clients from the network change; nil: nothing.
	Audit *auditlog.Log
	// Admission may be nil.
	Admission registry.AdmissionFunc
	// Bound is [registry.Config.Bound], and may be nil.
	Bound registry.AdmissionFunc
	// Gate receives the state of the storage. While it is closed, new objects are refused, but for
	// namespaces and events. It may be nil.
	Gate *health.Gate
	Log  *slog.Logger
}

// complete sets the defaults and validates the rest.
func (c *Config) complete() error {
	if c.Log == nil {
		c.Log = telemetry.Discard()
	}
	if !filepath.IsAbs(c.DataDir) {
		return fmt.Errorf("data directory: %w: must be an absolute path", errs.ErrInvalid)
	}
	if c.Listen != "" {
		if _, _, err := net.SplitHostPort(c.Listen); err != nil {
			return fmt.Errorf("listen address %s: %w: must be host:port, as in 127.0.0.1:7764", c.Listen, errs.ErrInvalid)
		}
	}
	return c.Etcd.Complete()
}
