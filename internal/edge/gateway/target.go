package gateway

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
	headerName      = headers.Name
	headerNamespace = headers.Namespace
	headerPort      = headers.Port

	defaultNamespace   = "default"
	defaultRouterPort  = 8888
	pathForm           = "/sandbox/"
	hostAPI            = "api"
	hostShared         = "sandbox"
	localhost          = "localhost"
	maxKubernetesName  = 253
	maxAuthorityLength = headers.MaxAuthorityLength
)

// target is the destination of a request.
type target struct {
	id   sandbox.ID
	port uint16
	// name and namespace replace id if agent-sandbox's headers were used.
	namespace, name string
	// host replaces the client's Host for the sandbox, if not empty.
	host string
	// prefix is the gateway's part of the path, which is not forwarded.
	prefix string
	// byHeader is true if headers named the sandbox.
	byHeader bool
}

type kind int

const (
	forSandbox kind = iota
	forAPI
)

var (
	errHost = errors.New("invalid host")
	errPort = errors.New("invalid port: want a number from 1 to 65535")
	errID   = errors.New("invalid sandbox ID: want 20 lower-case letters and digits")
	errName = errors.New("invalid sandbox name or namespace")
)

// targetOf returns the destination of a request: domains are those of sandboxes, the most specific one first, without
// port, in lower case. bySignature finds the sandbox of a signed file URL that does not name it. An error is a text for
// the client.
func targetOf(r *http.Request, domains []string, bySignature func(*http.Request) (target, error)) (target, kind, error) {
	if len(r.Host) > maxAuthorityLength || !httpguts.ValidHostHeader(r.Host) {
		return target{}, forSandbox, errHost
	}
	host := hostname(r.Host)
	label, domain, under := labelOf(host, domains)
	switch {
	case under && label == hostAPI:
		return target{}, forAPI, nil
	case under && label != hostShared && label != "":
		t, err := parseLabel(label)
		return t, forSandbox, err
	}
	shared := under && label == hostShared
	oneForAll := shared || host == localhost || isIP(host)
	if oneForAll && r.URL.Path == envd.PathFiles && r.Header.Get(envd.HeaderSandboxID) == "" && r.URL.Query().Has(envd.QuerySignature) {
		t, err := bySignature(r)
		return t, forSandbox, err
	}
	return plainTarget(r, host, domain, shared)
}

// plainTarget returns the target if the host alone does not name it. shared is true for
// sandbox.<domain>.
func plainTarget(r *http.Request, host, domain string, shared bool) (t target, k kind, err error) {
	byHeader := r.Header.Get(envd.HeaderSandboxID) != "" && (shared || host == localhost || isIP(host))
	switch {
	case byHeader:
		if !shared {
			domain = ""
		}
		t, err = headerTarget(r.Header, domain)
	case shared:
		err = fmt.Errorf("missing header %s", envd.HeaderSandboxID)
	case r.Header.Get(headerName) != "":
		t, err = routerTarget(r.Header)
	case strings.HasPrefix(r.URL.Path, pathForm):
		t, err = pathTarget(r.URL)
	default:
		k = forAPI
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
func parseLabel(label string) (target, error) {
	portText, rest, ok := strings.Cut(label, "-")
	if !ok || strings.Contains(label, ".") {
		return target{}, fmt.Errorf("%w: want <port>-<sandbox ID>", errHost)
	}
	port, err := parsePort(portText)
	if err != nil {
		return target{}, err
	}
	id, err := sandbox.ParseID(rest)
	if err != nil {
		return target{}, errID
	}
	return target{id: id, port: port}, nil
}

// headerTarget parses E2B's headers. With a domain, Host becomes the sandbox's host under it.
func headerTarget(h http.Header, domain string) (target, error) {
	id, err := sandbox.ParseID(h.Get(envd.HeaderSandboxID))
	if err != nil {
		return target{}, errID
	}
	t := target{id: id, port: envd.Port, byHeader: true}
	if text := h.Get(envd.HeaderSandboxPort); text != "" {
		if t.port, err = parsePort(text); err != nil {
			return target{}, err
		}
	}
	if domain != "" {
		t.host = portText(t.port) + "-" + string(id) + "." + domain
	}
	return t, nil
}

// routerTarget parses agent-sandbox's headers.
func routerTarget(h http.Header) (target, error) {
	t := target{name: h.Get(headerName), namespace: h.Get(headerNamespace), port: defaultRouterPort, byHeader: true}
	if t.namespace == "" {
		t.namespace = defaultNamespace
	}
	if !nameLike(t.name) || !nameLike(t.namespace) {
		return target{}, errName
	}
	if text := h.Get(headerPort); text != "" {
		port, err := parsePort(text)
		if err != nil {
			return target{}, err
		}
		t.port = port
	}
	return t, nil
}

// pathTarget parses /sandbox/<id>/<port>/….
func pathTarget(u *url.URL) (target, error) {
	idText, rest, _ := strings.Cut(u.Path[len(pathForm):], "/")
	portText, _, _ := strings.Cut(rest, "/")
	id, err := sandbox.ParseID(idText)
	if err != nil {
		return target{}, errID
	}
	port, err := parsePort(portText)
	if err != nil {
		return target{}, err
	}
	t := target{id: id, port: port, prefix: pathForm + idText + "/" + portText}
	// The prefix must be unescaped in the path as sent, so that exactly the parsed part is cut.
	if !strings.HasPrefix(u.EscapedPath(), t.prefix) {
		return target{}, errHost
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

// hostname returns a Host without port, brackets and final dot, in lower case.
func hostname(hostport string) string {
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

func portText(port uint16) string { return strconv.Itoa(int(port)) }
