package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/client"
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
	took     map[string]samples // by operation
	failures []error
	memory   float64 // the most that the server used, in MiB
}

func newPhase() *phase { return &phase{took: map[string]samples{}} }

func (p *phase) add(o *phase) {
	for name, s := range o.took {
		p.took[name] = append(p.took[name], s...)
	}
	p.failures = append(p.failures, o.failures...)
}

// measureNeighbors has one tenant attack while another one works. Attacks come in turns with quiet, so that a slow machine is slow for both.
func measureNeighbors(ctx context.Context, b *bench) (err error) {
	tenant, err := b.attacker(ctx)
	if err != nil {
		return err
	}
	if err := b.pool(ctx, neighborPool); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.pool(context.WithoutCancel(ctx), 0)) }()
	x, err := b.server.create(ctx, "gvisor")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.server.kill(context.WithoutCancel(ctx), x)) }()
	attack, quietFor := attackTime, quietTime
	if b.quick {
		attack, quietFor = attack/5, quietFor/5
	}
	quiet, before, beside := newPhase(), make([]*phase, len(attacks())), make([]*phase, len(attacks()))
	if _, err := b.neighbor(ctx, x, quietFor); err != nil { // warms
		return err
	}
	for i, a := range attacks() {
		p, err := b.neighbor(ctx, x, quietFor)
		if err != nil {
			return err
		}
		quiet.add(p)
		before[i] = p
		b.logf("neighbors: %s", a.name)
		end, err := tenant.begin(ctx, a)
		if err == nil {
			beside[i], err = b.neighbor(ctx, x, attack)
		}
		if err = errors.Join(err, end(), b.awaitFew(ctx, neighborPool+1)); err != nil {
			return fmt.Errorf("%s: %w", a.name, err)
		}
	}
	if len(quiet.failures) > 0 {
		return fmt.Errorf("nothing attacks, and still: %w", quiet.failures[0])
	}
	for i, a := range attacks() {
		b.reportNeighbor(a.name, quiet, before[i].memory, beside[i])
	}
	return nil
}

func (b *bench) reportNeighbor(attack string, quiet *phase, memory float64, beside *phase) {
	for _, name := range operations {
		took, floor := beside.took[name], quiet.took[name].at(0.99)
		f := b.report.one("neighbors", fmt.Sprintf("p99 of a %s beside: %s", name, attack), "ms", took.at(0.99)).over("p99 when quiet", floor)
		f.N = len(took)
		f.atMost(neighborBar * floor)
	}
	b.report.one("neighbors", "growth of the server beside: "+attack, "MiB", beside.memory-memory).atMost(neighborMemoryBar)
	b.report.one("neighbors", "refused or failed beside: "+attack, "", float64(len(beside.failures))).atMost(0)
	for i, err := range beside.failures {
		if i < 3 {
			b.logf("beside %s: %v", attack, err)
		}
	}
}

// neighbor works for a time: mostly requests, fewer commands, and from time to time a claim and a create.
func (b *bench) neighbor(ctx context.Context, x box, length time.Duration) (*phase, error) {
	p := newPhase()
	weighing, stop := context.WithCancel(ctx)
	var weigher sync.WaitGroup
	weigher.Go(func() { p.memory = b.weigh(weighing) })
	for began, i := time.Now(), 0; time.Since(began) < length; i++ {
		for range 20 {
			p.time(operations[0], func() error { return x.agent.Health(ctx) })
		}
		for range 5 {
			p.time(operations[1], func() error { _, err := x.run(ctx, "/bin/true"); return err })
		}
		for j, take := range []func(context.Context) (box, error){b.claimReady, b.createCold} {
			if i%2 != j {
				continue
			}
			if err := b.takeAndKill(ctx, p, operations[2+j], take); err != nil {
				stop()
				return p, err
			}
		}
	}
	stop()
	weigher.Wait()
	return p, ctx.Err()
}

