package main

import (
	"bytes"
	"fmt"
	"html"
	"image/color"
	"regexp"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Colours that depend on the reader's scheme: vg draws with these, and the file names them as variables.
var (
	ink   = color.RGBA{R: 0x23, G: 0x1d, B: 0x17, A: 0xff}
	faint = color.RGBA{R: 0xe3, G: 0xdd, B: 0xd4, A: 0xff}
	paper = color.RGBA{R: 0xff, G: 0xff, B: 0xff, A: 0xff}
)

// Colours that are readable on both. They are Okabe and Ito's, which colour-blind readers can tell apart.
var (
	grey       = color.RGBA{R: 0x99, G: 0x99, B: 0x99, A: 0xff}
	vermillion = color.RGBA{R: 0xd5, G: 0x5e, A: 0xff}
	blue       = color.RGBA{G: 0x72, B: 0xb2, A: 0xff}
	green      = color.RGBA{G: 0x9e, B: 0x73, A: 0xff}
	sky        = color.RGBA{R: 0x56, G: 0xb4, B: 0xe9, A: 0xff}
	orange     = color.RGBA{R: 0xe6, G: 0x9f, A: 0xff}
	pink       = color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff}
)

// schemes gives the variables their values. The picture has a background of its own, so that it is readable also where
// the page around it has the other scheme.
const schemes = `svg{--ink:#231d17;--faint:#e3ddd4;--paper:#fff;font-family:Arial,"Liberation Sans",Helvetica,sans-serif}` +
	`@media(prefers-color-scheme:dark){svg{--ink:#f1eae1;--faint:#3a332b;--paper:#1f1b17}}`

var (
	schemed = strings.NewReplacer("#231D17", "var(--ink)", "#E3DDD4", "var(--faint)", "#FFFFFF", "var(--paper)")
	// face is what vg writes with each text; the style sheet says it once.
	face = regexp.MustCompile(`font-family:[^;]*;font-variant:[^;]*;font-weight:[^;]*;font-style:[^;]*;`)
	// written is a text as vg writes it.
	written = regexp.MustCompile(`<text ([^>]*)>([^<]*)</text>`)
)

// size is that of all letters, in points, of which four are three pixels.
const size = 8.5

// chart is a picture with what a reader who does not see it should know.
type chart struct {
	file, title, alt string
	width, height    vg.Length
	plot             *plot.Plot
}

// newChart returns one without data.
func newChart(file, title string, width, height vg.Length) *chart {
	p := plot.New()
	p.BackgroundColor = paper
	p.Title.Text, p.Title.Padding, p.Title.TextStyle = title, 4, letters()
	p.Title.TextStyle.XAlign, p.Title.TextStyle.YAlign = draw.XCenter, draw.YTop
	p.Legend.TextStyle = letters()
	p.Legend.ThumbnailWidth, p.Legend.Padding = 10, 1.5
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		for _, s := range []*text.Style{&a.Label.TextStyle, &a.Tick.Label} {
			s.Color, s.Font = ink, letters().Font
		}
		a.Color, a.Tick.Color = ink, ink
		a.Tick.Length = 3
	}
	return &chart{file: file, title: title, width: width, height: height, plot: p}
}

// letters is the style of all text.
func letters() text.Style {
	return text.Style{Color: ink, Font: font.From(font.Font{Typeface: "Liberation", Variant: "Sans"}, size), Handler: plot.DefaultTextHandler}
}

// fitted gives each text the length that the picture has room for: a reader's font may be wider than the one measured.
func fitted(body string) string {
	return written.ReplaceAllStringFunc(body, func(element string) string {
		parts := written.FindStringSubmatch(element)
		style := letters()
		length := style.Width(html.UnescapeString(parts[2]))
		return fmt.Sprintf(`<text textLength="%.4g" lengthAdjust="spacingAndGlyphs" %s>%s</text>`, length.Points(), parts[1], parts[2])
	})
}

// texts stand right of points.
type texts struct{ plotter.XYLabels }

func (t *texts) add(x, y float64, text string) {
	t.XYs, t.Labels = append(t.XYs, plotter.XY{X: x, Y: y}), append(t.Labels, text)
}

// write adds texts to the picture.
func (c *chart) write(t texts, offset vg.Point) error {
	labels, err := plotter.NewLabels(t)
	if err != nil {
		return err
	}
	for i := range labels.TextStyle {
		labels.TextStyle[i] = letters()
		labels.TextStyle[i].YAlign = draw.YCenter
	}
	labels.Offset = offset
	c.plot.Add(labels)
	return nil
}

// svg draws the picture.
func (c *chart) svg() ([]byte, error) {
	canvas := vgsvg.New(c.width, c.height)
	all := draw.New(canvas)
	c.plot.Draw(draw.Crop(all, 6, -10, 4, -6))
	var drawn, out bytes.Buffer
	if _, err := canvas.WriteTo(&drawn); err != nil {
		return nil, err
	}
	_, body, found := strings.Cut(drawn.String(), `xlink">`)
	if !found {
		return nil, fmt.Errorf("no head in %.300q", drawn.String())
	}
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%gpt" height="%gpt" viewBox="0 0 %[1]g %[2]g" role="img"><title>%s</title><style>%s</style>`+
		`<rect width="100%%" height="100%%" rx="4" style="fill:var(--paper)"/>`, c.width.Points(), c.height.Points(), html.EscapeString(c.title), schemes)
	out.WriteString(schemed.Replace(face.ReplaceAllString(fitted(body), "")))
	return out.Bytes(), nil
}
