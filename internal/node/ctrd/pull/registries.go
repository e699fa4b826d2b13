package pull

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path"

	"github.com/containerd/containerd/v2/core/remotes/docker"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// anyRegistry is the key of mirrors for registries without mirrors of their own.
const anyRegistry = "*"

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
		if _, err := r.client(host); err != nil {
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

// client returns a client that trusts the authorities of a host.
func (r Registries) client(host string) (*http.Client, error) {
	file := r.CAs[host]
	if file == "" {
		return &http.Client{Transport: docker.DefaultHTTPTransport(nil)}, nil
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
			one, err := r.host(u.Host, u.Scheme, path.Join("/", u.Path, "v2"))
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
		own, err := r.host(host, scheme, "/v2", auth...)
		return append(all, own), err
	}
}

func (r Registries) host(host, scheme, at string, auth ...docker.AuthorizerOpt) (docker.RegistryHost, error) {
	client, err := r.client(host)
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
