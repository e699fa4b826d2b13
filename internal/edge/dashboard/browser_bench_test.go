package dashboard

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	cdpio "github.com/chromedp/cdproto/io"
	"github.com/chromedp/cdproto/performance"
	"github.com/chromedp/cdproto/tracing"
	"github.com/chromedp/chromedp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/browser"
)

// BenchmarkBrowser has headless Chromium show 10,000 sandboxes, and reports the first paint, the time from a change to the screen,
// and the frames of Chromium's trace while a script scrolls through the list for ten seconds. On a busy machine only the processor
// time of the page's main thread per frame says something.
func BenchmarkBrowser(b *testing.B) {
	s, f := newTestServer(b)
	earlier := metav1.NewTime(time.Now().Add(-time.Hour))
	for i := range 10_000 {
		o := box("team", fmt.Sprintf("sandbox-%05d", i), true)
		o.CreationTimestamp = earlier
		f.boxes = append(f.boxes, o)
	}
	srv := httptest.NewServer(s)
	defer srv.Close()
	ctx := browser.Start(b, chromedp.WindowSize(1360, 860))
	do(ctx, b, chromedp.Navigate(srv.URL+"/ui/"))
	script[int](ctx, b, `fetch("/ui/api/session", {method: "POST", headers: {"X-Barchan-UI": "1"}, body: JSON.stringify({key: "good"})}).then((r) => r.status)`)

	command(ctx, b, performance.Enable, performance.EnableParams{TimeDomain: performance.EnableTimeDomainThreadTicks})

	sums := map[string]float64{}
	for b.Loop() {
		do(ctx, b, chromedp.Navigate(srv.URL+"/ui/"))
		script[bool](ctx, b, `new Promise((done) => { const look = () => document.querySelector(".table")?.ariaRowCount > 10000 ? done(true) : requestAnimationFrame(look); look(); })`)
		sums["first-paint-ms"] += script[float64](ctx, b, `performance.getEntriesByName("first-contentful-paint")[0].startTime`)
		sums["watch-to-screen-ms"] += watchToScreen(ctx, b, s)
		for name, value := range scroll(ctx, b) {
			sums[name] += value
		}
	}
	for name, sum := range sums {
		b.ReportMetric(sum/float64(b.N), name)
	}
}

// watchToScreen returns the milliseconds from a change that the server observes until the frame that shows it.
func watchToScreen(ctx context.Context, b *testing.B, s *Server) float64 {
	o := box("team", fmt.Sprintf("new-%d", time.Now().UnixNano()), true)
	script[bool](ctx, b, fmt.Sprintf(`(window.shown = new Promise((done) => {
		const look = () => document.querySelector("[data-id=%s]") ? requestAnimationFrame(() => done(Date.now())) : requestAnimationFrame(look);
		look();
	}), true)`, sandbox.IDOf(o.UID)))
	start := time.Now()
	s.Observe(nil, o)
	shown := time.UnixMilli(script[int64](ctx, b, `window.shown`))
	s.Observe(o, nil)
	return float64(shown.Sub(start).Milliseconds())
}

// scroll moves the list on at each frame, 10,000 rows in ten seconds, and returns figures of Chromium's trace.
func scroll(ctx context.Context, b *testing.B) map[string]float64 {
	next, stop := iter.Pull2(chromedp.Events(ctx, tracing.TracingComplete))
	defer stop()
	before := mainThread(ctx, b)
	command(ctx, b, tracing.Start, tracing.StartParams{TransferMode: tracing.StartTransferModeReturnAsStream, TraceConfig: &tracing.TraceConfig{
		IncludedCategories: []string{"disabled-by-default-devtools.timeline.frame", "devtools.timeline.frame"}, ExcludedCategories: []string{"*"},
	}})
	// What is seen must be drawn: a blank list would be fast.
	frames := script[[2]float64](ctx, b, `new Promise((done) => {
		const list = document.querySelector(".scroll"), height = list.scrollHeight - list.clientHeight, start = performance.now();
		let blank = 0, frames = 0;
		const step = (now) => {
			const seen = list.getBoundingClientRect();
			frames++;
			if (!document.elementFromPoint(seen.x + seen.width / 2, seen.y + seen.height / 2)?.closest("[data-id]")) blank++;
			if (now - start >= 10000) { list.scrollTop = 0; done([blank, frames]); return; }
			list.scrollTop = height * Math.max(0, now - start) / 10000;
			requestAnimationFrame(step);
		};
		requestAnimationFrame(step);
	})`)
	used := mainThread(ctx, b) - before
	command(ctx, b, tracing.End, cdp.Empty{})
	done, err, _ := next()
	if err != nil {
		b.Fatal(err)
	}
	var text []byte
	for more := true; more; {
		part := command(ctx, b, cdpio.Read, cdpio.ReadParams{Handle: done.Stream})
		text = append(text, part.Data...)
		more = !part.EOF
	}
	var trace struct {
		TraceEvents []struct {
			Name string  `json:"name"`
			TS   float64 `json:"ts"` // microseconds
		} `json:"traceEvents"`
	}
	if err := json.Unmarshal(text, &trace); err != nil {
		b.Fatal(err)
	}
	var drawn []float64
	dropped := 0
	for _, e := range trace.TraceEvents {
		switch e.Name {
		case "DrawFrame":
			drawn = append(drawn, e.TS)
		case "DroppedFrame":
			dropped++
		}
	}
	if len(drawn) < 2 {
		b.Fatalf("the trace has %d frames", len(drawn))
	}
	slices.Sort(drawn)
	longest := 0.0
	for i, at := range drawn[1:] {
		longest = max(longest, at-drawn[i])
	}
	return map[string]float64{
		"frames/s": float64(len(drawn)-1) / (drawn[len(drawn)-1] - drawn[0]) * 1e6, "dropped-frames": float64(dropped),
		"longest-frame-ms": longest / 1000, "blank-frames": frames[0], "main-thread-ms/frame": used * 1000 / frames[1],
	}
}

// mainThread returns the seconds of processor time that the page's main thread has used.
func mainThread(ctx context.Context, b *testing.B) float64 {
	b.Helper()
	metrics := command(ctx, b, performance.GetMetrics, cdp.Empty{}).Metrics
	i := slices.IndexFunc(metrics, func(m *performance.Metric) bool { return m.Name == "TaskDuration" })
	if i < 0 {
		b.Fatalf("no TaskDuration among %d metrics", len(metrics))
	}
	return metrics[i].Value
}

func do(ctx context.Context, b *testing.B, actions ...chromedp.Action[chromedp.Void]) {
	b.Helper()
	if err := chromedp.Do(ctx, actions...); err != nil {
		b.Fatal(err)
	}
}

func command[P, R any](ctx context.Context, b *testing.B, c cdp.Command[P, R], params P) R {
	b.Helper()
	r, err := chromedp.Run(ctx, func(ctx context.Context, t *chromedp.Target) (R, error) { return cdp.Call(ctx, t, c, params) })
	if err != nil {
		b.Fatal(err)
	}
	return r
}

// script returns the value of an expression of JavaScript, or of its promise.
func script[T any](ctx context.Context, b *testing.B, expression string) T {
	b.Helper()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		b.Fatalf("%s: %v", expression, err)
	}
	return v
}
