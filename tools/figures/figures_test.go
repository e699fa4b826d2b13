package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const docs = "../../docs"

// committed returns the report that the page of figures in the repository is of.
func committed(t *testing.T) []byte { return committedTo(t, "report.json") }

// committedTo returns a report of the repository.
func committedTo(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(docs, "figures", name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func drawn(t *testing.T, text []byte) map[string][]byte {
	t.Helper()
	files, err := generate(text)
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// TestSame: the same report gives the same bytes, which are those in the repository.
func TestSame(t *testing.T) {
	for report, want := range map[string][]string{
		"report.json":  {"figures.md", "figures/growth.svg", "figures/path.svg", "figures/report.json", "figures/spread.svg", "figures/steps.svg"},
		"objects.json": {"figures/objects.json", "figures/objects.svg", "growth.md"},
	} {
		text := committedTo(t, report)
		first, again := drawn(t, text), drawn(t, text)
		for name, content := range first {
			if !bytes.Equal(content, again[name]) {
				t.Errorf("%s differs when it is drawn again", name)
			}
			if have, err := os.ReadFile(filepath.Join(docs, name)); err != nil || !bytes.Equal(content, have) {
				t.Errorf("docs/%s is stale (%v); run `go -C tools/figures run . ../../docs/figures/%s ../../docs`", name, err, report)
			}
		}
		if got := slices.Sorted(maps.Keys(first)); !slices.Equal(got, want) {
			t.Errorf("%s: files %q, want %q", report, got, want)
		}
	}
}

// TestBoth: a report of all chapters gives both pages, with all numbers of sandboxes in the table.
func TestBoth(t *testing.T) {
	var all, objects report
	for name, r := range map[string]*report{"report.json": &all, "objects.json": &objects} {
		if err := json.Unmarshal(committedTo(t, name), r); err != nil {
			t.Fatal(err)
		}
	}
	all.Figures = append(all.Figures, objects.Figures...)
	text, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	files := drawn(t, text)
	if len(files) != 9 {
		t.Errorf("files %q", slices.Sorted(maps.Keys(files)))
	}
	for _, n := range objects.sizes() {
		if want := fmt.Sprintf("\n| %d | ", n); !strings.Contains(string(files["growth.md"]), want) {
			t.Errorf("the page of growth lacks the row of %d sandboxes:\n%s", n, files["growth.md"])
		}
	}
	objects.Figures = slices.DeleteFunc(objects.Figures, func(f *figure) bool { return strings.HasPrefix(f.Name, "heap with 1000 ") })
	if text, err = json.Marshal(objects); err != nil {
		t.Fatal(err)
	}
	if _, err := generate(text); err == nil || !strings.Contains(err.Error(), `lacks "heap with 1000 asleep`) {
		t.Errorf("without a figure: %v", err)
	}
}

// TestPage: the page says where its numbers are from.
func TestPage(t *testing.T) {
	var r report
	if err := json.Unmarshal(committed(t), &r); err != nil {
		t.Fatal(err)
	}
	r.Quick, r.Note = true, "Other work was running."
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	page := string(drawn(t, text)["figures.md"])
	for _, want := range []string{r.Machine, r.Version, r.Began.UTC().Format("2006-01-02 15:04 UTC"), "make figures ARGS=--quick\n", "**A trial run with a tenth of the rounds. Other work was running.**", "](benchmarks.md)"} {
		if want == "" || !strings.Contains(page, want) {
			t.Errorf("the page lacks %q:\n%s", want, page)
		}
	}
	r.Quick, r.Note = false, ""
	if text, err = json.Marshal(r); err != nil {
		t.Fatal(err)
	}
	if page := string(drawn(t, text)["figures.md"]); strings.Contains(page, "trial run") || !strings.Contains(page, "make figures\n") {
		t.Errorf("the page of a whole run has a warning, or lacks the command:\n%s", page)
	}
}

// TestPictures: each is small, has both colour schemes and a title, and no colour or font that its style sheet should set.
func TestPictures(t *testing.T) {
	files := drawn(t, committed(t))
	maps.Copy(files, drawn(t, committedTo(t, "objects.json")))
	for name, content := range files {
		if filepath.Ext(name) != ".svg" {
			continue
		}
		if len(content) > 30_000 {
			t.Errorf("%s has %d bytes, want at most 30,000", name, len(content))
		}
		for dec := xml.NewDecoder(bytes.NewReader(content)); ; {
			if _, err := dec.Token(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s is no XML: %v", name, err)
			}
		}
		_, body, _ := bytes.Cut(content, []byte("</style>"))
		if !bytes.Contains(content, []byte("prefers-color-scheme:dark")) || !bytes.Contains(content, []byte("<title>")) || bytes.Contains(body, []byte("font-family")) {
			t.Errorf("%s lacks schemes or title, or names a font: %.800s", name, content)
		}
		for element := range bytes.SplitSeq(body, []byte("<")) {
			if !bytes.HasPrefix(element, []byte("text")) {
				continue
			}
			if !bytes.Contains(element, []byte("fill:var(--ink)")) {
				t.Errorf("%s has text that is black in both schemes: %s", name, element)
			}
			if !bytes.Contains(element, []byte("textLength=")) {
				t.Errorf("%s has text that another font makes longer than its room: %s", name, element)
			}
		}
	}
}

// TestHistory: the last run of a history counts, and what it did not measure is named.
func TestHistory(t *testing.T) {
	text := committed(t)
	both := slices.Concat([]byte(`{"figures": []}`+"\n"), text)
	if got := drawn(t, both)["figures/report.json"]; !bytes.Equal(got, text) {
		t.Errorf("the report of the last run is %.80s", got)
	}
	for name, tt := range map[string]struct{ give, want string }{
		"nothing":      {"", "no report"},
		"broken":       {"{", "unexpected EOF"},
		"no figures":   {"{}", `lacks "fork 1, until each has run a command" of the chapter sleep; run`},
		"no steps":     {`"steps"`, `lacks the step "outside the node" of runc`},
		"no quantiles": {`"quantiles"`, `no quantiles of "warm claim by REST`},
		"one fork":     {`"fork 10`, `1 figures of "forks of a sandbox at once"`},
	} {
		give := tt.give
		if strings.HasPrefix(give, `"`) { // a name that is not there
			give = strings.ReplaceAll(string(text), give, `"other `+give[1:])
		}
		if _, err := generate([]byte(give)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %s", name, err, tt.want)
		}
	}
}
