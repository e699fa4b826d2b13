// Package nodesocket connects a server with the node that runs its sandboxes in a process of its own on the same machine: the node
// answers on a unix socket what objects do not hold. That is whether it can take new work, the disk space that a sandbox uses, what it
// may reach, and the files of volumes, for those who have their tokens.
//
// The socket takes no orders. What a node is to do stands in objects, which it reads by its own account.
package nodesocket

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os/user"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/adminapi"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/egress"
)

// ContentPath begins the paths of volumes' files.
const ContentPath = "/volumecontent/"

const (
	pathState = "/v1/state"
	pathDisk  = "/v1/disk"
	pathTrace = "/v1/trace"

	// patience limits one request. A node that is busy with disks may take a while to count what a sandbox uses.
	patience = 10 * time.Second
	// maxAnswer bounds an answer, in bytes.
	maxAnswer = 1 << 20

	interval = time.Second
	// misses in a row set the condition, because a node that starts again answers before the second.
	misses = 2
	// conditionNode is that of a node that does not answer.
	conditionNode = "node"
)

// State is what a node reports of itself.
type State struct {
	// Version is that of the node's program, and DataDir the directory by which it is administered.
	Version, DataDir string
	// Conditions are those for which it takes no new work.
	Conditions []health.Condition
}

// Config is a node's end.
type Config struct {
	Socket string
	// Group may open the socket beside root; a name or an ID. Empty: root alone.
	Group string
	Log   *slog.Logger
	// State and DiskUsed answer. DiskUsed returns bytes.
	State    func() State
	DiskUsed func(ctx context.Context, ref sandbox.Ref) (int64, error)
	// TraceEgress decides about the traffic of a sandbox.
	TraceEgress func(ctx context.Context, id sandbox.ID, q egress.Query) (egress.Decision, error)
	// Content serves the files of volumes below ContentPath to those who have their tokens; nil: there are none.
	Content http.Handler
}

// Serve answers a server until ctx is done.
func Serve(ctx context.Context, cfg Config) error {
	gid, err := groupID(cfg.Group)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+pathState, func(w http.ResponseWriter, _ *http.Request) { answer(w, cfg.State()) })
	mux.HandleFunc("GET "+pathDisk, func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		n, err := cfg.DiskUsed(r.Context(), sandbox.Ref{Namespace: q.Get("namespace"), Name: q.Get("name"), UID: types.UID(q.Get("uid"))})
		respond(w, n, err)
	})
	mux.HandleFunc("GET "+pathTrace, func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		port, err := strconv.ParseUint(q.Get("port"), 10, 16)
		if err != nil {
			respond(w, nil, fmt.Errorf("port: %w: %w", err, errs.ErrInvalid))
			return
		}
		d, err := cfg.TraceEgress(r.Context(), sandbox.ID(q.Get("id")), egress.Query{Destination: q.Get("destination"), Port: uint16(port), Protocol: q.Get("protocol")})
		respond(w, d, err)
	})
	if cfg.Content != nil {
		mux.Handle(ContentPath, cfg.Content)
	}
	return adminapi.Serve(ctx, adminapi.Socket{Path: cfg.Socket, GID: gid, Shared: true}, mux, cfg.Log)
}

// respond answers with a body, or an error whose kind and text the client returns.
func respond(w http.ResponseWriter, body any, err error) {
	switch {
	case errors.Is(err, errs.ErrNotFound):
		http.Error(w, errs.Text(err), http.StatusNotFound)
	case errors.Is(err, errs.ErrInvalid):
		http.Error(w, errs.Text(err), http.StatusBadRequest)
	case err != nil:
		http.Error(w, errs.Text(err), http.StatusServiceUnavailable)
	default:
		answer(w, body)
	}
}

func answer(w http.ResponseWriter, body any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(body) // the client has gone
}

// groupID returns the ID of a group, or -1 for none.
func groupID(group string) (int, error) {
	if group == "" {
		return -1, nil
	}
	if id, err := strconv.ParseUint(group, 10, 31); err == nil {
		return int(id), nil
	}
	g, err := user.LookupGroup(group)
	if err != nil {
		return 0, fmt.Errorf("nodeSocketGroup: %w: %w", err, errs.ErrInvalid)
	}
	return strconv.Atoi(g.Gid)
}

