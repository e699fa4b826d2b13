// Package rest sends the requests of the public client to the REST API and reads its responses: JSON, pages, errors, and retries
// of requests that were refused for their rate. It knows no route.
package rest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// pageSize is the maximum of our servers; E2B returns at most 100.
const pageSize = 1000

// A request that is refused for its rate is sent again so often, if the server says when, as by E2B's SDKs.
const (
	maxRetries    = 3
	maxRetryAfter = time.Minute
)

// Client sends requests to one server. URL has no slash at its end. It is safe for concurrent use.
type Client struct {
	HTTP      *http.Client
	URL, Key  string
	UserAgent string // empty: that of net/http
}

// Do sends a request with the client's name, and without its key.
func (c *Client) Do(req *http.Request) (*http.Response, error) {
	if c.UserAgent != "" && req.Header.Get("User-Agent") == "" {
		req.Header.Set("User-Agent", c.UserAgent)
	}
	return c.HTTP.Do(req)
}

// Pages reads all pages of a list, or until it has limit items; zero: no limit, and each page is requested while the one before is decoded.
func Pages[T any](ctx context.Context, c *Client, path string, q url.Values, limit int) ([]T, error) {
	all := []T{}
	send := func() (*http.Response, error) {
		size := pageSize
		if limit > 0 {
			size = min(size, limit-len(all))
		}
		q.Set("limit", strconv.Itoa(size))
		return c.Send(ctx, http.MethodGet, path, q, nil)
	}
	for res, err := send(); ; { //nolint:bodyclose // read does
		if err != nil {
			return nil, err
		}
		next := res.Header.Get("X-Next-Token")
		repeated := next != "" && next == q.Get("nextToken")
		q.Set("nextToken", next)
		var ahead sync.WaitGroup
		var following *http.Response
		if next != "" && !repeated && limit == 0 {
			ahead.Go(func() { following, err = send() }) //nolint:bodyclose // read does
		}
		decodeErr := read(res, path, func(body io.Reader) error { return appendItems(body, &all) })
		ahead.Wait()
		switch {
		case decodeErr != nil:
			if following != nil {
				_ = following.Body.Close()
			}
			return nil, decodeErr
		case next == "" || limit > 0 && len(all) >= limit:
			return all, nil
		case repeated:
			return nil, fmt.Errorf("list %s: the server repeats a page: %w", path, errs.ErrUnavailable)
		case limit > 0: // a server may return fewer than were requested
			following, err = send() //nolint:bodyclose // read does
		}
		res = following
	}
}

// Fetch is a Call that returns the response's value.
func Fetch[T any](ctx context.Context, c *Client, method, path string, in any) (out T, err error) {
	_, err = c.Call(ctx, method, path, nil, in, &out)
	return out, err
}

// Call sends in as JSON, if not nil, and decodes the response into out, if not nil.
func (c *Client) Call(ctx context.Context, method, path string, q url.Values, in, out any) (http.Header, error) {
	res, err := c.Send(ctx, method, path, q, in) //nolint:bodyclose // Decode does
	if err != nil {
		return nil, err
	}
	return res.Header, Decode(res, path, out)
}

// Decode reads the value of a response, unless out is nil, and closes its body. Errors name what was requested.
func Decode(res *http.Response, what string, out any) error {
	return read(res, what, func(body io.Reader) error {
		if out == nil {
			return nil
		}
		return json.NewDecoder(body).Decode(out)
	})
}

// appendItems reads a JSON list, or null, item by item. As one value it would be in memory whole, in a buffer that grows by copies.
func appendItems[T any](list io.Reader, all *[]T) error {
	d := json.NewDecoder(list)
	begin, err := d.Token()
	switch {
	case err != nil || begin == nil:
		return err
	case begin != json.Delim('['):
		return fmt.Errorf("%v in place of a list", begin)
	}
	for d.More() {
		*all = append(*all, *new(T))
		if err := d.Decode(&(*all)[len(*all)-1]); err != nil {
			return err
		}
	}
	_, err = d.Token()
	return err
}

// read closes the body of a response when decode has read its value.
func read(res *http.Response, what string, decode func(body io.Reader) error) error {
	defer func() { _ = res.Body.Close() }()
	if err := decode(res.Body); err != nil {
		return fmt.Errorf("decode response of %s: %w: %w", what, err, errs.ErrUnavailable)
	}
	// The rest is read so that the connection can be reused.
	if _, err := io.Copy(io.Discard, io.LimitReader(res.Body, 4096)); err != nil {
		return fmt.Errorf("read response of %s: %w: %w", what, err, errs.ErrUnavailable)
	}
	return nil
}

// Send returns a response of success; any other is an *Error. in is sent as JSON, if not nil, and with the headers of its method
// Headers, if it has one.
func (c *Client) Send(ctx context.Context, method, path string, q url.Values, in any) (*http.Response, error) {
	var body []byte
	if in != nil {
		var err error
		if body, err = json.Marshal(in); err != nil {
			return nil, fmt.Errorf("encode request to %s: %w", path, err)
		}
	}
	for tried := 0; ; tried++ {
		res, err := c.sendOnce(ctx, method, path, q, in, body)
		if err != nil {
			return nil, err
		}
		refusal := Check(res)
		if refusal == nil {
			return res, nil
		}
		wait, err := strconv.Atoi(res.Header.Get("Retry-After"))
		after := time.Duration(wait) * time.Second
		if res.StatusCode != http.StatusTooManyRequests || err != nil || wait < 0 || after > maxRetryAfter || tried == maxRetries {
			return nil, refusal
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", context.Cause(ctx), refusal)
		case <-time.After(after):
		}
	}
}

func (c *Client) sendOnce(ctx context.Context, method, path string, q url.Values, in any, body []byte) (*http.Response, error) {
	target := c.URL + path
	if len(q) > 0 {
		target += "?" + q.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, target, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("make request to %s: %w", path, err)
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if with, ok := in.(interface{ Headers() http.Header }); ok {
		maps.Copy(req.Header, with.Headers())
	}
	req.Header.Set("X-API-Key", c.Key)
	res, err := c.Do(req)
	if err != nil {
		return nil, fmt.Errorf("reach the API: %w: %w", err, errs.ErrUnavailable)
	}
	return res, nil
}
