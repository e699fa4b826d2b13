package restclient

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Error is an error response of the server. errors.Is matches its kind.
type Error struct {
	Status  int
	Message string
}

// Error returns the server's message.
func (e *Error) Error() string { return e.Message }

// Unwrap returns the kind of the status, or nil.
func (e *Error) Unwrap() error { return kinds[e.Status] }

var kinds = map[int]error{
	http.StatusBadRequest:            errs.ErrInvalid,
	http.StatusUnauthorized:          errs.ErrUnauthenticated,
	http.StatusForbidden:             errs.ErrForbidden,
	http.StatusNotFound:              errs.ErrNotFound,
	http.StatusConflict:              errs.ErrConflict,
	http.StatusRequestEntityTooLarge: errs.ErrTooLarge,
	http.StatusTooManyRequests:       errs.ErrExhausted,
	http.StatusInsufficientStorage:   errs.ErrExhausted,
	http.StatusBadGateway:            errs.ErrUnavailable,
	http.StatusServiceUnavailable:    errs.ErrUnavailable,
	http.StatusGatewayTimeout:        errs.ErrTimeout,
}

// Config names the API and the client.
type Config struct {
	// URL is scheme, host and optionally a path before the routes.
	URL string
	Key string
	// HTTP must have no total timeout; calls are bounded by their context.
	HTTP *http.Client
	// UserAgent is the program's name.
	UserAgent string
}

// Client calls the API. It is safe for concurrent use.
type Client struct{ cfg Config }

// New checks the configuration and opens no connection.
func New(cfg Config) (*Client, error) {
	u, err := url.Parse(cfg.URL)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, fmt.Errorf("API URL: %q is not an http or https address: %w", cfg.URL, errs.ErrInvalid)
	}
	if cfg.HTTP == nil {
		return nil, fmt.Errorf("API: an http client is needed: %w", errs.ErrInvalid)
	}
	cfg.URL = strings.TrimSuffix(cfg.URL, "/")
	return &Client{cfg: cfg}, nil
}

// Create creates a sandbox and returns once it is ready.
func (c *Client) Create(ctx context.Context, n NewSandbox) (Sandbox, error) {
	return fetch[Sandbox](ctx, c, http.MethodPost, "/v2/sandboxes", n)
}

// Get reads a sandbox by its full ID.
func (c *Client) Get(ctx context.Context, id string) (Detail, error) {
	return fetch[Detail](ctx, c, http.MethodGet, "/sandboxes/"+url.PathEscape(id), nil)
}

// pageSize is the API's maximum.
const pageSize = 100

// List reads all pages.
func (c *Client) List(ctx context.Context, o ListOptions) ([]Listed, error) {
	q := url.Values{}
	if len(o.States) > 0 {
		q.Set("state", strings.Join(o.States, ","))
	}
	if len(o.Metadata) > 0 {
		q.Set("metadata", encodeMetadata(o.Metadata))
	}
	if o.Template != "" {
		q.Set("template", o.Template)
	}
	if o.Name != "" {
		q.Set("name", o.Name)
	}
	return pages[Listed](ctx, c, "/v2/sandboxes", q, o.Limit)
}

// pages reads all pages of a list, or until it has limit items; zero: no limit.
func pages[T any](ctx context.Context, c *Client, path string, q url.Values, limit int) ([]T, error) {
	all := []T{}
	for {
		size := pageSize
		if limit > 0 {
			size = min(size, limit-len(all))
		}
		q.Set("limit", strconv.Itoa(size))
		var page []T
		h, err := c.call(ctx, http.MethodGet, path, q, nil, &page)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		next := h.Get("X-Next-Token")
		if next == "" || (limit > 0 && len(all) >= limit) {
			return all, nil
		}
		if next == q.Get("nextToken") {
			return nil, fmt.Errorf("list %s: the server repeats a page: %w", path, errs.ErrUnavailable)
		}
		q.Set("nextToken", next)
	}
}

// encodeMetadata returns the API's filter form: pairs in form encoding, their keys and values
// percent-encoded before.
func encodeMetadata(m map[string]string) string {
	q := url.Values{}
	for k, v := range m {
		q.Set(url.QueryEscape(k), url.QueryEscape(v))
	}
	return q.Encode()
}

