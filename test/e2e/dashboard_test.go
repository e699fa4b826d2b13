package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/chromedp"
)

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
	b.openPrivatePort(key)
	b.open("sandboxes/" + id)
	b.changeState(id)
	b.otherPages()
	b.readBuild(key)
	b.useSnapshot(key)
	b.watchPool(key)
	lesser := b.makeKey()
	b.endSandbox(id)
	b.signOut()
	b.useKey(lesser, key)
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
	b.until(`/barchan.local\/base[^]*CPU hours/.test(document.querySelector(".facts-list").innerText)`)
	b.looks("sandbox")
	return strings.TrimPrefix(b.value("location.pathname"), "/ui/sandboxes/")
}

// watchList sees what others do, without a reload.
func (b *browser) watchList(key, id string) {
	b.click(`//a[.="Sandboxes"][ancestor::nav]`)
	b.until(`document.querySelectorAll(".tall .row").length === 1`)
	other := b.create(key, "base")
	b.until(fmt.Sprintf(`document.querySelector('[data-id=%s]')?.innerText.includes("Running")`, other))
	order := `[...document.querySelectorAll(".tall .row")].map((r) => r.dataset.id)`
	newestFirst := b.value(order)
	b.click(`//span[@role="columnheader"]/button[starts-with(normalize-space(),"Age")]`)
	b.until(fmt.Sprintf(`String(%s.reverse()) === %q && document.querySelector("[aria-sort=ascending]") !== null`, order, newestFirst))
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
	b.data("exec", "--api-key", key, id, "--", "sh", "-c", "setsid python3 -m http.server 8080 >/dev/null 2>&1 & until curl -sf localhost:8080 >/dev/null; do sleep 0.1; done")
	b.click(tab("Ports"))
	b.shows("8080-" + id)
	b.until(`document.querySelector(".url button") !== null`) // copies the URL, as the sandbox is public
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

// openPrivatePort follows the link of a port whose traffic is not public.
func (b *browser) openPrivatePort(key string) {
	status, body := b.call(key, http.MethodPost, "/sandboxes", map[string]any{"templateID": "base", "network": map[string]any{"allowPublicTraffic": false}})
	var made struct{ SandboxID string }
	if err := json.Unmarshal([]byte(body), &made); status != http.StatusCreated || err != nil {
		b.t.Fatalf("create = %d %s, %v", status, body, err)
	}
	b.data("exec", "--api-key", key, made.SandboxID, "--", "sh", "-c", "setsid python3 -m http.server 8080 >/dev/null 2>&1 & until curl -sf localhost:8080 >/dev/null; do sleep 0.1; done")
	b.open("sandboxes/" + made.SandboxID + "/ports")
	b.shows("The sandbox is private")
	b.until(`document.querySelector(".url a") !== null`)
	led := b.ask(b.cookie(), b.value(`new URL(document.querySelector(".url a").href).pathname`), "same-origin")
	to, err := led.Location()
	if led.StatusCode != http.StatusSeeOther || err != nil {
		b.t.Fatalf("the link = %s, %v", led.Status, err)
	}
	if to.RawQuery == "" {
		b.t.Fatalf("the link leads to %s, which is not signed", to)
	}
	if copies := b.value(`document.querySelectorAll(".url button").length`); copies != "0" {
		b.t.Errorf("%s buttons copy URLs that are not signed", copies)
	}
	for _, tt := range []struct {
		query string
		want  int
	}{{to.RawQuery, http.StatusOK}, {"", http.StatusForbidden}} {
		req, _ := http.NewRequestWithContext(b.t.Context(), http.MethodGet, "http://"+b.http+"/?"+tt.query, nil)
		req.Host = to.Host
		if res := b.send(req); res.StatusCode != tt.want {
			b.t.Errorf("%s with the query %q = %s, want %d", to.Host, tt.query, res.Status, tt.want)
		}
	}
	if status, body := b.call(key, http.MethodDelete, "/sandboxes/"+made.SandboxID, nil); status != http.StatusNoContent {
		b.t.Fatalf("delete = %d %s", status, body)
	}
}

// changeState uses the buttons.
func (b *browser) changeState(id string) {
	b.click(button("Pause"))
	b.shows("Paused, in memory")
	b.click(button("Resume"))
	b.until(`document.querySelector(".heading .phase").textContent.includes("Running")`)
	b.click(button("Snapshot"))
	b.shows("is ready")
	b.click(button("Fork"))
	b.shows("1 fork runs")
	b.click(`//a[.="Sandboxes"][ancestor::nav]`)
	b.click(fmt.Sprintf(`//div[@data-id and not(@data-id=%q)]//a`, id))
	b.until(fmt.Sprintf(`document.querySelector(".facts-list a")?.getAttribute("href") === "/ui/sandboxes/%s"`, id))
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
	b.open("nowhere")
	b.shows("There is no such page")
	b.looks("not-found")
	b.open("sandboxes/nowhere")
	b.shows("There is no such sandbox")
	b.click(`//header//a[.="Templates"]`)
	b.click(`//td//a[contains(.,"base")]`)
	b.until(`[...document.querySelectorAll(".revisions tbody tr")].some((r) => r.innerText.includes("current") && r.cells[4].innerText === "1")`)
	b.shows("This one has no log")
	b.looks("template")
	b.do("close", chromedp.KeyEvent("\x1b"))
}

// readBuild shows the log of a build.
func (b *browser) readBuild(key string) {
	dir := b.t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte("FROM "+baseImage+"\nRUN echo built $((6*7))\n"), 0o600); err != nil {
		b.t.Fatal(err)
	}
	b.data("build", "--api-key", key, "-t", "seen", dir)
	b.click(`//td//a[contains(.,"seen")]`)
	b.until(`/built 42/.test(document.querySelector("dialog .log")?.innerText)`)
	b.looks("build")
	b.do("close", chromedp.KeyEvent("\x1b"))
	if status, body := b.call(key, http.MethodDelete, "/templates/seen", nil); status != http.StatusNoContent {
		b.t.Errorf("delete the template = %d %s", status, body)
	}
}

