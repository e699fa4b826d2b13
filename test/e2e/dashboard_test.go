package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
	ctx := b.ctx
	if chromedp.FromContext(ctx).Browser != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, eventually.Patience)
		defer cancel()
	}
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

// click clicks on what an XPath finds, when it is seen.
func (b *browser) click(xpath string) {
	b.t.Helper()
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

// testDashboard drives each page of the dashboard in a browser.
func testDashboard(t *testing.T, s *server) {
	key := strings.TrimSpace(s.data("key", "create", "--namespace", "dashboard"))
	b := newBrowser(t, s)
	b.signIn(key)
	id := b.createSandbox()
	b.watchList(key, id)
	b.useTerminal()
	b.useFiles()
	b.readRest(key, id)
	b.changeState()
	b.otherPages()
	b.watchPool(key)
	b.endSandbox(id)
	b.signOut()
	b.readAudit(id)
}

// readAudit finds what the audit log has of the page's holder of the key.
func (b *browser) readAudit(id string) {
	out := b.must("audit", "--json", "--since", "1h")
	var got []string
	for line := range strings.Lines(out) {
		var e struct{ By, Name, Namespace, Action, Sandbox, Result string }
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			b.t.Fatal(err)
		}
		if e.Namespace == "dashboard" && e.By == "key" && e.Name != "" && (e.Sandbox == "" || e.Sandbox == id) {
			got = append(got, e.Action+" "+e.Result)
		}
	}
	for _, want := range []string{"open dashboard ok", "open terminal ok", "close terminal ok", "write files ok", "delete files ok"} {
		if !slices.Contains(got, want) {
			b.t.Errorf("the audit log lacks %q: %q", want, got)
		}
	}
}

// signIn is refused with a wrong key, and then by a link, which leaves nothing behind.
func (b *browser) signIn(key string) {
	b.open("")
	b.shows("API key")
	b.looks("sign-in")
	b.do("wrong key", chromedp.SendKeys(chromedp.CSS(`#key`), "e2b_0000000000000000000000000000000000000000\r"))
	b.shows("unknown or revoked")
	link := strings.TrimSpace(b.data("ui", "--api-key", key))
	b.do("link", chromedp.Navigate("about:blank"), chromedp.Navigate(link))
	b.shows("No sandboxes yet")
	for expression, want := range map[string]string{
		"location.hash": "", "document.cookie": "", "localStorage.length + sessionStorage.length": "0", `document.querySelector(".namespace").textContent`: "dashboard",
	} {
		if got := b.value(expression); got != want {
			b.t.Errorf("%s = %q, want %q", expression, got, want)
		}
	}
	ticket := link[strings.Index(link, "=")+1:]
	again := b.value(`await (await fetch("/ui/api/session", {method: "POST", headers: {"X-Barchan-UI": "1"}, body: JSON.stringify({ticket: "` + ticket + `"})})).status`)
	if again != "401" {
		b.t.Errorf("the second use of a link = %s, want 401", again)
	}
	b.looks("empty")
}

// createSandbox makes one by the dialog, and returns its ID.
func (b *browser) createSandbox() string {
	b.click(button("New sandbox")) // DevTools would type the key n into the form, too, which a keyboard would not
	b.until(`document.querySelector("#create-template")?.value === "base"`)
	b.looks("create")
	b.do("form", chromedp.SendKeys(chromedp.CSS(`#create-metadata`), "made=here"))
	b.click(button("Create"))
	b.until(`location.pathname.startsWith("/ui/sandboxes/")`)
	b.shows("Running")
	b.shows("Timeline")
	b.shows("Started") // an Event
	b.until(`["start gVisor", "agent answers"].every((name) => [...document.querySelectorAll(".steps tr")].some((r) => r.textContent.includes(name) && / m?s$/.test(r.textContent.trim())))`)
	b.until(`document.querySelectorAll(".plot canvas").length === 3`)
	b.looks("sandbox")
	return strings.TrimPrefix(b.value("location.pathname"), "/ui/sandboxes/")
}

