package docsite

import (
	"context"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/barchan-dev/barchan"
	"github.com/barchan-dev/barchan/internal/testkit/browser"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestInBrowser searches by the keyboard, and has buttons to copy, in pages of a server, under its policy, and of a disk.
func TestInBrowser(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "site")
	if err := build(t, barchan.Documents).Write(dir); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(Handler())
	defer srv.Close()
	ctx := browser.Start(t)
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
	answers(ctx, t, srv.URL+"/docs/")
	accessible(ctx, t, srv.URL+"/docs/")
}

// answers asks what people who are new ask: the section that answers is among the first three.
func answers(ctx context.Context, t *testing.T, root string) {
	for question, want := range map[string]string{
		"install":                   "index.html#install",
		"how do I pause a sandbox":  "memory.html#pause-and-resume",
		"backup restore":            "upgrade.html#going-back",
		"internet access":           "egress.html#a-sandboxs-own-policy",
		"GPU":                       "comparison.html#what-barchan-lacks",
		"private registry password": "images.html#registries-that-require-a-user",
		"why is create slow":        "pools.html#why-a-claim-was-slow",
		"persist files":             "volumes.html",
		"dockerfile":                "templates.html#build-from-a-dockerfile",
		"api key":                   "tenancy.html#scopes-of-keys",
		"who may use a key":         "tenancy.html#scopes-of-keys",
		"what is a quota":           "tenancy.html#quotas",
		"upgrade":                   "upgrade.html",
		"how do I uninstall it":     "operations.html#uninstall",
		"logs of a sandbox":         "sandboxes.html#logs",
		"environment variables":     "sandboxes.html#variables-of-the-environment",

		"How do I connect to a sandbox by ssh from VS Code?": "ssh.html#what-works",
		"How do I fork a sandbox into many copies?":          "memory.html#forks",
		"How can I limit the CPU of a sandbox?":              "memory.html#limits",
		"How long does a sandbox live?":                      "sandboxes.html#how-long-a-sandbox-lives",
		"timeout of a sandbox":                               "sandboxes.html#how-long-a-sandbox-lives",
		"How do I see the logs of my sandbox?":               "sandboxes.html#logs",
		"How do I set environment variables?":                "sandboxes.html#variables-of-the-environment",
		"Can I use multiple machines?":                       "comparison.html#what-barchan-lacks",
		"Does it run on Ubuntu or ARM?":                      "operations.html#requirements",
		"How can I run 5000 evaluations in parallel?":        "tutorial-evaluation.html",
		"Is it safe to run untrusted code?":                  "security.html",
		"What happens when the server crashes?":              "concepts.html#what-happens-at-a-fault",
		"how to get an alert when the disk is full":          "observability.html#alerts",
	} {
		limited, cancel := context.WithTimeout(ctx, eventually.Patience)
		do(limited, t, chromedp.Navigate(root+"index.html"), chromedp.SendKeys(chromedp.CSS("#search"), question), chromedp.WaitVisible("#results a"))
		found := read(limited, t, `new Promise((done) => setTimeout(() => done([...document.querySelectorAll("#results a")].slice(0, 3).map((a) => a.href).join(" ")), 100))`)
		if !slices.Contains(strings.Fields(found), root+want) {
			t.Errorf("%q finds %s, want %s", question, found, want)
		}
		cancel()
	}
}

// accessible has axe look at pages with all that there is in documents, wide and dark, and on a phone. No page is wider than that.
func accessible(ctx context.Context, t *testing.T, root string) {
	for _, page := range []string{"index.html", "concepts.html", "figures.html"} {
		for _, v := range []struct {
			scheme        string
			width, height int64
		}{{"dark", 1360, 860}, {"light", 390, 800}} {
			limited, cancel := context.WithTimeout(ctx, eventually.Patience)
			do(limited, t, chromedp.EmulateViewport(v.width, v.height), browser.Scheme(v.scheme), chromedp.Navigate(root+page))
			wide := read(limited, t, `new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(document.documentElement.scrollWidth > innerWidth
				? "it is " + document.documentElement.scrollWidth + " pixels wide" : ""), 50)))`)
			faults, err := browser.Violations(limited)
			if err != nil {
				t.Fatal(err)
			}
			if wide != "" || len(faults) > 0 {
				t.Errorf("%s, %s, %d pixels: %s %s", page, v.scheme, v.width, wide, strings.Join(faults, "; "))
			}
			cancel()
		}
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
