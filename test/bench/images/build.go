package images

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// Bars of template builds.
const (
	cachedBuildBar = 1000 // ms, median
	emptyRunBar    = 300  // ms beyond a cold create, median
)

// builtSteps are the first lines of a Dockerfile: ten steps with a file.
const builtSteps = `FROM barchan.local/base:latest
COPY page /srv/
WORKDIR /srv
ENV WORD=hello
RUN echo one > one
RUN echo two > two
RUN echo three > three
RUN echo four > four
RUN echo five > five
USER user
`

// slowServer is a program that needs five seconds to start.
const slowServer = `CMD sleep 5; exec python3 -m http.server 8080 --directory /srv
HEALTHCHECK CMD curl -sf localhost:8080/page
`

var askSlowServer = []string{"curl", "-sf", "localhost:8080/page"}

// Build builds templates by the command that users have, its start included, and makes
// sandboxes of one whose program starts slowly.
func Build(ctx context.Context, b *harness.Bench) error {
	dir, err := os.MkdirTemp(b.Server.Dir, "build-")
	if err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "page"), []byte("a page"), 0o644); err != nil { //nolint:gosec // another user serves it
		return err
	}
	build := func(dockerfile string) error {
		if err := os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte(dockerfile), 0o600); err != nil {
			return err
		}
		_, err := b.Server.Command(ctx, "build", "-t", "bench-built", dir)
		return err
	}
	began := time.Now()
	if err := build(builtSteps); err != nil {
		return err
	}
	b.Report.One("build", "ten steps, none cached", "ms", report.Millis(time.Since(began)))
	cached, err := harness.Times(b.Rounds(20), func() error { return build(builtSteps) })
	if err != nil {
		return err
	}
	b.Report.Add("build", "the same again, all cached", "ms", cached).AtMost(cachedBuildBar)

	created, err := creates(ctx, b, harness.DefaultTemplate, b.Rounds(20))
	if err != nil {
		return err
	}
	round := 0
	empty, err := harness.Times(b.Rounds(20), func() error {
		round++
		return build(fmt.Sprintf("%sRUN : %d\n", builtSteps, round))
	})
	if err != nil {
		return err
	}
	b.Report.Add("build", "one empty RUN more", "ms", empty).Over("cold create", created.At(0.5)).
		AtMost(cached.At(0.5) + created.At(0.5) + emptyRunBar)

	began = time.Now()
	if err := build(builtSteps + slowServer); err != nil {
		return err
	}
	b.Report.One("build", "a program that needs 5 s to start", "ms", report.Millis(time.Since(began)))
	slow, err := creates(ctx, b, "bench-built", b.Rounds(20), askSlowServer...)
	if err != nil {
		return err
	}
	b.Report.Add("build", "cold create of it, until the program answers", "ms", slow).Over("cold create", created.At(0.5))
	return claimBuilt(ctx, b)
}

// claimBuilt claims from a pool of the template whose program starts slowly, beside one that has no program, in turns.
func claimBuilt(ctx context.Context, b *harness.Bench) error {
	const plain, built = harness.DefaultTemplate, "bench-built"
	claims, outputs := map[string]report.Samples{}, map[string]report.Samples{}
	for range b.Rounds(10) {
		for template, argv := range map[string][]string{plain: {"curl", "-V"}, built: askSlowServer} {
			if err := b.Server.Pool(ctx, template, harness.RowPool); err != nil {
				return err
			}
			c, o, err := b.Server.ClaimInARow(ctx, client.CreateOptions{TemplateID: template}, argv...)
			if err != nil {
				return err
			}
			claims[template], outputs[template] = append(claims[template], c[1:]...), append(outputs[template], o[1:]...)
			if err := b.Server.Pool(ctx, template, 0); err != nil {
				return err
			}
			if err := b.Server.AwaitFew(ctx, 0); err != nil {
				return err
			}
		}
	}
	b.Report.Add("build", "warm claim of it, from a pool", "ms", claims[built]).Over("warm claim of a plain template", claims[plain].At(0.5))
	b.Report.Add("build", "the same until the program answers curl", "ms", outputs[built]).Over("warm claim of a plain template to the output of curl -V", outputs[plain].At(0.5))
	return nil
}

// creates makes sandboxes of a template one after another, and runs a command in each.
func creates(ctx context.Context, b *harness.Bench, template string, n int, argv ...string) (took report.Samples, err error) {
	for range n + 1 { // the first meets cold caches
		began := time.Now()
		x, err := b.Server.Claim(ctx, client.CreateOptions{TemplateID: template, Timeout: time.Hour})
		if err != nil {
			return nil, err
		}
		if len(argv) > 0 {
			out, err := x.Run(ctx, argv...)
			if err != nil {
				return nil, err
			}
			if !strings.Contains(out.Text, "a page") {
				return nil, fmt.Errorf("the program of %s answers %q", template, out.Text)
			}
		}
		took = append(took, report.Millis(time.Since(began)))
		if err := b.Server.Clear(ctx, x); err != nil {
			return nil, err
		}
	}
	return took[1:], nil
}