// watchList sees what others do, without a reload.
func (b *browser) watchList(key, id string) {
	b.click(`//a[.="Sandboxes"][ancestor::nav]`)
	b.until(`document.querySelectorAll(".tall .row").length === 1`)
	other := b.create(key, "base")
	b.until(fmt.Sprintf(`document.querySelector('[data-id=%s]')?.innerText.includes("Running")`, other))
	b.do("search", chromedp.KeyEvent("/"))
	b.until(`document.activeElement.type === "search"`)
	evaluate[bool](b, `(document.activeElement.select(), true)`) // DevTools types the slash, too, which a keyboard would not
	b.do("filter", chromedp.KeyEvent("made=here"))
	b.until(fmt.Sprintf(`document.querySelectorAll(".tall .row").length === 1 && document.querySelector("[data-id=%s]") !== null`, id))
	b.do("clear", chromedp.KeyEvent("\x1b"))
	b.looks("list")
	if status, body := b.call(key, http.MethodDelete, "/sandboxes/"+other, nil); status != http.StatusNoContent {
		b.t.Fatalf("delete = %d %s", status, body)
	}
	b.until(fmt.Sprintf(`document.querySelector("[data-id=%s]") === null`, other))
	b.do("open by keys", chromedp.Focus(chromedp.CSS(`.scroll`)), chromedp.KeyEvent("j"), chromedp.KeyEvent("\r"))
	b.until(fmt.Sprintf(`location.pathname === "/ui/sandboxes/%s"`, id))
}

func (b *browser) useTerminal() {
	b.click(tab("Terminal"))
	b.shows("Connected")
	b.until(`document.querySelector(".xterm-rows")?.textContent.includes("$")`)
	b.do("type", insert("echo $((6*7))-$(tput cols); touch typed"), chromedp.KeyEvent("\r"))
	b.until(`/42-[0-9]{2,}/.test(document.querySelector(".xterm-rows").textContent)`)
	b.looks("terminal")
	b.do("exit", insert("exit"), chromedp.KeyEvent("\r"))
	b.shows("the shell has ended with exit code 0")
}

func (b *browser) useFiles() {
	b.click(tab("Files"))
	b.shows("typed")
	file := filepath.Join(b.t.TempDir(), "up loaded.txt")
	if err := os.WriteFile(file, []byte("from the page"), 0o600); err != nil {
		b.t.Fatal(err)
	}
	b.do("upload", chromedp.SetUploadFiles(chromedp.CSS(`input[type=file]`), []string{file}))
	b.until(`[...document.querySelectorAll("td a")].some((a) => a.textContent === "up loaded.txt")`)
	if got := b.value(`await (await fetch([...document.querySelectorAll("td a")].find((a) => a.textContent === "up loaded.txt").href)).text()`); got != "from the page" {
		b.t.Errorf("the download is %q", got)
	}
	b.looks("files")
	b.click(`//button[@aria-label="Remove up loaded.txt"]`)
	b.click(`//dialog` + button("Remove"))
	b.until(`![...document.querySelectorAll("td a")].some((a) => a.textContent === "up loaded.txt")`)
}

// readRest reads logs and ports, and changes the network.
func (b *browser) readRest(key, id string) {
	b.click(tab("Logs"))
	b.shows("agent serves")
	b.looks("logs")
	b.data("exec", "--api-key", key, id, "--", "sh", "-c", "setsid python3 -m http.server 8080 >/dev/null 2>&1 & sleep 1")
	b.click(tab("Ports"))
	b.shows("8080-" + id)
	b.looks("ports")
	b.click(tab("Network"))
	b.click(button("Edit the policy"))
	b.do("rule", chromedp.SendKeys(chromedp.CSS(`#deny`), "192.0.2.0/24"))
	b.click(button("Apply"))
	b.shows("the policy’s deny list")
	b.do("destination", chromedp.SendKeys(chromedp.CSS(`#trace-to`), "192.0.2.7"))
	b.click(button("Ask"))
	b.until(`/refused 192.0.2.7, tcp 443: .*From /s.test(document.querySelector(".decides [role=status]").innerText)`)
	b.looks("network")
	if _, body := b.call(key, http.MethodGet, "/sandboxes/"+id, nil); !strings.Contains(body, "192.0.2.0/24") {
		b.t.Errorf("the API does not show the rule: %s", body)
	}
}

// changeState uses the buttons.
func (b *browser) changeState() {
	b.click(tab("Overview"))
	b.click(button("Pause"))
	b.shows("Paused, in memory")
	b.click(button("Resume"))
	b.until(`document.querySelector(".heading .phase").textContent.includes("Running")`)
	b.click(button("Snapshot"))
	b.shows("is ready")
	b.click(button("Fork"))
	b.shows("1 fork runs")
}

func (b *browser) otherPages() {
	for _, page := range []struct{ link, want, name string }{
		{"Snapshots", "with", "snapshots"}, {"Templates", "all namespaces", "templates"}, {"Pools", "No pools yet", "pools"}, {"Server", "Nothing is wrong", "server"},
	} {
		b.click(fmt.Sprintf(`//header//a[.=%q]`, page.link))
		b.shows(page.want)
		if page.name == "snapshots" { // the fork and the snapshot are below their source
			b.until(`document.querySelectorAll(".tree > li").length === 1 && document.querySelectorAll(".tree ul > li").length === 2`)
		}
		if page.name == "server" {
			b.until(`[...document.querySelectorAll(".nodes tbody tr")].map((r) => r.innerText.split(/\s+/)[1]).join() === "2"`)
		}
		b.looks(page.name)
	}
	b.click(`//header//a[.="Templates"]`)
	b.click(`//td//a[contains(.,"base")]`)
	b.until(`[...document.querySelectorAll(".revisions tbody tr")].some((r) => r.innerText.includes("current") && r.cells[4].innerText === "1")`)
	b.shows("This one has no log")
	b.looks("template")
	b.do("close", chromedp.KeyEvent("\x1b"))
}

