package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/barchan-dev/barchan/client"
)

// Bars of claims.
const (
	warmClaimBar   = 3   // ms, median
	firstOutputBar = 15  // ms, median
	boundClaimBar  = 1.3 // of a claim that brings nothing
	burstBar       = 300 // ms, the last of a hundred at once
	claimsBar      = 1500
)

const (
	smallPool = 16
	inARow    = 12
	bigPool   = 100
	fillTime  = 3 * time.Minute
	// settleTime is what a pool that has just got its last member has to write that down.
	settleTime = time.Second
)

// Floors of a claim, which is one durable write.
const (
	bareTransaction = "bare etcd transaction"
	bareFsync       = "bare fsync of 1 KiB"
)

// claimBenchmark is the package whose benchmark claims from a pool of a thousand without a node.
const claimBenchmark = "./internal/edge/e2b"

// measureClaim takes warm sandboxes from pools: one at a time, each from a full pool while nothing
// else continues, and a hundred at once. Without the source tree the floor is a write to the disk, and
// claims without a node are left out.
func measureClaim(ctx context.Context, b *bench) error {
	synced, err := fsyncs(b.server.dir, b.rounds(500))
	if err != nil {
		return err
	}
	b.report.add("claim", bareFsync, "ms", synced)
	durable := floor{Name: bareFsync, Median: synced.at(0.5)}
	source := hasSource()
	if source {
		found, err := b.benchmarks(ctx, apiBenchmark, "BenchmarkAPI/floor", b.rounds(1000))
		if err != nil {
			return err
		}
		durable = floor{Name: bareTransaction, Median: found["floor/create/1"].metrics["p50-µs"] / 1000}
	}
	if err := b.claimOneByOne(ctx, durable); err != nil {
		return err
	}
	if err := b.claimAtOnce(ctx); err != nil || !source {
		return err
	}
	return b.claimWithoutNode(ctx, durable)
}

// claimOneByOne claims again and again from a pool that is full: a dozen claims that follow each
// other, each with a first command, then the same with variables, and then the pool gets its time to
// refill. A claim alone on an idle machine is measured beside it.
func (b *bench) claimOneByOne(ctx context.Context, durable floor) error {
	if err := b.pool(ctx, smallPool); err != nil {
		return err
	}
	env := map[string]string{"GREETING": "hello", "API_TOKEN": "s3cret-s3cret-s3cret", "EMPTY": ""}
	var plain, output, bound, alone samples
	for range b.rounds(10) {
		for _, with := range []map[string]string{nil, env} {
			claims, outputs, err := b.claimInARow(ctx, client.CreateOptions{TemplateID: "bench-gvisor", EnvVars: with}, "/bin/echo", "here")
			if err != nil {
				return err
			}
			if with == nil {
				alone = append(alone, claims[0])
				plain, output = append(plain, claims[1:]...), append(output, outputs[1:]...)
			} else {
				bound = append(bound, claims[1:]...)
			}
		}
	}
	b.report.add("claim", "warm claim by REST, one after another, real sandboxes", "ms", plain).over(durable.Name, durable.Median).atMost(warmClaimBar)
	b.report.add("claim", "the first of them, the machine idle before", "ms", alone).over(durable.Name, durable.Median)
	f := b.report.add("claim", "warm claim that brings variables", "ms", bound).over("one that brings nothing", plain.at(0.5))
	f.atMost(boundClaimBar * plain.at(0.5))
	b.report.add("claim", "claim to first output of a command", "ms", output).over(durable.Name, durable.Median).atMost(firstOutputBar)
	return nil
}

// claimInARow waits until the pool is full and at rest, claims most of it, and runs a command in each.
func (b *bench) claimInARow(ctx context.Context, o client.CreateOptions, argv ...string) (claims, outputs samples, err error) {
	o.Timeout = time.Hour
	if err := b.awaitMembers(ctx, smallPool); err != nil {
		return nil, nil, err
	}
	if err := rest(ctx, settleTime); err != nil {
		return nil, nil, err
	}
	var boxes []box
	for range inARow {
		began := time.Now()
		x, err := b.server.claim(ctx, o)
		if err != nil {
			return nil, nil, err
		}
		claims = append(claims, millis(time.Since(began)))
		first, err := x.run(ctx, argv...)
		if err != nil {
			return nil, nil, err
		}
		if first.stdout == "" {
			return nil, nil, fmt.Errorf("%v in a sandbox of %s printed nothing", argv, o.TemplateID)
		}
		outputs = append(outputs, millis(first.output.Sub(began)))
		boxes = append(boxes, x)
	}
	for _, x := range boxes {
		if err := b.clear(ctx, x); err != nil {
			return nil, nil, err
		}
	}
	return claims, outputs, nil
}

