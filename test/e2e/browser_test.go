package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	browsers "github.com/barchan-dev/barchan/internal/testkit/browser"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// browser is a headless Chromium at a server's dashboard.
type browser struct {
	*server
	ctx context.Context //nolint:containedctx // chromedp keeps its browser there
	dir string          // for screenshots; empty: none are made
}

// newBrowser starts one that reaches this machine alone.
func newBrowser(t *testing.T, s *server) *browser {
	t.Helper()
	ctx := browsers.Start(t, chromedp.WindowSize(1360, 860))
	b := &browser{server: s, ctx: ctx, dir: os.Getenv("BARCHAN_SCREENSHOTS")}
	faults := chromedp.Events(ctx, runtime.ExceptionThrown)
	var reader sync.WaitGroup
	reader.Go(func() {
		for e, err := range faults {
			if err != nil {
				return
			}
			t.Errorf("a script of the page failed: %+v", e.ExceptionDetails)
		}
	})
	t.Cleanup(reader.Wait)
	return b
}

// do runs actions, which must succeed in time.
func (b *browser) do(what string, actions ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, eventually.Patience)
	defer cancel()
	if err := chromedp.Do(ctx, actions...); err != nil {
		b.fail(what, err)
	}
}

func (b *browser) fail(what string, err error) {
	b.t.Helper()
	page, _ := chromedp.Run(b.ctx, chromedp.Evaluate[string](`location.href + "\n" + document.body.innerText`))
	b.t.Fatalf("%s: %v\n%s\n%s", what, err, page, b.tail())
}

// evaluate returns the value of an expression of JavaScript, which may await something.
func evaluate[T any](b *browser, expression string) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, eventually.Patience)
	defer cancel()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T]("(async () => ("+expression+"))()", chromedp.EvalAwaitPromise))
	if err != nil {
		b.fail(expression, err)
	}
	return v
}

// click clicks on what an XPath finds, when it is seen and has stopped moving: chromedp clicks on a point, which it has found before.
func (b *browser) click(xpath string) {
	b.t.Helper()
	quoted, _ := json.Marshal(xpath)
	b.until(fmt.Sprintf(`new Promise((done) => {
		const place = () => {
			const e = document.evaluate(%s, document, null, XPathResult.FIRST_ORDERED_NODE_TYPE, null).singleNodeValue
			return e && JSON.stringify(e.getBoundingClientRect())
		}
		const first = place()
		setTimeout(() => done(!!first && place() === first), 50)
	})`, quoted))
	b.do("click "+xpath, chromedp.Click(xpath, chromedp.NodeVisible))
}

func button(text string) string {
	return fmt.Sprintf(`//button[normalize-space()=%q and not(@disabled)]`, text)
}
func tab(text string) string { return fmt.Sprintf(`//nav[@class="tabs"]/a[.=%q]`, text) }

// until waits until an expression of JavaScript is true.
func (b *browser) until(expression string) {
	b.t.Helper()
	for end := time.Now().Add(eventually.Patience); !evaluate[bool](b, expression); {
		if time.Now().After(end) {
			b.fail("wait for "+expression, context.DeadlineExceeded)
		}
		evaluate[bool](b, `new Promise((done) => setTimeout(() => done(true), 25))`)
	}
}

func (b *browser) shows(text string) {
	b.t.Helper()
	quoted, _ := json.Marshal(text)
	b.until(fmt.Sprintf(`document.body.innerText.includes(%s)`, quoted))
}

func (b *browser) value(expression string) string {
	b.t.Helper()
	return evaluate[string](b, "String("+expression+")")
}

func (b *browser) open(path string) {
	b.t.Helper()
	b.do("open "+path, chromedp.Navigate("http://"+b.http+"/ui/"+path))
}

// looks has axe check the page as it is, wide and light, dark, and on a phone, and keeps a picture of each.
func (b *browser) looks(name string) {
	b.t.Helper()
	for _, v := range []struct {
		suffix, scheme string
		width, height  int64
	}{{"", "light", 1360, 860}, {"-dark", "dark", 1360, 860}, {"-phone", "light", 390, 800}} {
		b.do("look at "+name, chromedp.EmulateViewport(v.width, v.height), browsers.Scheme(v.scheme))
		evaluate[bool](b, `new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(true), 200)))`)
		if got := evaluate[int64](b, "document.documentElement.scrollWidth"); got > v.width {
			b.t.Errorf("%s%s is %d pixels wide, on a screen of %d", name, v.suffix, got, v.width)
		}
		violations, err := browsers.Violations(b.ctx)
		if err != nil {
			b.fail("axe", err)
		}
		for _, violation := range violations {
			b.t.Errorf("%s%s: axe: %s", name, v.suffix, violation)
		}
		if b.dir == "" {
			continue
		}
		picture, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
		if err == nil {
			err = os.WriteFile(filepath.Join(b.dir, name+v.suffix+".png"), picture, 0o600)
		}
		if err != nil {
			b.t.Error(err)
		}
	}
	b.do("size", chromedp.EmulateViewport(1360, 860), browsers.Scheme("light"))
}

// insert types text as an input method does: DevTools sends a key's letter twice, which a terminal shows.
func insert(text string) chromedp.Action[chromedp.Void] {
	return func(ctx context.Context, t *chromedp.Target) (chromedp.Void, error) {
		_, err := cdp.Call(ctx, t, input.InsertText, input.InsertTextParams{Text: text})
		return chromedp.Void{}, err
	}
}

// cookie is the session's.
func (b *browser) cookie() *network.Cookie {
	b.t.Helper()
	found, err := chromedp.Run(b.ctx, func(ctx context.Context, t *chromedp.Target) (network.GetCookiesResult, error) {
		return cdp.Call(ctx, t, network.GetCookies, network.GetCookiesParams{URLs: []string{"http://" + b.http + "/ui/"}})
	})
	if err != nil || len(found.Cookies) != 1 {
		b.t.Fatalf("cookies = %+v, %v", found.Cookies, err)
	}
	return found.Cookies[0]
}

// ask makes a request by a session, as a page of the site would.
func (b *browser) ask(c *network.Cookie, path, site string) *http.Response {
	b.t.Helper()
	req, _ := http.NewRequestWithContext(b.t.Context(), http.MethodGet, "http://"+b.http+path, nil)
	req.Header.Set("Cookie", c.Name+"="+c.Value)
	req.Header.Set("X-Barchan-UI", "1")
	req.Header.Set("Sec-Fetch-Site", site)
	return b.send(req)
}

// send follows no redirect, and reads no body.
func (b *browser) send(req *http.Request) *http.Response {
	b.t.Helper()
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		b.t.Fatal(err)
	}
	_ = res.Body.Close()
	return res
}
