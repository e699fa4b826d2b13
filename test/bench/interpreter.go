package main

import (
	"bytes"
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
)

// firstCodeBar is for the first code in a claimed sandbox of the code interpreter, as a median.
const firstCodeBar = 40 // ms

// measureInterpreter claims sandboxes of the code interpreter, and runs code in each. Without its image in the cache, which takes
// minutes to build, it measures nothing.
func measureInterpreter(ctx context.Context, b *bench) error {
	cache := cmp.Or(os.Getenv("BARCHAN_CACHE"), "/var/cache/barchan")
	if found, err := filepath.Glob(filepath.Join(cache, "images", interpreter.Image+"-*.tar")); err != nil || len(found) == 0 {
		b.logf("the code interpreter is left out: `barchan image build %s` makes its image", interpreter.Image)
		return err
	}
	if _, err := b.server.command(ctx, "", "image", "build", interpreter.Image); err != nil {
		return err
	}
	before, err := b.membersReady(ctx)
	if err != nil {
		return err
	}
	const size = 3
	if _, err := b.server.command(ctx, "", "pool", "create", "bench-interpreter", "--template", interpreter.Template, "--size", strconv.Itoa(size)); err != nil {
		return err
	}
	var creates, first, later samples
	for range b.rounds(20) {
		if err := b.awaitMembers(ctx, before+size); err != nil {
			return err
		}
		if err := rest(ctx, settleTime); err != nil {
			return err
		}
		began := time.Now()
		made, err := b.server.rest.Create(ctx, client.CreateOptions{TemplateID: interpreter.Template, Timeout: time.Hour})
		if err != nil {
			return fmt.Errorf("create sandbox: %w", err)
		}
		creates = append(creates, millis(time.Since(began)))
		for i := range 6 {
			began := time.Now()
			if err := b.server.runCode(ctx, made.SandboxID, made.AgentToken); err != nil {
				return err
			}
			if took := millis(time.Since(began)); i == 0 {
				first = append(first, took)
			} else {
				later = append(later, took)
			}
		}
		if err := b.server.rest.Kill(ctx, made.SandboxID); err != nil {
			return fmt.Errorf("kill sandbox: %w", err)
		}
	}
	b.report.add("interpreter", "claim", "ms", creates)
	b.report.add("interpreter", "first runCode after a claim", "ms", first).over("later runCode", later.at(0.5)).atMost(firstCodeBar)
	b.report.add("interpreter", "later runCode", "ms", later)
	_, err = b.server.command(ctx, "", "pool", "rm", "bench-interpreter")
	return err
}

// runCode runs Python as E2B's client does.
func (s *server) runCode(ctx context.Context, id, token string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.addr+"/execute", bytes.NewReader([]byte(`{"code":"6 * 7"}`)))
	if err != nil {
		return err
	}
	req.Header.Set(envd.HeaderSandboxID, id)
	req.Header.Set(envd.HeaderSandboxPort, strconv.Itoa(interpreter.Port))
	req.Header.Set(envd.HeaderAccessToken, token)
	res, err := s.http.Do(req)
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
