package pull

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// anyRegistry is the key of mirrors for registries without mirrors of their own.
const anyRegistry = "*"

// dialTimeout is that of docker's own transport.
const dialTimeout = 30 * time.Second

// Registries are the hosts that registries are reached at. The zero value has each registry reached at its own host.
type Registries struct {
	// Mirrors are URLs by the host of a registry, or "*" for all others. They are tried in order, the registry itself last.
	Mirrors map[string][]string
	// CAs are PEM files by host, of a registry or a mirror. Their authorities are trusted besides the system's.
	CAs map[string]string
}

// check returns an errs.ErrInvalid for a URL or file that cannot be used.
func (r Registries) check() error {
	for registry, mirrors := range r.Mirrors {
		for _, m := range mirrors {
			if _, err := mirrorURL(m); err != nil {
				return fmt.Errorf("mirror of registry %s: %w", registry, err)
			}
		}
	}
	for host := range r.CAs {
		if _, err := r.client(host, true); err != nil {
			return err
		}
	}
	return nil
}

func mirrorURL(text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil || (u.Scheme != "https" && u.Scheme != "http") || u.Host == "" || u.User != nil || u.RawQuery != "" {
		return nil, fmt.Errorf("%q: want a URL such as https://mirror.example.com/docker: %w", text, errs.ErrInvalid)
	}
	return u, nil
}

// client returns a client that trusts the authorities of a host. For a host that the operator has not named it is guarded.
func (r Registries) client(host string, named bool) (*http.Client, error) {
	file := r.CAs[host]
	if file == "" {
		plain := docker.DefaultHTTPTransport(nil)
		if !named {
			plain.DialContext = (&net.Dialer{Timeout: dialTimeout, KeepAlive: dialTimeout, ControlContext: guard(host)}).DialContext
		}
		return &http.Client{Transport: plain}, nil
	}
	roots, err := x509.SystemCertPool()
	if err != nil {
		roots = x509.NewCertPool() // a machine without any
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("authorities of registry %s: %w: %w", host, err, errs.ErrInvalid)
	}
	if !roots.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("authorities of registry %s: %s has no certificate: %w", host, file, errs.ErrInvalid)
	}
	return &http.Client{Transport: docker.DefaultHTTPTransport(&tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12})}, nil
}

// guard refuses connections to addresses at which machines are served, and not images: tenants name registries, and a registry names in
// its answers where tokens and layers are. Link-local ones, with the metadata of clouds, are closed to all, this machine's loopback
// to registries elsewhere. Private ranges stay open: registries are there.
func guard(host string) func(context.Context, string, string, syscall.RawConn) error {
	proxy, _ := http.ProxyFromEnvironment(&http.Request{URL: &url.URL{Scheme: "https", Host: host}})
	loopback := isLoopback(host) || proxy != nil
	return func(_ context.Context, _, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return fmt.Errorf("address of registry %s: %w", host, err)
		}
		ip := to.Addr().Unmap().WithZone("")
		if ip.IsLinkLocalUnicast() || wireServers[ip] || (ip.IsLoopback() || ip.IsUnspecified()) && !loopback {
			return errs.Public(errs.ErrForbidden, fmt.Sprintf("registry %s: no image is fetched from the address %s", host, ip))
		}
		return nil
	}
}

// wireServers are the addresses beside link-local ones at which clouds serve their machines.
var wireServers = map[netip.Addr]bool{
	netip.MustParseAddr("168.63.129.16"):   true, // Azure
	netip.MustParseAddr("100.100.100.200"): true, // Alibaba
	netip.MustParseAddr("192.0.0.192"):     true, // Oracle
	netip.MustParseAddr("fd00:ec2::254"):   true, // Amazon
}

// hosts returns where a registry's images are, its own host last. Only that receives the credentials: a mirror is another's.
func (r Registries) hosts(creds Credentials) docker.RegistryHosts {
	return func(registry string) (all []docker.RegistryHost, err error) {
		mirrors, ok := r.Mirrors[registry]
		if !ok {
			mirrors = r.Mirrors[anyRegistry]
		}
		for _, m := range mirrors {
			u, err := mirrorURL(m)
			if err != nil {
				return nil, err
			}
			one, err := r.host(u.Host, u.Scheme, path.Join("/", u.Path, "v2"), true)
			if err != nil {
				return nil, err
			}
			all = append(all, one)
		}
		host := registry
		if registry == "docker.io" {
			host = "registry-1.docker.io"
		}
		scheme := "https"
		if r.CAs[registry] == "" && isLoopback(host) {
			scheme = "http"
		}
		var auth []docker.AuthorizerOpt
		if creds != (Credentials{}) {
			auth = append(auth, docker.WithAuthCreds(func(string) (string, string, error) { return creds.Username, creds.Password, nil }))
		}
		own, err := r.host(host, scheme, "/v2", false, auth...)
		return append(all, own), err
	}
}

func (r Registries) host(host, scheme, at string, named bool, auth ...docker.AuthorizerOpt) (docker.RegistryHost, error) {
	client, err := r.client(host, named)
	if err != nil {
		return docker.RegistryHost{}, err
	}
	return docker.RegistryHost{
		Client: client, Authorizer: docker.NewDockerAuthorizer(append(auth, docker.WithAuthClient(client))...),
		Host: host, Scheme: scheme, Path: at, Capabilities: docker.HostCapabilityPull | docker.HostCapabilityResolve,
	}, nil
}

// isLoopback reports whether a registry's host, with or without port, is this host.
func isLoopback(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || (err == nil && addr.IsLoopback())
}
