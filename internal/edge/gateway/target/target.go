// Package target parses which sandbox and port a request is for: by host, headers or path. It reads no route.
package target

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/gateway/headers"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Headers of agent-sandbox's router. Its X-Sandbox-Pod-IP is never read: a client must not choose an
// address.
const (
	HeaderName      = headers.Name
	HeaderNamespace = headers.Namespace
	HeaderPort      = headers.Port

	defaultNamespace   = "default"
	defaultRouterPort  = 8888
	pathForm           = "/sandbox/"
	hostAPI            = "api"
	hostShared         = "sandbox"
	Localhost          = "localhost"
	maxKubernetesName  = 253
	maxAuthorityLength = headers.MaxAuthorityLength
)

// Target is the destination of a request.
type Target struct {
	ID   sandbox.ID
	Port uint16
	// name and namespace replace id if agent-sandbox's headers were used.
	Namespace, Name string
	// host replaces the client's Host for the sandbox, if not empty.
	Host string
	// prefix is the gateway's part of the path, which is not forwarded.
	Prefix string
	// byHeader is true if headers named the sandbox, and signed if the signature of a file URL did.
	ByHeader, Signed bool
}

// Kind says who serves a request.
type Kind int

// The kinds: a sandbox, or the API.
const (
	ForSandbox Kind = iota
	ForAPI
)

var (
	errHost = errors.New("invalid host")
	errPort = errors.New("invalid port: want a number from 1 to 65535")
	errID   = errors.New("invalid sandbox ID: want 20 lower-case letters and digits")
	errName = errors.New("invalid sandbox name or namespace")
)

// Of returns the destination of a request: domains are those of sandboxes, the most specific one first, without
// port, in lower case. bySignature finds the sandbox of a signed file URL that does not name it. An error is a text for
// the client.
func Of(r *http.Request, domains []string, bySignature func(*http.Request) (Target, error)) (Target, Kind, error) {
	if len(r.Host) > maxAuthorityLength || !httpguts.ValidHostHeader(r.Host) {
		return Target{}, ForSandbox, errHost
	}
	host := Hostname(r.Host)
	label, domain, under := labelOf(host, domains)
	switch {
	case under && label == hostAPI:
		return Target{}, ForAPI, nil
	case under && label != hostShared && label != "":
		t, err := parseLabel(label)
		return t, ForSandbox, err
	}
	shared := under && label == hostShared
	oneForAll := shared || host == Localhost || isIP(host)
	if oneForAll && r.URL.Path == envd.PathFiles && r.Header.Get(envd.HeaderSandboxID) == "" && strings.Contains(r.URL.RawQuery, envd.QuerySignature) {
		t, err := bySignature(r)
		t.Signed = true
		return t, ForSandbox, err
	}
	return plainTarget(r, host, domain, shared)
}

// plainTarget returns the target if the host alone does not name it. shared is true for
// sandbox.<domain>.
func plainTarget(r *http.Request, host, domain string, shared bool) (t Target, k Kind, err error) {
	byHeader := r.Header.Get(envd.HeaderSandboxID) != "" && (shared || host == Localhost || isIP(host))
	switch {
	case byHeader:
		if !shared {
			domain = ""
		}
		t, err = headerTarget(r.Header, domain)
	case shared:
		err = fmt.Errorf("missing header %s", envd.HeaderSandboxID)
	case r.Header.Get(HeaderName) != "":
		t, err = routerTarget(r.Header)
	case strings.HasPrefix(r.URL.Path, pathForm):
		t, err = pathTarget(r.URL)
	default:
		k = ForAPI
	}
	return t, k, err
}

// labelOf splits a host into a label and one of the domains. The label is empty for the domain itself.
func labelOf(host string, domains []string) (label, domain string, under bool) {
	for _, d := range domains {
		if host == d {
			return "", d, true
		}
		if rest, ok := strings.CutSuffix(host, d); ok && strings.HasSuffix(rest, ".") {
			return rest[:len(rest)-1], d, true
		}
	}
	return "", "", false
}

// parseLabel parses <port>-<id>[-client].
func parseLabel(label string) (Target, error) {
	portText, rest, ok := strings.Cut(label, "-")
	if !ok || strings.Contains(label, ".") {
		return Target{}, fmt.Errorf("%w: want <port>-<sandbox ID>", errHost)
	}
	port, err := parsePort(portText)
	if err != nil {
		return Target{}, err
	}
	id, err := sandbox.ParseID(rest)
	if err != nil {
		return Target{}, errID
	}
	return Target{ID: id, Port: port}, nil
}

// headerTarget parses E2B's headers. With a domain, Host becomes the sandbox's host under it.
func headerTarget(h http.Header, domain string) (Target, error) {
	id, err := sandbox.ParseID(h.Get(envd.HeaderSandboxID))
	if err != nil {
		return Target{}, errID
	}
	t := Target{ID: id, Port: envd.Port, ByHeader: true}
	if text := h.Get(envd.HeaderSandboxPort); text != "" {
		if t.Port, err = parsePort(text); err != nil {
			return Target{}, err
		}
	}
	if domain != "" {
		t.Host = PortText(t.Port) + "-" + string(id) + "." + domain
	}
	return t, nil
}

// routerTarget parses agent-sandbox's headers.
func routerTarget(h http.Header) (Target, error) {
	t := Target{Name: h.Get(HeaderName), Namespace: h.Get(HeaderNamespace), Port: defaultRouterPort, ByHeader: true}
	if t.Namespace == "" {
		t.Namespace = defaultNamespace
	}
	if !nameLike(t.Name) || !nameLike(t.Namespace) {
		return Target{}, errName
	}
	if text := h.Get(HeaderPort); text != "" {
		port, err := parsePort(text)
		if err != nil {
			return Target{}, err
		}
		t.Port = port
	}
	return t, nil
}

// pathTarget parses /sandbox/<id>/<port>/….
func pathTarget(u *url.URL) (Target, error) {
	idText, rest, _ := strings.Cut(u.Path[len(pathForm):], "/")
	portText, _, _ := strings.Cut(rest, "/")
	id, err := sandbox.ParseID(idText)
	if err != nil {
		return Target{}, errID
	}
	port, err := parsePort(portText)
	if err != nil {
		return Target{}, err
	}
	t := Target{ID: id, Port: port, Prefix: pathForm + idText + "/" + portText}
	// The prefix must be unescaped in the path as sent, so that exactly the parsed part is cut.
	if !strings.HasPrefix(u.EscapedPath(), t.Prefix) {
		return Target{}, errHost
	}
	return t, nil
}

func parsePort(text string) (uint16, error) {
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port == 0 {
		return 0, errPort
	}
	return uint16(port), nil
}

// nameLike reports whether a text may be a name of a Kubernetes object.
func nameLike(text string) bool {
	if text == "" || len(text) > maxKubernetesName {
		return false
	}
	for _, c := range []byte(text) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '.' {
			return false
		}
	}
	return true
}

// Hostname returns a Host without port, brackets and final dot, in lower case.
func Hostname(hostport string) string {
	host := hostport
	if strings.HasPrefix(host, "[") {
		if end := strings.IndexByte(host, ']'); end > 0 {
			return strings.ToLower(host[1:end])
		}
	}
	if i := strings.LastIndexByte(host, ':'); i >= 0 && strings.IndexByte(host, ':') == i {
		host = host[:i]
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

func isIP(host string) bool {
	_, err := netip.ParseAddr(host)
	return err == nil
}

// PortText formats a port.
func PortText(port uint16) string { return strconv.Itoa(int(port)) }
