package bench

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Names of figures.
const (
	claimP50    = "SandboxClaim to Ready, one at a time, p50"
	claimP99    = "SandboxClaim to Ready, 20 at once, p99"
	claimRate   = "SandboxClaims a second, 20 at once"
	e2bP50      = "E2B create, one at a time, p50"
	claimWrites = "API writes per claim with refill, 20 at once"
	poolFilled  = "warm pool filled"
)

// figure is one of a report. A side's median is compared with the figure over of the last side, or is judged by itself
// where there is no such figure. Without a bar it is only reported.
type figure struct {
	name, unit, over string
	bar              *bar
}

// claimFigures are those of the turns of sides.
var claimFigures = []figure{
	{claimP50, "ms", claimP50, &bar{Value: 0.5}},
	{claimP99, "ms", claimP99, &bar{Value: 0.5}},
	{claimRate, "/s", claimRate, &bar{Value: 2.5, AtLeast: true}},
	{e2bP50, "ms", claimP50, &bar{Value: 0.3}},
	{claimWrites, "", claimWrites, &bar{Value: 0.55}},
	{poolFilled, "s", poolFilled, &bar{Value: 1}},
}

// bar is what the first side's ratio shall keep to, or its median.
type bar struct {
	Value   float64 `json:"value"`
	AtLeast bool    `json:"atLeast"` // else at most
}

func (b bar) met(value float64) bool {
	if b.AtLeast {
		return value >= b.Value
	}
	return value <= b.Value
}

// turn is what one side's turn showed.
type turn struct {
	Figures map[string]float64 `json:"figures"`
	Writes  counts             `json:"writesPerClaim"`
	Reads   counts             `json:"readsPerClaim,omitempty"` // BenchmarkClaims alone has them
	// Processor is in ms, from the first of the claims that are made at once to their last; refills that come later are not in it.
	Processor counts `json:"processorMillisPerClaim,omitempty"` // likewise
}

// report is all that a run found.
type report struct {
	Began   time.Time         `json:"began"`
	Ended   time.Time         `json:"ended"`
	Machine string            `json:"machine"`
	Load    string            `json:"load"` // when it began
	Setup   string            `json:"setup"`
	Sides   []string          `json:"sides"` // the first is judged
	Turns   map[string][]turn `json:"turns"` // by side
	Results []result          `json:"results"`

	figures []figure
}

// result is a figure of all turns. Ratio is absent without another side, Bar and Met where nothing is judged.
type result struct {
	Name   string             `json:"name"`
	Unit   string             `json:"unit,omitempty"`
	Median map[string]float64 `json:"median"` // by side
	Over   string             `json:"over,omitempty"`
	Ratio  *float64           `json:"ratio,omitempty"`
	Bar    *bar               `json:"bar,omitempty"`
	Met    *bool              `json:"met,omitempty"`
}

func newReport(figures []figure, setup string, sides ...string) *report {
	r := &report{
		Began: time.Now(), Machine: fmt.Sprintf("%d CPUs, %s, %s/%s", runtime.NumCPU(), runtime.Version(), runtime.GOOS, runtime.GOARCH),
		Setup: setup, Sides: sides, Turns: map[string][]turn{}, figures: figures,
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		r.Load = strings.Join(strings.Fields(string(text))[:3], " ")
	}
	return r
}

func (r *report) add(side string, t turn) { r.Turns[side] = append(r.Turns[side], t) }

// sum computes Results from Turns.
func (r *report) sum() {
	r.Results = nil
	for _, f := range r.figures {
		out := result{Name: f.name, Unit: f.unit, Median: map[string]float64{}}
		for _, side := range r.Sides {
			if m := r.median(side, f.name); !math.IsNaN(m) {
				out.Median[side] = m
			}
		}
		value, ok := out.Median[r.Sides[0]]
		if f.over != "" {
			value /= r.median(r.Sides[len(r.Sides)-1], f.over)
			if ok = ok && len(r.Sides) > 1 && !math.IsNaN(value); ok {
				out.Over, out.Ratio = f.over, &value
			}
		}
		if ok {
			out.judge(f.bar, value)
		}
		r.Results = append(r.Results, out)
	}
}

func (f *result) judge(by *bar, value float64) {
	if by != nil {
		f.Bar, f.Met = by, new(by.met(value))
	}
}

