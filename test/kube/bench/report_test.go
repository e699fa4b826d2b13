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

// figures lists what is reported: each with the figure of the other side that its ratio is over, and with the bar of that ratio.
var figures = []struct {
	name, unit, over string
	bar              bar
}{
	{claimP50, "ms", claimP50, bar{Value: 0.5}},
	{claimP99, "ms", claimP99, bar{Value: 0.5}},
	{claimRate, "/s", claimRate, bar{Value: 2.5, AtLeast: true}},
	{e2bP50, "ms", claimP50, bar{Value: 0.3}},
	{claimWrites, "", claimWrites, bar{Value: 0.55}},
	{poolFilled, "s", poolFilled, bar{Value: 1}},
}

// bar is what a ratio shall keep to.
type bar struct {
	Value   float64 `json:"value"`
	AtLeast bool    `json:"atLeast"` // else at most
}

func (b bar) met(ratio float64) bool {
	if b.AtLeast {
		return ratio >= b.Value
	}
	return ratio <= b.Value
}

// turn is what one side's turn showed.
type turn struct {
	Figures map[string]float64 `json:"figures"`
	Writes  writes             `json:"writesPerClaim"`
}

// report is all that a run found.
type report struct {
	Began   time.Time         `json:"began"`
	Ended   time.Time         `json:"ended"`
	Machine string            `json:"machine"`
	Load    string            `json:"load"` // when it began
	Pool    int               `json:"pool"`
	Claims  int               `json:"claims"`
	Sides   []string          `json:"sides"` // ours is the first
	Turns   map[string][]turn `json:"turns"` // by side
	Results []result          `json:"results"`
}

// result is a figure of all turns. Ratio, Bar and Met are absent without another side.
type result struct {
	Name   string             `json:"name"`
	Unit   string             `json:"unit,omitempty"`
	Median map[string]float64 `json:"median"` // by side
	Over   string             `json:"over,omitempty"`
	Ratio  *float64           `json:"ratio,omitempty"`
	Bar    *bar               `json:"bar,omitempty"`
	Met    *bool              `json:"met,omitempty"`
}

func newReport(sides []side) *report {
	r := &report{
		Began: time.Now(), Machine: fmt.Sprintf("%d CPUs, %s, %s/%s", runtime.NumCPU(), runtime.Version(), runtime.GOOS, runtime.GOARCH),
		Pool: *pool, Claims: *claims, Turns: map[string][]turn{},
	}
	if text, err := os.ReadFile("/proc/loadavg"); err == nil {
		r.Load = strings.Join(strings.Fields(string(text))[:3], " ")
	}
	for _, s := range sides {
		r.Sides = append(r.Sides, s.name)
	}
	return r
}

func (r *report) add(side string, t turn) { r.Turns[side] = append(r.Turns[side], t) }

// sum computes Results from Turns.
func (r *report) sum() {
	r.Results = nil
	for _, f := range figures {
		out := result{Name: f.name, Unit: f.unit, Median: map[string]float64{}}
		for _, side := range r.Sides {
			if m := r.median(side, f.name); !math.IsNaN(m) {
				out.Median[side] = m
			}
		}
		if len(r.Sides) > 1 {
			ratio := out.Median[r.Sides[0]] / r.median(r.Sides[1], f.over)
			met := f.bar.met(ratio)
			out.Over, out.Ratio, out.Bar, out.Met = f.over, &ratio, &f.bar, &met
		}
		r.Results = append(r.Results, out)
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
	fmt.Fprintf(out, "%s\n%s, %.0f s, load at the start %s\n%d turns of each side; a pool of %d; %d claims one at a time, %d claims 20 at once\n",
		r.Machine, r.Began.UTC().Format("2006-01-02 15:04 MST"), r.Ended.Sub(r.Began).Seconds(), r.Load, len(r.Turns[r.Sides[0]]), r.Pool, r.Claims/2, r.Claims)
	fmt.Fprint(out, "kubelets are played by kwok, and agents by one server that accepts everything: no container starts\n\n")
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "MEDIAN OF THE TURNS\t%s", strings.Join(r.Sides, "\t"))
	if len(r.Sides) > 1 {
		fmt.Fprint(w, "\tRATIO\tBAR")
	}
	fmt.Fprintln(w)
	for _, f := range r.Results {
		cells := []string{f.Name}
		for _, side := range r.Sides {
			cells = append(cells, number(f.Median, side, f.Unit))
		}
		if f.Ratio != nil {
			cells = append(cells, fmt.Sprintf("%.2f", *f.Ratio), f.verdict())
		}
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	r.writeWrites(w)
	return w.Flush()
}

func number(of map[string]float64, side, unit string) string {
	v, ok := of[side]
	if !ok {
		return "-"
	}
	return strings.TrimSpace(fmt.Sprintf("%.1f %s", v, unit))
}

func (f result) verdict() string {
	sign, verdict := "<=", "missed"
	if f.Bar.AtLeast {
		sign = ">="
	}
	if *f.Met {
		verdict = "met"
	}
	if f.Over != f.Name {
		verdict += ", over " + f.Over
	}
	return fmt.Sprintf("%s %g: %s", sign, f.Bar.Value, verdict)
}

// writeWrites lists what the writes are, of the turns' means, the most frequent first.
func (r *report) writeWrites(out io.Writer) {
	fmt.Fprintf(out, "\nAPI WRITES PER CLAIM, MEAN\n")
	mean := map[string]writes{}
	for side, turns := range r.Turns {
		for _, t := range turns {
			for key, n := range t.Writes {
				if mean[key] == nil {
					mean[key] = writes{}
				}
				mean[key][side] += n / float64(len(turns))
			}
		}
	}
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
