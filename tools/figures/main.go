// Command figures draws docs/figures.md and its pictures from one report of the bench. It measures nothing and judges
// nothing. The same report gives the same files, byte by byte.
//
//	figures REPORT DOCS
//
// REPORT is a file of `barchan bench --json` or --history, of which the last run counts. DOCS is the directory to write to.
package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"text/template"
)

//go:embed page.md.tmpl
var pageText string

var pageTemplate = template.Must(template.New("page").Parse(pageText))

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

// page is what its template gets.
type page struct {
	*report
	charts map[string]*chart
}

// Picture is the Markdown of a picture.
func (p page) Picture(file string) string {
	return fmt.Sprintf("![%s](figures/%s)", p.charts[file].alt, file)
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
	files := map[string][]byte{"figures/report.json": compact.Bytes()}
	p := page{r, map[string]*chart{}}
	for _, draw := range []func(*report) (*chart, error){drawPath, drawSteps, drawSpread, drawGrowth} {
		c, err := draw(r)
		if err != nil {
			return nil, err
		}
		if files["figures/"+c.file], err = c.svg(); err != nil {
			return nil, fmt.Errorf("draw %s: %w", c.file, err)
		}
		p.charts[c.file] = c
	}
	var out bytes.Buffer
	if err := pageTemplate.Execute(&out, p); err != nil {
		return nil, err
	}
	files["figures.md"] = out.Bytes()
	return files, nil
}
