package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/restclient"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Environment variables of a client without a data directory. Barchan's take precedence over E2B's.
const (
	envAPIURL     = "BARCHAN_API_URL"
	envAPIKey     = "BARCHAN_API_KEY"
	envSandboxURL = "BARCHAN_SANDBOX_URL"
	envKubeconfig = "BARCHAN_KUBECONFIG"

	envE2BAPIURL      = "E2B_API_URL"
	envE2BDomain      = "E2B_DOMAIN"
	envE2BAPIKey      = "E2B_API_KEY"
	envE2BAccessToken = "E2B_ACCESS_TOKEN" //nolint:gosec // the name of a variable
	envE2BSandboxURL  = "E2B_SANDBOX_URL"
)

func (a *app) config(flags ...*config.Flags) (*config.Resolved, error) {
	return config.Load(config.Options{
		File:      a.configFile,
		LookupEnv: a.lookupEnv,
		Flags:     append(flags, a.rootFlags),
	})
}

// first returns the value of a flag, or else of the first variable that is not empty.
func (a *app) first(flag string, env ...string) string {
	value := flag
	for i := 0; value == "" && i < len(env); i++ {
		value, _ = a.lookupEnv(env[i])
	}
	return value
}

// givenKey returns the key of a flag or a variable, or empty. E2B's variables for the key apply only
// with those for the server: do not send a key of E2B's cloud to the local server.
func (a *app) givenKey() string {
	key := a.first(a.apiKey, envAPIKey)
	if key == "" && a.first("", envE2BAPIURL, envE2BDomain) != "" {
		key = a.first("", envE2BAPIKey, envE2BAccessToken)
	}
	return key
}

func (a *app) admin() (*adminclient.Client, error) {
	cfg, err := a.config()
	if err != nil {
		return nil, err
	}
	return adminclient.New(cfg.AdminSocket(), cfg.DataDir), nil
}

// localServer returns the status of the data directory's server.
func (a *app) localServer(ctx context.Context) (adminclient.Status, error) {
	client, err := a.admin()
	if err != nil {
		return adminclient.Status{}, err
	}
	s, err := client.Status(ctx)
	if err == nil && !s.Ready {
		err = fmt.Errorf("barchan is still starting (phase %q); wait for `barchan status` to say ready: %w", s.Phase, errs.ErrUnavailable)
	}
	return s, err
}

// target is one server as its REST client sees it.
type target struct {
	url, key   string
	sandboxURL string // empty: derived from url
	http       *http.Client
	rest       *restclient.Client
}

func (a *app) target(ctx context.Context) (*target, error) {
	t := &target{
		url:        a.first(a.apiURL, envAPIURL),
		key:        a.givenKey(),
		sandboxURL: a.first("", envSandboxURL),
		http:       &http.Client{Transport: newTransport()},
	}
	if t.url == "" {
		if err := a.findServer(ctx, t); err != nil {
			return nil, err
		}
	}
	if t.key == "" {
		return nil, fmt.Errorf("no key for %s: set %s or --api-key: %w", t.url, envAPIKey, errs.ErrInvalid)
	}
	var err error
	t.rest, err = restclient.New(restclient.Config{URL: t.url, Key: t.key, HTTP: t.http, UserAgent: "barchan/" + a.version().Version})
	return t, err
}

// findServer finds the server of E2B's variables, or else of the data directory.
func (a *app) findServer(ctx context.Context, t *target) error {
	domain := a.first("", envE2BDomain)
	if t.url = a.first("", envE2BAPIURL); t.url == "" {
		s, err := a.localServer(ctx)
		if err == nil && (domain == "" || domain == s.Addresses.Domain) {
			t.url = "http://" + dialable(s.Addresses.HTTP)
			if t.key == "" {
				t.key, err = readKey(s.Addresses.APIKeyFile)
			}
			return err
		}
		if domain == "" {
			return err
		}
		t.url = "https://api." + domain
	}
	if t.sandboxURL == "" { // it belongs to the same server
		t.sandboxURL = a.first("", envE2BSandboxURL)
	}
	return nil
}

// newTransport has no total timeout, for streams, but detects an unreachable address soon.
func newTransport() *http.Transport {
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

// dialable converts a listening address to one to connect to.
func dialable(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	if ip, err := netip.ParseAddr(host); host == "" || (err == nil && ip.IsUnspecified()) {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}

func readKey(file string) (string, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrPermission) {
		return "", fmt.Errorf("%s is for root only; run this as root, or set %s: %w", file, envAPIKey, errs.ErrForbidden)
	}
	if err != nil {
		return "", fmt.Errorf("read the local key: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// sandboxAddress returns the base URL and headers for a port of a sandbox. Addresses and localhost
// route by header, names by host.
func (t *target) sandboxAddress(id string, port int) (string, http.Header) {
	h := http.Header{}
	h.Set(envd.HeaderSandboxID, id)
	h.Set(envd.HeaderSandboxPort, strconv.Itoa(port))
	if t.sandboxURL != "" {
		return t.sandboxURL, h
	}
	u, err := url.Parse(t.url)
	if err != nil {
		return t.url, h
	}
	host := u.Hostname()
	if _, err := netip.ParseAddr(host); err == nil || host == "localhost" {
		return u.Scheme + "://" + u.Host, h
	}
	return fmt.Sprintf("%s://%d-%s.%s", u.Scheme, port, id, strings.TrimPrefix(u.Host, "api.")), h
}

// agent returns a client of a running sandbox's agent.
func (t *target) agent(id, token, user string) (*envd.Client, error) {
	base, h := t.sandboxAddress(id, envd.Port)
	return envd.NewClient(envd.ClientConfig{
		HTTP: t.http, BaseURL: base, User: user, Header: h,
		Token: func() string { return token },
	})
}

// running resolves a sandbox and returns a client of its agent.
func (t *target) running(ctx context.Context, text, user string) (*connection, error) {
	d, err := t.find(ctx, text)
	if err != nil {
		return nil, err
	}
	if d.State == restclient.StatePaused {
		return nil, pausedError(d.SandboxID)
	}
	client, err := t.agent(d.SandboxID, d.AgentToken, user)
	return &connection{t: t, id: d.SandboxID, endAt: d.EndAt, client: client}, err
}

// withTarget opens the target and runs a command's work.
func (a *app) withTarget(ctx context.Context, work func(t *target) error) error {
	t, err := a.target(ctx)
	if err != nil {
		return err
	}
	return work(t)
}

func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.stdout)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

func absFile(path string) string {
	if abs, err := filepath.Abs(path); err == nil && path != "" {
		return abs
	}
	return path
}
