package report

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"

	"github.com/barchan-dev/barchan/internal/base/durable"
)

//go:embed page.html
var pageText string

var pageTemplate = template.Must(template.New("page").Parse(pageText))

// plotWidth is how wide a plot is, in the units of its picture.
const plotWidth = 260

// page is a report as HTML shows it.
type page struct {
	*Report
	Seconds     float64
	Groups      []pageGroup
	StepClasses []string
	StepRows    []stepRow
}

type pageGroup struct {
	Name    string
	Figures []pageFigure
}

type pageFigure struct {
	*Figure
	Cells struct{ Median, P99, Floor, Ratio string }
	// Plot has widths and places; zero is left out.
	Plot struct{ Median, Tail, Floor, Target float64 }
}

type stepRow struct {
	Name  string
	Cells []stepCell
}

type stepCell struct {
	Width float64
	Text  string
}

// Target is the text of a bar.
func (page) Target(b *Bar) string { return b.text() }

// writePage writes the report as one HTML file that needs no other.
func (r *Report) writePage(w io.Writer) error {
	p := page{Report: r, Seconds: r.Ended.Sub(r.Began).Seconds()}
	for _, f := range r.grouped() {
		if n := len(p.Groups); n == 0 || p.Groups[n-1].Name != f.Group {
			p.Groups = append(p.Groups, pageGroup{Name: f.Group})
		}
		g := &p.Groups[len(p.Groups)-1]
		g.Figures = append(g.Figures, plotted(f))
	}
	names, classes, of := r.stepTable()
	p.StepClasses = classes
	for _, name := range names {
		row := stepRow{Name: name}
		for _, c := range classes {
			s := of[[2]string{c, name}]
			row.Cells = append(row.Cells, stepCell{min(1, s.Share) * plotWidth, fmt.Sprintf("%.1f ms, %.0f %%", s.Mean, 100*s.Share)})
		}
		p.StepRows = append(p.StepRows, row)
	}
	return pageTemplate.Execute(w, p)
}

// plotted places a figure, its tail, its floor and its target on one scale from zero.
func plotted(f *Figure) pageFigure {
	p := pageFigure{Figure: f}
	cells := f.cells()
	p.Cells.Median, p.Cells.P99, p.Cells.Floor, p.Cells.Ratio = cells[1], cells[2], cells[4], cells[5]
	if math.IsNaN(f.Median) {
		return p
	}
	var tail, floor, target float64
	if f.P99 != nil && !math.IsNaN(*f.P99) {
		tail = *f.P99
	}
	if f.Floor != nil && !math.IsNaN(f.Floor.Median) {
		floor = f.Floor.Median
	}
	if f.Bar != nil {
		target = f.Bar.Value
	}
	if scale := max(f.Median, tail, floor, target); scale > 0 {
		at := func(v float64) float64 { return math.Round(10*v/scale*(plotWidth-4)) / 10 }
		p.Plot.Median, p.Plot.Tail, p.Plot.Floor, p.Plot.Target = at(f.Median), at(tail), at(floor), at(target)
	}
	return p
}

// SavePage writes the report as a page to a file, whole or not at all.
func (r *Report) SavePage(path string) error {
	var text bytes.Buffer
	err := r.writePage(&text)
	if err == nil {
		err = durable.WriteFile(path, text.Bytes(), 0o644)
	}
	if err != nil {
		return fmt.Errorf("--html: %w", err)
	}
	return nil
}
