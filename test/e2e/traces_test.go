package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// collector is an OpenTelemetry Collector that runs the configuration of docs/observability.md.
type collector struct {
	program.Server
	address, file string
}

// startCollector starts one, at a port of its own. It ends with the test.
func startCollector(t *testing.T) *collector {
	t.Helper()
	page, err := os.ReadFile("../../docs/observability.md")
	if err != nil {
		t.Fatal(err)
	}
	_, config, _ := strings.Cut(string(page), "# otelcol --config first.yaml\n")
	config, _, _ = strings.Cut(config, "```")
	const documented = "127.0.0.1:4317"
	if !strings.Contains(config, documented) {
		t.Fatalf("docs/observability.md has no configuration with %s:\n%s", documented, config)
	}
	dir := t.TempDir()
	c := &collector{address: program.Address(t), file: filepath.Join(dir, "traces.json")}
	if err := os.WriteFile(filepath.Join(dir, "first.yaml"), []byte(strings.ReplaceAll(config, documented, c.address)), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program.Find(t, "otelcol", "scripts/tool.sh otelcol"), "--config", "first.yaml") //nolint:gosec // ended by Stop
	cmd.Dir = dir
	t.Cleanup(func() { c.Stop(t) })
	c.Start(t, cmd, func() error {
		conn, err := net.DialTimeout("tcp", c.address, time.Second)
		if err != nil {
			return err
		}
		return conn.Close()
	})
	return c
}

// span is a part of a span in OTLP's JSON.
type span struct {
	TraceID, SpanID, ParentSpanID, Name string
	service                             string
}

// spans returns what the collector has written, by the IDs of trace and span.
func (c *collector) spans() (map[[2]string]span, error) {
	b, err := os.ReadFile(c.file)
	if err != nil {
		return nil, err
	}
	found := map[[2]string]span{}
	for line := range bytes.Lines(b) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break // the collector is writing it
		}
		var export struct {
			ResourceSpans []struct {
				Resource struct {
					Attributes []struct {
						Key   string
						Value struct{ StringValue string }
					}
				}
				ScopeSpans []struct{ Spans []span }
			}
		}
		if err := json.Unmarshal(line, &export); err != nil {
			return nil, fmt.Errorf("%s: %w", line, err)
		}
		for _, r := range export.ResourceSpans {
			service := ""
			for _, a := range r.Resource.Attributes {
				if a.Key == "service.name" {
					service = a.Value.StringValue
				}
			}
			for _, scope := range r.ScopeSpans {
				for _, s := range scope.Spans {
					s.service = service
					found[[2]string{s.TraceID, s.SpanID}] = s
				}
			}
		}
	}
	return found, nil
}

// path returns the services and names of a span and of those above it, from the root of its trace.
func path(s span, all map[[2]string]span) (names []string) {
	for ok := true; ok; s, ok = all[[2]string{s.TraceID, s.ParentSpanID}] {
		names = append(names, s.service+": "+s.Name)
	}
	slices.Reverse(names)
	return names
}

// has waits until one trace has the spans of want, the first as its root and each other below the one before.
func (c *collector) has(t *testing.T, want ...string) {
	t.Helper()
	eventually.NoError(t, "the trace of "+want[len(want)-1], func() error {
		all, err := c.spans()
		if err != nil {
			return err
		}
		var seen []string
		for _, s := range all {
			if s.service+": "+s.Name != want[len(want)-1] {
				continue
			}
			names := path(s, all)
			rest := want
			for _, name := range names {
				if len(rest) > 0 && name == rest[0] {
					rest = rest[1:]
				}
			}
			if len(rest) == 0 && names[0] == want[0] {
				return nil
			}
			seen = append(seen, strings.Join(names, " > "))
		}
		return fmt.Errorf("want %s; of %d spans these end so:\n%s", strings.Join(want, " > "), len(all), strings.Join(seen, "\n"))
	})
}

// TestTraces has a server and its node, two processes, export to a real collector: a create, claims and a request that wakes
// are one trace each.
func TestTraces(t *testing.T) {
	skipInFast(t) // the first build of the collector takes minutes
	t.Parallel()
	c := startCollector(t)
	whole := newServer(t)
	whole.start()
	whole.must("image", "build", "base")
	whole.stop(syscall.SIGTERM)
	front, node := whole.split()
	for _, s := range []*server{front, node} {
		s.set("BARCHAN_OTLP_ENDPOINT", c.address)
		s.set("BARCHAN_STORE_AFTER", "1ms")
	}
	front.start()
	node.start()
	front.untilWell()

	t.Run("create", func(t *testing.T) {
		front := front.in(t)
		front.create(front.localKey(), "base")
		c.has(t, "barchan: POST /", "barchan: create sandbox", "barchan: cold start", "barchan-node: node create", "barchan-node: agent start")
	})
	t.Run("claim", func(t *testing.T) {
		front := front.in(t)
		front.mustKubectl(fmt.Sprintf(poolManifests, 1, poolFor, "OnReplenish"), "apply", "-f", "-")
		front.poolFills()
		status, body := front.call(front.localKey(), http.MethodPost, "/sandboxes", map[string]any{"templateID": "py", "envVars": map[string]string{"WHO": "me"}})
		if status != http.StatusCreated {
			t.Fatalf("create = %d %s", status, body)
		}
		c.has(t, "barchan: POST /", "barchan: create sandbox", "barchan: claim member", "barchan: agent init")
		c.has(t, "barchan: POST /", "barchan: create sandbox", "barchan-node: node bind")
	})
	t.Run("SandboxClaim", func(t *testing.T) {
		front := front.in(t)
		front.mustKubectl(fmt.Sprintf(claimManifest, "traced", "claim"), "apply", "-f", "-")
		front.mustKubectl("", "wait", "--for=condition=Ready", "sandboxclaim/traced", patience)
		c.has(t, "barchan: serve SandboxClaim", "barchan: agent init")
		c.has(t, "barchan: serve SandboxClaim", "barchan-node: node bind")
		front.mustKubectl("", "delete", "sandboxclaim", "traced", patience)
	})
	t.Run("request that wakes", func(t *testing.T) {
		front := front.in(t)
		front.mustKubectl(idleManifest, "apply", "-f", "-")
		id := front.idOf("idler")
		front.untilServed(id, "/")
		front.onDisk(id)
		front.untilServed(id, "/")
		c.has(t, "barchan: sandbox request", "barchan: wake sandbox", "barchan: connect sandbox", "barchan-node: node resume", "barchan-node: agent restore")
	})
}
