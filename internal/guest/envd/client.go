package envd

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/barchan-dev/barchan/internal/guest/envd/filesystempb"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// ClientConfig is how to reach an agent.
type ClientConfig struct {
	// HTTP must have no total timeout, or streams end with it.
	HTTP *http.Client
	// BaseURL is scheme and host, for example http://10.0.0.2:49983.
	BaseURL string
	// Token gives the access token for each request; nil means none.
	Token func() string
	// User runs the client's programs; empty means the agent's default.
	User string
	// Header is added to every request, for example the gateway's routing headers.
	Header http.Header
}

// Client talks to one agent. It is safe for concurrent use and holds nothing open
// but the connections of its http.Client. A program in the sandbox may have replaced the agent, so the client bounds
// what it reads, and follows no redirect. HTTP's transport must bound the headers, see [MaxResponseHeader].
type Client struct {
	cfg        ClientConfig
	process    processpb.ProcessClient
	filesystem filesystempb.FilesystemClient
}

// Error is an agent's refusal on a route that is not an RPC.
type Error struct {
	Status  int
	Message string
}

// Error is the agent's message.
func (e *Error) Error() string {
	return fmt.Sprintf("agent answered %d: %s", e.Status, e.Message)
}

// ErrorOf returns an error of a call as the agent's response, with the status of HTTP that an RPC's code stands for. Nil: it is
// another error.
func ErrorOf(err error) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	e, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return nil
	}
	return &Error{Status: cmp.Or(statuses[e.Code()], http.StatusInternalServerError), Message: e.Message()}
}

var statuses = map[connect.Code]int{
	connect.CodeInvalidArgument:    http.StatusBadRequest,
	connect.CodeUnauthenticated:    http.StatusUnauthorized,
	connect.CodePermissionDenied:   http.StatusForbidden,
	connect.CodeNotFound:           http.StatusNotFound,
	connect.CodeAlreadyExists:      http.StatusConflict,
	connect.CodeFailedPrecondition: http.StatusConflict,
	connect.CodeAborted:            http.StatusConflict,
	connect.CodeResourceExhausted:  http.StatusTooManyRequests,
	connect.CodeDeadlineExceeded:   http.StatusGatewayTimeout,
	connect.CodeUnavailable:        http.StatusBadGateway,
	connect.CodeUnimplemented:      http.StatusNotImplemented,
}

// NewClient checks the configuration and opens nothing.
func NewClient(cfg ClientConfig) (*Client, error) {
	u, err := url.Parse(cfg.BaseURL)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, fmt.Errorf("base URL: %q is not an http or https address", cfg.BaseURL)
	}
	if cfg.HTTP == nil {
		return nil, errors.New("http client: needed")
	}
	cfg.BaseURL = strings.TrimSuffix(cfg.BaseURL, "/")
	cfg.HTTP = withoutRedirects(cfg.HTTP)
	c := &Client{cfg: cfg}
	c.process = processpb.NewProcessClient(doer{c}, cfg.BaseURL, connect.WithReadMaxBytes(maxProcessMessage))
	c.filesystem = filesystempb.NewFilesystemClient(doer{c}, cfg.BaseURL, connect.WithReadMaxBytes(maxFilesMessage))
	return c, nil
}

// doer adds a client's identity to the requests of RPCs.
type doer struct{ c *Client }

// Do sends a request.
func (d doer) Do(req *http.Request) (*http.Response, error) { return d.c.do(req) }

func (c *Client) do(req *http.Request) (*http.Response, error) {
	maps.Copy(req.Header, c.cfg.Header)
	if c.cfg.Token != nil {
		if token := c.cfg.Token(); token != "" {
			req.Header.Set(HeaderAccessToken, token)
		}
	}
	if c.cfg.User != "" {
		req.Header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(c.cfg.User+":")))
	}
	return c.cfg.HTTP.Do(req)
}

// Process has the RPCs about processes.
func (c *Client) Process() processpb.ProcessClient { return c.process }

// Filesystem has the RPCs about files.
func (c *Client) Filesystem() filesystempb.FilesystemClient { return c.filesystem }

// Health returns nil once the agent answers.
func (c *Client) Health(ctx context.Context) error {
	return c.call(ctx, http.MethodGet, PathHealth, nil, nil)
}

// Init hands over what is known only once the sandbox has an owner. Repeating it is harmless.
func (c *Client) Init(ctx context.Context, req InitRequest) error {
	return c.call(ctx, http.MethodPost, PathInit, req, nil)
}

// Metrics reads the sandbox's resource usage.
func (c *Client) Metrics(ctx context.Context) (Metrics, error) {
	var m Metrics
	err := c.call(ctx, http.MethodGet, PathMetrics, nil, &m)
	return m, err
}

// MetricsHistory reads the kept samples of the resource usage since a time, oldest first. An agent older than this route answers 404, an
// [Error].
func (c *Client) MetricsHistory(ctx context.Context, since time.Time) ([]Metrics, error) {
	all := list[Metrics]{max: MaxMetrics}
	err := c.call(ctx, http.MethodGet, PathMetricsHistory+"?"+QuerySince+"="+strconv.FormatInt(since.Unix(), 10), nil, &all)
	return all.items, err
}

