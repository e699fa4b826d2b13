package adminclient

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"syscall"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// ErrNotRunning means that no server listens on the socket; it is an errs.ErrUnavailable.
var ErrNotRunning = fmt.Errorf("not running: %w", errs.ErrUnavailable)

// Client administers the server of one data directory. It is safe for concurrent use.
type Client struct {
	http    *http.Client
	dataDir string
}

// New opens no connection. dataDir is only for messages.
func New(socket, dataDir string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", socket)
	}
	return &Client{
		dataDir: dataDir,
		http:    &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}},
	}
}

// Status returns the state of the server.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return get[Status](ctx, c, PathStatus)
}

// Doctor runs the server's checks.
func (c *Client) Doctor(ctx context.Context) ([]Check, error) {
	return get[[]Check](ctx, c, PathDoctor)
}

// Images lists the images.
func (c *Client) Images(ctx context.Context) ([]Image, error) {
	return get[[]Image](ctx, c, PathImages)
}

// RemoveImage removes an image by its name; with force also one that templates name.
func (c *Client) RemoveImage(ctx context.Context, ref string, force bool) error {
	return c.change(ctx, http.MethodDelete, PathImages+"/"+url.PathEscape(ref)+"?force="+strconv.FormatBool(force))
}

// Prune removes images that nothing uses, and returns them.
func (c *Client) Prune(ctx context.Context, req PruneRequest) ([]Image, error) {
	return post[[]Image](ctx, c, PathPrune, req)
}

// BuildImage builds an image.
func (c *Client) BuildImage(ctx context.Context, req BuildImageRequest, progress func(Event)) (Result, error) {
	return c.stream(ctx, PathBuildImage, req, progress)
}

// Pull pulls an image from its registry.
func (c *Client) Pull(ctx context.Context, req PullRequest, progress func(Event)) (Result, error) {
	return c.stream(ctx, PathPull, req, progress)
}

// Import imports images from a tar (OCI layout or docker save). name, if not empty, is the name for an
// image without one.
func (c *Client) Import(ctx context.Context, tar io.Reader, name string, progress func(Event)) (Result, error) {
	path := PathImport
	if name != "" {
		path += "?" + url.Values{"name": {name}}.Encode()
	}
	return c.upload(ctx, path, tar, progress)
}

// Shutdown stops the server. Its process may exit shortly after the call returns.
func (c *Client) Shutdown(ctx context.Context, req ShutdownRequest, progress func(Event)) (Result, error) {
	return c.stream(ctx, PathShutdown, req, progress)
}

func get[T any](ctx context.Context, c *Client, path string) (T, error) {
	return call[T](ctx, c, http.MethodGet, path, nil)
}

// post sends a request with a single response.
func post[T any](ctx context.Context, c *Client, path string, in any) (out T, err error) {
	body, err := encode(path, in)
	if err != nil {
		return out, err
	}
	return call[T](ctx, c, http.MethodPost, path, body)
}

func call[T any](ctx context.Context, c *Client, method, path string, body io.Reader) (out T, err error) {
	res, err := c.send(ctx, method, path, body)
	if err != nil {
		return out, err
	}
	defer func() { _ = res.Body.Close() }()
	if err := json.NewDecoder(res.Body).Decode(&out); err != nil {
		return out, fmt.Errorf("decode response of %s: %w", path, err)
	}
	return out, nil
}

func encode(path string, in any) (io.Reader, error) {
	b, err := json.Marshal(in)
	if err != nil {
		return nil, fmt.Errorf("encode request to %s: %w", path, err)
	}
	return bytes.NewReader(b), nil
}

// change sends a request without bodies.
func (c *Client) change(ctx context.Context, method, path string) error {
	res, err := c.send(ctx, method, path, nil)
	if err != nil {
		return err
	}
	return res.Body.Close()
}

func (c *Client) stream(ctx context.Context, path string, in any, progress func(Event)) (Result, error) {
	body, err := encode(path, in)
	if err != nil {
		return Result{}, err
	}
	return c.upload(ctx, path, body, progress)
}

// upload sends a body and reads the events of the response.
func (c *Client) upload(ctx context.Context, path string, body io.Reader, progress func(Event)) (Result, error) {
	res, err := c.send(ctx, http.MethodPost, path, body)
	if err != nil {
		return Result{}, err
	}
	defer func() { _ = res.Body.Close() }()
	return readStream(res.Body, progress)
}

// readStream reads to the last line; a stream without one was interrupted.
func readStream(body io.Reader, progress func(Event)) (Result, error) {
	dec := json.NewDecoder(body)
	for {
		var e Event
		if err := dec.Decode(&e); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return Result{}, fmt.Errorf("the server ended before the work was done; see its log: %w", errs.ErrUnavailable)
			}
			return Result{}, fmt.Errorf("read progress: %w", err)
		}
		switch {
		case e.Error != nil:
			return Result{}, mapError(e.Error)
		case e.Result != nil:
			return *e.Result, nil
		case progress != nil:
			progress(e)
		}
	}
}

// send returns a successful response; any other becomes an error.
func (c *Client) send(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://barchan"+path, body)
	if err != nil {
		return nil, fmt.Errorf("make request to %s: %w", path, err)
	}
	res, err := c.http.Do(req)
	if err != nil {
		return nil, c.explain(err)
	}
	if res.StatusCode/100 == 2 {
		return res, nil
	}
	defer func() { _ = res.Body.Close() }()
	e := &Error{Code: res.StatusCode}
	b, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if err != nil {
		return nil, fmt.Errorf("read error of %s: %w", path, err)
	}
	if json.Unmarshal(b, e) != nil || e.Text == "" {
		e.Text = http.StatusText(res.StatusCode)
	}
	return nil, mapError(e)
}

// explain describes the error of a missing or unserved socket.
func (c *Client) explain(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return errs.Public(ErrNotRunning, fmt.Sprintf("barchan is not running on %s; start it with `barchan up`", c.dataDir))
	case errors.Is(err, fs.ErrPermission):
		return errs.Public(errs.ErrForbidden, fmt.Sprintf("the administration of %s is for root only; run this as root", c.dataDir))
	}
	return fmt.Errorf("reach the server of %s: %w", c.dataDir, err)
}

// kinds maps codes to kinds of errors; package adminapi has the inverse.
var kinds = map[int]error{
	http.StatusBadRequest:            errs.ErrInvalid,
	http.StatusForbidden:             errs.ErrForbidden,
	http.StatusNotFound:              errs.ErrNotFound,
	http.StatusConflict:              errs.ErrConflict,
	http.StatusRequestEntityTooLarge: errs.ErrTooLarge,
	http.StatusServiceUnavailable:    errs.ErrUnavailable,
	http.StatusInsufficientStorage:   errs.ErrExhausted,
	http.StatusGatewayTimeout:        errs.ErrTimeout,
}

func mapError(e *Error) error {
	if kind, ok := kinds[e.Code]; ok {
		return errs.Public(errors.Join(kind, e), e.Text)
	}
	return e
}
