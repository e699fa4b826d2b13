package report

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Figure is one line of the table.
type Figure struct {
	Group  string   `json:"group"`
	Name   string   `json:"name"`
	Unit   string   `json:"unit"`
	Median float64  `json:"median"`
	P99    *float64 `json:"p99,omitempty"` // of a rate: what 99 % are at least
	N      int      `json:"n"`
	// Interval holds the median at 95 % confidence; nil: there are too few measurements.
	Interval *[2]float64 `json:"interval,omitempty"`
	// Quantiles are at 0, 5, 10 to 100 %, for plots of the distribution; nil: there are fewer measurements.
	Quantiles []float64 `json:"quantiles,omitempty"`
	Floor     *Floor    `json:"floor,omitempty"`
	Bar       *Bar      `json:"bar,omitempty"`
}

// Floor is what the same would cost without us, measured in the same run.
type Floor struct {
	Name   string  `json:"name"`
	Median float64 `json:"median"`
	Ratio  float64 `json:"ratio"` // of the figure's median to the floor's
}

// Bar is what a figure shall keep to.
type Bar struct {
	Value   float64 `json:"value"`
	AtLeast bool    `json:"atLeast"` // else at most
	Met     bool    `json:"met"`
}

// Step is what one step takes of a cold create, on average.
type Step struct {
	Class string  `json:"class"`
	Name  string  `json:"name"`
	Mean  float64 `json:"meanMilliseconds"`
	Share float64 `json:"share"` // of the whole create by the REST API
}

// Report is all that a run found out.
type Report struct {
	Began   time.Time `json:"began"`
	Ended   time.Time `json:"ended"`
	Machine string    `json:"machine"`
	Version string    `json:"version"`
	Load    string    `json:"load"`            // when it began
	Quick   bool      `json:"quick,omitempty"` // a tenth of the rounds
	Note    string    `json:"note,omitempty"`
	Figures []*Figure `json:"figures"`
	Steps   []Step    `json:"steps"`
}

// New returns the report of a run that begins now on this machine.
func New(ctx context.Context) *Report {
	return &Report{Began: time.Now(), Load: loadAverage(), Machine: describeMachine(ctx)}
}

// Add puts a figure of several measurements into the report.
func (r *Report) Add(group, name, unit string, s Samples) *Figure {
	tail := 0.99
	if unit == "MB/s" { // the bad end of a rate is the low one
		tail = 0.01
	}
	p99 := s.At(tail)
	f := &Figure{Group: group, Name: name, Unit: unit, Median: s.At(0.5), P99: &p99, N: len(s), Interval: s.interval(), Quantiles: s.quantiles()}
	r.Figures = append(r.Figures, f)
	return f
}

// One puts a figure that was measured once into the report.
func (r *Report) One(group, name, unit string, value float64) *Figure {
	f := &Figure{Group: group, Name: name, Unit: unit, Median: value, N: 1}
	r.Figures = append(r.Figures, f)
	return f
}

// Over sets the floor of a figure.
func (f *Figure) Over(name string, median float64) *Figure {
	f.Floor = &Floor{Name: name, Median: median, Ratio: f.Median / median}
	return f
}

// AtMost sets the greatest median that a figure shall have.
func (f *Figure) AtMost(v float64) {
	f.Bar = &Bar{Value: v, Met: f.Median <= v}
}

// AtLeast sets the least median that a figure shall have.
func (f *Figure) AtLeast(v float64) {
	f.Bar = &Bar{Value: v, AtLeast: true, Met: f.Median >= v}
}

// MarshalJSON leaves out what was not measured, since JSON has no NaN: figures without a median, floors without a ratio, and steps.
func (r *Report) MarshalJSON() ([]byte, error) {
	type plain Report
	measured := plain(*r)
	measured.Figures = []*Figure{}
	for _, f := range r.grouped() {
		if !finite(f.Median) {
			continue
		}
		shown := *f
		if f.P99 != nil && !finite(*f.P99) {
			shown.P99 = nil
		}
		if f.Floor != nil && !finite(f.Floor.Median, f.Floor.Ratio) {
			shown.Floor = nil
		}
		measured.Figures = append(measured.Figures, &shown)
	}
	measured.Steps = slices.DeleteFunc(slices.Clone(r.Steps), func(s Step) bool { return !finite(s.Mean, s.Share) })
	return json.Marshal(measured)
}

func finite(values ...float64) bool {
	return !slices.ContainsFunc(values, func(v float64) bool { return math.IsNaN(v) || math.IsInf(v, 0) })
}

// WriteJSON writes the report as --json prints it.
func (r *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteTable writes the report as text.
func (r *Report) WriteTable(w io.Writer) error {
	fmt.Fprintf(w, "%s\n%s\n%s, %.0f s, load at the start %s\n\n", r.Version, r.Machine, r.Began.UTC().Format("2006-01-02 15:04 MST"),
		r.Ended.Sub(r.Began).Seconds(), strings.TrimSpace(r.Load+"\n"+r.Note))
	if err := WriteFigures(w, r.grouped()); err != nil {
		return err
	}
	fmt.Fprintln(w, "\nP99 of a rate is what 99 % of the rounds reach at least. RATIO is the median over the floor's.")
	return r.writeSteps(w)
}

// WriteFigures prints figures, of which those of a group stand together.
func WriteFigures(w io.Writer, figures []*Figure) error {
	var text bytes.Buffer
	tw := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "FIGURE\tMEDIAN\tP99\tN\tFLOOR\tRATIO\tBAR")
	group := ""
	for _, f := range figures {
		if f.Group != group {
			group = f.Group
			fmt.Fprintf(tw, "%s\t\t\t\t\t\t\n", group)
		}
		fmt.Fprintln(tw, strings.Join(f.cells(), "\t"))
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for line := range strings.Lines(text.String()) {
		fmt.Fprintln(w, strings.TrimRight(line, " \n")) // empty cells are filled up
	}
	return nil
}

// grouped returns the figures with those of a group together, groups as they first came.
func (r *Report) grouped() []*Figure {
	place := map[string]int{}
	for _, f := range r.Figures {
		if _, ok := place[f.Group]; !ok {
			place[f.Group] = len(place)
		}
	}
	sorted := slices.Clone(r.Figures)
	slices.SortStableFunc(sorted, func(a, b *Figure) int { return place[a.Group] - place[b.Group] })
	return sorted
}

func (f *Figure) cells() []string {
	cells := []string{"  " + f.Name, number(f.Median) + " " + f.Unit, "", fmt.Sprint(f.N), "", "", ""}
	if f.P99 != nil {
		cells[2] = number(*f.P99)
	}
	if f.Floor != nil {
		cells[4], cells[5] = fmt.Sprintf("%s %s", number(f.Floor.Median), f.Floor.Name), number(f.Floor.Ratio)
	}
	if f.Bar != nil {
		cells[6] = f.Bar.text()
	}
	return cells
}

func (b *Bar) text() string {
	sign, verdict := "<=", "missed"
	if b.AtLeast {
		sign = ">="
	}
	if b.Met {
		verdict = "met"
	}
	return fmt.Sprintf("%s %s: %s", sign, number(b.Value), verdict)
}

// writeSteps prints where a cold create goes, a column for each class.
func (r *Report) writeSteps(w io.Writer) error {
	names, classes, of := r.stepTable()
	if len(names) == 0 {
		return nil
	}
	fmt.Fprintln(w, "\nSteps of a cold create, mean and share of the whole. Chains run side by side (address and network beside snapshot\n"+
		"and mount; bundle beside record; agent beside hold), so the shares of the steps add up to more than the node's.")
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(tw, "STEP\t%s\t\n", strings.Join(classes, " ms\tshare\t")+" ms\tshare")
	for _, name := range names {
		row := []string{name}
		for _, c := range classes {
			s := of[[2]string{c, name}]
			row = append(row, fmt.Sprintf("%.1f", s.Mean), fmt.Sprintf("%.0f %%", 100*s.Share))
		}
		fmt.Fprintln(tw, strings.Join(row, "\t")+"\t")
	}
	return tw.Flush()
}

// stepTable returns the rows and columns of the steps, and each step by class and name.
func (r *Report) stepTable() (names, classes []string, of map[[2]string]Step) {
	of = map[[2]string]Step{}
	for _, s := range r.Steps {
		if !slices.Contains(names, s.Name) {
			names = append(names, s.Name)
		}
		if !slices.Contains(classes, s.Class) {
			classes = append(classes, s.Class)
		}
		of[[2]string{s.Class, s.Name}] = s
	}
	return names, classes, of
}

// number prints three significant digits, and whole numbers from 100 on.
func number(v float64) string {
	switch a := math.Abs(v); {
	case a >= 100 || v == math.Trunc(v):
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 1:
		return fmt.Sprintf("%.2f", v)
	default:
		return fmt.Sprintf("%.3f", v)
	}
}

func loadAverage() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(b))[:3], " ")
}

// describeMachine describes the machine in a line.
func describeMachine(ctx context.Context) string {
	model := "unknown processor"
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
				model = strings.TrimSpace(value)
				break
			}
		}
	}
	memory := "unknown memory"
	if b, err := os.ReadFile("/proc/meminfo"); err == nil {
		var kib float64
		if _, err := fmt.Sscanf(string(b), "MemTotal: %f kB", &kib); err == nil {
			memory = fmt.Sprintf("%.0f GiB", kib/(1<<20))
		}
	}
	kernel, err := exec.CommandContext(ctx, "uname", "-sr").Output()
	if err != nil {
		kernel = []byte("unknown kernel")
	}
	return fmt.Sprintf("%d CPUs (%s), %s, %s, %s", runtime.NumCPU(), model, memory, strings.TrimSpace(string(kernel)), runtime.Version())
}
