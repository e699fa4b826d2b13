// Package browser starts a headless Chromium for tests, and has axe-core look at what it shows.
package browser

import (
	"context"
	_ "embed"
	"os"
	"os/exec"
	"testing"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
)

//go:embed axe.min.js
var axe string

// Start starts one that reaches this machine alone, and ends it with the test. It is a chromedp context. Without Chromium the test is
// skipped; in CI it fails.
func Start(tb testing.TB, options ...chromedp.ExecAllocatorOption) context.Context {
	tb.Helper()
	var program string
	for _, name := range []string{"chromium-headless-shell", "chromium"} { // the first that is found
		if found, err := exec.LookPath(name); err == nil {
			program = found
			break
		}
	}
	switch {
	case program != "":
	case os.Getenv("CI") != "":
		tb.Fatal("chromium-headless-shell is missing; scripts/deps.sh installs it")
	default:
		tb.Skip("SKIPPED: chromium-headless-shell is missing; scripts/deps.sh installs it")
	}
	all := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(program), chromedp.NoSandbox,
		chromedp.Flag("host-resolver-rules", "MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE *.localhost"))
	allocator, end := chromedp.NewExecAllocator(tb.Context(), append(all, options...)...)
	tb.Cleanup(end)
	ctx, end := chromedp.NewContext(allocator)
	tb.Cleanup(end)
	if err := chromedp.Do(ctx, chromedp.Navigate("about:blank")); err != nil { // a time limit of this call would be the browser's
		tb.Fatal(err)
	}
	return ctx
}

// Scheme emulates a preference of colours: light or dark.
func Scheme(name string) chromedp.Action[chromedp.Void] {
	return func(ctx context.Context, t *chromedp.Target) (chromedp.Void, error) {
		_, err := cdp.Call(ctx, t, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}})
		return chromedp.Void{}, err
	}
}

// Violations returns what axe finds on the page as it is that is serious or critical.
func Violations(ctx context.Context) ([]string, error) {
	if _, err := chromedp.Run(ctx, chromedp.Evaluate[chromedp.Void](axe)); err != nil {
		return nil, err
	}
	return chromedp.Run(ctx, chromedp.Evaluate[[]string](`axe.run().then(({ violations }) => violations
		.filter((v) => v.impact === "serious" || v.impact === "critical")
		.map((v) => v.impact + " " + v.id + ": " + v.help + ": " + v.nodes.map((n) => n.html).join(" ").slice(0, 500)))`, chromedp.EvalAwaitPromise))
}
