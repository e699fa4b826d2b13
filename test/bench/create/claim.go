package create

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/test/bench/gobench"
	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// Bars of claims.
const (
	warmClaimBar   = 3   // ms, median
	firstOutputBar = 15  // ms, median
	boundClaimBar  = 1.3 // of a claim that brings nothing
	burstBar       = 300 // ms, the last of a hundred at once
	claimsBar      = 1500
)

// bigPool is the size of the pool whose members are all claimed at once.
const bigPool = 100

// bareFsync is the floor of a claim, which is one durable write, where there is no source tree to measure one of etcd.
const bareFsync = "bare fsync of 1 KiB"

// Claim takes warm sandboxes from pools: one at a time, each from a full pool while nothing
// else continues, and a hundred at once. Without the source tree the floor is a write to the disk, and
// claims without a node are left out.
func Claim(ctx context.Context, b *harness.Bench) error {
	synced, err := fsyncs(b.Server.Dir, b.Rounds(500))
	if err != nil {
		return err
	}
	b.Report.Add("claim", bareFsync, "ms", synced)
	durable := report.Floor{Name: bareFsync, Median: synced.At(0.5)}
	source := gobench.HasSource()
	if source {
		if durable, err = gobench.Transaction(ctx, b); err != nil {
			return err
		}
	}
	if err := claimOneByOne(ctx, b, durable); err != nil {
		return err
	}
	if err := claimAtOnce(ctx, b); err != nil || !source {
		return err
	}
	return claimWithoutNode(ctx, b, durable)
}

// claimOneByOne claims again and again from a pool that is full: a dozen claims that follow each
// other, each with a first command, then the same with variables, and then the pool gets its time to
// refill. A claim alone on an idle machine is measured beside it.
func claimOneByOne(ctx context.Context, b *harness.Bench, durable report.Floor) error {
	if err := b.Server.Pool(ctx, harness.DefaultTemplate, harness.RowPool); err != nil {
		return err
	}
	env := map[string]string{"GREETING": "hello", "API_TOKEN": "s3cret-s3cret-s3cret", "EMPTY": ""}
	var plain, output, bound, boundOutput, alone report.Samples
	for range b.Rounds(10) {
		for _, with := range []map[string]string{nil, env} {
			claims, outputs, err := b.Server.ClaimInARow(ctx, client.CreateOptions{TemplateID: harness.DefaultTemplate, EnvVars: with}, "/bin/echo", "here")
			if err != nil {
				return err
			}
			if with == nil {
				alone = append(alone, claims[0])
				plain, output = append(plain, claims[1:]...), append(output, outputs[1:]...)
			} else {
				bound, boundOutput = append(bound, claims[1:]...), append(boundOutput, outputs[1:]...)
			}
		}
	}
	b.Report.Add("claim", "warm claim by REST, one after another, real sandboxes", "ms", plain).Over(durable.Name, durable.Median).AtMost(warmClaimBar)
	b.Report.Add("claim", "the first of them, the machine idle before", "ms", alone).Over(durable.Name, durable.Median)
	f := b.Report.Add("claim", "warm claim that brings variables", "ms", bound).Over("one that brings nothing", plain.At(0.5))
	f.AtMost(boundClaimBar * plain.At(0.5))
	b.Report.Add("claim", "claim to first output of a command", "ms", output).Over(durable.Name, durable.Median).AtMost(firstOutputBar)
	b.Report.Add("claim", "the same with variables", "ms", boundOutput).Over("one that brings nothing", output.At(0.5))
	return nil
}