func (b *bench) claimAtOnce(ctx context.Context) error {
	began := time.Now()
	if err := b.pool(ctx, bigPool); err != nil {
		return err
	}
	if err := b.awaitMembers(ctx, bigPool); err != nil {
		return err
	}
	made := float64(bigPool - smallPool)
	b.report.one("claim", "pool filled with real sandboxes", "/s", made/time.Since(began).Seconds())
	took, boxes := make(samples, bigPool), make([]box, bigPool)
	var all errgroup.Group
	began = time.Now()
	for i := range bigPool {
		all.Go(func() (err error) {
			boxes[i], err = b.server.claim(ctx, client.CreateOptions{TemplateID: "bench-gvisor", Timeout: time.Hour})
			took[i] = millis(time.Since(began))
			return err
		})
	}
	if err := all.Wait(); err != nil {
		return fmt.Errorf("a claim of a hundred at once: %w", err)
	}
	b.report.add("claim", "each of 100 claims at once, 100 real sandboxes", "ms", took)
	b.report.one("claim", "the last of 100 claims at once", "ms", took.at(1)).atMost(burstBar)
	if err := b.pool(ctx, 0); err != nil {
		return err
	}
	for _, x := range boxes {
		if err := b.server.kill(ctx, x); err != nil {
			return err
		}
	}
	return b.awaitGone(ctx, "gvisor")
}

// clear kills a sandbox and returns when nothing of it is left.
func (b *bench) clear(ctx context.Context, x box) error {
	const class = "gvisor"
	before, err := b.stepTimes(ctx, class)
	if err != nil {
		return err
	}
	if err := b.server.kill(ctx, x); err != nil {
		return err
	}
	return b.awaitUndone(ctx, class, func(now map[string]stepTime) bool {
		return now["undo_"+lastUndone].count > before["undo_"+lastUndone].count
	})
}

// claimWithoutNode runs the benchmark whose members are made ready by a stand-in for the node.
func (b *bench) claimWithoutNode(ctx context.Context, durable floor) error {
	found, err := b.benchmarks(ctx, claimBenchmark, "BenchmarkClaim", 1000)
	if err != nil {
		return err
	}
	one, ok := found["1"]
	many, alsoOK := found["16"]
	if !ok || !alsoOK {
		return fmt.Errorf("the benchmark of %s did not print both BenchmarkClaim/1 and /16", claimBenchmark)
	}
	each := func(name string, r result) *figure {
		p99 := r.metrics["p99-µs"] / 1000
		f := &figure{Group: "claim", Name: name, Unit: "ms", Median: r.metrics["p50-µs"] / 1000, P99: &p99, N: r.n}
		b.report.Figures = append(b.report.Figures, f)
		return f
	}
	each("claims by REST, one after another, pool of 1000, node stand-in", one).over(durable.Name, durable.Median).atMost(warmClaimBar)
	b.report.one("claim", "claims by REST, 16 clients, pool of 1000, node stand-in", "/s", many.metrics["ops/s"]).atLeast(claimsBar)
	each("each of them", many)
	return nil
}

// pool makes the pool of the gVisor template, or changes its size.
func (b *bench) pool(ctx context.Context, size int) error { return b.poolOf(ctx, "bench-gvisor", size) }

// poolOf makes the pool of a template, or changes its size.
func (b *bench) poolOf(ctx context.Context, template string, size int) error {
	_, err := b.server.command(ctx, fmt.Sprintf(`{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxWarmPool",
"metadata":{"name":"%[1]s","namespace":"default"},"spec":{"replicas":%[2]d,"sandboxTemplateRef":{"name":"%[1]s"}}}`, template, size), "apply", "-f", "-")
	return err
}

// awaitMembers returns when so many members can be handed out.
func (b *bench) awaitMembers(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, fillTime)
	defer cancel()
	for {
		ready, err := b.membersReady(ctx)
		if err != nil {
			return err
		}
		if ready >= n {
			return nil
		}
		if err := rest(ctx, goneTick); err != nil {
			return fmt.Errorf("wait for %d members of the pool (%d are ready): %w", n, ready, err)
		}
	}
}

func (b *bench) membersReady(ctx context.Context) (int, error) {
	res, err := b.server.get(ctx, "/metrics")
	if err != nil {
		return 0, fmt.Errorf("read metrics: %w", err)
	}
	defer func() { _ = res.Body.Close() }()
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		if text, ok := strings.CutPrefix(lines.Text(), "barchan_picker_ready "); ok {
			v, err := strconv.ParseFloat(text, 64)
			return int(v), err
		}
	}
	return 0, fmt.Errorf("the server's metrics have no barchan_picker_ready: %w", lines.Err())
}

// fsyncs measures what it takes to make 1 KiB durable at the end of a file.
func fsyncs(dir string, n int) (took samples, err error) {
	f, err := os.Create(filepath.Join(dir, "fsync"))
	if err != nil {
		return nil, fmt.Errorf("measure fsync: %w", err)
	}
	defer func() { _ = f.Close() }()
	return times(n, func() error {
		if _, err := f.Write(make([]byte, 1024)); err != nil {
			return err
		}
		return f.Sync()
	})
}