// useSnapshot starts a sandbox from the snapshot, and deletes it.
func (b *browser) useSnapshot(key string) {
	b.click(`//header//a[.="Snapshots"]`)
	b.click(`//li//button[.="Start one"]`)
	b.until(`location.pathname.startsWith("/ui/sandboxes/")`)
	b.until(`/snapshot /.test(document.querySelector(".facts-list")?.innerText)`)
	if status, body := b.call(key, http.MethodDelete, strings.TrimPrefix(b.value("location.pathname"), "/ui"), nil); status != http.StatusNoContent {
		b.t.Fatalf("delete = %d %s", status, body)
	}
	b.click(`//header//a[.="Snapshots"]`)
	b.click(`//li//button[.="Delete"]`)
	b.click(`//dialog` + button("Delete"))
	b.until(`![...document.querySelectorAll(".tree button")].length`)
}

// makeKey makes a key that may use sandboxes alone.
func (b *browser) makeKey() string {
	b.click(`//header//a[.="Server"]`)
	b.click(button("New key"))
	b.do("name", chromedp.SendKeys(chromedp.CSS(`#key-name`), "lesser"))
	b.looks("key")
	b.click(`//dialog` + button("Create"))
	b.until(`/^e2b_/.test(document.querySelector("dialog code")?.textContent)`)
	key := b.value(`document.querySelector("dialog code").textContent`)
	b.click(button("Done"))
	b.until(`[...document.querySelectorAll(".keys tbody tr")].some((r) => [0, 1, 4, 5].map((i) => r.cells[i].innerText).join() === "lesser,use,never,never")`)
	evaluate[bool](b, `(document.querySelector(".keys").scrollIntoView(), true)`)
	b.looks("keys")
	return key
}

// useKey signs in with a key of scope use, which sees no keys, though the browser loses two requests. Its end is the session's.
func (b *browser) useKey(lesser, key string) {
	// As where the machine gets another address meanwhile.
	evaluate[bool](b, `((real) => { let lost = 2; window.fetch = (...a) => lost-- > 0 ? Promise.reject(new TypeError("lost")) : real(...a) })(window.fetch), true`)
	b.do("key", chromedp.SendKeys(chromedp.CSS(`#key`), lesser+"\r"))
	b.click(`//header//a[.="Server"]`)
	b.shows("it may not see or make keys")
	if b.value(`[...document.querySelectorAll("button")].some((x) => x.innerText === "New key")`) != "false" {
		b.t.Error("a key of scope use is offered to make keys")
	}
	var keys []struct{ ID, Name string }
	if _, body := b.call(key, http.MethodGet, "/api-keys", nil); json.Unmarshal([]byte(body), &keys) != nil {
		b.t.Fatal(body)
	}
	i := slices.IndexFunc(keys, func(k struct{ ID, Name string }) bool { return k.Name == "lesser" })
	if i < 0 {
		b.t.Fatalf("the API lists no key with the name lesser: %+v", keys)
	}
	if status, body := b.call(key, http.MethodDelete, "/api-keys/"+keys[i].ID, nil); status != http.StatusNoContent {
		b.t.Fatalf("revoke = %d %s", status, body)
	}
	b.shows("The session has ended")
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
	b.do("mark", chromedp.Focus(chromedp.CSS(`.scroll`)), chromedp.KeyEvent("j"), chromedp.KeyEvent(" "), chromedp.KeyEvent("j"), chromedp.KeyEvent(" "))
	b.shows("2 marked")
	b.click(button("Kill"))
	b.looks("kill")
	b.click(`//dialog` + button("Kill"))
	b.until(`document.querySelectorAll(".tall .row").length === 0`)
	b.open("sandboxes/" + id)
	b.shows("does not exist any more")
	b.shows("It was killed at ")
	b.until(`/Created[^]*Paused[^]*Resumed[^]*Ended\s+ran [0-9.]+ (ms|s|min|h) with 2 CPU/.test(document.querySelector(".events")?.innerText)`)
	b.looks("ended")
}

// signOut ends the session, not only the page's; and a revoked key ends those of others.
func (b *browser) signOut() {
	c := b.cookie()
	if !c.HTTPOnly || c.SameSite != network.CookieSameSiteStrict || c.Path != "/ui" {
		b.t.Fatalf("cookie = %+v", c)
	}
	ask := func(site string) int { return b.ask(c, "/ui/api/session", site).StatusCode }
	if own, sandbox := ask("same-origin"), ask("same-site"); own != http.StatusOK || sandbox != http.StatusForbidden {
		b.t.Errorf("a request of the page = %d, want 200; of a sandbox's page = %d, want 403", own, sandbox)
	}
	b.click(button("Sign out"))
	b.shows("API key")
	if status := ask("same-origin"); status != http.StatusUnauthorized {
		b.t.Errorf("a request after the end of the session = %d, want 401", status)
	}
}