// Kill deletes a sandbox.
func (c *Client) Kill(ctx context.Context, id string) error {
	return c.do(ctx, http.MethodDelete, "/sandboxes/"+url.PathEscape(id), nil)
}

// Pause pauses a sandbox.
func (c *Client) Pause(ctx context.Context, id string) error {
	return c.do(ctx, http.MethodPost, "/sandboxes/"+url.PathEscape(id)+"/pause", struct{}{})
}

// PauseFiles pauses a sandbox and keeps its files only.
func (c *Client) PauseFiles(ctx context.Context, id string) error {
	return c.do(ctx, http.MethodPost, "/sandboxes/"+url.PathEscape(id)+"/pause", map[string]bool{"memory": false})
}

// ConnectFiles is Connect that permanently discards the memory of a paused sandbox.
func (c *Client) ConnectFiles(ctx context.Context, id string, timeout int64) (Sandbox, error) {
	body := struct {
		Timeout int64 `json:"timeout,omitempty"`
		Memory  bool  `json:"memory"`
	}{Timeout: timeout}
	return fetch[Sandbox](ctx, c, http.MethodPost, "/v2/sandboxes/"+url.PathEscape(id)+"/connect", body)
}

// CreateSnapshot takes a snapshot of a sandbox, and returns once it is durable.
func (c *Client) CreateSnapshot(ctx context.Context, id string, n NewSnapshot) (Snapshot, error) {
	return fetch[Snapshot](ctx, c, http.MethodPost, "/sandboxes/"+url.PathEscape(id)+"/snapshots", n)
}

// Snapshots lists snapshots, the newest first.
func (c *Client) Snapshots(ctx context.Context, o SnapshotListOptions) ([]Snapshot, error) {
	q := url.Values{}
	if o.SandboxID != "" {
		q.Set("sandboxID", o.SandboxID)
	}
	if o.Name != "" {
		q.Set("name", o.Name)
	}
	return pages[Snapshot](ctx, c, "/snapshots", q, o.Limit)
}

// Templates lists the templates.
func (c *Client) Templates(ctx context.Context) ([]Template, error) {
	return pages[Template](ctx, c, "/v2/templates", url.Values{}, 0)
}

// DeleteSnapshot deletes one snapshot, by its ID.
func (c *Client) DeleteSnapshot(ctx context.Context, id string) error {
	return c.do(ctx, http.MethodDelete, "/templates/"+url.PathEscape(id), nil)
}

// ForkEach forks a running sandbox, and reports each fork, by its index and in any order, as soon as
// it runs or has failed. After an error, the results of unreported forks are unknown.
func (c *Client) ForkEach(ctx context.Context, id string, n NewFork, report func(index int, fork Forked)) error {
	res, err := c.send(ctx, http.MethodPost, "/sandboxes/"+url.PathEscape(id)+"/fork", url.Values{"stream": {"true"}}, n)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if media, _, _ := mime.ParseMediaType(res.Header.Get("Content-Type")); media != "application/x-ndjson" { // a server that does not stream
		var all []Forked
		if err := json.NewDecoder(res.Body).Decode(&all); err != nil {
			return fmt.Errorf("decode the forks of %s: %w", id, err)
		}
		for i, fork := range all {
			report(i, fork)
		}
		return nil
	}
	lines, count := json.NewDecoder(res.Body), max(n.Count, 1)
	for seen := range count {
		var line struct {
			Index int `json:"index"`
			Forked
		}
		if err := lines.Decode(&line); err != nil {
			return fmt.Errorf("the server's response ended after %d of %d forks; others may run: %w: %w", seen, count, err, errs.ErrUnavailable)
		}
		report(line.Index, line.Forked)
	}
	_, err = io.Copy(io.Discard, res.Body) // drains the body
	return err
}

// Connect resumes a paused sandbox, and extends its time to live to at least timeout seconds; zero is
// the server's default.
func (c *Client) Connect(ctx context.Context, id string, timeout int64) (Sandbox, error) {
	body := struct {
		Timeout int64 `json:"timeout,omitempty"`
	}{timeout}
	return fetch[Sandbox](ctx, c, http.MethodPost, "/v2/sandboxes/"+url.PathEscape(id)+"/connect", body)
}

