package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestSamples(t *testing.T) {
	var s Samples
	for i := 100; i > 0; i-- {
		s = append(s, float64(i))
	}
	for p, want := range map[float64]float64{0.01: 1, 0.5: 50, 0.99: 99, 1: 100, 0: 1} {
		if got := s.At(p); got != want {
			t.Errorf("at(%v) = %v, want %v", p, got, want)
		}
	}
	if got := s.Mean(); got != 50.5 {
		t.Errorf("mean = %v, want 50.5", got)
	}
	if s[0] != 100 {
		t.Error("at changed the order of its samples")
	}
	if got := (Samples{}).At(0.5); !math.IsNaN(got) {
		t.Errorf("the median of nothing = %v", got)
	}
}

// TestInterval compares with the ranks of a binomial distribution: 40 and 61 of 100.
func TestInterval(t *testing.T) {
	var s Samples
	for i := range 100 {
		s = append(s, float64(i+1))
	}
	if got := s.interval(); got == nil || *got != [2]float64{40, 61} {
		t.Errorf("interval of 1 to 100 = %v, want 40 to 61", got)
	}
	if got := s[:5].interval(); got != nil {
		t.Errorf("five measurements have the interval %v", *got)
	}
}

// TestQuantiles: a distribution is described from its least to its greatest value, if there is one.
func TestQuantiles(t *testing.T) {
	var s Samples
	for i := range 101 {
		s = append(s, float64(100-i))
	}
	if got := s.quantiles(); len(got) != 21 || got[0] != 0 || got[10] != 50 || got[20] != 100 {
		t.Errorf("quantiles of 0 to 100: %v", got)
	}
	if got := s[:20].quantiles(); got != nil {
		t.Errorf("20 measurements have the quantiles %v", got)
	}
}

// TestCompare: a change beyond the noise is listed, and no other.
func TestCompare(t *testing.T) {
	history := filepath.Join(t.TempDir(), "runs.jsonl")
	for _, shift := range []float64{0, 20} {
		r := New(t.Context())
		var slower, same Samples
		for i := range 50 {
			slower, same = append(slower, 100+float64(i%5)+shift), append(same, 10+float64(i%5)+shift/50)
		}
		r.Add("create", "cold", "ms", slower).Over("bare", 80)
		r.Add("create", "warm", "ms", same)
		r.One("memory", "idle", "MB", 90+shift)
		if err := r.SaveHistory(history); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	if err := Compare([]string{history}, &out); err != nil {
		t.Fatal(err)
	}
	got := strings.Join(strings.Fields(out.String()), " ")
	for _, want := range []string{"create: cold 102 ms 122 ms +20 % 1.27 to 1.52", "1 others do; 1 have too few rounds"} {
		if !strings.Contains(got, want) {
			t.Errorf("the comparison lacks %q:\n%s", want, out.String())
		}
	}
	if strings.Contains(got, "warm") {
		t.Errorf("noise is listed:\n%s", out.String())
	}
	broken := filepath.Join(t.TempDir(), "broken")
	if err := os.WriteFile(broken, []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Compare([]string{history, broken}, &out); err == nil || !strings.Contains(err.Error(), "broken: report 1 has no figures") {
		t.Errorf("a file without figures: %v", err)
	}
}

// TestPage: the page has each figure with its floor and target, and is whole or not there.
func TestPage(t *testing.T) {
	r := New(t.Context())
	r.Version, r.Ended = "barchan <1>", r.Began.Add(time.Minute)
	r.Add("create", "cold & fresh", "ms", Samples{100, 110, 120}).Over("bare runsc", 80).AtMost(90)
	r.One("create", "nothing", "ms", math.NaN())
	r.One("exec", "rate", "MB/s", 5).AtLeast(4)
	r.Steps = []Step{{Class: "gvisor", Name: "snapshot", Mean: 4, Share: 0.05}}
	path := filepath.Join(t.TempDir(), "report.html")
	if err := r.SavePage(path); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"barchan &lt;1&gt;", "cold &amp; fresh", "110 ms", "80 bare runsc", "1.38", "&lt;= 90: missed", "&gt;= 4: met", `class="floor" x="170.7"`, "4.0 ms, 5 %", "NaN ms"} {
		if !strings.Contains(string(got), want) {
			t.Errorf("the page lacks %q:\n%s", want, got)
		}
	}
	if err := r.SavePage(filepath.Join(filepath.Dir(path), "none", "x.html")); err == nil || !strings.HasPrefix(err.Error(), "--html: ") {
		t.Errorf("a directory that is missing: %v", err)
	}
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
}

func TestReport(t *testing.T) {
	r := New(t.Context())
	r.Add("exec", "slow", "ms", Samples{20, 10, 30}).Over("nothing", 5).AtMost(15)
	r.One("memory", "count", "sandboxes", 100).AtLeast(100)
	f := r.Add("exec", "rate", "MB/s", Samples{100, 300, 200})
	if *f.P99 != 100 {
		t.Errorf("the bad end of a rate = %v, want 100", *f.P99)
	}
	var table, text bytes.Buffer
	if err := r.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"<= 15: missed", ">= 100: met", "5 nothing"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, table.String())
		}
	}
	if n := strings.Count(table.String(), "\nexec"); n != 1 {
		t.Errorf("the group exec stands in %d places:\n%s", n, table.String())
	}
	if err := r.WriteJSON(&text); err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(text.Bytes(), &back); err != nil || len(back.Figures) != 3 || back.Figures[0].Floor.Ratio != 4 {
		t.Errorf("from JSON: %+v, %v", back, err)
	}
}

// TestUnmeasured: a part of a run that failed does not cost the report of the others.
func TestUnmeasured(t *testing.T) {
	r := New(t.Context())
	r.Add("create", "nothing", "ms", nil)
	r.Add("create", "cold", "ms", Samples{100}).Over("no floor", math.NaN())
	r.Add("create", "warm", "ms", Samples{10}).Over("free", 0)
	r.Add("create", "claim", "ms", Samples{20}).Over("bare", 10)
	r.Steps = []Step{{Name: "snapshot", Mean: 4, Share: 0.05}, {Name: "mount", Mean: Samples{}.Mean(), Share: math.Inf(1)}}
	history := filepath.Join(t.TempDir(), "runs.jsonl")
	var text bytes.Buffer
	if err := errors.Join(r.SaveHistory(history), r.WriteJSON(&text)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(history+".json", text.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{history, history + ".json"} {
		back, err := readReports(path)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, f := range back[0].Figures {
			got = append(got, fmt.Sprint(f.Name, f.Median, f.Floor != nil))
		}
		if want := []string{"cold100 false", "warm10 false", "claim20 true"}; !slices.Equal(got, want) || len(back[0].Steps) != 1 {
			t.Errorf("%s has %q and %d steps, want %q and one", path, got, len(back[0].Steps), want)
		}
	}
	if len(r.Figures) != 4 || r.Figures[1].Floor == nil || len(r.Steps) != 2 {
		t.Error("the report itself has changed")
	}
}
