package main

import (
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"os"
	"path/filepath"
)

//go:embed page.html
var pageText string

var pageTemplate = template.Must(template.New("page").Parse(pageText))

// plotWidth is how wide a plot is, in the units of its picture.
const plotWidth = 260

// page is a report as HTML shows it.
type page struct {
	*report
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
	*figure
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
func (page) Target(b *bar) string { return b.text() }

// writePage writes the report as one HTML file that needs no other.
func (r *report) writePage(w io.Writer) error {
	p := page{report: r, Seconds: r.Ended.Sub(r.Began).Seconds()}
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
func plotted(f *figure) pageFigure {
	p := pageFigure{figure: f}
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

// savePage writes the report to a file, whole or not at all.
func (r *report) savePage(path string) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("--html: %w", err)
	}
	defer func() { _ = os.Remove(f.Name()) }()
	err = r.writePage(f)
	if err == nil {
		err = f.Chmod(0o644)
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("--html: %w", err)
	}
	return nil
}
