package docsite

import (
	"context"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"github.com/barchan-dev/barchan"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestInBrowser searches by the keyboard, and has buttons to copy, in pages of a server, under its policy, and of a disk.
func TestInBrowser(t *testing.T) {
	program, err := exec.LookPath("chromium-headless-shell")
	if err != nil && os.Getenv("CI") != "" {
		t.Fatal("chromium-headless-shell is missing; scripts/deps.sh installs it")
	} else if err != nil {
		t.Skip("SKIPPED: chromium-headless-shell is missing; scripts/deps.sh installs it")
	}
	dir := filepath.Join(t.TempDir(), "site")
	if err := build(t, barchan.Documents).Write(dir); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(Handler())
	defer srv.Close()
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(program), chromedp.NoSandbox,
		chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"))
	allocator, end := chromedp.NewExecAllocator(t.Context(), options...)
	defer end()
	ctx, end := chromedp.NewContext(allocator)
	defer end()
	do(ctx, t, chromedp.Navigate("about:blank")) // starts the browser, which would have the time limit of this call
	for _, root := range []string{"file://" + dir + "/", srv.URL + "/docs/"} {
		limited, cancel := context.WithTimeout(ctx, eventually.Patience)
		do(limited, t, chromedp.Navigate(root+"adr/index.html"), chromedp.KeyEvent("/"))
		// The protocol sends the letter apart from the key, so that the page cannot keep it out of the field, as it does with a keyboard.
		if focus := read(limited, t, `document.activeElement.value = "", document.activeElement.id`); focus != "search" {
			t.Errorf("%s: the key / focuses %q", root, focus)
		}
		do(limited, t, chromedp.KeyEvent("storeaft thaw"), chromedp.WaitVisible("#results a"))
		found := read(limited, t, `[...document.querySelectorAll("#results a")].map((a) => a.href + " " + a.querySelector("mark")?.textContent).join("\n")`)
		if !strings.Contains(found, root+"concepts.html#how-a-pause-and-a-wake-work storeAft") {
			t.Errorf("%s: found %q, want the section about pauses", root, found)
		}
		do(limited, t, chromedp.Navigate(root+"memory.html"))
		if buttons := read(limited, t, `document.querySelectorAll(".code").length + " " + document.querySelectorAll(".code > button").length`); buttons == "0 0" || strings.Fields(buttons)[0] != strings.Fields(buttons)[1] {
			t.Errorf("%s: blocks of code and buttons: %s", root, buttons)
		}
		do(limited, t, chromedp.Navigate(root+"figures.html"))
		if missing := read(limited, t, `[...document.images].filter((i) => !i.naturalWidth).map((i) => i.src).join(" ") || document.images.length + " shown"`); missing != "4 shown" {
			t.Errorf("%s: pictures %s, want 4 shown", root, missing)
		}
		cancel()
	}
	accessible(ctx, t, srv.URL+"/docs/")
}

// accessible has axe look at pages with all that there is in documents, wide and dark, and on a phone. No page is wider than that.
func accessible(ctx context.Context, t *testing.T, root string) {
	axe, err := os.ReadFile("../../../test/e2e/testdata/axe.min.js")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range []string{"index.html", "concepts.html", "figures.html"} {
		for _, v := range []struct {
			scheme        string
			width, height int64
		}{{"dark", 1360, 860}, {"light", 390, 800}} {
			limited, cancel := context.WithTimeout(ctx, eventually.Patience)
			do(limited, t, chromedp.EmulateViewport(v.width, v.height), scheme(v.scheme), chromedp.Navigate(root+page))
			read(limited, t, string(axe)+`; ""`)
			faults := read(limited, t, `(async () => {
				await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50)));
				const wide = document.documentElement.scrollWidth > innerWidth ? "it is " + document.documentElement.scrollWidth + " pixels wide. " : "";
				return wide + (await axe.run()).violations.filter((v) => v.impact === "serious" || v.impact === "critical")
					.map((v) => v.id + ": " + v.help + ": " + v.nodes.map((n) => n.html).join(" ").slice(0, 300)).join("; ");
			})()`)
			if faults != "" {
				t.Errorf("%s, %s, %d pixels: %s", page, v.scheme, v.width, faults)
			}
			cancel()
		}
	}
}

// scheme emulates a preference of colours.
func scheme(name string) chromedp.Action[chromedp.Void] {
	return func(ctx context.Context, t *chromedp.Target) (chromedp.Void, error) {
		_, err := cdp.Call(ctx, t, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}})
		return chromedp.Void{}, err
	}
}

func do(ctx context.Context, t *testing.T, actions ...chromedp.Action[chromedp.Void]) {
	t.Helper()
	if err := chromedp.Do(ctx, actions...); err != nil {
		t.Fatal(err)
	}
}

func read(ctx context.Context, t *testing.T, script string) string {
	t.Helper()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[string](script, chromedp.EvalAwaitPromise))
	if err != nil {
		t.Fatal(err)
	}
	return v
}
