package client

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/client/internal/rest"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Environment variables that [New] reads. Those of Barchan take precedence. The key of E2B's variables is used only with a server
// of E2B's variables: a key of another server does not reach this one.
const (
	EnvAPIURL     = "BARCHAN_API_URL"
	EnvAPIKey     = "BARCHAN_API_KEY"
	EnvSandboxURL = "BARCHAN_SANDBOX_URL"

	EnvE2BAPIURL     = "E2B_API_URL"
	EnvE2BDomain     = "E2B_DOMAIN"
	EnvE2BAPIKey     = "E2B_API_KEY"
	EnvE2BSandboxURL = "E2B_SANDBOX_URL"
	// EnvE2BAccessToken takes the place of a key.
	EnvE2BAccessToken = "E2B_ACCESS_TOKEN" //nolint:gosec // the name of a variable
)

// Config names the server and the client. A field that is empty is taken from the environment.
type Config struct {
	// URL of the API: scheme, host and optionally a path before the routes.
	URL string
	Key string
	// Domain of the server, optionally with a port: without a URL, the API is https://api.DOMAIN. It is also the domain of [Sandbox.Host]; by
	// default that of URL.
	Domain string
	// SandboxURL is one address for all sandboxes, which are then named by headers; empty: derived from URL. Addresses and localhost route by
	// header, names by host.
	SandboxURL string
	// HTTP must have no total timeout; calls are bounded by their context. Nil is a client of its own.
	HTTP *http.Client
	// UserAgent is the program's name.
	UserAgent string
}

// Client calls a server. It is safe for concurrent use.
type Client struct {
	api                rest.Client
	domain, sandboxURL string
}

// New checks the configuration and opens no connection. The zero Config is the server that the environment names.
func New(cfg Config) (*Client, error) {
	cfg.fill(os.Getenv)
	if cfg.URL == "" {
		return nil, fmt.Errorf("API URL: none; set %s, %s or %s: %w", EnvAPIURL, EnvE2BAPIURL, EnvE2BDomain, ErrInvalid)
	}
	u, err := url.Parse(cfg.URL)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, fmt.Errorf("API URL: %q is not an http or https address: %w", cfg.URL, ErrInvalid)
	}
	if cfg.Key == "" {
		return nil, fmt.Errorf("API key: none for %s; set %s: %w", u.Host, EnvAPIKey, ErrInvalid)
	}
	if cfg.HTTP == nil {
		cfg.HTTP = &http.Client{Transport: NewTransport()}
	}
	return &Client{
		api:    rest.Client{HTTP: cfg.HTTP, URL: strings.TrimSuffix(cfg.URL, "/"), Key: cfg.Key, UserAgent: cfg.UserAgent},
		domain: cfg.Domain, sandboxURL: strings.TrimSuffix(cfg.SandboxURL, "/"),
	}, nil
}

// fill takes what is missing from the environment. A server that is given has nothing of E2B's.
func (cfg *Config) fill(env func(string) string) {
	given := cmp.Or(cfg.URL, cfg.Domain) != ""
	cfg.Key = cmp.Or(cfg.Key, env(EnvAPIKey))
	if !given {
		cfg.URL = env(EnvAPIURL)
	}
	if cfg.URL == "" && !given {
		cfg.Domain, cfg.URL = env(EnvE2BDomain), env(EnvE2BAPIURL)
		if cmp.Or(cfg.Domain, cfg.URL) != "" {
			cfg.Key = cmp.Or(cfg.Key, env(EnvE2BAPIKey), env(EnvE2BAccessToken))
			cfg.SandboxURL = cmp.Or(cfg.SandboxURL, env(EnvSandboxURL), env(EnvE2BSandboxURL))
		}
	} else if !given {
		cfg.SandboxURL = cmp.Or(cfg.SandboxURL, env(EnvSandboxURL))
	}
	if cfg.URL == "" && cfg.Domain != "" {
		cfg.URL = "https://api." + cfg.Domain
	}
}

// NewTransport has no total timeout, for streams, but detects an unreachable address soon.
func NewTransport() *http.Transport {
	d := net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}
	return &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         d.DialContext,
		ForceAttemptHTTP2:   true,
		MaxIdleConnsPerHost: 16,
		IdleConnTimeout:     time.Minute,
		TLSHandshakeTimeout: 10 * time.Second,
	}
}

// Call makes a request of the API: for routes that have no method here. in is sent as JSON, and the response decoded into out; each may be nil.
func (c *Client) Call(ctx context.Context, method, path string, q url.Values, in, out any) error {
	_, err := c.api.Call(ctx, method, path, q, in, out)
	return err
}

// Do sends a request with the client's connections and name, and without its key: to a sandbox or a URL that the API has returned.
func (c *Client) Do(req *http.Request) (*http.Response, error) { return c.api.Do(req) }

// SandboxAddress returns the base URL of a port of a sandbox, and the headers that a request to it needs.
func (c *Client) SandboxAddress(id string, port int) (string, http.Header) {
	h := http.Header{}
	h.Set(envd.HeaderSandboxID, id)
	h.Set(envd.HeaderSandboxPort, strconv.Itoa(port))
	if c.sandboxURL != "" {
		return c.sandboxURL, h
	}
	u, err := url.Parse(c.api.URL)
	if err != nil {
		return c.api.URL, h
	}
	if _, err := netip.ParseAddr(u.Hostname()); err == nil || u.Hostname() == "localhost" {
		return u.Scheme + "://" + u.Host, h
	}
	return u.Scheme + "://" + c.host(id, port), h
}

// host returns the name of a port of a sandbox below the domain.
func (c *Client) host(id string, port int) string {
	domain := c.domain
	if u, err := url.Parse(c.api.URL); err == nil && domain == "" {
		domain = strings.TrimPrefix(u.Host, "api.")
	}
	return fmt.Sprintf("%d-%s.%s", port, id, domain)
}

// agent returns a client of a sandbox's agent.
func (c *Client) agent(id, token, user string) (*envd.Client, error) {
	base, h := c.SandboxAddress(id, envd.Port)
	if c.api.UserAgent != "" {
		h.Set("User-Agent", c.api.UserAgent)
	}
	return envd.NewClient(envd.ClientConfig{
		HTTP: c.api.HTTP, BaseURL: base, User: user, Header: maps.Clone(h), Token: func() string { return token },
	})
}
