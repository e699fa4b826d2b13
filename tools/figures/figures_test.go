package main

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const docs = "../../docs"

// committed returns the report that the page of the repository is of.
func committed(t *testing.T) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(docs, "figures/report.json"))
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
	first, again := drawn(t, committed(t)), drawn(t, committed(t))
	for name, content := range first {
		if !bytes.Equal(content, again[name]) {
			t.Errorf("%s differs when it is drawn again", name)
		}
		if have, err := os.ReadFile(filepath.Join(docs, name)); err != nil || !bytes.Equal(content, have) {
			t.Errorf("docs/%s is stale (%v); run `go -C tools/figures run . ../../docs/figures/report.json ../../docs`", name, err)
		}
	}
	want := []string{"figures.md", "figures/growth.svg", "figures/path.svg", "figures/report.json", "figures/spread.svg", "figures/steps.svg"}
	if got := slices.Sorted(maps.Keys(first)); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
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
	for name, content := range drawn(t, committed(t)) {
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
