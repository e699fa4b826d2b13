package neighbors

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/proc"
	"github.com/barchan-dev/barchan/test/bench/report"
)

const (
	// neighborBar is how many times its quiet p99 an operation may take beside an attack.
	neighborBar = 2
	// neighborMemoryBar is by how much the server's memory may grow, in MiB.
	neighborMemoryBar = 64
	// attackTime is for how long each attack runs, quietTime is the pause before it, in which nothing else runs.
	attackTime = 20 * time.Second
	quietTime  = 10 * time.Second
	// attackers is how many sandboxes attack at once: together they may use both processors of a small machine.
	attackers = 2
	// neighborPool is the size of the pool that claims take from.
	neighborPool = 4
)

// operations are what the neighbor of an attacker does, in the order of the report.
var operations = []string{"request to a sandbox", "command", "warm claim", "cold create"}

// phase is what the neighbor measured while one thing was so.
type phase struct {
	took     map[string]report.Samples // by operation
	failures []error
	memory   float64 // the most that the server used, in MiB
}

func newPhase() *phase { return &phase{took: map[string]report.Samples{}} }

func (p *phase) add(o *phase) {
	for name, s := range o.took {
		p.took[name] = append(p.took[name], s...)
	}
	p.failures = append(p.failures, o.failures...)
}

// Measure has one tenant attack while another one works. Attacks come in turns with quiet, so that a slow machine is slow for both.
// Only has the names of attacks, separated by commas; empty means all.
func Measure(ctx context.Context, b *harness.Bench, only string) (err error) {
	attacks, err := chosen(only)
	if err != nil {
		return err
	}
	tenant, err := attacker(ctx, b)
	if err != nil {
		return err
	}
	if err := b.Server.Pool(ctx, harness.DefaultTemplate, neighborPool); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Server.Pool(context.WithoutCancel(ctx), harness.DefaultTemplate, 0)) }()
	x, err := b.Server.Create(ctx, "gvisor")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Server.Kill(context.WithoutCancel(ctx), x)) }()
	if err := preferThis(); err != nil {
		return err
	}
	attack, quietFor := attackTime, quietTime
	if b.Quick {
		attack, quietFor = attack/5, quietFor/5
	}
	quiet, before, beside := newPhase(), make([]*phase, len(attacks)), make([]*phase, len(attacks))
	if _, err := neighbor(ctx, b, x, quietFor); err != nil { // warms
		return err
	}
	for i, a := range attacks {
		p, err := neighbor(ctx, b, x, quietFor)
		if err != nil {
			return err
		}
		quiet.add(p)
		before[i] = p
		b.Logf("neighbors: %s", a.name)
		end, err := tenant.begin(ctx, a)
		if err == nil {
			beside[i], err = neighbor(ctx, b, x, attack)
		}
		if err = errors.Join(err, end(), b.Server.AwaitFew(ctx, neighborPool+1)); err != nil {
			return fmt.Errorf("%s: %w", a.name, err)
		}
	}
	if len(quiet.failures) > 0 {
		return fmt.Errorf("nothing attacks, and still: %w", quiet.failures[0])
	}
	for i, a := range attacks {
		reportNeighbor(b, a.name, quiet, before[i].memory, beside[i])
	}
	return nil
}

// preferThis gives this process, the neighbor's client, the highest priority: a real one has a machine of its own.
func preferThis() error {
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return fmt.Errorf("threads of this program: %w", err)
	}
	for _, t := range threads { // later ones inherit it
		id, err := strconv.Atoi(t.Name())
		if err == nil {
			err = unix.Setpriority(unix.PRIO_PROCESS, id, -20)
		}
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("priority of this program: %w", err)
		}
	}
	return nil
}

func reportNeighbor(b *harness.Bench, attack string, quiet *phase, memory float64, beside *phase) {
	for _, name := range operations {
		took, floor := beside.took[name], quiet.took[name].At(0.99)
		f := b.Report.One("neighbors", fmt.Sprintf("p99 of a %s beside: %s", name, attack), "ms", took.At(0.99)).Over("p99 when quiet", floor)
		f.N = len(took)
		f.AtMost(neighborBar * floor)
	}
	b.Report.One("neighbors", "growth of the server beside: "+attack, "MiB", beside.memory-memory).AtMost(neighborMemoryBar)
	b.Report.One("neighbors", "refused or failed beside: "+attack, "", float64(len(beside.failures))).AtMost(0)
	for i, err := range beside.failures {
		if i < 3 {
			b.Logf("beside %s: %v", attack, err)
		}
	}
}

// neighbor works for a time: mostly requests, fewer commands, and from time to time a claim and a create.
func neighbor(ctx context.Context, b *harness.Bench, x harness.Sandbox, length time.Duration) (*phase, error) {
	p := newPhase()
	weighing, stop := context.WithCancel(ctx)
	var weigher sync.WaitGroup
	weigher.Go(func() { p.memory = weigh(weighing, b) })
	for began, i := time.Now(), 0; time.Since(began) < length; i++ {
		for range 20 {
			p.time(operations[0], func() error { return x.Agent.Health(ctx) })
		}
		for range 5 {
			p.time(operations[1], func() error { _, err := x.Run(ctx, "/bin/true"); return err })
		}
		for j, template := range []string{harness.DefaultTemplate, coldTemplate} {
			if i%2 != j {
				continue
			}
			if err := claimAndKill(ctx, b, p, operations[2+j], template); err != nil {
				stop()
				return p, err
			}
		}
	}
	stop()
	weigher.Wait()
	return p, ctx.Err()
}

// claimAndKill measures until a sandbox is there. A template without a pool makes it a cold create.
func claimAndKill(ctx context.Context, b *harness.Bench, p *phase, name, template string) error {
	if err := b.Server.AwaitMembers(ctx, 1); err != nil {
		return err
	}
	var made harness.Sandbox
	p.time(name, func() (err error) {
		made, err = b.Server.Claim(ctx, client.CreateOptions{TemplateID: template, Timeout: time.Hour})
		return err
	})
	if made.ID == "" {
		return nil
	}
	return b.Server.Kill(ctx, made)
}

func (p *phase) time(name string, f func() error) {
	began := time.Now()
	if err := f(); err != nil {
		p.failures = append(p.failures, fmt.Errorf("%s: %w", name, err))
		return
	}
	p.took[name] = append(p.took[name], report.Millis(time.Since(began)))
}

// weigh returns the most memory that the server used until ctx was done.
func weigh(ctx context.Context, b *harness.Bench) (most float64) {
	for {
		if now, err := proc.RSS(b.Server.PID()); err == nil {
			most = max(most, now)
		}
		if harness.Rest(ctx, 200*time.Millisecond) != nil {
			return most
		}
	}
}