// takeAndKill measures until a sandbox is there.
func (b *bench) takeAndKill(ctx context.Context, p *phase, name string, take func(context.Context) (box, error)) error {
	if err := b.awaitMembers(ctx, 1); err != nil {
		return err
	}
	var made box
	p.time(name, func() (err error) { made, err = take(ctx); return err })
	if made.id == "" {
		return nil
	}
	return b.server.kill(ctx, made)
}

func (b *bench) claimReady(ctx context.Context) (box, error) { return b.server.create(ctx, "gvisor") }

// createCold makes a sandbox of a template without a pool.
func (b *bench) createCold(ctx context.Context) (box, error) {
	return b.server.claim(ctx, client.CreateOptions{TemplateID: coldTemplate, Timeout: time.Hour})
}

func (p *phase) time(name string, f func() error) {
	began := time.Now()
	if err := f(); err != nil {
		p.failures = append(p.failures, fmt.Errorf("%s: %w", name, err))
		return
	}
	p.took[name] = append(p.took[name], millis(time.Since(began)))
}

// weigh returns the most memory that the server used until ctx was done.
func (b *bench) weigh(ctx context.Context) (most float64) {
	for {
		if now, err := residentMiB(b.server.cmd.Process.Pid); err == nil {
			most = max(most, now)
		}
		if rest(ctx, 200*time.Millisecond) != nil {
			return most
		}
	}
}

const (
	coldTemplate    = "bench-cold"
	tenantNamespace = "attacker"
)

// attacker makes a namespace with a key and a template, and the template that has no pool.
func (b *bench) attacker(ctx context.Context) (*tenant, error) {
	key, err := b.server.command(ctx, "", "key", "create", "attacker", "--namespace", tenantNamespace)
	if err != nil {
		return nil, err
	}
	cold := strings.Replace(templateOf("gvisor"), "bench-gvisor", coldTemplate, 1)
	for _, manifest := range []string{cold, strings.Replace(templateOf("gvisor"), `"default"`, `"`+tenantNamespace+`"`, 1)} {
		if _, err := b.server.command(ctx, manifest, "apply", "-f", "-"); err != nil {
			return nil, err
		}
	}
	return newTenant(b.server.addr, strings.TrimSpace(key))
}

// tenant is who attacks.
type tenant struct {
	key, addr string
	rest      *client.Client
}

func newTenant(addr, key string) (*tenant, error) {
	c, err := client.New(client.Config{URL: "http://" + addr, Key: key, UserAgent: "bench"})
	return &tenant{key: key, addr: addr, rest: c}, err
}

// begin starts an attack. The function ends it, and is never nil.
func (t *tenant) begin(ctx context.Context, a attack) (end func() error, err error) {
	var boxes []*client.Sandbox
	var outside *outsider
	end = func() error {
		err := outside.end()
		for _, x := range boxes {
			if gone := t.rest.Kill(context.WithoutCancel(ctx), x.SandboxID); !a.breaks || !errors.Is(gone, client.ErrNotFound) { // the attack may have ended it
				err = errors.Join(err, gone)
			}
		}
		return err
	}
	for range attackers {
		x, err := t.rest.Create(ctx, client.CreateOptions{TemplateID: "bench-gvisor", Timeout: time.Hour})
		if err != nil {
			return end, err
		}
		boxes = append(boxes, x)
		if err := x.Files.WriteString(ctx, "/tmp/attack.py", attackPrelude+a.inside); err != nil {
			return end, err
		}
		if _, err := x.Commands.Run(ctx, "sudo -n sh -c 'nohup python3 /tmp/attack.py >/tmp/attack.out 2>&1 & sleep 1; if ! pgrep -f attack.py >/dev/null; then cat /tmp/attack.out; exit 1; fi'",
			client.CommandOptions{}); err != nil && a.inside != "" && !a.breaks {
			return end, fmt.Errorf("start in the sandbox: %w", err)
		}
	}
	if a.outside != nil {
		outside, err = startOutsider(ctx, a.name, t.addr, t.key, boxes[0].SandboxID)
	}
	return end, err
}
