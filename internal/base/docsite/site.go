package docsite

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

//go:embed web
var web embed.FS

// indexFile has the words of all pages. It is JSON in a script: browsers let a page on a disk load scripts, and nothing else.
const indexFile = "assets/search-index.js"

// Site is a set of files, by their paths with slashes.
type Site struct {
	Files map[string][]byte
	// outside has the files of the repository that pages link to and that are not in the site.
	outside map[string][]string
}

// Build makes the site from the Markdown files and pictures of source, whose paths are those of the repository.
func Build(source fs.FS) (*Site, error) {
	documents, err := listFiles(source, ".md")
	if err != nil {
		return nil, fmt.Errorf("list the documents: %w", err)
	}
	pictures, err := listFiles(source, picture)
	if err != nil {
		return nil, fmt.Errorf("list the pictures: %w", err)
	}
	has := map[string]bool{decisions: true}
	for _, name := range slices.Concat(documents, pictures) {
		has[name] = true
	}
	pages := make([]*page, 0, len(documents)+1)
	for _, d := range documents {
		p, err := readPage(source, d, has)
		if err != nil {
			return nil, fmt.Errorf("read the documents: %w", err)
		}
		pages = append(pages, p)
	}
	pages = append(pages, listDecisions(pages))
	s, err := assemble(pages)
	if err != nil {
		return nil, err
	}
	for _, name := range pictures {
		if s.Files[fileOf(name)], err = fs.ReadFile(source, name); err != nil {
			return nil, fmt.Errorf("read the pictures: %w", err)
		}
	}
	return s, nil
}

// listFiles returns the paths of the files with an extension.
func listFiles(source fs.FS, ext string) (names []string, err error) {
	err = fs.WalkDir(source, ".", func(name string, _ fs.DirEntry, err error) error {
		if path.Ext(name) == ext {
			names = append(names, name)
		}
		return err
	})
	return names, err
}

// listDecisions makes the page that lists the decisions, newest first.
func listDecisions(pages []*page) *page {
	p := &page{document: decisions, file: fileOf(decisions), title: "Decisions", sections: []*section{{heading: heading{Text: "Decisions"}}}}
	var list strings.Builder
	list.WriteString("<h1>Decisions</h1>\n<p>What was decided in the design of Barchan, and why, newest first.</p>\n<ul class=\"plain\">\n")
	for _, other := range slices.Backward(pages) {
		if path.Dir(other.document) == decisions {
			fmt.Fprintf(&list, "<li><a href=\"%s\">%s</a></li>\n", path.Base(other.file), template.HTMLEscapeString(other.title))
		}
	}
	list.WriteString("</ul>\n")
	p.html = list.String()
	return p
}

// view is what the template of a page gets.
type view struct {
	Title, Root, Index string
	Body               template.HTML
	Contents           []heading
	Navigation         []navGroup
}

type navGroup struct {
	Title string
	Links []navLink
}

type navLink struct {
	Href, Label string
	Current     bool
}

// assemble puts the pages into their frame, and adds the index and the files that all share.
func assemble(pages []*page) (*Site, error) {
	frame, err := template.ParseFS(web, "web/page.html")
	if err != nil {
		return nil, fmt.Errorf("read the frame of pages: %w", err)
	}
	s := &Site{Files: map[string][]byte{}, outside: map[string][]string{}}
	for _, p := range pages {
		var out bytes.Buffer
		v := view{
			Title: p.title, Root: p.root(), Index: indexFile, Contents: p.contents(), Navigation: navigation(p),
			Body: template.HTML(p.html), // of our own documents, without raw HTML
		}
		if err := frame.Execute(&out, v); err != nil {
			return nil, fmt.Errorf("frame %s: %w", p.document, err)
		}
		s.Files[p.file], s.outside[p.document] = out.Bytes(), p.outside
	}
	if s.Files[indexFile], err = makeIndex(pages); err != nil {
		return nil, err
	}
	for _, name := range []string{"site.css", "site.js"} {
		if s.Files["assets/"+name], err = web.ReadFile("web/" + name); err != nil {
			return nil, fmt.Errorf("read the site's files: %w", err)
		}
	}
	return s, nil
}

// navigation marks the current page; a decision is part of the list of them.
func navigation(p *page) (list []navGroup) {
	for _, g := range groups {
		shown := navGroup{Title: g.title}
		for _, e := range g.entries {
			current := e.document == p.document || e.document == decisions && path.Dir(p.document) == decisions
			shown.Links = append(shown.Links, navLink{Href: p.root() + fileOf(e.document), Label: e.label, Current: current})
		}
		list = append(list, shown)
	}
	return list
}

// indexed is a section in the index; the names are short because there are many.
type indexed struct {
	URL     string `json:"u"`
	Page    string `json:"p"`
	Heading string `json:"h"`
	Text    string `json:"t"`
}

func makeIndex(pages []*page) ([]byte, error) {
	list := []indexed{}
	for _, p := range pages {
		for _, s := range p.sections {
			to := p.file
			if s.ID != "" {
				to += "#" + s.ID
			}
			list = append(list, indexed{URL: to, Page: p.title, Heading: s.Text, Text: strings.Join(strings.Fields(s.words.String()), " ")})
		}
	}
	text, err := json.Marshal(list)
	if err != nil {
		return nil, fmt.Errorf("write the index: %w", err)
	}
	return slices.Concat([]byte("globalThis.docsIndex = "), text, []byte(";\n")), nil
}

// Write writes the files to a directory, which it makes if it is missing. One with files is refused, as ErrConflict,
// so that no file of others is replaced and no page of an older site stays.
func (s *Site) Write(dir string) error {
	entries, err := os.ReadDir(dir)
	switch {
	case err == nil && len(entries) > 0:
		return fmt.Errorf("%s has files; name a new directory or an empty one: %w", dir, errs.ErrConflict)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("read the directory: %w", err)
	}
	for name, content := range s.Files {
		file := filepath.Join(dir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return fmt.Errorf("make a directory: %w", err)
		}
		if err := os.WriteFile(file, content, 0o644); err != nil {
			return fmt.Errorf("write a page: %w", err)
		}
	}
	return nil
}
