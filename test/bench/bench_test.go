package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func TestSamples(t *testing.T) {
	var s samples
	for i := 100; i > 0; i-- {
		s = append(s, float64(i))
	}
	for p, want := range map[float64]float64{0.01: 1, 0.5: 50, 0.99: 99, 1: 100, 0: 1} {
		if got := s.at(p); got != want {
			t.Errorf("at(%v) = %v, want %v", p, got, want)
		}
	}
	if got := s.mean(); got != 50.5 {
		t.Errorf("mean = %v, want 50.5", got)
	}
	if s[0] != 100 {
		t.Error("at changed the order of its samples")
	}
	if got := (samples{}).at(0.5); !math.IsNaN(got) {
		t.Errorf("the median of nothing = %v", got)
	}
}

// TestInterval compares with the ranks of a binomial distribution: 40 and 61 of 100.
func TestInterval(t *testing.T) {
	var s samples
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
	var s samples
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
		r := newReport()
		var slower, same samples
		for i := range 50 {
			slower, same = append(slower, 100+float64(i%5)+shift), append(same, 10+float64(i%5)+shift/50)
		}
		r.add("create", "cold", "ms", slower).over("bare", 80)
		r.add("create", "warm", "ms", same)
		r.one("memory", "idle", "MB", 90+shift)
		if err := r.saveHistory(history); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	if err := runCompare([]string{history}, &out); err != nil {
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
	if err := runCompare([]string{history, broken}, &out); err == nil || !strings.Contains(err.Error(), "broken: report 1 has no figures") {
		t.Errorf("a file without figures: %v", err)
	}
}

func TestParseBenchmark(t *testing.T) {
	const out = "goos: linux\n" +
		"BenchmarkAPI/floor/etcd-create-2 \t 2000\t 639000 ns/op\t 612.5 p50-µs\t 900.0 p99-µs\n" +
		"BenchmarkAPI/get \t 2000\t 150000 ns/op\t 148.0 p50-µs\n" +
		"BenchmarkOther/get-2 \t 1\t 7 ns/op\n" +
		"PASS\n"
	got := parseBenchmark(out, "BenchmarkAPI/")
	if len(got) != 2 {
		t.Fatalf("%d cases, want 2: %v", len(got), got)
	}
	if r := got["floor/etcd-create"]; r.n != 2000 || r.metrics["p50-µs"] != 612.5 || r.metrics["p99-µs"] != 900 {
		t.Errorf("the floor = %+v", r)
	}
	if r := got["get"]; r.metrics["p50-µs"] != 148 {
		t.Errorf("get = %+v", r)
	}
}

// TestPage: the page has each figure with its floor and target, and is whole or not there.
func TestPage(t *testing.T) {
	r := newReport()
	r.Version, r.Ended = "barchan <1>", r.Began.Add(time.Minute)
	r.add("create", "cold & fresh", "ms", samples{100, 110, 120}).over("bare runsc", 80).atMost(90)
	r.one("create", "nothing", "ms", math.NaN())
	r.one("exec", "rate", "MB/s", 5).atLeast(4)
	r.Steps = []step{{Class: "gvisor", Name: "snapshot", Mean: 4, Share: 0.05}}
	path := filepath.Join(t.TempDir(), "report.html")
	if err := r.savePage(path); err != nil {
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
	if err := r.savePage(filepath.Join(filepath.Dir(path), "none", "x.html")); err == nil || !strings.HasPrefix(err.Error(), "--html: ") {
		t.Errorf("a directory that is missing: %v", err)
	}
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 1 {
		t.Errorf("left: %v", left)
	}
}

// TestDeadClusters: what another process may use stays.
func TestDeadClusters(t *testing.T) {
	namespaces := []string{"bcl31sb", "bcl31r1", "bcl31r12", "bcl72r1", "bcl3", "bclxr1", "be123", "abcl31r1", "bcl31r1x"}
	for name, c := range map[string]struct {
		tests []int
		want  string
	}{
		"no user":      {nil, "map[bcl31:[bcl31sb bcl31r1 bcl31r12] bcl72:[bcl72r1]]"},
		"owner of 31":  {[]int{1003}, "map[]"}, // its further clusters may be 72
		"owner of 72":  {[]int{1007}, "map[bcl31:[bcl31sb bcl31r1 bcl31r12]]"},
		"another user": {[]int{1019}, "map[bcl31:[bcl31sb bcl31r1 bcl31r12] bcl72:[bcl72r1]]"},
	} {
		if got := fmt.Sprint(deadClusters(namespaces, c.tests)); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// TestSweepCluster: all of a cluster is removed.
func TestSweepCluster(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: network namespaces need root")
	}
	tag := fmt.Sprintf("bcl9%d", os.Getpid())
	must := func(line string) {
		t.Helper()
		args := strings.Fields(line)
		if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", line, err, out)
		}
	}
	must("ip netns add " + tag + "sb")
	must("ip netns add " + tag + "r1")
	must("ip link add " + tag + " type bridge")
	left := exec.CommandContext(t.Context(), "ip", "netns", "exec", tag+"r1", "sleep", "600")
	if err := left.Start(); err != nil {
		t.Fatal(err)
	}
	eventually.NoError(t, "its process is in the namespace", func() error {
		out, err := exec.CommandContext(t.Context(), "ip", "netns", "pids", tag+"r1").CombinedOutput()
		if err == nil && strings.TrimSpace(string(out)) != strconv.Itoa(left.Process.Pid) {
			err = fmt.Errorf("there are %q", out)
		}
		return err
	})
	if err := sweepCluster(t.Context(), tag, []string{tag + "sb", tag + "r1"}); err != nil {
		_ = left.Process.Kill()
		t.Error(err)
	}
	_ = left.Wait()
	for _, path := range []string{"/run/netns/" + tag + "sb", "/run/netns/" + tag + "r1", "/sys/class/net/" + tag} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s is left", path)
		}
	}
}

