package alerts

import (
	"encoding/json"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
)

const chart = "../../packaging/chart/barchan/files/"

// TestLabels: each expression of the Grafana dashboard and of the alerts is one of PromQL, and asks for labels that docs/metrics.md has.
func TestLabels(t *testing.T) {
	known := documented(t)
	for name, expr := range expressions(t) {
		parsed, err := language.ParseExpr(strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*").Replace(expr))
		if err != nil {
			t.Errorf("%s: %s: %v", name, expr, err)
			continue
		}
		for _, label := range unknown(parsed, known) {
			t.Errorf("%s: %s: no metric of it has the label %s", name, expr, label)
		}
	}
	seeded, err := language.ParseExpr(`sum by (le, nothing) (rate(barchan_gateway_requests_total{class="2xx", status="5m"}[5m]))`)
	must(t, err)
	same(t, "a wrong expression", unknown(seeded, known), []string{"le", "nothing", "status"})
}

// documented returns the labels of each series, by its name.
func documented(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("../../docs/metrics.md")
	must(t, err)
	known, quoted := map[string][]string{}, regexp.MustCompile("`([^`]+)`")
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, " | ")
		if !strings.HasPrefix(line, "| `barchan_") || len(cells) < 4 {
			continue
		}
		name, all := strings.Trim(cells[0], "| `"), []string{"instance", "job"}
		for _, label := range quoted.FindAllStringSubmatch(cells[2], -1) {
			all = append(all, label[1])
		}
		known[name] = all
		if strings.HasPrefix(cells[1], "histogram") {
			known[name+"_count"], known[name+"_sum"], known[name+"_bucket"] = all, all, append(slices.Clone(all), "le")
		}
	}
	if len(known) < 50 {
		t.Fatalf("docs/metrics.md has %d series", len(known))
	}
	return known
}

// expressions returns those of the dashboard's panels and of the alerts, by title.
func expressions(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	text, err := os.ReadFile(chart + "dashboard.json")
	must(t, err)
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ RefID, Expr string }
		}
	}
	must(t, json.Unmarshal(text, &dashboard))
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			found["panel "+p.Title+" "+target.RefID] = target.Expr
		}
	}
	groups, errs := rulefmt.ParseFile(chart+"alerts.yaml", false, model.UTF8Validation, language, slog.New(slog.DiscardHandler))
	for _, err := range errs {
		t.Fatal(err)
	}
	for _, g := range groups.Groups {
		for _, r := range g.Rules {
			found["alert "+r.Alert] = r.Expr
		}
	}
	if len(found) < 40 {
		t.Fatalf("%d expressions", len(found))
	}
	return found
}

// unknown returns the labels that an expression selects or groups by and that its metrics, as far as they are ours, do not have.
func unknown(expr parser.Expr, known map[string][]string) (wrong []string) {
	var all []string
	others := false
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		v, ok := node.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		has, ours := known[v.Name]
		others = others || !ours
		all = append(all, has...)
		for _, m := range v.LabelMatchers {
			if ours && m.Name != labels.MetricName && !slices.Contains(has, m.Name) {
				wrong = append(wrong, m.Name)
			}
		}
		return nil
	})
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		if a, ok := node.(*parser.AggregateExpr); ok && !others && !a.Without {
			for _, label := range a.Grouping {
				if !slices.Contains(all, label) {
					wrong = append(wrong, label)
				}
			}
		}
		return nil
	})
	return wrong
}
