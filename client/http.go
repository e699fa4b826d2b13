package client

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
	"time"
)

// pageSize is the maximum of our servers; E2B returns at most 100.
const pageSize = 1000

// A request that is refused for its rate is sent again so often, if the server says when, as by E2B's SDKs.
const (
	maxRetries    = 3
	maxRetryAfter = time.Minute
)

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
			return nil, fmt.Errorf("list %s: the server repeats a page: %w", path, ErrUnavailable)
		}
		q.Set("nextToken", next)
	}
}

// Call makes a request of the API: for routes that have no method here. in is sent as JSON, and the response decoded into out; each may be nil.
func (c *Client) Call(ctx context.Context, method, path string, q url.Values, in, out any) error {
	_, err := c.call(ctx, method, path, q, in, out)
	return err
}

// Do sends a request with the client's connections and name, and without its key: to a sandbox or a URL that the API has returned.
func (c *Client) Do(req *http.Request) (*http.Response, error) {
	if c.cfg.UserAgent != "" && req.Header.Get("User-Agent") == "" {
		req.Header.Set("User-Agent", c.cfg.UserAgent)
	}
	return c.cfg.HTTP.Do(req)
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
			return nil, fmt.Errorf("decode response of %s: %w: %w", path, err, ErrUnavailable)
		}
	}
	// The rest is read so that the connection can be reused.
	if _, err := io.Copy(io.Discard, io.LimitReader(res.Body, 4096)); err != nil {
		return nil, fmt.Errorf("read response of %s: %w: %w", path, err, ErrUnavailable)
	}
	return res.Header, nil
}

// send returns a response of success; any other is an *Error.
func (c *Client) send(ctx context.Context, method, path string, q url.Values, in any) (*http.Response, error) {
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
		if res.StatusCode/100 == 2 {
			return res, nil
		}
		refusal := readError(res)
		_ = res.Body.Close() // it was only read
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
	target := c.cfg.URL + path
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
	if with, ok := in.(interface{ headers() http.Header }); ok {
		maps.Copy(req.Header, with.headers())
	}
	req.Header.Set("X-API-Key", c.cfg.Key)
	if c.cfg.UserAgent != "" {
		req.Header.Set("User-Agent", c.cfg.UserAgent)
	}
	res, err := c.cfg.HTTP.Do(req)
	if err != nil {
		return nil, fmt.Errorf("reach the API: %w: %w", err, ErrUnavailable)
	}
	return res, nil
}

// seconds rounds a time up for the API.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }
