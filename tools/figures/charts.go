package main

import (
	"errors"
	"fmt"
	"image/color"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// Sizes in points. Two halves stand beside each other.
const (
	whole = 594
	half  = 284
)

// drawPath shows what a client waits for, from a create to a fork, each above its floor.
func drawPath(r *report) (*chart, error) {
	const row, bar = 21, 8.5
	rows := []struct{ label, group, name string }{
		{"create, agent ready", "create", "cold create by REST to agent ready, gvisor"},
		{"create, first output", "create", "create to first output, gvisor"},
		{"claim from a pool", "claim", oneClaim},
		{"claim, first output", "claim", claimOutput},
		{"pause, answered", "sleep", "pause until answered, small"},
		{"pause, memory on disk", "sleep", "pause until memory is on disk, small"},
		{"resume from RAM, by a request", "sleep", "request that wakes from RAM"},
		{"resume from disk, first output", "sleep", "resume to first command's output, small"},
		{"fork, answered", "sleep", "fork 1, until answered"},
		{"fork, first output", "sleep", "fork 1, until each has run a command"},
	}
	slices.Reverse(rows) // the axis begins at the bottom
	c := newChart("path.svg", "A sandbox from create to fork: median (and p99) in ms, and the floor of the same run in grey", whole, 42+row*vg.Length(len(rows)))
	var medians, floors plotter.Values
	var names, alt []string
	var labels, notes texts
	for i, row := range rows {
		f, err := r.find(row.group, row.name)
		if err != nil {
			return nil, err
		}
		floor := 0.0
		labels.add(f.Median, float64(i), fmt.Sprintf("%s (%s)", number(f.Median), number(f.P99)))
		said := fmt.Sprintf("%s %s", row.label, number(f.Median))
		if f.Floor != nil {
			floor = f.Floor.Median
			note := number(floor) + " " + f.Floor.Name
			notes.add(floor, float64(i), note)
			said += " over " + note
		}
		medians, floors = append(medians, f.Median), append(floors, floor)
		names, alt = append(names, row.label), append(alt, said)
	}
	slices.Reverse(alt)
	c.alt = "Bars of medians in milliseconds: " + strings.Join(alt, "; ") + "."
	for _, b := range []struct {
		values plotter.Values
		texts  texts
		color  color.Color
		offset vg.Length
	}{{medians, labels, vermillion, bar / 2}, {floors, notes, grey, -bar / 2}} {
		bars, err := plotter.NewBarChart(b.values, bar)
		if err != nil {
			return nil, err
		}
		bars.Horizontal, bars.Color, bars.Offset, bars.LineStyle.Width = true, b.color, b.offset, 0
		c.plot.Add(bars)
		if err := c.write(b.texts, vg.Point{X: 3, Y: b.offset + 1}); err != nil {
			return nil, err
		}
	}
	c.plot.NominalY(names...)
	c.fromZero(1.15 * slices.Max(medians))
	c.plot.Y.Min, c.plot.Y.Max = -0.5, float64(len(rows))-0.5
	return c, nil
}

// drawSteps shows where a cold create goes. Of chains of steps that run side by side, the longer one counts.
func drawSteps(r *report) (*chart, error) {
	segments := []struct {
		label  string
		chains [][]string
		color  color.Color
	}{
		{"API, controller, watch", [][]string{{"outside the node"}}, grey},
		{"image", [][]string{{"image"}}, pink},
		{"journal", [][]string{{"journal"}}, sky},
		{"network beside files", [][]string{{"address", "network"}, {"snapshot", "mount"}}, green},
		{"bundle beside record", [][]string{{"bundle"}, {"record"}}, orange},
		{"start of the runtime", [][]string{{"start"}}, vermillion},
		{"agent", [][]string{{"agent"}, {"hold"}}, blue},
	}
	classes := []string{"runc", "gvisor"}
	c := newChart("steps.svg", "Steps of a cold create, mean in ms: gVisor, runc", whole, 124)
	var below *plotter.BarChart
	var alt []string
	for _, s := range segments {
		values := make(plotter.Values, len(classes))
		for i, class := range classes {
			for _, chain := range s.chains {
				sum, err := r.mean(class, chain...)
				if err != nil {
					return nil, err
				}
				values[i] = max(values[i], sum)
			}
		}
		bars, err := plotter.NewBarChart(values, 26)
		if err != nil {
			return nil, err
		}
		bars.Horizontal, bars.Color, bars.LineStyle.Width = true, s.color, 0
		if below != nil {
			bars.StackOn(below)
		}
		below = bars
		c.plot.Add(bars)
		text := fmt.Sprintf("%s %.1f, %.1f", s.label, values[1], values[0])
		c.plot.Legend.Add(text, bars)
		alt = append(alt, text)
	}
	var totals texts
	for i, class := range classes {
		mean, err := r.mean(class, "create by REST")
		if err != nil {
			return nil, err
		}
		totals.add(below.BarHeight(i), float64(i), number(mean)+" in all")
	}
	if err := c.write(totals, vg.Point{X: 4}); err != nil {
		return nil, err
	}
	c.alt = "Stacked bars of the steps of a cold create, milliseconds with gVisor and with runc: " + strings.Join(alt, "; ") + "."
	c.plot.NominalY("runc", "gVisor")
	c.plot.Legend.Top = true
	c.fromZero(1.5 * max(below.BarHeight(0), below.BarHeight(1)))
	c.plot.Y.Min, c.plot.Y.Max = -0.5, 1.5
	return c, nil
}

// drawSpread shows the distribution of claims.
func drawSpread(r *report) (*chart, error) {
	c := newChart("spread.svg", "Claims: share answered within a time", half, 200)
	c.plot.Add(grid())
	var alt []string
	least, most := 1e9, 0.0
	for _, l := range []struct {
		label, name string
		color       color.Color
	}{{"claim", oneClaim, blue}, {"first output", claimOutput, vermillion}} {
		f, err := r.find("claim", l.name)
		if err != nil {
			return nil, err
		}
		if len(f.Quantiles) == 0 {
			return nil, fmt.Errorf("the report has no quantiles of %q, of which it has %d measurements", f.Name, f.N)
		}
		var points plotter.XYs
		last := len(f.Quantiles) - 1
		for i, v := range f.Quantiles {
			if i == last {
				points = append(points, plotter.XY{X: f.P99, Y: 99})
			}
			points = append(points, plotter.XY{X: v, Y: 100 * float64(i) / float64(last)})
		}
		least, most = min(least, f.Quantiles[0]), max(most, f.Quantiles[last])
		var name texts
		name.add(f.Median, 50, fmt.Sprintf("%s, of %d", l.label, f.N))
		if err := errors.Join(c.line(points, l.color), c.write(name, vg.Point{X: 6, Y: -4})); err != nil {
			return nil, err
		}
		alt = append(alt, fmt.Sprintf("%s: fastest %s, median %s, 95 %% within %s, 99 %% within %s, slowest %s", l.label,
			number(f.Quantiles[0]), number(f.Median), number(f.Quantiles[last-1]), number(f.P99), number(f.Quantiles[last])))
	}
	c.alt = "Cumulative distribution, in milliseconds. " + strings.Join(alt, "; ") + "."
	c.plot.X.Scale, c.plot.X.Label.Text = plot.LogScale{}, "ms"
	c.plot.X.Min, c.plot.X.Max = least/1.5, most*1.6
	c.plot.X.Tick.Marker = decimals(1, 2, 5)
	c.plot.Y.Min, c.plot.Y.Max = 0, 103
	c.plot.Y.Tick.Marker = plot.ConstantTicks{{Value: 0, Label: "0 %"}, {Value: 50, Label: "50 %"}, {Value: 90, Label: "90 %"}, {Value: 99, Label: "99 %"}}
	return c, nil
}

// Names of figures that two pictures have.
const (
	oneClaim    = "warm claim by REST, one after another, real sandboxes"
	claimOutput = "claim to first output of a command"
)

// drawGrowth shows times that depend on a number, which stands in the names of their figures; one without it is of one.
func drawGrowth(r *report) (*chart, error) {
	c := newChart("growth.svg", "Times that depend on a number", half, 200)
	return c, c.byNumber(r, []numbered{
		{"forks of a sandbox at once", "sleep", `fork (\d+), until answered`, vermillion},
		{"boot beside sandboxes", "boot", `boot to ready, (\d+) sandboxes (?:of runc )?adopted`, blue},
		{"claims at once, the last", "claim", `the last of (\d+) claims at once|` + oneClaim, green},
		{"address, of 65,533", "address", `reserve an address, ([\d,]+) of.*`, orange},
	})
}

// drawObjects shows what a server does beside sandboxes that sleep.
func drawObjects(r *report) (*chart, error) {
	c := newChart("objects.svg", "Beside sandboxes asleep: median in ms by their number", whole, 240)
	err := c.byNumber(r, []numbered{
		{"start of the server", objects, `boot to ready, ([1-9]\d*) asleep`, blue},
		{"watch of all", objects, `start of a watch, until it has all (\d+)`, orange},
		{"barchan ls", objects, `barchan ls, (\d+) asleep`, green},
		{"page by Kubernetes' API", objects, `page of 100 by the Kubernetes API, (\d+) asleep`, sky},
		{"page by REST", objects, `page of 100 by REST, (\d+) asleep`, pink},
	})
	c.plot.X.Min, c.plot.X.Max = 50, 2e6 // room for the legend
	return c, err
}

// numbered are the figures of a line: names is a pattern of their whole names, with the number as its group.
type numbered struct {
	label, group, names string
	color               color.Color
}

// byNumber draws lines of medians by a number, on logarithmic axes.
func (c *chart) byNumber(r *report, lines []numbered) error {
	c.plot.Add(grid())
	var alt []string
	for _, l := range lines {
		var points plotter.XYs
		var said []string
		names := regexp.MustCompile("^(?:" + l.names + ")$")
		for _, f := range r.Figures {
			m := names.FindStringSubmatch(f.Name)
			if f.Group != l.group || m == nil {
				continue
			}
			n, err := strconv.ParseFloat(strings.ReplaceAll(m[1], ",", ""), 64)
			if err != nil {
				n = 1
			}
			points = append(points, plotter.XY{X: n, Y: f.Median})
		}
		if len(points) < 2 {
			return fmt.Errorf("the report has %d figures of %q, want at least 2; run `make figures`, which measures all that it draws", len(points), l.label)
		}
		slices.SortFunc(points, func(a, b plotter.XY) int { return int(a.X - b.X) })
		for _, p := range points {
			said = append(said, fmt.Sprintf("%.0f: %s", p.X, number(p.Y)))
		}
		alt = append(alt, l.label+", "+strings.Join(said, ", "))
		if err := c.line(points, l.color, l.label); err != nil {
			return err
		}
	}
	c.alt = "Median milliseconds by number, on logarithmic axes. " + strings.Join(alt, "; ") + "."
	c.plot.X.Scale, c.plot.Y.Scale = plot.LogScale{}, plot.LogScale{}
	c.plot.X.Tick.Marker, c.plot.Y.Tick.Marker = decimals(1), decimals(1)
	c.plot.X.Label.Text, c.plot.Y.Label.Text = "number", "ms"
	c.plot.Legend.Top = true
	c.plot.X.Min, c.plot.X.Max = 0.7, 1e5
	c.plot.Y.Min, c.plot.Y.Max = c.plot.Y.Min/2, c.plot.Y.Max*2
	return nil
}

// line adds a line with its points to the picture, and to the legend by its labels.
func (c *chart) line(points plotter.XYs, col color.Color, labels ...string) error {
	line, dots, err := plotter.NewLinePoints(points)
	if err != nil {
		return err
	}
	line.Color, line.Width = col, 1.5
	dots.Color, dots.Shape, dots.Radius = col, draw.CircleGlyph{}, 2
	c.plot.Add(line, dots)
	for _, label := range labels {
		c.plot.Legend.Add(label, line, dots)
	}
	return nil
}

func grid() *plotter.Grid {
	g := plotter.NewGrid()
	g.Horizontal.Color, g.Vertical.Color = faint, faint
	return g
}

// fromZero has the horizontal axis begin at zero, with at most eight round numbers on it.
func (c *chart) fromZero(most float64) {
	c.plot.X.Min, c.plot.X.Max = 0, most
	var step float64
	for _, step = range []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000} {
		if most/step <= 8 {
			break
		}
	}
	var ticks plot.ConstantTicks
	for v := 0.0; v <= most; v += step {
		ticks = append(ticks, plot.Tick{Value: v, Label: strconv.FormatFloat(v, 'f', -1, 64)})
	}
	c.plot.X.Tick.Marker = ticks
}

// decimals marks these multiples of the powers of ten on a logarithmic axis.
func decimals(multiples ...float64) plot.TickerFunc {
	return func(least, most float64) (ticks []plot.Tick) {
		for power := -3; power < 6; power++ {
			for _, m := range multiples {
				if v := m * math.Pow10(power); v >= least && v <= most {
					ticks = append(ticks, plot.Tick{Value: v, Label: strconv.FormatFloat(v, 'f', -1, 64)})
				}
			}
		}
		return ticks
	}
}
