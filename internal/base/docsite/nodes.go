package docsite

import (
	"bytes"
	"fmt"
	"html"
	"strings"

	"github.com/bep/goat"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/renderer"
	"github.com/yuin/goldmark/util"
)

// languageDrawing is the language of a block that is drawn.
const languageDrawing = "goat"

// nodes renders what differs from goldmark's own HTML: anchors at headings, blocks of code, drawings, links out of
// the site, and raw HTML, which is shown as the text that it is.
type nodes struct{}

// RegisterFuncs implements renderer.NodeRenderer.
func (nodes) RegisterFuncs(r renderer.NodeRendererFuncRegisterer) {
	r.Register(ast.KindHeading, renderHeading)
	r.Register(ast.KindCodeBlock, renderCode)
	r.Register(ast.KindFencedCodeBlock, renderCode)
	r.Register(ast.KindLink, renderLink)
	r.Register(ast.KindRawHTML, renderRaw)
	r.Register(ast.KindHTMLBlock, renderRawBlock)
}

func renderHeading(w util.BufWriter, _ []byte, n ast.Node, entering bool) (ast.WalkStatus, error) {
	h := n.(*ast.Heading) // registered for this kind
	id, _ := h.AttributeString("id")
	anchor, _ := id.([]byte)
	if entering {
		fmt.Fprintf(w, `<h%d id="%s">`, h.Level, html.EscapeString(string(anchor)))
		return ast.WalkContinue, nil
	}
	fmt.Fprintf(w, ` <a class="anchor" href="#%s" aria-label="Link to this section">#</a></h%d>`+"\n", html.EscapeString(string(anchor)), h.Level)
	return ast.WalkContinue, nil
}

func renderCode(w util.BufWriter, source []byte, n ast.Node, entering bool) (ast.WalkStatus, error) {
	if !entering {
		return ast.WalkContinue, nil
	}
	code := n.Lines().Value(source)
	if fenced, ok := n.(*ast.FencedCodeBlock); ok && string(fenced.Language(source)) == languageDrawing {
		writeDrawing(w, code)
		return ast.WalkSkipChildren, nil
	}
	fmt.Fprintf(w, `<div class="code"><pre tabindex="0"><code>%s</code></pre></div>`+"\n", html.EscapeString(string(code)))
	return ast.WalkSkipChildren, nil
}

// writeDrawing writes lines and letters as SVG. Its letters get their size from the style sheet, not inline.
func writeDrawing(w util.BufWriter, code []byte) {
	svg := goat.BuildSVG(bytes.NewReader(code))
	body := strings.ReplaceAll(svg.Body, " style='font-size:1em'", "")
	fmt.Fprintf(w, `<figure class="drawing"><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="Drawing; the text around it says the same">%s</svg></figure>`+"\n",
		svg.Width, svg.Height, svg.Width, svg.Height, body)
}

func renderLink(w util.BufWriter, _ []byte, n ast.Node, entering bool) (ast.WalkStatus, error) {
	link := n.(*ast.Link) // registered for this kind
	switch {
	case link.Destination == nil && entering:
		fmt.Fprintf(w, `<span class="outside" title="%s">`, html.EscapeString(string(link.Title)))
	case link.Destination == nil:
		fmt.Fprint(w, "</span>")
	case !entering:
		fmt.Fprint(w, "</a>")
	default:
		to := util.URLEscape(link.Destination, true)
		fmt.Fprintf(w, `<a href="%s">`, html.EscapeString(string(to)))
	}
	return ast.WalkContinue, nil
}

func renderRaw(w util.BufWriter, source []byte, n ast.Node, entering bool) (ast.WalkStatus, error) {
	if raw, ok := n.(*ast.RawHTML); ok && entering {
		fmt.Fprint(w, html.EscapeString(string(raw.Segments.Value(source))))
	}
	return ast.WalkSkipChildren, nil
}

func renderRawBlock(w util.BufWriter, source []byte, n ast.Node, entering bool) (ast.WalkStatus, error) {
	if entering {
		fmt.Fprintf(w, "<p>%s</p>\n", html.EscapeString(string(n.Lines().Value(source))))
	}
	return ast.WalkSkipChildren, nil
}
