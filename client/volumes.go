package client

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/client/internal/rest"
)

// VolumeOptions describe a volume.
type VolumeOptions struct {
	Name string `json:"name"`
	// Capacity in bytes; zero: the server's default.
	Capacity int64 `json:"capacity,omitempty"`
	// ReadOnly goes with S3 and NFS.
	ReadOnly bool `json:"readOnly,omitempty"`
	// S3 or NFS has the files; nil: they are on the server.
	S3  *VolumeBucket `json:"s3,omitempty"`
	NFS *VolumeExport `json:"nfs,omitempty"`
}

// VolumeExport is an export of an NFS server.
type VolumeExport struct {
	Server string `json:"server"`
	Path   string `json:"path"`
	// MountOptions are port=N and mountport=N, and those that say what is so in any case.
	MountOptions []string `json:"mountOptions,omitempty"`
}

// VolumeBucket is a directory of a bucket in an S3-compatible object store, with either the name of a Secret or a key.
type VolumeBucket struct {
	Endpoint        string `json:"endpoint"` // a URL
	Region          string `json:"region,omitempty"`
	Bucket          string `json:"bucket"`
	Prefix          string `json:"prefix,omitempty"`
	SecretName      string `json:"secretName,omitempty"`
	AccessKeyID     string `json:"accessKeyID,omitempty"`
	SecretAccessKey string `json:"secretAccessKey,omitempty"` //nolint:gosec // the request's field
	SessionToken    string `json:"sessionToken,omitempty"`
	// CA has certificates that sign the endpoint's, in PEM.
	CA string `json:"ca,omitempty"`
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
	// Backend is local, s3 or nfs; Source says where the files are that are not local.
	Backend  string `json:"backend"`
	Source   string `json:"source,omitempty"`
	ReadOnly bool   `json:"readOnly"`
	// Ready is whether sandboxes can mount it now; Reason and Message say why.
	Ready   bool   `json:"ready"`
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
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
func (c *Client) CreateVolume(ctx context.Context, n VolumeOptions) (Volume, error) {
	return rest.Fetch[Volume](ctx, &c.api, http.MethodPost, "/volumes", n)
}

// Volumes lists all volumes, by name.
func (c *Client) Volumes(ctx context.Context) ([]Volume, error) {
	return rest.Fetch[[]Volume](ctx, &c.api, http.MethodGet, "/volumes", nil)
}

// Volume finds a volume by its name or ID, with its token.
func (c *Client) Volume(ctx context.Context, name string) (Volume, error) {
	all, err := c.Volumes(ctx)
	if err != nil {
		return Volume{}, err
	}
	for _, v := range all {
		if v.Name == name || v.VolumeID == name {
			return rest.Fetch[Volume](ctx, &c.api, http.MethodGet, "/volumes/"+url.PathEscape(v.VolumeID), nil)
		}
	}
	return Volume{}, fmt.Errorf("volume %q not found: %w", name, ErrNotFound)
}

// DeleteVolume deletes a volume by its ID.
func (c *Client) DeleteVolume(ctx context.Context, id string) error {
	return c.Call(ctx, http.MethodDelete, "/volumes/"+url.PathEscape(id), nil, nil, nil)
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

// VolumeRemove deletes a file, or a directory and all in it.
func (c *Client) VolumeRemove(ctx context.Context, v Volume, path string) error {
	return c.content(ctx, v, http.MethodDelete, "path", url.Values{"path": {path}}, nil, nil)
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
	res, err := c.sendContent(ctx, v, method, route, q, body) //nolint:bodyclose // Decode does
	if err != nil {
		return err
	}
	return rest.Decode(res, route+" of volume "+v.Name, out)
}

// sendContent makes a request with the volume's token, and without the key.
func (c *Client) sendContent(ctx context.Context, v Volume, method, route string, q url.Values, body io.Reader) (*http.Response, error) {
	target := strings.Join([]string{c.api.URL, "volumecontent", url.PathEscape(v.VolumeID), route}, "/") + "?" + q.Encode()
	req, err := http.NewRequestWithContext(ctx, method, target, body)
	if err != nil {
		return nil, fmt.Errorf("%s of volume %s: %w", route, v.Name, err)
	}
	req.Header.Set("Authorization", "Bearer "+v.Token)
	if body != nil {
		req.Header.Set("Content-Type", "application/octet-stream")
	}
	res, err := c.Do(req)
	if err != nil {
		return nil, fmt.Errorf("%s of volume %s: %w: %w", route, v.Name, err, ErrUnavailable)
	}
	if err := CheckResponse(res); err != nil {
		return nil, err
	}
	return res, nil
}
