// Command figures draws docs/figures.md, docs/growth.md and their pictures from one report of the bench, as far as it has their
// numbers. It measures nothing and judges nothing. The same report gives the same files, byte by byte.
//
//	figures REPORT DOCS
//
// REPORT is a file of `barchan bench --json` or --history, of which the last run counts. DOCS is the directory to write to.
package main

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"text/template"
)

//go:embed *.md.tmpl
var templates embed.FS

// pages are what a report is shown on.
var pages = []page{
	{"figures", "report.json", (*report).isWhole, []func(*report) (*chart, error){drawPath, drawSteps, drawSpread, drawGrowth}},
	{"growth", "objects.json", (*report).hasObjects, []func(*report) (*chart, error){drawObjects}},
}

// page is a page with pictures.
type page struct {
	name   string // of its template and of the file of Markdown
	report string // the file of its report
	shows  func(*report) bool
	charts []func(*report) (*chart, error)
}

func main() {
	err := errors.New("usage: figures REPORT DOCS")
	if len(os.Args) == 3 {
		err = run(os.Args[1], os.Args[2])
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "figures: %v\n", err)
		os.Exit(1)
	}
}

// run writes the page, its pictures, and the report that they are of.
func run(path, docs string) error {
	text, err := os.ReadFile(path) //nolint:gosec // a path of the user's
	if err != nil {
		return fmt.Errorf("read the report: %w", err)
	}
	files, err := generate(text)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err := os.MkdirAll(filepath.Join(docs, "figures"), 0o755); err != nil {
		return fmt.Errorf("make a directory: %w", err)
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(docs, name), content, 0o644); err != nil {
			return fmt.Errorf("write the figures: %w", err)
		}
	}
	return nil
}

// content is what the template of a page gets.
type content struct {
	*report
	charts map[string]*chart
}

// Picture is the Markdown of a picture.
func (c content) Picture(file string) string {
	return fmt.Sprintf("![%s](figures/%s)", c.charts[file].alt, file)
}

// generate returns the files, by their paths in the directory of documents.
func generate(text []byte) (map[string][]byte, error) {
	raw, r, err := lastReport(text)
	if err != nil {
		return nil, err
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, raw); err != nil {
		return nil, err
	}
	compact.WriteByte('\n')
	files := map[string][]byte{}
	for _, p := range pages {
		if !p.shows(r) {
			continue
		}
		files["figures/"+p.report] = compact.Bytes()
		if err := p.generate(r, files); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// generate adds the page and its pictures.
func (p page) generate(r *report, files map[string][]byte) error {
	c := content{r, map[string]*chart{}}
	for _, draw := range p.charts {
		one, err := draw(r)
		if err != nil {
			return err
		}
		if files["figures/"+one.file], err = one.svg(); err != nil {
			return fmt.Errorf("draw %s: %w", one.file, err)
		}
		c.charts[one.file] = one
	}
	t, err := template.ParseFS(templates, p.name+".md.tmpl")
	if err != nil {
		return err
	}
	var out bytes.Buffer
	err = t.Execute(&out, c)
	files[p.name+".md"] = out.Bytes()
	return err
}