// TestSweepFiles: a directory is removed once it has no user.
func TestSweepFiles(t *testing.T) {
	held, gone := filepath.Join(t.TempDir(), "bcl-held"), filepath.Join(t.TempDir(), "bcl-gone")
	for _, dir := range []string{held, gone} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		long := time.Now().Add(-time.Hour)
		f, err := os.Create(filepath.Join(dir, "f"))
		if err != nil {
			t.Fatal(err)
		}
		if dir == gone {
			_ = f.Close()
		} else {
			defer func() { _ = f.Close() }()
		}
		if err := errors.Join(os.Chtimes(dir, long, long), sweepFiles(dir, []int{os.Getpid()})); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(held); err != nil {
		t.Errorf("a directory in use was removed: %v", err)
	}
	if _, err := os.Stat(gone); err == nil {
		t.Error("an unused directory is left")
	}
}

func TestReadSteps(t *testing.T) {
	const metrics = "# HELP barchan_node_step_seconds Time.\n" +
		"barchan_node_step_seconds_bucket{runtime=\"gvisor\",step=\"start\",le=\"0.1\"} 1\n" +
		"barchan_node_step_seconds_sum{runtime=\"gvisor\",step=\"start\"} 0.25\n" +
		"barchan_node_step_seconds_count{runtime=\"gvisor\",step=\"start\"} 2\n" +
		"barchan_node_step_seconds_sum{runtime=\"runc\",step=\"start\"} 9\n"
	got, err := readSteps(strings.NewReader(metrics), "gvisor")
	if err != nil || len(got) != 1 || got["start"] != (stepTime{0.25, 2}) {
		t.Errorf("steps = %v, %v", got, err)
	}
}

func TestReport(t *testing.T) {
	r := newReport()
	r.add("exec", "slow", "ms", samples{20, 10, 30}).over("nothing", 5).atMost(15)
	r.one("memory", "count", "sandboxes", 100).atLeast(100)
	f := r.add("exec", "rate", "MB/s", samples{100, 300, 200})
	if *f.P99 != 100 {
		t.Errorf("the bad end of a rate = %v, want 100", *f.P99)
	}
	var table, text bytes.Buffer
	if err := r.writeTable(&table); err != nil {
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
	if err := r.writeJSON(&text); err != nil {
		t.Fatal(err)
	}
	var back report
	if err := json.Unmarshal(text.Bytes(), &back); err != nil || len(back.Figures) != 3 || back.Figures[0].Floor.Ratio != 4 {
		t.Errorf("from JSON: %+v, %v", back, err)
	}
}

// TestUnmeasured: a part of a run that failed does not cost the report of the others.
func TestUnmeasured(t *testing.T) {
	r := newReport()
	r.add("create", "nothing", "ms", nil)
	r.add("create", "cold", "ms", samples{100}).over("no floor", math.NaN())
	r.add("create", "warm", "ms", samples{10}).over("free", 0)
	r.add("create", "claim", "ms", samples{20}).over("bare", 10)
	r.Steps = []step{{Name: "snapshot", Mean: 4, Share: 0.05}, {Name: "mount", Mean: samples{}.mean(), Share: math.Inf(1)}}
	history := filepath.Join(t.TempDir(), "runs.jsonl")
	var text bytes.Buffer
	if err := errors.Join(r.saveHistory(history), r.writeJSON(&text)); err != nil {
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

func TestTemplatesAreJSON(t *testing.T) {
	var v map[string]any
	if err := json.Unmarshal([]byte(templateOf("runc")), &v); err != nil {
		t.Error(err)
	}
}

func TestParse(t *testing.T) {
	var talk bytes.Buffer
	if _, err := parse([]string{"-only", "exec,nope"}, &talk); err == nil || !strings.Contains(err.Error(), "nope") {
		t.Errorf("an unknown part = %v", err)
	}
	o, err := parse([]string{"--quick", "--only", "exec,api"}, &talk)
	if err != nil || len(o.wanted()) != 2 || o.rounds(500) != 50 || o.rounds(3) != 2 {
		t.Errorf("options = %+v, %v", o, err)
	}
}

// TestInterrupted ends a run in its second chapter: the first has been printed by then, and is in
// the table at the end.
func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var log, table bytes.Buffer
	b := &bench{report: newReport(), log: &log, parts: []part{
		{name: "first", alone: true, measure: func(_ context.Context, b *bench) error {
			b.report.one("first", "what was measured", "ms", 12.3)
			return nil
		}},
		{name: "second", alone: true, measure: func(ctx context.Context, _ *bench) error {
			if !strings.Contains(log.String(), "what was measured  12.3 ms") {
				t.Errorf("the first chapter is not printed when the second begins:\n%s", log.String())
			}
			cancel()
			<-ctx.Done()
			return ctx.Err()
		}},
	}}
	if err := b.run(ctx, &table); !errors.Is(err, context.Canceled) {
		t.Errorf("run = %v, want canceled", err)
	}
	if !strings.Contains(table.String(), "what was measured  12.3 ms") {
		t.Errorf("the table lacks what was done:\n%s", table.String())
	}
}
