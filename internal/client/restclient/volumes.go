package restclient

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// NewVolume is the request for a volume.
type NewVolume struct {
	Name string `json:"name"`
	// Capacity in bytes; zero: the server's default.
	Capacity int64 `json:"capacity,omitempty"`
}

// Volume is one volume.
type Volume struct {
	VolumeID string `json:"volumeID"`
	Name     string `json:"name"`
	// Capacity and Used are bytes; Used and Files are as they were last measured.
	Capacity  int64 `json:"capacity"`
	Used      int64 `json:"used"`
	Files     int64 `json:"files"`
	Sandboxes int   `json:"sandboxes"`
	// Token gives access to the files; a list has none.
	Token string `json:"token,omitempty"`
}

// VolumeMount is a volume, by its name, at a path of a sandbox.
type VolumeMount struct {
	Name string `json:"name"`
	Path string `json:"path"`
}

// VolumeEntry is one file of a volume.
type VolumeEntry struct {
	Name string `json:"name"`
	Path string `json:"path"`
	Type string `json:"type"` // file, directory, symlink or unknown
	// Mode has the permission bits.
	Mode  uint32    `json:"mode"`
	Size  int64     `json:"size"`
	Mtime time.Time `json:"mtime"`
}

// CreateVolume makes a volume.
func (c *Client) CreateVolume(ctx context.Context, n NewVolume) (Volume, error) {
	return fetch[Volume](ctx, c, http.MethodPost, "/volumes", n)
}

// Volumes lists all volumes, by name.
func (c *Client) Volumes(ctx context.Context) ([]Volume, error) {
	return fetch[[]Volume](ctx, c, http.MethodGet, "/volumes", nil)
}

// Volume finds a volume by its name or ID, with its token.
func (c *Client) Volume(ctx context.Context, name string) (Volume, error) {
	all, err := c.Volumes(ctx)
	if err != nil {
		return Volume{}, err
	}
	for _, v := range all {
		if v.Name == name || v.VolumeID == name {
			return fetch[Volume](ctx, c, http.MethodGet, "/volumes/"+url.PathEscape(v.VolumeID), nil)
		}
	}
	return Volume{}, fmt.Errorf("volume %q not found; `barchan volume ls` lists them: %w", name, errs.ErrNotFound)
}

// DeleteVolume deletes a volume by its ID.
func (c *Client) DeleteVolume(ctx context.Context, id string) error {
	return c.do(ctx, http.MethodDelete, "/volumes/"+url.PathEscape(id), nil)
}

// VolumeStat describes a file of a volume.
func (c *Client) VolumeStat(ctx context.Context, v Volume, path string) (e VolumeEntry, err error) {
	return e, c.content(ctx, v, http.MethodGet, "path", url.Values{"path": {path}}, nil, &e)
}

// VolumeList describes what is in a directory of a volume.
func (c *Client) VolumeList(ctx context.Context, v Volume, path string) (list []VolumeEntry, err error) {
	return list, c.content(ctx, v, http.MethodGet, "dir", url.Values{"path": {path}}, nil, &list)
}

// VolumeMakeDir makes a directory, and those above it.
func (c *Client) VolumeMakeDir(ctx context.Context, v Volume, path string) error {
	return c.content(ctx, v, http.MethodPost, "dir", url.Values{"path": {path}, "force": {"true"}}, nil, nil)
}

// VolumeWrite writes a file with the permission bits of mode; one of its name is replaced.
func (c *Client) VolumeWrite(ctx context.Context, v Volume, path string, mode uint32, body io.Reader) error {
	q := url.Values{"path": {path}, "force": {"true"}}
	if mode != 0 {
		q.Set("mode", strconv.FormatUint(uint64(mode), 10))
	}
	return c.content(ctx, v, http.MethodPut, "file", q, body, nil)
}

// VolumeRead returns the content of a file; the caller closes it.
func (c *Client) VolumeRead(ctx context.Context, v Volume, path string) (io.ReadCloser, error) {
	res, err := c.sendContent(ctx, v, http.MethodGet, "file", url.Values{"path": {path}}, nil)
	if err != nil {
		return nil, err
	}
	return res.Body, nil
}

func (c *Client) content(ctx context.Context, v Volume, method, route string, q url.Values, body io.Reader, out any) error {
	res, err := c.sendContent(ctx, v, method, route, q, body)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(res.Body).Decode(out); err != nil {
		return fmt.Errorf("%s of volume %s: %w: %w", route, v.Name, err, errs.ErrUnavailable)
	}
	return nil
}

// sendContent makes a request with the volume's token, and without the key.
func (c *Client) sendContent(ctx context.Context, v Volume, method, route string, q url.Values, body io.Reader) (*http.Response, error) {
	target := strings.Join([]string{c.cfg.URL, "volumecontent", url.PathEscape(v.VolumeID), route}, "/") + "?" + q.Encode()
	req, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return nil, fmt.Errorf("%s of volume %s: %w", route, v.Name, err)
	}
	req.Header.Set("Authorization", "Bearer "+v.Token)
	if body != nil {
		req.Header.Set("Content-Type", "application/octet-stream")
	}
	if c.cfg.UserAgent != "" {
		req.Header.Set("User-Agent", c.cfg.UserAgent)
	}
	res, err := c.cfg.HTTP.Do(req)
	if err != nil {
		return nil, fmt.Errorf("%s of volume %s: %w: %w", route, v.Name, err, errs.ErrUnavailable)
	}
	if res.StatusCode/100 != 2 {
		defer func() { _ = res.Body.Close() }()
		return nil, readError(res)
	}
	return res, nil
}
