package sleep

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/proc"
	"github.com/barchan-dev/barchan/test/bench/report"
)

const (
	asleepAtOnce  = 200
	heldBar       = 64 // KiB
	wakeFreezeBar = 40 // milliseconds
)

// gapProgram stamps the time every millisecond and keeps the greatest gap. GET / answers with it, in
// milliseconds, and begins again.
const gapProgram = `
import http.server, threading, time
worst = [0.0]
def stamp():
    last = time.monotonic()
    while True:
        time.sleep(0.001)
        now = time.monotonic()
        worst[0] = max(worst[0], now - last)
        last = now
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        gap, worst[0] = worst[0], 0.0
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(1000 * gap).encode())
    def log_message(self, *args):
        pass
threading.Thread(target=stamp, daemon=True).start()
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
`

// wakes has a request wake a sandbox, from RAM and from disk.
func wakes(ctx context.Context, b *harness.Bench) error {
	for _, from := range []struct {
		name, storeAfter string
		bar              float64
	}{{"RAM", "1h", wakeFreezeBar}, {"disk", "1ms", 0}} {
		if err := b.Server.RestartWith(ctx, "BARCHAN_STORE_AFTER="+from.storeAfter); err != nil {
			return err
		}
		var made client.Sandbox
		wakeable := map[string]any{"templateID": harness.DefaultTemplate, "timeout": 3600, "autoPause": true, "autoResume": map[string]bool{"enabled": true}}
		if err := b.Server.REST.Call(ctx, http.MethodPost, "/sandboxes", nil, wakeable, &made); err != nil {
			return err
		}
		x, err := b.Server.Open(&made)
		if err != nil {
			return err
		}
		if err := b.Server.Serve(ctx, x, gapProgram); err != nil {
			return err
		}
		running, err := harness.Times(b.Rounds(50), func() error {
			_, err := b.Server.Visit(ctx, x.ID)
			return err
		})
		if err != nil {
			return err
		}
		var took report.Samples
		for i := range b.Rounds(30) + 1 {
			ms, err := wakeByRequest(ctx, b, x, from.storeAfter != "1h")
			if err != nil {
				return err
			}
			if i > 0 { // the first one only warms
				took = append(took, ms)
			}
		}
		f := b.Report.Add("sleep", "request that wakes from "+from.name, "ms", took).Over("request to the same sandbox, awake", running.At(0.5))
		if from.bar > 0 {
			f.AtMost(from.bar)
		}
		if err := b.Server.Kill(ctx, x); err != nil {
			return err
		}
	}
	return nil
}

func wakeByRequest(ctx context.Context, b *harness.Bench, x harness.Sandbox, disk bool) (float64, error) {
	var err error
	if disk {
		err = pauseToDisk(ctx, b, x.ID)
	} else {
		err = b.Server.REST.Pause(ctx, x.ID, client.PauseOptions{})
	}
	if err != nil {
		return 0, err
	}
	if err := awaitStored(ctx, b, x.ID); err != nil {
		return 0, err
	}
	began := time.Now()
	_, err = b.Server.Visit(ctx, x.ID)
	return report.Millis(time.Since(began)), err
}

// held measures the memory of a restarted server with no and with many sandboxes stored on disk.
func held(ctx context.Context, b *harness.Bench) error {
	n := asleepAtOnce
	if b.Quick {
		n /= 10
	}
	empty, err := freshServer(ctx, b)
	if err != nil {
		return err
	}
	sandboxes, err := b.Server.Fill(ctx, "gvisor", n)
	if err != nil {
		return err
	}
	pause := func(ctx context.Context, x harness.Sandbox) error {
		return b.Server.REST.Pause(ctx, x.ID, client.PauseOptions{})
	}
	if err := harness.Each(ctx, sandboxes, pause); err != nil {
		return err
	}
	if err := awaitStores(ctx, b, float64(n)); err != nil {
		return err
	}
	full, err := freshServer(ctx, b)
	if err != nil {
		return err
	}
	left, err := proc.InCgroup(b.Server.Cgroup)
	if err != nil {
		return err
	}
	b.Report.One("sleep", fmt.Sprintf("server RSS with %d asleep, beyond that with none, each", n), "KiB", 1024*(full-empty)/float64(n)).AtMost(heldBar)
	b.Report.One("sleep", fmt.Sprintf("processes of %d asleep", n), "", float64(len(left))).AtMost(0)
	if err := b.Boots(ctx, fmt.Sprintf("boot to ready, %d asleep", n), b.Rounds(10)); err != nil {
		return err
	}
	return b.Server.KillAll(ctx, sandboxes)
}

// freshServer restarts the server, lets it rest, and returns its resident memory in MiB.
func freshServer(ctx context.Context, b *harness.Bench) (float64, error) {
	if err := b.Server.RestartIdle(ctx); err != nil {
		return 0, err
	}
	return proc.RSS(b.Server.PID())
}