// Client is a server's end. It is safe for concurrent use.
type Client struct {
	socket string
	http   *http.Client
}

// NewClient opens no connection.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}
	return &Client{socket: socket, http: &http.Client{Timeout: patience, Transport: &http.Transport{DialContext: dial, IdleConnTimeout: time.Minute}}}
}

// Content passes requests for the files of volumes on to the node, which checks their tokens.
func (c *Client) Content(log *slog.Logger) http.Handler {
	return &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.Out.URL.Scheme, r.Out.URL.Host = "http", "node" },
		Transport:     c.http.Transport,
		FlushInterval: -1,
		ErrorLog:      slog.NewLogLogger(log.Handler(), slog.LevelInfo),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			log.WarnContext(r.Context(), "files of a volume not served", telemetry.Error, err)
			w.Header().Set("Content-Type", "application/json")
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, `{"code":503,"message":"the node does not answer; try again"}`)
		},
	}
}

// State returns what the node reports of itself.
func (c *Client) State(ctx context.Context) (State, error) { return get[State](ctx, c, pathState) }

// DiskUsed returns the bytes that the files of a sandbox take, or an errs.ErrNotFound.
func (c *Client) DiskUsed(ctx context.Context, ref sandbox.Ref) (int64, error) {
	return get[int64](ctx, c, pathDisk+"?"+url.Values{"namespace": {ref.Namespace}, "name": {ref.Name}, "uid": {string(ref.UID)}}.Encode())
}

// TraceEgress returns the decision about the traffic of a sandbox; its errors are those of node.Node.TraceEgress.
func (c *Client) TraceEgress(ctx context.Context, id sandbox.ID, q egress.Query) (egress.Decision, error) {
	return get[egress.Decision](ctx, c, pathTrace+"?"+url.Values{
		"id": {string(id)}, "destination": {q.Destination}, "port": {strconv.Itoa(int(q.Port))}, "protocol": {q.Protocol},
	}.Encode())
}

// Await returns when the node answers, which it does once its boot is complete.
func (c *Client) Await(ctx context.Context) error {
	for {
		if _, err := c.State(ctx); err == nil {
			return nil
		}
		if !lifecycle.Sleep(ctx, interval/20) {
			return context.Cause(ctx)
		}
	}
}

// Watch sets the node's conditions on the server's gate until ctx is done, and one of its own while the node does not answer.
func (c *Client) Watch(ctx context.Context, gate *health.Gate) error {
	missed, set := 0, map[string]bool{}
	return lifecycle.Every(ctx, interval, func() {
		state, err := c.State(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			if missed++; missed >= misses {
				gate.Set(conditionNode, errs.Public(err, "its process does not answer"))
			}
			return
		}
		missed = 0
		gate.Set(conditionNode, nil)
		now := map[string]bool{}
		for _, x := range state.Conditions {
			name := conditionNode + ": " + x.Name
			now[name] = true
			gate.Set(name, errs.Public(errors.New(x.Detail), x.Reason))
		}
		for name := range set {
			if !now[name] {
				gate.Set(name, nil)
			}
		}
		set = now
	})
}

func get[T any](ctx context.Context, c *Client, path string) (out T, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://node"+path, http.NoBody)
	if err != nil {
		return out, fmt.Errorf("ask the node: %w", err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return out, fmt.Errorf("ask the node at %s: %w: %w", c.socket, err, errs.ErrUnavailable)
	}
	defer func() { _ = resp.Body.Close() }()
	body := io.LimitReader(resp.Body, maxAnswer)
	switch resp.StatusCode {
	case http.StatusOK:
		if err := json.NewDecoder(body).Decode(&out); err != nil {
			return out, fmt.Errorf("decode the node's answer: %w: %w", err, errs.ErrUnavailable)
		}
		return out, nil
	case http.StatusNotFound:
		return out, fmt.Errorf("the node has no such sandbox: %w", errs.ErrNotFound)
	}
	text, _ := io.ReadAll(body) // the status says enough
	if resp.StatusCode == http.StatusBadRequest {
		return out, fmt.Errorf("%s: %w", bytes.TrimSpace(text), errs.ErrInvalid)
	}
	return out, fmt.Errorf("the node answers %s: %s: %w", resp.Status, text, errs.ErrUnavailable)
}