// Namespace returns the key's namespace, which E2B calls a team.
func (c *Client) Namespace(ctx context.Context) (string, error) {
	var teams []struct {
		TeamID    string `json:"teamID"`
		IsDefault bool   `json:"isDefault"`
	}
	if _, err := c.call(ctx, http.MethodGet, "/teams", nil, nil, &teams); err != nil {
		return "", err
	}
	for _, t := range teams {
		if t.IsDefault {
			return t.TeamID, nil
		}
	}
	return "", fmt.Errorf("find the namespace of the key: the server names none: %w", errs.ErrUnavailable)
}

// Metrics reads the samples of a sandbox.
func (c *Client) Metrics(ctx context.Context, id string) ([]Metric, error) {
	return fetch[[]Metric](ctx, c, http.MethodGet, "/sandboxes/"+url.PathEscape(id)+"/metrics", nil)
}

// Logs reads lines, oldest first.
func (c *Client) Logs(ctx context.Context, id string, o LogOptions) ([]LogEntry, error) {
	q := url.Values{"direction": {"forward"}}
	if !o.Since.IsZero() {
		q.Set("cursor", strconv.FormatInt(o.Since.UnixMilli(), 10))
	}
	if o.Limit > 0 {
		q.Set("limit", strconv.Itoa(o.Limit))
	}
	var out struct {
		Logs []LogEntry `json:"logs"`
	}
	_, err := c.call(ctx, http.MethodGet, "/v2/sandboxes/"+url.PathEscape(id)+"/logs", q, nil, &out)
	slices.SortStableFunc(out.Logs, func(a, b LogEntry) int { return a.Timestamp.Compare(b.Timestamp) })
	return out.Logs, err
}

// do sends a request whose response has no body of interest.
func (c *Client) do(ctx context.Context, method, path string, in any) error {
	_, err := c.call(ctx, method, path, nil, in, nil)
	return err
}

func fetch[T any](ctx context.Context, c *Client, method, path string, in any) (out T, err error) {
	_, err = c.call(ctx, method, path, nil, in, &out)
	return out, err
}

// call sends in as JSON, if not nil, and decodes the response into out, if not nil.
func (c *Client) call(ctx context.Context, method, path string, q url.Values, in, out any) (http.Header, error) {
	res, err := c.send(ctx, method, path, q, in)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	if out != nil {
		if err := json.NewDecoder(res.Body).Decode(out); err != nil {
			return nil, fmt.Errorf("decode response of %s: %w", path, err)
		}
	}
	return res.Header, nil
}

// send sends in as JSON, if not nil, and returns a successful response.
func (c *Client) send(ctx context.Context, method, path string, q url.Values, in any) (*http.Response, error) {
	target := c.cfg.URL + path
	if len(q) > 0 {
		target += "?" + q.Encode()
	}
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return nil, fmt.Errorf("encode request to %s: %w", path, err)
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return nil, fmt.Errorf("make request to %s: %w", path, err)
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if with, ok := in.(interface{ headers() http.Header }); ok {
		maps.Copy(req.Header, with.headers())
	}
	req.Header.Set("X-API-Key", c.cfg.Key)
	if c.cfg.UserAgent != "" {
		req.Header.Set("User-Agent", c.cfg.UserAgent)
	}
	res, err := c.cfg.HTTP.Do(req)
	if err != nil {
		return nil, fmt.Errorf("reach the API: %w: %w", err, errs.ErrUnavailable)
	}
	if res.StatusCode/100 != 2 {
		defer func() { _ = res.Body.Close() }()
		return nil, readError(res)
	}
	return res, nil
}

func readError(res *http.Response) error {
	b, err := io.ReadAll(io.LimitReader(res.Body, 64<<10))
	if err != nil {
		return fmt.Errorf("read error of %d: %w", res.StatusCode, err)
	}
	var body struct {
		Message string `json:"message"`
	}
	if json.Unmarshal(b, &body) != nil || body.Message == "" {
		body.Message = fmt.Sprintf("the API responded %s", res.Status)
	}
	return &Error{Status: res.StatusCode, Message: body.Message}
}