func claimAtOnce(ctx context.Context, b *harness.Bench) error {
	began := time.Now()
	if err := b.Server.Pool(ctx, harness.DefaultTemplate, bigPool); err != nil {
		return err
	}
	if err := b.Server.AwaitMembers(ctx, bigPool); err != nil {
		return err
	}
	made := float64(bigPool - harness.RowPool)
	b.Report.One("claim", "pool filled with real sandboxes", "/s", made/time.Since(began).Seconds())
	took, sandboxes := make(report.Samples, bigPool), make([]harness.Sandbox, bigPool)
	var all errgroup.Group
	began = time.Now()
	for i := range bigPool {
		all.Go(func() (err error) {
			sandboxes[i], err = b.Server.Claim(ctx, client.CreateOptions{TemplateID: harness.DefaultTemplate, Timeout: time.Hour})
			took[i] = report.Millis(time.Since(began))
			return err
		})
	}
	if err := all.Wait(); err != nil {
		return fmt.Errorf("a claim of a hundred at once: %w", err)
	}
	b.Report.Add("claim", "each of 100 claims at once, 100 real sandboxes", "ms", took)
	b.Report.One("claim", "the last of 100 claims at once", "ms", took.At(1)).AtMost(burstBar)
	claimed, err := claimWhileFilling(ctx, b, sandboxes)
	if err != nil {
		return err
	}
	sandboxes = append(sandboxes, claimed...)
	if err := b.Server.Pool(ctx, harness.DefaultTemplate, 0); err != nil {
		return err
	}
	for _, x := range sandboxes {
		if err := b.Server.Kill(ctx, x); err != nil {
			return err
		}
	}
	return b.Server.AwaitGone(ctx, "gvisor")
}

const maxWhileFilling = 30

// claimWhileFilling measures what clients wait for while the pool gets members in place of a hundred that were claimed: claims, one
// second after the other, and commands in the sandboxes that are in use. It ends after maxWhileFilling claims, so that a chapter stays short
// where starts are slow.
func claimWhileFilling(ctx context.Context, b *harness.Bench, used []harness.Sandbox) (claimed []harness.Sandbox, _ error) {
	var claims, outputs, commands report.Samples
	for i := range maxWhileFilling {
		ready, err := b.Server.MembersReady(ctx)
		if err != nil {
			return nil, err
		}
		if ready >= bigPool*9/10 {
			break
		}
		for range 5 {
			began := time.Now()
			if _, err := used[i%len(used)].Run(ctx, "/bin/echo", "here"); err != nil {
				return nil, err
			}
			commands = append(commands, report.Millis(time.Since(began)))
			if err := harness.Rest(ctx, 200*time.Millisecond); err != nil {
				return nil, err
			}
		}
		x, claim, output, err := b.Server.ClaimAndRun(ctx, client.CreateOptions{TemplateID: harness.DefaultTemplate, Timeout: time.Hour}, "/bin/echo", "here")
		if err != nil {
			return nil, err
		}
		claims, outputs, claimed = append(claims, claim), append(outputs, output), append(claimed, x)
	}
	b.Report.Add("claim", "a claim a second while the pool is filled", "ms", claims)
	b.Report.Add("claim", "until the first output of a command in it", "ms", outputs)
	b.Report.Add("claim", "a command in a sandbox in use meanwhile", "ms", commands)
	return claimed, nil
}

// claimWithoutNode runs the benchmark whose members are made ready by a stand-in for the node.
func claimWithoutNode(ctx context.Context, b *harness.Bench, durable report.Floor) error {
	found, err := gobench.Run(ctx, b, "./internal/edge/e2b", "BenchmarkClaim", 1000, "1", "16")
	if err != nil {
		return err
	}
	one, many := found["1"], found["16"]
	one.Add(b.Report, "claim", "claims by REST, one after another, pool of 1000, node stand-in").Over(durable.Name, durable.Median).AtMost(warmClaimBar)
	b.Report.One("claim", "claims by REST, 16 clients, pool of 1000, node stand-in", "/s", many.Metrics["ops/s"]).AtLeast(claimsBar)
	many.Add(b.Report, "claim", "each of them")
	return nil
}

// fsyncs measures what it takes to make 1 KiB durable at the end of a file.
func fsyncs(dir string, n int) (took report.Samples, err error) {
	f, err := os.Create(filepath.Join(dir, "fsync"))
	if err != nil {
		return nil, fmt.Errorf("measure fsync: %w", err)
	}
	defer func() { _ = f.Close() }()
	return harness.Times(n, func() error {
		if _, err := f.Write(make([]byte, 1024)); err != nil {
			return err
		}
		return f.Sync()
	})
}
