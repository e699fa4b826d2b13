package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/client"
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

// measureBuild builds templates by the command that users have, its start included, and makes
// sandboxes of one whose program starts slowly.
func measureBuild(ctx context.Context, b *bench) error {
	dir, err := os.MkdirTemp(b.server.dir, "build-")
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
		_, err := b.server.command(ctx, "", "build", "-t", "bench-built", dir)
		return err
	}
	began := time.Now()
	if err := build(builtSteps); err != nil {
		return err
	}
	b.report.one("build", "ten steps, none cached", "ms", millis(time.Since(began)))
	cached, err := times(b.rounds(20), func() error { return build(builtSteps) })
	if err != nil {
		return err
	}
	b.report.add("build", "the same again, all cached", "ms", cached).atMost(cachedBuildBar)

	created, err := b.creates(ctx, "bench-gvisor", b.rounds(20))
	if err != nil {
		return err
	}
	round := 0
	empty, err := times(b.rounds(20), func() error {
		round++
		return build(fmt.Sprintf("%sRUN : %d\n", builtSteps, round))
	})
	if err != nil {
		return err
	}
	b.report.add("build", "one empty RUN more", "ms", empty).over("cold create", created.at(0.5)).
		atMost(cached.at(0.5) + created.at(0.5) + emptyRunBar)

	began = time.Now()
	if err := build(builtSteps + slowServer); err != nil {
		return err
	}
	b.report.one("build", "a program that needs 5 s to start", "ms", millis(time.Since(began)))
	slow, err := b.creates(ctx, "bench-built", b.rounds(20), askSlowServer...)
	if err != nil {
		return err
	}
	b.report.add("build", "cold create of it, until the program answers", "ms", slow).over("cold create", created.at(0.5))
	return b.claimBuilt(ctx)
}

// claimBuilt claims from a pool of the template whose program starts slowly, beside one that has no program, in turns.
func (b *bench) claimBuilt(ctx context.Context) error {
	const plain, built = "bench-gvisor", "bench-built"
	claims, outputs := map[string]samples{}, map[string]samples{}
	for range b.rounds(10) {
		for template, argv := range map[string][]string{plain: {"curl", "-V"}, built: askSlowServer} {
			if err := b.poolOf(ctx, template, smallPool); err != nil {
				return err
			}
			c, o, err := b.claimInARow(ctx, client.CreateOptions{TemplateID: template}, argv...)
			if err != nil {
				return err
			}
			claims[template], outputs[template] = append(claims[template], c[1:]...), append(outputs[template], o[1:]...)
			if err := b.poolOf(ctx, template, 0); err != nil {
				return err
			}
			if err := b.awaitFew(ctx, 0); err != nil {
				return err
			}
		}
	}
	b.report.add("build", "warm claim of it, from a pool", "ms", claims[built]).over("warm claim of a plain template", claims[plain].at(0.5))
	b.report.add("build", "the same until the program answers curl", "ms", outputs[built]).over("warm claim of a plain template to the output of curl -V", outputs[plain].at(0.5))
	return nil
}

// creates makes sandboxes of a template one after another, and runs a command in each.
func (b *bench) creates(ctx context.Context, template string, n int, argv ...string) (took samples, err error) {
	for range n + 1 { // the first meets cold caches
		began := time.Now()
		x, err := b.server.claim(ctx, client.CreateOptions{TemplateID: template, Timeout: time.Hour})
		if err != nil {
			return nil, err
		}
		if len(argv) > 0 {
			out, err := x.run(ctx, argv...)
			if err != nil {
				return nil, err
			}
			if !strings.Contains(out.stdout, "a page") {
				return nil, fmt.Errorf("the program of %s answers %q", template, out.stdout)
			}
		}
		took = append(took, millis(time.Since(began)))
		if err := b.clear(ctx, x); err != nil {
			return nil, err
		}
	}
	return took[1:], nil
}
