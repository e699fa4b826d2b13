package client

import (
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
	"time"

	"github.com/barchan-dev/barchan/client/internal/rest"
)

// Create creates a sandbox and returns once it is ready.
func (c *Client) Create(ctx context.Context, o CreateOptions) (*Sandbox, error) {
	if o.TemplateID == "" {
		o.TemplateID = "base"
	}
	s, err := rest.Fetch[Sandbox](ctx, &c.api, http.MethodPost, "/v2/sandboxes", createWire{o, seconds(o.Timeout)})
	return c.handle(&s, err)
}

// Connect returns a sandbox, resumes it if it is paused, and extends its life to at least the timeout.
func (c *Client) Connect(ctx context.Context, id string, o ConnectOptions) (*Sandbox, error) {
	body := struct {
		Timeout int64 `json:"timeout,omitempty"`
		Memory  *bool `json:"memory,omitempty"`
	}{Timeout: seconds(o.Timeout)}
	if o.DiscardMemory {
		body.Memory = new(false)
	}
	s, err := rest.Fetch[Sandbox](ctx, &c.api, http.MethodPost, "/v2"+sandboxPath(id, "/connect"), body)
	return c.handle(&s, err)
}

// Open returns a running sandbox, and changes nothing.
func (c *Client) Open(ctx context.Context, id string) (*Sandbox, error) {
	d, err := c.Get(ctx, id)
	if err == nil && d.State == StatePaused {
		err = fmt.Errorf("sandbox %s is paused: %w", id, ErrConflict)
	}
	return c.handle(&Sandbox{SandboxID: d.SandboxID, TemplateID: d.TemplateID, Alias: d.Alias, EnvdVersion: d.EnvdVersion, AgentToken: d.AgentToken, Domain: d.Domain}, err)
}

// Get reads a sandbox by its full ID.
func (c *Client) Get(ctx context.Context, id string) (SandboxDetail, error) {
	return rest.Fetch[SandboxDetail](ctx, &c.api, http.MethodGet, sandboxPath(id, ""), nil)
}

