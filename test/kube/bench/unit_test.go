package bench

import (
	"math"
	"strings"
	"testing"
)

// TestWrites: requests that write count, those of leases, reviews and reads do not, reads are counted apart, refused ones stand alone, and parts of a count are added up.
func TestWrites(t *testing.T) {
	text := []byte(`# TYPE apiserver_request_total counter
apiserver_request_total{code="201",group="",resource="pods",subresource="",verb="POST",version="v1"} 2
apiserver_request_total{code="202",group="",resource="pods",subresource="",verb="POST",version="v1"} 1
apiserver_request_total{code="409",group="",resource="pods",subresource="",verb="POST",version="v1"} 1
apiserver_request_total{code="201",group="",resource="pods",subresource="binding",verb="POST",version="v1"} 2
apiserver_request_total{code="200",group="agents.x-k8s.io",resource="sandboxes",subresource="status",verb="PATCH",version="v1beta1"} 5
apiserver_request_total{code="200",group="coordination.k8s.io",resource="leases",subresource="",verb="PUT",version="v1"} 100
apiserver_request_total{code="201",group="authorization.k8s.io",resource="subjectaccessreviews",subresource="",verb="POST",version="v1"} 100
apiserver_request_total{code="200",group="",resource="pods",subresource="",verb="LIST",version="v1"} 100
apiserver_request_total{code="200",group="",resource="",subresource="/metrics",verb="GET",version=""} 100
`)
	got, err := parseRequests(text, writeVerbs)
	must(t, err)
	if got["POST pods"] != 3 || got["POST pods: 409"] != 1 || got["POST pods/binding"] != 2 || got["PATCH sandboxes/status"] != 5 || got.total() != 11 || got.refused() != 1 {
		t.Errorf("writes = %v", got)
	}
	if read, err := parseRequests(text, readVerbs); err != nil || len(read) != 1 || read["LIST pods"] != 100 {
		t.Errorf("reads = %v, %v", read, err)
	}
	per := got.since(counts{"POST pods": 1, "POST pods: 409": 1, "POST pods/binding": 2}).per(2)
	if len(per) != 2 || per["POST pods"] != 1 || per["PATCH sandboxes/status"] != 2.5 {
		t.Errorf("per claim = %v", per)
	}
}

// TestReport: ratios are of medians, each over the figure it is compared with, and bars are judged in their direction.
func TestReport(t *testing.T) {
	r := newReport(claimFigures, "", "ours", "theirs")
	for i := range 3 {
		n := float64(i + 1)
		r.add("ours", turn{
			Figures: map[string]float64{claimP50: 4 * n, claimP99: 10 * n, claimRate: 30 * n, e2bP50: n, claimWrites: 11, poolFilled: 2 * n},
			Writes:  counts{"POST pods": 1}, Reads: counts{"GET sandboxtemplates": 1},
		})
		r.add("theirs", turn{
			Figures: map[string]float64{claimP50: 10 * n, claimP99: 12 * n, claimRate: 10 * n, claimWrites: 22, poolFilled: 2 * n},
			Writes:  counts{"POST pods": 1, "PUT sandboxclaims": 2},
		})
	}
	r.sum()
	want := []struct {
		name  string
		ratio float64
		met   bool
	}{{claimP50, 0.4, true}, {claimP99, 10.0 / 12, false}, {claimRate, 3, true}, {e2bP50, 0.1, true}, {claimWrites, 0.5, true}, {poolFilled, 1, true}}
	for i, w := range want {
		if got := r.Results[i]; got.Name != w.name || math.Abs(*got.Ratio-w.ratio) > 1e-9 || *got.Met != w.met {
			t.Errorf("%s: ratio %v, met %v; want %v", got.Name, *got.Ratio, *got.Met, w)
		}
	}
	var out strings.Builder
	must(t, r.writeTable(&out))
	for _, line := range []string{"<= 0.3: met, over " + claimP50, ">= 2.5: met", "<= 0.5: missed", "PUT sandboxclaims", "GET sandboxtemplates"} {
		if !strings.Contains(out.String(), line) {
			t.Errorf("the table lacks %q:\n%s", line, &out)
		}
	}
}

// TestReportAlone: without another side there is no ratio, and only what is judged by itself has a verdict.
func TestReportAlone(t *testing.T) {
	r := newReport(claimFigures, "", "ours")
	r.add("ours", turn{Figures: map[string]float64{claimP50: 4}})
	r.sum()
	if got := r.Results[0]; got.Median["ours"] != 4 || got.Ratio != nil || got.Met != nil {
		t.Errorf("result = %+v", got)
	}
	if got := r.Results[1]; len(got.Median) != 0 {
		t.Errorf("a figure that was not measured: %+v", got)
	}
	var out strings.Builder
	must(t, r.writeTable(&out))
	if strings.Contains(out.String(), "BAR") {
		t.Errorf("the table judges:\n%s", &out)
	}
	r = newReport(scaleFigures(1), "", "200", "100")
	r.add("200", turn{Figures: map[string]float64{leaderRSS: 401, replicaRSS: 300, conflicts: 0.01, scaleE2BP99: 31}})
	r.add("100", turn{Figures: map[string]float64{leaderRSS: 100, replicaRSS: 100, conflicts: 0.5, scaleE2BP99: 20}})
	out.Reset()
	r.sum()
	must(t, r.writeTable(&out))
	if strings.Contains(out.String(), "NaN") {
		t.Errorf("a ratio without figures:\n%s", &out)
	}
	for _, line := range []string{"<= 400: missed", "<= 300: met", "<= 0.02: met", "1.55", "<= 1.5: missed"} {
		if !strings.Contains(out.String(), line) {
			t.Errorf("the table lacks %q:\n%s", line, &out)
		}
	}
}
