package chart

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// TestAlertsAndDashboard: each metric that alerts and the dashboard ask for is one that docs/metrics.md has. Each alert has its
// section in docs/observability.md, and its series in the tests of alerts.
func TestAlertsAndDashboard(t *testing.T) {
	read := func(name string) string {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	metrics, page, alerts, dashboard, tested := read("../../docs/metrics.md"), read("../../docs/observability.md"), read("barchan/files/alerts.yaml"), read("barchan/files/dashboard.json"), read("../prometheus/alerts_test.yaml")
	names := regexp.MustCompile(`barchan_[a-z_]+`)
	for file, text := range map[string]string{"alerts.yaml": alerts, "dashboard.json": dashboard} {
		for _, name := range names.FindAllString(text, -1) {
			known := false
			for _, suffix := range []string{"", "_bucket", "_count"} {
				base, ok := strings.CutSuffix(name, suffix)
				known = known || ok && strings.Contains(metrics, "`"+base+"`")
			}
			if !known {
				t.Errorf("%s asks for %s, which docs/metrics.md lacks", file, name)
			}
		}
	}
	checkRules(t, alerts, page, tested)
	if !json.Valid([]byte(dashboard)) {
		t.Error("dashboard.json is no JSON")
	}
}

// checkRules checks what each alert needs beside its expression.
func checkRules(t *testing.T, alerts, page, tested string) {
	t.Helper()
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Labels      map[string]string
				Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal([]byte(alerts), &rules); err != nil || len(rules.Groups) != 1 || len(rules.Groups[0].Rules) < 10 {
		t.Fatalf("alerts.yaml: %v", err)
	}
	for _, r := range rules.Groups[0].Rules {
		if !strings.Contains(page, "\n### "+r.Alert+"\n") || r.Annotations["runbook"] != "docs/observability.md#"+strings.ToLower(r.Alert) {
			t.Errorf("%s has no section in docs/observability.md, or another runbook: %s", r.Alert, r.Annotations["runbook"])
		}
		if s := r.Labels["severity"]; s != "critical" && s != "warning" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("%s has no severity, summary or description", r.Alert)
		}
		if !strings.Contains(tested, `alertname="`+r.Alert+`"`) {
			t.Errorf("%s is not in alerts_test.yaml", r.Alert)
		}
	}
}
