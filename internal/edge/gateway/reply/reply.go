// Package reply has the responses that the gateway gives in place of a sandbox: JSON for programs, a page for browsers.
package reply

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
	MessageNotFound = "The sandbox was not found"
	MessagePort     = "The sandbox is running but port is not open"
)

// Reply is a response of the gateway in place of the sandbox's.
type Reply struct {
	Status  int
	Message string
	Port    uint16 // omitted if zero
	Path    string // replaces the sandbox if not empty
	// retryAfter in seconds; omitted if zero.
	RetryAfter int
}

// Error implements error.
func (f *Reply) Error() string { return strconv.Itoa(f.Status) + ": " + f.Message }

// mostReason bounds the reason of a failed wake in a response, in bytes.
const mostReason = 500

// Because returns the reply to a failed wake with its reason in place of the general text.
func (f *Reply) Because(reason string) *Reply {
	reply := *f
	if len(reason) > mostReason {
		reason = strings.ToValidUTF8(reason[:mostReason], "") + "…"
	}
	reply.Message = "The sandbox could not be woken: " + reason
	return &reply
}

// The replies without a variable part.
var (
	NotFound   = &Reply{Status: http.StatusBadGateway, Message: MessageNotFound}
	NotSynced  = &Reply{Status: http.StatusServiceUnavailable, Message: "The gateway is still learning its routes", RetryAfter: 1}
	NoToken    = &Reply{Status: http.StatusForbidden, Message: "The traffic access token is missing or wrong"}
	NoKey      = &Reply{Status: http.StatusUnauthorized, Message: "A sandbox's name needs an API key of its namespace: send one in X-API-Key or as Authorization: Bearer"}
	NoWorker   = &Reply{Status: http.StatusForbidden, Message: "Service workers need an origin of the sandbox's own: use its host in place of a path"}
	NoWake     = &Reply{Status: http.StatusForbidden, Message: "The sandbox sleeps, and this request may not wake it"}
	InMotion   = &Reply{Status: http.StatusConflict, Message: "The sandbox is changing its state; try again", RetryAfter: 1}
	TooSlow    = &Reply{Status: http.StatusConflict, Message: "The sandbox was not ready in time; try again", RetryAfter: 1}
	OverLimit  = &Reply{Status: http.StatusTooManyRequests, Message: "The sandbox cannot be woken: a limit is reached", RetryAfter: 5}
	WakeFailed = &Reply{Status: http.StatusServiceUnavailable, Message: "The sandbox could not be woken; try again", RetryAfter: 1}
	Silent     = &Reply{Status: http.StatusBadGateway, Message: "The sandbox did not answer"}
	Lost       = &Reply{Status: http.StatusBadGateway, Message: "The sandbox closed the connection before it answered"}
	Malformed  = &Reply{Status: http.StatusBadGateway, Message: "The sandbox gave no valid HTTP answer"}
)

// body is the JSON of a local reply; the order of the fields is that of the protocol.
type body struct {
	SandboxID sandbox.ID `json:"sandboxId,omitempty"`
	Message   string     `json:"message"`
	Path      string     `json:"path,omitempty"`
	Port      uint16     `json:"port,omitempty"`
	Code      int        `json:"code"`
}

// Write sends the local reply.
func (f *Reply) Write(w http.ResponseWriter, r *http.Request, id sandbox.ID) {
	b := body{SandboxID: id, Message: f.Message, Path: f.Path, Port: f.Port, Code: f.Status}
	if f.Path != "" {
		b.SandboxID = ""
	}
	h := w.Header()
	OpenToBrowsers(h)
	h.Set("Cache-Control", "no-store")
	if f.Status == http.StatusUnauthorized {
		h.Set("Www-Authenticate", "Bearer")
	}
	if f.RetryAfter > 0 {
		h.Set("Retry-After", strconv.Itoa(f.RetryAfter))
	}
	var out bytes.Buffer
	if wantsPage(r) {
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
		if err := page.Execute(&out, b); err != nil {
			fmt.Fprintf(&out, "%d", f.Status)
		}
	} else {
		h.Set("Content-Type", "application/json; charset=utf-8")
		if err := json.NewEncoder(&out).Encode(b); err != nil {
			fmt.Fprintf(&out, `{"code":%d}`, f.Status)
		}
	}
	text := bytes.TrimSuffix(out.Bytes(), []byte("\n"))
	h.Set("Content-Length", strconv.Itoa(len(text)))
	w.WriteHeader(f.Status)
	_, _ = w.Write(text) // an error means that the client is gone
}

// OpenToBrowsers lets scripts of any origin read a local reply.
func OpenToBrowsers(h http.Header) { h.Set("Access-Control-Allow-Origin", "*") }

// IsPreflight reports whether a request is a CORS preflight, which carries no tokens.
func IsPreflight(r *http.Request) bool {
	return r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != ""
}

// AllowRequest answers a preflight in place of a sandbox that only requests with tokens reach: the
// request itself must carry one, whatever its origin.
func AllowRequest(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	OpenToBrowsers(h)
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

// TooMany is the local reply to a request beyond a rate.
func TooMany(what string, after time.Duration) *Reply {
	return &Reply{Status: http.StatusTooManyRequests, Message: "Too many requests " + what + "; try again later", RetryAfter: seconds(after)}
}

// StreamIdleReply ends a stream without data.
var StreamIdleReply = &Reply{Status: http.StatusGatewayTimeout, Message: "The sandbox sent nothing for too long"}
