package daemon

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"

	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/controllers/claim"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/picker"
	"github.com/barchan-dev/barchan/internal/control/webhooks"
	"github.com/barchan-dev/barchan/internal/edge/e2b"
	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/edge/peers"
	"github.com/barchan-dev/barchan/internal/edge/sshd"
	"github.com/barchan-dev/barchan/internal/node"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/resolver"
)

var update = flag.Bool("update", false, "write docs/metrics.md")

const metricsFile = "../../docs/metrics.md"

const metricsIntro = `# Metrics

Written by internal/daemon/generate.sh; do not edit.

Every metric at ` + "`/metrics`" + `, by the part of the program that has it, with the roles of the processes where that part is.
[Observability](observability.md) says where the page is, who may read it, and has the alerts and the Grafana dashboard.

- A **server** without a node of its own lacks the metrics of nodes; the process of the role **node** has them.
- A metric with labels appears with its first value. A label has few values; none names a tenant or a sandbox. Only ` + "`sandbox_template`" + ` names a template.
- The suffix is the unit: ` + "`_seconds`, `_total`" + ` for a count that only grows, ` + "`_info`" + ` for a constant 1 with labels. The others are numbers of things, or 0 or 1.
- ` + "`agent_sandbox_…`" + ` has the name, the labels, the milliseconds and the buckets that agent-sandbox gives it.
- The buckets of all other histograms end at %s seconds. With traces, their samples have exemplars.
- The metrics of the Go runtime (` + "`go_…`" + `) and of the process (` + "`process_…`" + `) are those of Prometheus' client for Go.
`

// metricsParts are the packages that have metrics, by the directory in internal, in the order of the reference.
var metricsParts = []struct {
	title, dir, roles string
	register          func(prometheus.Registerer) error
}{
	{"The API", "edge/e2b", "server, replica", e2b.Metrics},
	{"Operations on sandboxes", "control/manager", "server, replica", manager.Metrics},
	{"Claims", "control/controllers/claim", "server, controller", claim.Metrics},
	{"Claims, for agent-sandbox's dashboards", "control/controllers/claim", "controller", claim.UpstreamMetrics},
	{"Warm pools", "control/picker", "server, replica, controller", picker.Metrics},
	{"Gateway", "edge/gateway", "server, replica", gateway.Metrics},
	{"SSH", "edge/sshd", "server, replica; with `sshAddr`", sshd.Metrics},
	{"Node", "node", "server, node", node.Metrics},
	{"Addresses of sandboxes", "node/ipam", "server, node", ipam.Metrics},
	{"DNS of sandboxes", "node/resolver", "server, node", resolver.Metrics},
	{"Routes between replicas", "edge/peers", "server, replica; with `peerAddr`", peers.Metrics},
	{"Webhooks", "control/webhooks", "server", webhooks.Metrics},
	{"Audit log", "base/auditlog", "server, replica; with `auditLog`", func(to prometheus.Registerer) error {
		dir, err := os.MkdirTemp("", "barchan-audit-")
		if err == nil {
			_, err = auditlog.Open(auditlog.Config{Path: filepath.Join(dir, "log"), Log: telemetry.Discard(), Metrics: to})
		}
		return errors.Join(err, os.RemoveAll(dir))
	}},
	{"Health", "base/health", "server, replica, controller, node", func(to prometheus.Registerer) error {
		_, err := health.NewGate(telemetry.Discard(), to)
		return err
	}},
	{"Program", "base/telemetry", "server, replica, controller, node", func(to prometheus.Registerer) error {
		return telemetry.Register(to, ours{telemetry.NewRegistry("v0")})
	}},
}

// ours are a collector's metrics without those of Go and the process.
type ours struct{ prometheus.Collector }

func (o ours) Collect(to chan<- prometheus.Metric) {
	all := make(chan prometheus.Metric)
	go func() { defer close(all); o.Collector.Collect(all) }()
	for m := range all {
		if strings.Contains(m.Desc().String(), `fqName: "barchan_`) {
			to <- m
		}
	}
}

// withSamples is a Registerer that gives vectors a sample, whose labels have their own names as values: a registry shows no others.
type withSamples struct{ prometheus.Registerer }

var variableLabels = regexp.MustCompile(`variableLabels: \{([^}]+)\}`)

func (r withSamples) Register(c prometheus.Collector) error {
	var vector *prometheus.MetricVec
	switch c := c.(type) {
	case *prometheus.CounterVec:
		vector = c.MetricVec
	case *prometheus.GaugeVec:
		vector = c.MetricVec
	case *prometheus.HistogramVec:
		vector = c.MetricVec
	default:
		return r.Registerer.Register(c)
	}
	desc := make(chan *prometheus.Desc, 1)
	vector.Describe(desc)
	labels := variableLabels.FindStringSubmatch((<-desc).String())
	if labels == nil {
		return errors.New("no labels in the description of a vector")
	}
	if _, err := vector.GetMetricWithLabelValues(strings.Split(labels[1], ",")...); err != nil {
		return err
	}
	return r.Registerer.Register(c)
}

