package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	stillBar = 60 // milliseconds
	gapPort  = 8080
)

// forkBars are the milliseconds in which so many forks shall be made.
var forkBars = map[int]float64{1: 200, 10: 1000, 100: 8000}

// dropCaches has the kernel forget what it has of files.
func dropCaches() error {
	return os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0)
}

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

// serve has a program of Python run in the background until port 8080 answers.
func (b *bench) serve(ctx context.Context, x box, program string) error {
	if _, err := x.run(ctx, "/bin/sh", "-c", `setsid python3 -c "$1" >/dev/null 2>&1 &`, "sh", program); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	for {
		if _, err := b.visit(ctx, x.id); err == nil {
			return nil
		}
		if err := rest(ctx, goneTick); err != nil {
			return fmt.Errorf("port %d of %s: %w", gapPort, x.id, err)
		}
	}
}

// visit requests port 8080 of a sandbox through the gateway.
func (b *bench) visit(ctx context.Context, id string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+b.server.addr+"/", nil)
	if err != nil {
		return "", fmt.Errorf("make request: %w", err)
	}
	req.Header.Set(envd.HeaderSandboxID, id)
	req.Header.Set(envd.HeaderSandboxPort, strconv.Itoa(gapPort))
	res, err := b.server.http.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("GET of sandbox %s: %d %s", id, res.StatusCode, body)
	}
	return string(body), err
}

// errLater is the answer to what the server does not have.
var errLater = errors.New("the server does not have it")

// call makes a request of the REST API that its client does not know.
func (b *bench) call(ctx context.Context, method, path string, body, into any) error {
	status, err := b.server.admin.Status(ctx)
	if err != nil {
		return fmt.Errorf("read status: %w", err)
	}
	key, err := os.ReadFile(status.Addresses.APIKeyFile)
	if err != nil {
		return fmt.Errorf("read the API key: %w", err)
	}
	text, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("write request: %w", err)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+b.server.addr+path, bytes.NewReader(text))
	if err != nil {
		return fmt.Errorf("make request: %w", err)
	}
	req.Header.Set("X-API-Key", strings.TrimSpace(string(key)))
	req.Header.Set("Content-Type", "application/json")
	res, err := b.server.http.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	answer, err := io.ReadAll(res.Body)
	switch {
	case err != nil:
		return fmt.Errorf("%s %s: %w", method, path, err)
	case res.StatusCode == http.StatusNotImplemented:
		return fmt.Errorf("%s %s: %w", method, path, errLater)
	case res.StatusCode/100 != 2:
		return fmt.Errorf("%s %s: %d %s", method, path, res.StatusCode, answer)
	case into == nil:
		return nil
	}
	return json.Unmarshal(answer, into)
}

// snapshots takes snapshots of a running sandbox, and reads from it how long it stood still.
func (b *bench) snapshots(ctx context.Context) error {
	x, err := b.server.create(ctx, "gvisor")
	if err != nil {
		return err
	}
	if err := b.serve(ctx, x, gapProgram); err != nil {
		return err
	}
	gap := func() (float64, error) {
		text, err := b.visit(ctx, x.id)
		if err != nil {
			return 0, err
		}
		return strconv.ParseFloat(text, 64)
	}
	var took, still, idle samples
	for i := range b.rounds(20) + 1 {
		if _, err := gap(); err != nil {
			return err
		}
		if err := rest(ctx, 200*time.Millisecond); err != nil {
			return err
		}
		before, err := gap()
		if err != nil {
			return err
		}
		began := time.Now()
		var made struct {
			SnapshotID string `json:"snapshotID"`
		}
		if err := b.call(ctx, http.MethodPost, "/sandboxes/"+x.id+"/snapshots", struct{}{}, &made); errors.Is(err, errLater) {
			b.logf("no figures of snapshots: %v", err)
			return b.server.kill(ctx, x)
		} else if err != nil {
			return err
		}
		whole := millis(time.Since(began))
		after, err := gap()
		if err != nil {
			return err
		}
		if i > 0 { // the first one only warms
			took, still, idle = append(took, whole), append(still, after), append(idle, before)
		}
		if err := b.call(ctx, http.MethodDelete, "/templates/"+strings.ReplaceAll(strings.ReplaceAll(made.SnapshotID, "/", "%2F"), ":", "%3A"), nil, nil); err != nil {
			return err
		}
	}
	b.report.add("sleep", "snapshot until answered, small", "ms", took)
	b.report.add("sleep", "greatest gap inside meanwhile, small", "ms", still).over("the same without a snapshot", idle.at(0.5)).atMost(stillBar)
	return b.server.kill(ctx, x)
}

// forks multiplies a sandbox, and has each fork run a command.
func (b *bench) forks(ctx context.Context) error {
	x, err := b.server.create(ctx, "gvisor")
	if err != nil {
		return err
	}
	if err := x.hold(ctx, 1); err != nil { // a program that rests: a hundred that do not are all that is measured
		return err
	}
	for _, n := range []int{1, 10, 100} {
		rounds := map[int]int{1: 20, 10: 5, 100: 2}[n]
		if b.quick {
			rounds = 1
		}
		var all, each, output samples
		for range rounds {
			whole, first, err := b.fork(ctx, x, n)
			if errors.Is(err, errLater) {
				b.logf("no figures of forks: %v", err)
				return b.server.kill(ctx, x)
			}
			if err != nil {
				return fmt.Errorf("%d forks: %w", n, err)
			}
			all, each, output = append(all, whole), append(each, whole/float64(n)), append(output, first)
		}
		b.report.add("sleep", fmt.Sprintf("fork %d, until answered", n), "ms", all).atMost(forkBars[n])
		b.report.add("sleep", fmt.Sprintf("fork %d, per fork", n), "ms", each)
		b.report.add("sleep", fmt.Sprintf("fork %d, until each has run a command", n), "ms", output)
	}
	return b.server.kill(ctx, x)
}

// fork makes n forks, has each run a command, and removes them.
func (b *bench) fork(ctx context.Context, x box, n int) (whole, output float64, err error) {
	began := time.Now()
	var made []struct {
		Sandbox *client.Sandbox `json:"sandbox"`
		Error   *struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	if err := b.call(ctx, http.MethodPost, "/sandboxes/"+x.id+"/fork", map[string]int{"count": n, "timeout": 3600}, &made); err != nil {
		return 0, 0, err
	}
	whole = millis(time.Since(began))
	var boxes []box
	for _, f := range made {
		if f.Error != nil || f.Sandbox == nil {
			return 0, 0, fmt.Errorf("a fork failed: %+v", f.Error)
		}
		y, err := b.server.boxOf(*f.Sandbox)
		if err != nil {
			return 0, 0, err
		}
		boxes = append(boxes, y)
	}
	if len(boxes) != n {
		return 0, 0, fmt.Errorf("%d forks instead of %d", len(boxes), n)
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for _, y := range boxes {
		group.Go(func() error {
			_, err := y.run(groupCtx, "echo", "here")
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return 0, 0, err
	}
	output = millis(time.Since(began))
	const undone = "undo_" + lastUndone
	before, err := b.stepTimes(ctx, "gvisor")
	if err != nil {
		return 0, 0, err
	}
	for _, y := range boxes {
		if err := b.server.kill(ctx, y); err != nil {
			return 0, 0, err
		}
	}
	return whole, output, b.awaitUndone(ctx, "gvisor", func(now map[string]stepTime) bool {
		return now[undone].count >= before[undone].count+float64(n)
	})
}