// List reads all pages.
func (c *Client) List(ctx context.Context, o ListOptions) ([]SandboxInfo, error) {
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
	return rest.Pages[SandboxInfo](ctx, &c.api, "/v2/sandboxes", q, o.Limit)
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

func sandboxPath(id, verb string) string { return "/sandboxes/" + url.PathEscape(id) + verb }

// Kill deletes a sandbox, running or paused.
func (c *Client) Kill(ctx context.Context, id string) error {
	return c.Call(ctx, http.MethodDelete, sandboxPath(id, ""), nil, nil, nil)
}

// Pause pauses a sandbox; one that is paused is an [ErrConflict].
func (c *Client) Pause(ctx context.Context, id string, o PauseOptions) error {
	body := map[string]bool{}
	if o.FilesOnly {
		body["memory"] = false
	}
	return c.Call(ctx, http.MethodPost, sandboxPath(id, "/pause"), nil, body, nil)
}

// SetTimeout sets how long a sandbox lives from now on, which may be shorter than before.
func (c *Client) SetTimeout(ctx context.Context, id string, d time.Duration) error {
	return c.Call(ctx, http.MethodPost, sandboxPath(id, "/timeout"), nil, map[string]int64{"timeout": seconds(d)}, nil)
}

// SetNetwork replaces a sandbox's egress policy.
func (c *Client) SetNetwork(ctx context.Context, id string, n Network) error {
	return c.Call(ctx, http.MethodPut, sandboxPath(id, "/network"), nil, n, nil)
}

// Metrics reads the samples of a sandbox, oldest first: one for every ten seconds of the last hour, and the present.
func (c *Client) Metrics(ctx context.Context, id string) ([]Metric, error) {
	return rest.Fetch[[]Metric](ctx, &c.api, http.MethodGet, sandboxPath(id, "/metrics"), nil)
}

// MetricsOf reads the newest sample of each of the running sandboxes, by ID. It omits those that have ended or do not answer.
func (c *Client) MetricsOf(ctx context.Context, ids []string) (map[string]Metric, error) {
	const most = 100 // of one request
	all := map[string]Metric{}
	for part := range slices.Chunk(ids, most) {
		got, err := rest.Fetch[struct {
			Sandboxes map[string]Metric `json:"sandboxes"`
		}](ctx, &c.api, http.MethodGet, "/sandboxes/metrics?"+url.Values{"sandbox_ids": {strings.Join(part, ",")}}.Encode(), nil)
		if err != nil {
			return nil, err
		}
		maps.Copy(all, got.Sandboxes)
	}
	return all, nil
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
	if o.Container != "" {
		q.Set("container", o.Container)
	}
	var out struct {
		Logs []LogEntry `json:"logs"`
	}
	err := c.Call(ctx, http.MethodGet, "/v2"+sandboxPath(id, "/logs"), q, nil, &out)
	slices.SortStableFunc(out.Logs, func(a, b LogEntry) int { return a.Timestamp.Compare(b.Timestamp) })
	return out.Logs, err
}

// CreateSnapshot takes a snapshot of a sandbox, and returns once it is durable. [Client.Create] starts from it, by its ID.
func (c *Client) CreateSnapshot(ctx context.Context, id string, o SnapshotOptions) (Snapshot, error) {
	body := struct {
		SnapshotOptions
		TTL int64 `json:"ttl,omitempty"` // seconds
	}{o, seconds(o.TTL)}
	return rest.Fetch[Snapshot](ctx, &c.api, http.MethodPost, sandboxPath(id, "/snapshots"), body)
}

// Snapshots lists snapshots, the newest first.
func (c *Client) Snapshots(ctx context.Context, o SnapshotsOptions) ([]Snapshot, error) {
	q := url.Values{}
	if o.SandboxID != "" {
		q.Set("sandboxID", o.SandboxID)
	}
	if o.Name != "" {
		q.Set("name", o.Name)
	}
	return rest.Pages[Snapshot](ctx, &c.api, "/snapshots", q, o.Limit)
}

// DeleteSnapshot deletes one snapshot, by its ID.
func (c *Client) DeleteSnapshot(ctx context.Context, id string) error {
	return c.DeleteTemplate(ctx, id)
}

// Fork copies a running sandbox, with its memory and files, into new ones. Forks fail one by one: each has an error or a sandbox.
func (c *Client) Fork(ctx context.Context, id string, o ForkOptions) ([]Forked, error) {
	all := make([]Forked, max(o.Count, 1))
	err := c.ForkEach(ctx, id, o, func(i int, f Forked) {
		if i >= 0 && i < len(all) {
			all[i] = f
		}
	})
	if err != nil {
		return nil, err
	}
	return all, nil
}

// ForkEach is Fork that reports each fork, by its index and in any order, as soon as it runs or has failed. After an error, the
// results of unreported forks are unknown.
func (c *Client) ForkEach(ctx context.Context, id string, o ForkOptions, report func(index int, fork Forked)) error {
	body := struct {
		ForkOptions
		Timeout int64 `json:"timeout,omitempty"` // seconds
	}{o, seconds(o.Timeout)}
	res, err := c.api.Send(ctx, http.MethodPost, sandboxPath(id, "/fork"), url.Values{"stream": {"true"}}, body)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if media, _, _ := mime.ParseMediaType(res.Header.Get("Content-Type")); media != "application/x-ndjson" { // a server that does not stream
		var all []Forked
		if err := json.NewDecoder(res.Body).Decode(&all); err != nil {
			return fmt.Errorf("decode the forks of %s: %w", id, err)
		}
		for i := range all {
			report(i, c.forked(all[i]))
		}
		return nil
	}
	lines, count := json.NewDecoder(res.Body), max(o.Count, 1)
	for seen := range count {
		var line struct {
			Index int `json:"index"`
			Forked
		}
		if err := lines.Decode(&line); err != nil {
			return fmt.Errorf("the server's response ended after %d of %d forks; others may run: %w: %w", seen, count, err, ErrUnavailable)
		}
		report(line.Index, c.forked(line.Forked))
	}
	_, err = io.Copy(io.Discard, res.Body) // drains the body
	return err
}

func (c *Client) forked(f Forked) Forked {
	if f.Sandbox != nil {
		f.Sandbox, _ = c.handle(f.Sandbox, nil) // no error to return
	}
	return f
}

// Templates lists the templates.
func (c *Client) Templates(ctx context.Context) ([]Template, error) {
	return rest.Pages[Template](ctx, &c.api, "/v2/templates", url.Values{}, 0)
}

// DeleteTemplate deletes a template that a build has made, or a snapshot, by its ID.
func (c *Client) DeleteTemplate(ctx context.Context, id string) error {
	return c.Call(ctx, http.MethodDelete, "/templates/"+url.PathEscape(id), nil, nil, nil)
}

// Namespace returns the key's namespace, which E2B calls a team.
func (c *Client) Namespace(ctx context.Context) (string, error) {
	var teams []struct {
		TeamID    string `json:"teamID"`
		IsDefault bool   `json:"isDefault"`
	}
	if err := c.Call(ctx, http.MethodGet, "/teams", nil, nil, &teams); err != nil {
		return "", err
	}
	for _, t := range teams {
		if t.IsDefault {
			return t.TeamID, nil
		}
	}
	return "", fmt.Errorf("find the namespace of the key: the server names none: %w", ErrUnavailable)
}