// metricsOf returns the metrics that a part registers, by name.
func metricsOf(t *testing.T, register func(prometheus.Registerer) error) []*dto.MetricFamily {
	t.Helper()
	r := prometheus.NewRegistry()
	err := register(withSamples{r})
	families, gathered := r.Gather()
	if err = errors.Join(err, gathered); err != nil {
		t.Fatal(err)
	}
	return families
}

// isUpstream: the name and the buckets are agent-sandbox's.
func isUpstream(f *dto.MetricFamily) bool {
	return f.GetName() == "agent_sandbox_claim_controller_startup_latency_ms"
}

// unit of a metric, by the conventions of Prometheus; empty if the name and the help do not say it.
func unit(f *dto.MetricFamily) string {
	name, counts := f.GetName(), f.GetType() == dto.MetricType_COUNTER
	if isUpstream(f) {
		return "milliseconds"
	}
	for _, u := range []string{"seconds", "bytes", "ratio"} {
		if !counts && strings.HasSuffix(name, "_"+u) {
			return u
		}
	}
	switch {
	case f.GetType() == dto.MetricType_HISTOGRAM:
		return ""
	case counts && strings.HasSuffix(name, "_total"):
		return "count"
	case counts:
		return ""
	case strings.HasSuffix(name, "_info"):
		return "1"
	case strings.HasPrefix(f.GetHelp(), "Number of "):
		return "count"
	case strings.HasPrefix(f.GetHelp(), "1 while "):
		return "0 or 1"
	}
	return ""
}

// boundsOf returns the ends of a histogram's buckets; nil for another metric.
func boundsOf(m *dto.Metric) (bounds []float64) {
	for _, b := range m.GetHistogram().GetBucket() {
		bounds = append(bounds, b.GetUpperBound())
	}
	return bounds
}

// TestMetricsReference compares docs/metrics.md with the registered metrics; generate.sh writes it.
func TestMetricsReference(t *testing.T) {
	var w bytes.Buffer
	fmt.Fprintf(&w, metricsIntro, strings.Trim(fmt.Sprint(telemetry.Buckets()), "[]"))
	for _, part := range metricsParts {
		families := metricsOf(t, part.register)
		if len(families) == 0 {
			t.Errorf("%s has no metrics", part.dir)
		}
		problems, err := promlint.NewWithMetricFamilies(slices.DeleteFunc(slices.Clone(families), isUpstream)).Lint()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range problems {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
		fmt.Fprintf(&w, "\n## %s\n\nRoles: %s.\n\n| Metric | Type, unit | Labels | Meaning |\n|---|---|---|---|\n", part.title, part.roles)
		for _, f := range families {
			u, m := unit(f), f.GetMetric()[0]
			if u == "" {
				t.Errorf("%s, a %s: want the suffix of a unit, or a help that begins with \"Number of\" or \"1 while\"", f.GetName(), f.GetType())
			}
			if bounds := boundsOf(m); bounds != nil && !isUpstream(f) && !slices.Equal(bounds, telemetry.Buckets()) {
				t.Errorf("%s has buckets of its own, %v", f.GetName(), bounds)
			}
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, "`"+l.GetName()+"`")
			}
			fmt.Fprintf(&w, "| `%s` | %s, %s | %s | %s |\n", f.GetName(), strings.ToLower(f.GetType().String()), u, strings.Join(labels, ", "), f.GetHelp())
		}
	}
	if *update {
		if err := os.WriteFile(metricsFile, w.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(metricsFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, w.Bytes()) {
		t.Error("docs/metrics.md differs from the metrics; run internal/daemon/generate.sh")
	}
}

var (
	newMetric      = regexp.MustCompile(`prometheus\.New(Counter|Gauge|Histogram|Summary|Untyped|Desc)`)
	newMetricsBody = regexp.MustCompile(`(?ms)^func newMetrics\(.*?^}`)
)

// TestMetricsAreReferenced finds metrics in the code that the reference cannot have: of a package that is not among the parts, or
// outside the function that the part registers.
func TestMetricsAreReferenced(t *testing.T) {
	direct := []string{"base/auditlog", "base/health", "base/telemetry"} // the reference calls what makes them
	err := fs.WalkDir(os.DirFS(".."), ".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(filepath.Join("..", path))
		if err != nil || !newMetric.Match(text) {
			return err
		}
		dir := filepath.Dir(path)
		listed := false
		for _, part := range metricsParts {
			listed = listed || part.dir == dir
		}
		if !listed {
			t.Errorf("internal/%s makes metrics; add its package to metricsParts", path)
		}
		if newMetric.Match(newMetricsBody.ReplaceAll(text, nil)) && !slices.Contains(direct, dir) {
			t.Errorf("internal/%s makes metrics outside newMetrics, which the reference does not see", path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
