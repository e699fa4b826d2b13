package gateway

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html/template"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Messages that clients compare.
const (
	messageNotFound = "The sandbox was not found"
	messagePort     = "The sandbox is running but port is not open"
)

// localReply is a response of the gateway in place of the sandbox's.
type localReply struct {
	status  int
	message string
	port    uint16 // omitted if zero
	path    string // replaces the sandbox if not empty
	// retryAfter in seconds; omitted if zero.
	retryAfter int
}

// Error implements error.
func (f *localReply) Error() string { return strconv.Itoa(f.status) + ": " + f.message }

// mostReason bounds the reason of a failed wake in a response, in bytes.
const mostReason = 500

// because returns the reply to a failed wake with its reason in place of the general text.
func (f *localReply) because(reason string) *localReply {
	told := *f
	if len(reason) > mostReason {
		reason = strings.ToValidUTF8(reason[:mostReason], "") + "…"
	}
	told.message = "The sandbox could not be woken: " + reason
	return &told
}

var (
	notFound   = &localReply{status: http.StatusBadGateway, message: messageNotFound}
	notSynced  = &localReply{status: http.StatusServiceUnavailable, message: "The gateway is still learning its routes", retryAfter: 1}
	noToken    = &localReply{status: http.StatusForbidden, message: "The traffic access token is missing or wrong"}
	noKey      = &localReply{status: http.StatusUnauthorized, message: "A sandbox's name needs an API key of its namespace: send one in X-API-Key or as Authorization: Bearer"}
	noWake     = &localReply{status: http.StatusForbidden, message: "The sandbox sleeps, and this request may not wake it"}
	inMotion   = &localReply{status: http.StatusConflict, message: "The sandbox is changing its state; try again", retryAfter: 1}
	tooSlow    = &localReply{status: http.StatusConflict, message: "The sandbox was not ready in time; try again", retryAfter: 1}
	overLimit  = &localReply{status: http.StatusTooManyRequests, message: "The sandbox cannot be woken: a limit is reached", retryAfter: 5}
	wakeFailed = &localReply{status: http.StatusServiceUnavailable, message: "The sandbox could not be woken; try again", retryAfter: 1}
	silent     = &localReply{status: http.StatusBadGateway, message: "The sandbox did not answer"}
	lost       = &localReply{status: http.StatusBadGateway, message: "The sandbox closed the connection before it answered"}
	malformed  = &localReply{status: http.StatusBadGateway, message: "The sandbox gave no valid HTTP answer"}
)

// body is the JSON of a local reply; the order of the fields is that of the protocol.
type body struct {
	SandboxID sandbox.ID `json:"sandboxId,omitempty"`
	Message   string     `json:"message"`
	Path      string     `json:"path,omitempty"`
	Port      uint16     `json:"port,omitempty"`
	Code      int        `json:"code"`
}

// write sends the local reply.
func (f *localReply) write(w http.ResponseWriter, r *http.Request, id sandbox.ID) {
	b := body{SandboxID: id, Message: f.message, Path: f.path, Port: f.port, Code: f.status}
	if f.path != "" {
		b.SandboxID = ""
	}
	h := w.Header()
	openToBrowsers(h)
	h.Set("Cache-Control", "no-store")
	if f.status == http.StatusUnauthorized {
		h.Set("Www-Authenticate", "Bearer")
	}
	if f.retryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(f.retryAfter))
	}
	var out bytes.Buffer
	if wantsPage(r) {
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
		if err := page.Execute(&out, b); err != nil {
			fmt.Fprintf(&out, "%d", f.status)
		}
	} else {
		h.Set("Content-Type", "application/json; charset=utf-8")
		if err := json.NewEncoder(&out).Encode(b); err != nil {
			fmt.Fprintf(&out, `{"code":%d}`, f.status)
		}
	}
	text := bytes.TrimSuffix(out.Bytes(), []byte("\n"))
	h.Set("Content-Length", strconv.Itoa(len(text)))
	w.WriteHeader(f.status)
	_, _ = w.Write(text) // an error means that the client is gone
}

// openToBrowsers lets scripts of any origin read a local reply.
func openToBrowsers(h http.Header) { h.Set("Access-Control-Allow-Origin", "*") }

// isPreflight reports whether a request is a CORS preflight, which carries no tokens.
func isPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != ""
}

// allowRequest answers a preflight in place of a sandbox that only requests with tokens reach: the
// request itself must carry one, whatever its origin.
func allowRequest(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	openToBrowsers(h)
	h.Set("Access-Control-Allow-Methods", r.Header.Get("Access-Control-Request-Method"))
	if names := r.Header.Get("Access-Control-Request-Headers"); names != "" {
		h.Set("Access-Control-Allow-Headers", names)
	}
	h.Set("Access-Control-Max-Age", "7200")
	h.Set("Vary", "Access-Control-Request-Method, Access-Control-Request-Headers")
	w.WriteHeader(http.StatusNoContent)
}

// wantsPage reports whether the client is a browser that expects a page.
func wantsPage(r *http.Request) bool {
	if !strings.Contains(r.UserAgent(), "Mozilla/") || !strings.Contains(r.Header.Get("Accept"), "text/html") {
		return false
	}
	mode := r.Header.Get("Sec-Fetch-Mode")
	return mode == "" || mode == "navigate"
}

var page = template.Must(template.New("refusal").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{{.Message}}</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:36em;margin:15vh auto;padding:0 1em;color:#222}code{background:#eee;padding:.1em .3em}</style>
<h1>{{.Message}}</h1>
<p>{{with .SandboxID}}Sandbox <code>{{.}}</code>{{end}}{{with .Port}}, port <code>{{.}}</code>{{end}}{{with .Path}}Path <code>{{.}}</code>{{end}} (error {{.Code}})</p>
</html>
`))

// seconds rounds a time up for Retry-After; it is at least 1.
func seconds(d time.Duration) int { return max(1, int(math.Ceil(d.Seconds()))) }

// tooMany is the local reply to a request beyond a rate.
func tooMany(what string, after time.Duration) *localReply {
	return &localReply{status: http.StatusTooManyRequests, message: "Too many requests " + what + "; try again later", retryAfter: seconds(after)}
}

var streamIdleReply = &localReply{status: http.StatusGatewayTimeout, message: "The sandbox sent nothing for too long"}