// median is that of a side's turns; NaN if none has the figure.
func (r *report) median(side, figure string) float64 {
	var all []float64
	for _, t := range r.Turns[side] {
		if v, ok := t.Figures[figure]; ok {
			all = append(all, v)
		}
	}
	return percentile(all, 0.5)
}

// percentile is by nearest rank; NaN without values.
func percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	return slices.Sorted(slices.Values(values))[max(0, int(math.Ceil(p*float64(len(values))))-1)]
}

// writeTo writes the report to a file, or to stdout.
func (r *report) writeTo(path string, asJSON bool) error {
	r.sum()
	out := os.Stdout
	if path != "" {
		file, err := os.Create(path)
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }()
		out = file
	}
	if asJSON {
		enc := json.NewEncoder(out)
		enc.SetIndent("", "  ")
		return enc.Encode(r)
	}
	return r.writeTable(out)
}

func (r *report) writeTable(out io.Writer) error {
	fmt.Fprintf(out, "%s\n%s, %.0f s, load at the start %s\n%d turns of each side; %s\n",
		r.Machine, r.Began.UTC().Format("2006-01-02 15:04 MST"), r.Ended.Sub(r.Began).Seconds(), r.Load, len(r.Turns[r.Sides[0]]), r.Setup)
	fmt.Fprint(out, "kubelets are played by kwok, and agents by one server that accepts everything: no container starts\n\n")
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "MEDIAN OF THE TURNS\t%s", strings.Join(r.Sides, "\t"))
	if slices.ContainsFunc(r.Results, func(f result) bool { return f.Bar != nil }) {
		fmt.Fprint(w, "\tRATIO\tBAR")
	}
	fmt.Fprintln(w)
	for _, f := range r.Results {
		cells := []string{f.Name}
		for _, side := range r.Sides {
			cells = append(cells, number(f.Median, side, f.Unit))
		}
		if f.Ratio != nil {
			cells = append(cells, fmt.Sprintf("%.2f", *f.Ratio))
		} else if f.Bar != nil {
			cells = append(cells, "")
		}
		if f.Bar != nil {
			cells = append(cells, f.verdict())
		}
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	r.writeCounts(w, "API WRITES", func(t turn) counts { return t.Writes })
	r.writeCounts(w, "API READS", func(t turn) counts { return t.Reads })
	r.writeCounts(w, "PROCESSOR TIME, MS,", func(t turn) counts { return t.Processor })
	return w.Flush()
}

func number(of map[string]float64, side, unit string) string {
	v, ok := of[side]
	if !ok {
		return "-"
	}
	return strings.TrimSpace(fmt.Sprintf("%.*f %s", digits(v), v, unit))
}

// digits is how many a figure has after the point.
func digits(v float64) int {
	if v < 1 {
		return 3
	}
	return 1
}

func (f result) verdict() string {
	sign, verdict := "<=", "missed"
	if f.Bar.AtLeast {
		sign = ">="
	}
	if *f.Met {
		verdict = "met"
	}
	if f.Over != "" && f.Over != f.Name {
		verdict += ", over " + f.Over
	}
	return fmt.Sprintf("%s %g: %s", sign, f.Bar.Value, verdict)
}

// writeCounts lists what was counted for a claim, of the turns' means, the most first.
func (r *report) writeCounts(out io.Writer, title string, of func(turn) counts) {
	mean := map[string]counts{}
	for side, turns := range r.Turns {
		for _, t := range turns {
			for key, n := range of(t) {
				if mean[key] == nil {
					mean[key] = counts{}
				}
				mean[key][side] += n / float64(len(turns))
			}
		}
	}
	if len(mean) == 0 {
		return
	}
	fmt.Fprintf(out, "\n%s PER CLAIM, MEAN\n", title)
	keys := slices.SortedFunc(maps.Keys(mean), func(a, b string) int {
		return cmp.Or(cmp.Compare(mean[b].total(), mean[a].total()), strings.Compare(a, b))
	})
	for _, key := range keys {
		cells := []string{key}
		for _, side := range r.Sides {
			cells = append(cells, fmt.Sprintf("%.2f", mean[key][side]))
		}
		fmt.Fprintln(out, strings.Join(cells, "\t"))
	}
}
