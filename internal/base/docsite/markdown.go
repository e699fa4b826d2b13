package docsite

import (
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"unicode"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/renderer"
	"github.com/yuin/goldmark/text"
	"github.com/yuin/goldmark/util"
)

// markdown is that of GitHub, as far as the documents use it. Cells of tables are aligned by attributes, since
// the policy of the site forbids inline styles.
func markdown() goldmark.Markdown {
	return goldmark.New(
		goldmark.WithExtensions(extension.NewTable(extension.WithTableCellAlignMethod(extension.TableCellAlignAttribute)), extension.Strikethrough),
		goldmark.WithParserOptions(parser.WithAutoHeadingID()),
		goldmark.WithRendererOptions(renderer.WithNodeRenderers(util.Prioritized(nodes{}, 1))),
	)
}

// heading is one of a page, for its table of contents.
type heading struct {
	ID, Text string
	Level    int
}

// section is a heading and what follows it, for the index.
type section struct {
	heading
	words strings.Builder
}

// page is a document that has been read.
type page struct {
	document, file string
	title          string
	html           string
	sections       []*section
	outside        []string // files of the repository that it links to and that are not in the site
}

// readPage reads and renders a document; has says which documents the site has.
func readPage(source fs.FS, document string, has map[string]bool) (*page, error) {
	content, err := fs.ReadFile(source, document)
	if err != nil {
		return nil, err
	}
	p := &page{document: document, file: fileOf(document)}
	md := markdown()
	root := md.Parser().Parse(text.NewReader(content))
	p.resolveLinks(root, has)
	p.readSections(root, content)
	var out bytes.Buffer
	if err := md.Renderer().Render(&out, content, root); err != nil {
		return nil, fmt.Errorf("render %s: %w", document, err)
	}
	p.html = out.String()
	return p, nil
}

// resolveLinks turns links between documents into those between files of the site.
func (p *page) resolveLinks(root ast.Node, has map[string]bool) {
	_ = ast.Walk(root, func(n ast.Node, entering bool) (ast.WalkStatus, error) { // the walker returns no error
		if img, ok := n.(*ast.Image); ok && entering {
			if target := path.Join(path.Dir(p.document), string(img.Destination)); has[target] {
				img.Destination = []byte(p.root() + fileOf(target))
			}
		}
		link, ok := n.(*ast.Link)
		if !ok || !entering {
			return ast.WalkContinue, nil
		}
		to, fragment, _ := strings.Cut(string(link.Destination), "#")
		if to == "" || strings.Contains(to, ":") {
			return ast.WalkContinue, nil
		}
		target := path.Join(path.Dir(p.document), to)
		if !has[target] {
			p.outside = append(p.outside, target)
			link.Title, link.Destination = []byte("In the repository: "+target), nil
			return ast.WalkContinue, nil
		}
		href := p.root() + fileOf(target)
		if fragment != "" {
			href += "#" + fragment
		}
		link.Destination = []byte(href)
		return ast.WalkContinue, nil
	})
}

// root is the way from the page to the directory of the site.
func (p *page) root() string { return strings.Repeat("../", strings.Count(p.file, "/")) }

// readSections divides a document by its headings. The first heading is its title.
func (p *page) readSections(root ast.Node, content []byte) {
	now := &section{}
	p.sections = append(p.sections, now)
	for n := root.FirstChild(); n != nil; n = n.NextSibling() {
		h, ok := n.(*ast.Heading)
		if !ok {
			writeWords(&now.words, n, content)
			continue
		}
		var words strings.Builder
		writeWords(&words, n, content)
		title := strings.Join(strings.Fields(words.String()), " ")
		if p.title == "" {
			p.title = title
			now.heading = heading{Text: title, Level: h.Level}
			continue
		}
		id, _ := h.AttributeString("id")
		anchor, _ := id.([]byte)
		now = &section{heading: heading{ID: string(anchor), Text: title, Level: h.Level}}
		p.sections = append(p.sections, now)
	}
}

// writeWords writes the text of a node without marks; words of different blocks and cells stay apart.
func writeWords(w *strings.Builder, root ast.Node, content []byte) {
	_ = ast.Walk(root, func(n ast.Node, entering bool) (ast.WalkStatus, error) { // the walker returns no error
		if !entering {
			if n.Type() == ast.TypeBlock {
				w.WriteByte(' ')
			}
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.Text:
			w.Write(n.Segment.Value(content))
			if n.SoftLineBreak() || n.HardLineBreak() {
				w.WriteByte(' ')
			}
		case *ast.String:
			w.Write(n.Value)
		case *ast.FencedCodeBlock:
			if string(n.Language(content)) == languageDrawing { // what is no word draws
				isWord := func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }
				w.WriteString(strings.Join(strings.FieldsFunc(string(n.Lines().Value(content)), func(r rune) bool { return !isWord(r) }), " "))
				break
			}
			w.Write(n.Lines().Value(content))
		case *ast.CodeBlock:
			w.Write(n.Lines().Value(content))
		}
		return ast.WalkContinue, nil
	})
}

// contents are the headings of a page below its title, two levels of them.
func (p *page) contents() (list []heading) {
	for _, s := range p.sections {
		if s.ID != "" && (s.Level == 2 || s.Level == 3) {
			list = append(list, s.heading)
		}
	}
	return list
}