// Envs reads the environment that the agent gives to processes.
func (c *Client) Envs(ctx context.Context) (map[string]string, error) {
	var m map[string]string
	err := c.call(ctx, http.MethodGet, PathEnvs, nil, &m)
	return m, err
}

// Freeze has the agent write what it holds before the node stops the sandbox.
func (c *Client) Freeze(ctx context.Context) error {
	return c.call(ctx, http.MethodPost, PathFreeze, nil, nil)
}

// OOMKill kills the process with the most memory, except the agent, and returns when it is gone. Without one, and from an
// agent older than this route, the error is an [Error] of status 404.
func (c *Client) OOMKill(ctx context.Context) (OOMKilled, error) {
	var p OOMKilled
	err := c.call(ctx, http.MethodPost, PathOOMKill, nil, &p)
	p.Name = cut(p.Name)
	return p, err
}

// Restored has the agent of a restored sandbox read its configuration again: ID, token, environment,
// names and system files. Requests that were in flight at the checkpoint end with an error; processes
// continue. It needs no token. at must be later than the sandbox's previous restore; a repeated call
// with the same time is harmless. An agent older than this route answers 404, an [Error].
func (c *Client) Restored(ctx context.Context, at time.Time) error {
	return c.call(ctx, http.MethodPost, PathRestored, RestoredRequest{Timestamp: &at}, nil)
}

// Download opens a file for reading; the caller closes it.
func (c *Client) Download(ctx context.Context, path string) (io.ReadCloser, error) {
	// Naming an encoding keeps the transport from requesting gzip.
	h := http.Header{"Accept-Encoding": {"identity"}}
	res, err := c.send(ctx, http.MethodGet, c.filesURL(path), nil, h)
	if err != nil {
		return nil, err
	}
	return res.Body, nil
}

// Upload writes a file and its missing parents, replacing an older one at
// once or not at all. metadata may be nil.
func (c *Client) Upload(ctx context.Context, path string, content io.Reader, metadata map[string]string) (FileInfo, error) {
	h := http.Header{"Content-Type": {"application/octet-stream"}}
	for k, v := range metadata {
		h.Set(HeaderMetadataPrefix+k, v)
	}
	res, err := c.send(ctx, http.MethodPost, c.filesURL(path), content, h)
	if err != nil {
		return FileInfo{}, err
	}
	defer func() { _ = res.Body.Close() }()
	infos := list[FileInfo]{max: 1}
	if err := readAnswer(res.Body, &infos); err != nil {
		return FileInfo{}, fmt.Errorf("decode answer to upload: %w", err)
	}
	if len(infos.items) == 0 {
		return FileInfo{}, errors.New("decode answer to upload: no file instead of one")
	}
	return infos.items[0], nil
}

// Compose joins files into one and removes the sources.
func (c *Client) Compose(ctx context.Context, req ComposeRequest) (FileInfo, error) {
	if req.Username == "" {
		req.Username = c.cfg.User
	}
	ctx, cancel := withTimeout(ctx, composeTimeout)
	defer cancel()
	var info FileInfo
	err := c.call(ctx, http.MethodPost, PathCompose, req, &info)
	return info, err
}

func (c *Client) filesURL(path string) string {
	q := url.Values{QueryPath: {path}}
	if c.cfg.User != "" {
		q.Set(QueryUsername, c.cfg.User)
	}
	return PathFiles + "?" + q.Encode()
}

// call sends in as JSON, if not nil, and decodes the answer into out, if not nil. It ends after callTimeout if ctx has no
// deadline.
func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	ctx, cancel := withTimeout(ctx, callTimeout)
	defer cancel()
	var body io.Reader
	h := http.Header{}
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return fmt.Errorf("encode request to %s: %w", path, err)
		}
		body = bytes.NewReader(b)
		h.Set("Content-Type", "application/json")
	}
	res, err := c.send(ctx, method, path, body, h)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if out != nil {
		if err := readAnswer(res.Body, out); err != nil {
			return fmt.Errorf("decode response of %s: %w", path, err)
		}
	}
	// What is left is read so that the connection can be used again.
	if _, err := io.Copy(io.Discard, io.LimitReader(res.Body, 4096)); err != nil {
		return fmt.Errorf("read answer of %s: %w", path, err)
	}
	return nil
}

// send returns an answer of success; any other becomes an *Error.
func (c *Client) send(ctx context.Context, method, path string, body io.Reader, h http.Header) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.cfg.BaseURL+path, body)
	if err != nil {
		return nil, fmt.Errorf("make request to %s: %w", path, err)
	}
	if h != nil {
		req.Header = h
	}
	res, err := c.do(req)
	if err != nil {
		return nil, fmt.Errorf("call agent: %w", err)
	}
	if res.StatusCode/100 == 2 {
		return res, nil
	}
	defer func() { _ = res.Body.Close() }()
	return nil, readError(res)
}

// IsCode reports whether an error of an RPC has a code.
func IsCode(err error, code connect.Code) bool {
	return err != nil && connect.CodeOf(err) == code
}
