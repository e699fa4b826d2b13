package images

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/interpreter"
	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// firstCodeBar is for the first code in a claimed sandbox of the code interpreter, as a median.
const firstCodeBar = 40 // ms

// Interpreter claims sandboxes of the code interpreter, and runs code in each. Without its image in the cache, which takes
// minutes to build, it measures nothing.
func Interpreter(ctx context.Context, b *harness.Bench) error {
	cache := cmp.Or(os.Getenv("BARCHAN_CACHE"), "/var/cache/barchan")
	if found, err := filepath.Glob(filepath.Join(cache, "images", interpreter.Image+"-*.tar")); err != nil || len(found) == 0 {
		b.Logf("the code interpreter is left out: `barchan image build %s` makes its image", interpreter.Image)
		return err
	}
	if _, err := b.Server.Command(ctx, "image", "build", interpreter.Image); err != nil {
		return err
	}
	before, err := b.Server.MembersReady(ctx)
	if err != nil {
		return err
	}
	const size = 3
	if _, err := b.Server.Command(ctx, "pool", "create", "bench-interpreter", "--template", interpreter.Template, "--size", strconv.Itoa(size)); err != nil {
		return err
	}
	var creates, first, later report.Samples
	for range b.Rounds(20) {
		if err := b.Server.AwaitFull(ctx, before+size); err != nil {
			return err
		}
		began := time.Now()
		made, err := b.Server.REST.Create(ctx, client.CreateOptions{TemplateID: interpreter.Template, Timeout: time.Hour})
		if err != nil {
			return fmt.Errorf("create sandbox: %w", err)
		}
		creates = append(creates, report.Millis(time.Since(began)))
		for i := range 6 {
			began := time.Now()
			if err := runCode(ctx, made); err != nil {
				return err
			}
			if took := report.Millis(time.Since(began)); i == 0 {
				first = append(first, took)
			} else {
				later = append(later, took)
			}
		}
		if err := made.Kill(ctx); err != nil {
			return fmt.Errorf("kill sandbox: %w", err)
		}
	}
	b.Report.Add("interpreter", "claim", "ms", creates)
	b.Report.Add("interpreter", "first runCode after a claim", "ms", first).Over("later runCode", later.At(0.5)).AtMost(firstCodeBar)
	b.Report.Add("interpreter", "later runCode", "ms", later)
	_, err = b.Server.Command(ctx, "pool", "rm", "bench-interpreter")
	return err
}

// runCode runs Python as E2B's client does.
func runCode(ctx context.Context, x *client.Sandbox) error {
	base, h := x.Address(interpreter.Port)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/execute", strings.NewReader(`{"code":"6 * 7"}`))
	if err != nil {
		return err
	}
	req.Header = h
	req.Header.Set(envd.HeaderAccessToken, x.AgentToken)
	res, err := x.Client().Do(req)
	if err != nil {
		return fmt.Errorf("run code: %w", err)
	}
	defer func() { _ = res.Body.Close() }()
	out, err := io.ReadAll(res.Body)
	if err != nil {
		return fmt.Errorf("run code: %w", err)
	}
	if !strings.Contains(string(out), `"text": "42"`) {
		return fmt.Errorf("run code: status %d: %q", res.StatusCode, out)
	}
	return nil
}