// watchPool sees why claims of a pool waited: three at once for one member.
func (b *browser) watchPool(key string) {
	b.data("pool", "create", "py", "--namespace", "dashboard", "--template", "base", "--size", "1", "--wait")
	var ids [3]string
	var claims sync.WaitGroup
	for i := range ids {
		claims.Go(func() {
			status, body, err := b.tryCall(key, http.MethodPost, "/sandboxes", map[string]any{"templateID": "base"})
			var made struct{ SandboxID string }
			if err == nil {
				err = json.Unmarshal([]byte(body), &made)
			}
			if status != http.StatusCreated || err != nil {
				b.t.Errorf("create = %d %s, %v", status, body, err)
			}
			ids[i] = made.SandboxID
		})
	}
	claims.Wait()
	b.click(`//header//a[.="Pools"]`)
	b.shows("Of the claims of 3 live sandboxes, 1 got a ready one at once")
	b.shows("What made claims wait")
	b.until(`document.querySelectorAll(".waits tbody th a").length === 2 && [...document.querySelectorAll(".waits tbody .num")].every((n) => / m?s$/.test(n.innerText))`)
	b.looks("pool")
	b.click(`//table[@class="waits"]//a`)
	b.until(`/the claim waited [0-9.]+m?s|cold start: the pool had no/.test(document.querySelector(".timeline")?.innerText)`)
	for _, id := range ids {
		if status, body := b.call(key, http.MethodDelete, "/sandboxes/"+id, nil); status != http.StatusNoContent {
			b.t.Fatalf("delete = %d %s", status, body)
		}
	}
	b.data("pool", "rm", "py", "--namespace", "dashboard")
}

// endSandbox kills all that there are from the list.
func (b *browser) endSandbox(id string) {
	b.do("g s", chromedp.KeyEvent("g"), chromedp.KeyEvent("s"))
	b.until(`document.querySelectorAll(".tall .row").length === 2`)
	for left := 1; left >= 0; left-- {
		b.do("mark", chromedp.Focus(chromedp.CSS(`.scroll`)), chromedp.KeyEvent("j"), chromedp.KeyEvent(" "))
		b.click(button("Kill"))
		b.looks("kill")
		b.click(`//dialog` + button("Kill"))
		b.until(fmt.Sprintf(`document.querySelectorAll(".tall .row").length === %d`, left))
	}
	b.open("sandboxes/" + id)
	b.shows("does not exist any more")
}

// signOut ends the session, not only the page's; and a revoked key ends those of others.
func (b *browser) signOut() {
	found, err := chromedp.Run(b.ctx, func(ctx context.Context, t *chromedp.Target) (network.GetCookiesResult, error) {
		return cdp.Call(ctx, t, network.GetCookies, network.GetCookiesParams{URLs: []string{"http://" + b.http + "/ui/"}})
	})
	if err != nil {
		b.t.Fatal(err)
	}
	cookies := found.Cookies
	if len(cookies) != 1 || !cookies[0].HTTPOnly || cookies[0].SameSite != network.CookieSameSiteStrict || cookies[0].Path != "/ui" {
		b.t.Fatalf("cookies = %+v", cookies)
	}
	ask := func(site string) int {
		req, _ := http.NewRequestWithContext(b.t.Context(), http.MethodGet, "http://"+b.http+"/ui/api/session", nil)
		req.Header.Set("Cookie", cookies[0].Name+"="+cookies[0].Value)
		req.Header.Set("X-Barchan-UI", "1")
		req.Header.Set("Sec-Fetch-Site", site)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			b.t.Fatal(err)
		}
		_ = res.Body.Close()
		return res.StatusCode
	}
	if own, sandbox := ask("same-origin"), ask("same-site"); own != http.StatusOK || sandbox != http.StatusForbidden {
		b.t.Errorf("a request of the page = %d, want 200; of a sandbox's page = %d, want 403", own, sandbox)
	}
	b.click(button("Sign out"))
	b.shows("API key")
	if status := ask("same-origin"); status != http.StatusUnauthorized {
		b.t.Errorf("a request after the end of the session = %d, want 401", status)
	}
}
