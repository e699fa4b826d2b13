package scale

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// kubeSandboxes is the path of the sandboxes of all namespaces.
const kubeSandboxes = "/apis/agents.x-k8s.io/v1beta1/sandboxes"

// get reads the response to a request.
func get(ctx context.Context, c *http.Client, url string, header http.Header) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	req.Header = header
	res, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET %s: status %d: %.200s", url, res.StatusCode, body)
	}
	return body, err
}

// lists reads pages of a hundred by both APIs, beside a server that has nothing to do but to send the same bytes.
func (o *objects) lists(ctx context.Context, n int) error {
	m := o.model
	for _, l := range []struct {
		name, url string
		client    *http.Client
		header    http.Header
	}{
		{"page of 100 by REST", "http://" + o.Server.Addr + "/v2/sandboxes?limit=100&state=running,paused", http.DefaultClient, http.Header{"X-Api-Key": {o.Server.Key}}},
		{"page of 100 by the Kubernetes API", m.url + kubeSandboxes + "?limit=100", m.http, nil},
	} {
		var body []byte
		took, err := harness.Times(o.Rounds(100), func() (err error) {
			body, err = get(ctx, l.client, l.url, l.header)
			return err
		})
		if err != nil {
			return err
		}
		bare, err := bareServer(ctx, o.Rounds(100), body)
		if err != nil {
			return err
		}
		o.bar(o.Report.Add("objects", fmt.Sprintf("%s, %d asleep", l.name, n), "ms", took).Over("the same bytes from a bare server", bare.At(0.5)), n, pageBar)
	}
	return nil
}

// bareServer measures how long it takes to get a body from a server of this process.
func bareServer(ctx context.Context, n int, body []byte) (report.Samples, error) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(body) }))
	defer s.Close()
	return harness.Times(n, func() error {
		_, err := get(ctx, s.Client(), s.URL, nil)
		return err
	})
}

// watches measures how long it takes until a new watch has all objects, beside decoding these.
func (o *objects) watches(ctx context.Context, n int) error {
	var took, decoded report.Samples
	for range o.Rounds(10) {
		began := time.Now()
		lines, err := o.model.watch(ctx)
		if err != nil {
			return err
		}
		took = append(took, report.Millis(time.Since(began)))
		if len(lines) < n {
			return fmt.Errorf("a watch begins with %d objects, want %d", len(lines), n)
		}
		began = time.Now()
		for _, line := range lines {
			var event struct{ Object map[string]any }
			if err := json.Unmarshal(line, &event); err != nil {
				return fmt.Errorf("decode an event: %w", err)
			}
		}
		decoded = append(decoded, report.Millis(time.Since(began)))
	}
	o.bar(o.Report.Add("objects", fmt.Sprintf("start of a watch, until it has all %d", n), "ms", took).Over("decoding its events", decoded.At(0.5)), n, watchBar)
	return nil
}

// watch begins a watch of all sandboxes, and returns the events before it has all of them.
func (m *model) watch(ctx context.Context) (events [][]byte, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	url := m.url + kubeSandboxes + "?watch=1&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, fmt.Errorf("make request: %w", err)
	}
	res, err := m.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	in := bufio.NewReaderSize(res.Body, 1<<20)
	for {
		line, err := in.ReadBytes('\n')
		switch {
		case errors.Is(err, io.EOF):
			return nil, fmt.Errorf("the watch ended after %d events: status %d: %s", len(events), res.StatusCode, line)
		case err != nil:
			return nil, err
		case bytes.Contains(line, []byte("k8s.io/initial-events-end")):
			return events, nil
		}
		events = append(events, line)
	}
}
