package docsite

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"golang.org/x/net/html"

	"github.com/barchan-dev/barchan"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

func build(t *testing.T, source fs.FS) *Site {
	t.Helper()
	s, err := Build(source)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// parsed is what the checks need of an HTML file.
type parsed struct {
	ids    map[string]int
	links  []string // of href and src
	inline []string // what the policy of the site forbids
	h1     int
}

func parse(t *testing.T, content []byte) parsed {
	t.Helper()
	root, err := html.Parse(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	p := parsed{ids: map[string]int{}}
	for n := range root.Descendants() {
		if n.Type != html.ElementNode {
			continue
		}
		if n.Data == "h1" {
			p.h1++
		}
		if n.Data == "style" || n.Data == "script" && n.FirstChild != nil {
			p.inline = append(p.inline, n.Data)
		}
		for _, a := range n.Attr {
			switch {
			case a.Key == "id":
				p.ids[a.Val]++
			case a.Key == "href" || a.Key == "src" || a.Key == "data-index":
				p.links = append(p.links, a.Val)
			case a.Key == "style" || strings.HasPrefix(a.Key, "on"):
				p.inline = append(p.inline, n.Data+" "+a.Key)
			}
		}
	}
	return p
}

// deadLinks returns the links of all pages to a file or an anchor that the site does not have.
func deadLinks(t *testing.T, s *Site) (dead []string) {
	t.Helper()
	pages := map[string]parsed{}
	for name, content := range s.Files {
		if path.Ext(name) == ".html" {
			pages[name] = parse(t, content)
		}
	}
	for name, p := range pages {
		for _, link := range p.links {
			if strings.Contains(link, "://") {
				continue
			}
			to, anchor, _ := strings.Cut(link, "#")
			target := name
			if to != "" {
				target = path.Join(path.Dir(name), to)
			}
			if s.Files[target] == nil || anchor != "" && pages[target].ids[anchor] == 0 {
				dead = append(dead, name+" -> "+link)
			}
		}
	}
	slices.Sort(dead)
	return dead
}

// TestOwnSite checks every page of the repository's documents.
func TestOwnSite(t *testing.T) {
	s := build(t, barchan.Documents)
	for _, link := range deadLinks(t, s) {
		t.Error("dead link:", link)
	}
	for name, content := range s.Files {
		if path.Ext(name) != ".html" {
			continue
		}
		p := parse(t, content)
		if p.h1 != 1 {
			t.Errorf("%s has %d titles, want 1", name, p.h1)
		}
		if len(p.inline) > 0 {
			t.Errorf("%s has what the policy forbids: %q", name, p.inline)
		}
		for id, n := range p.ids {
			if n > 1 {
				t.Errorf("%s has the id %q %d times", name, id, n)
			}
		}
	}
	for document, files := range s.outside {
		for _, file := range files {
			if _, err := os.Stat(filepath.Join("../../..", file)); err != nil {
				t.Errorf("%s links to a file that is not in the repository: %v", document, err)
			}
		}
	}
}

// TestNavigation: each document is in the navigation, or in the list of decisions.
func TestNavigation(t *testing.T) {
	listed := map[string]bool{}
	for _, g := range groups {
		for _, e := range g.entries {
			listed[e.document] = true
		}
	}
	documents, err := listFiles(barchan.Documents, ".md")
	if err != nil || len(documents) < 50 {
		t.Fatalf("%d documents, %v", len(documents), err)
	}
	index := string(build(t, barchan.Documents).Files["adr/index.html"])
	for _, d := range documents {
		if path.Dir(d) == decisions {
			if !strings.Contains(index, `"`+path.Base(fileOf(d))+`"`) {
				t.Errorf("%s is not in the list of decisions", d)
			}
		} else if !listed[d] {
			t.Errorf("%s is in no group of nav.go", d)
		}
	}
}

// sample has a document of each kind of path and what rendering changes.
func sample(more string) fstest.MapFS {
	return fstest.MapFS{
		"README.md":          {Data: []byte("# Barchan\n\nSee [a page](docs/page.md#second-part), [code](api/x.go) and [decisions](docs/adr). ![a & b](docs/plots/a.svg)\n")},
		"docs/page.md":       {Data: []byte("# Page\n\n## Second part\n\nA <b>word</b>: zebra.\n\n```sh\necho '<x>' & zebra crossing\n```\n\n|a|\n|:-:|\n|c|\n\n" + more)},
		"docs/adr/0001-x.md": {Data: []byte("# 1. First\n\n[page](../page.md), [home](../../README.md)\n")},
		"docs/plots/a.svg":   {Data: []byte("<svg/>")},
	}
}

func TestRendering(t *testing.T) {
	s := build(t, sample("```goat\n+---+\n| a |\n+---+\n```\n"))
	for file, want := range map[string][]string{
		"index.html":      {`<a href="page.html#second-part">a page</a>`, `<span class="outside" title="In the repository: api/x.go">code</span>`, `<a href="adr/index.html">decisions</a>`, `<img src="plots/a.svg" alt="a &amp; b">`, "<title>Barchan</title>"},
		"page.html":       {`<h2 id="second-part">`, "A &lt;b&gt;word&lt;/b&gt;: zebra.", "<code>echo &#39;&lt;x&gt;&#39; &amp; zebra crossing\n</code>", `<td align="center">`, `<svg xmlns="http://www.w3.org/2000/svg"`, "<title>Page · Barchan</title>"},
		"adr/0001-x.html": {`<a href="../page.html">page</a>`, `<a href="../index.html">home</a>`, `href="../assets/site.css"`},
		"adr/index.html":  {`<a href="0001-x.html">1. First</a>`},
		"plots/a.svg":     {"<svg/>"},
	} {
		for _, part := range want {
			if !strings.Contains(string(s.Files[file]), part) {
				t.Errorf("%s lacks %s", file, part)
			}
		}
	}
}

// TestDeadLinksAreFound seeds what TestOwnSite must find; links of the navigation, whose documents a sample lacks, are left out.
func TestDeadLinksAreFound(t *testing.T) {
	before := deadLinks(t, build(t, sample("")))
	after := deadLinks(t, build(t, sample("[x](#nowhere) [y](../README.md#none) [z](adr/0001-x.md) ![gone](plots/b.svg)\n")))
	found := slices.DeleteFunc(after, func(link string) bool { return slices.Contains(before, link) })
	if want := []string{"page.html -> #nowhere", "page.html -> index.html#none", "page.html -> plots/b.svg"}; !slices.Equal(found, want) {
		t.Errorf("dead links %q, want %q", found, want)
	}
	if got := build(t, sample("[y](gone.md)\n")).outside["docs/page.md"]; !slices.Equal(got, []string{"docs/gone.md"}) {
		t.Errorf("files beyond the site: %q", got)
	}
}

func TestIndex(t *testing.T) {
	text := build(t, sample("")).Files[indexFile]
	text = bytes.TrimSuffix(bytes.TrimPrefix(text, []byte("globalThis.docsIndex = ")), []byte(";\n"))
	var list []indexed
	if err := json.Unmarshal(text, &list); err != nil {
		t.Fatal(err)
	}
	want := indexed{URL: "page.html#second-part", Page: "Page", Heading: "Second part", Text: "A word: zebra. echo '<x>' & zebra crossing a c"}
	if !slices.Contains(list, want) {
		t.Errorf("the index has %+v, want %+v among it", list, want)
	}
	drawn := string(build(t, sample("```goat\n+-----+\n| a b |\n+-----+\n```\n")).Files[indexFile])
	if !strings.Contains(drawn, " c a b\"") {
		t.Errorf("the index has not the words of a drawing alone: %s", drawn)
	}
}

func TestWrite(t *testing.T) {
	s := build(t, sample(""))
	dir := filepath.Join(t.TempDir(), "new", "site")
	if err := s.Write(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Files)) {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || !bytes.Equal(got, s.Files[name]) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
	if err := s.Write(dir); !errors.Is(err, errs.ErrConflict) || !strings.Contains(err.Error(), dir+" has files") {
		t.Errorf("into a directory with files: %v", err)
	}
	if err := s.Write(filepath.Join(dir, "index.html")); err == nil || !strings.Contains(err.Error(), "not a directory") {
		t.Errorf("into a file: %v", err)
	}
}
