package docsite

import (
	"context"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

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
}

func do(ctx context.Context, t *testing.T, actions ...chromedp.Action[chromedp.Void]) {
	t.Helper()
	if err := chromedp.Do(ctx, actions...); err != nil {
		t.Fatal(err)
	}
}

func read(ctx context.Context, t *testing.T, script string) string {
	t.Helper()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[string](script))
	if err != nil {
		t.Fatal(err)
	}
	return v
}
