package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

var clusterSeed = flag.Uint64("cluster-seed", 0, "seed of the cluster's events; 0 takes a new one")

// TestCluster has four replicas over one API server live through partitions, losses and deaths while
// sandboxes come and go at addresses that are used again at once. After each, all gateways agree
// with the objects; no request ever gets another sandbox's response.
func TestCluster(t *testing.T) {
	skipInFast(t)
	c := newCluster(t, 4, restTime)
	for _, r := range c.replicas {
		r.start()
	}
	seed := *clusterSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("repeat with -cluster-seed=%d", seed)
	w := &clusterFixture{cluster: c, rng: rand.New(rand.NewPCG(seed, 1)), alive: map[string]bool{}}
	for range 8 {
		w.create()
	}
	w.agree("at the start")
	stop := w.probe()
	defer stop()
	for _, part := range []struct {
		name string
		do   func()
		undo func()
	}{
		{"two that are isolated from each other", func() { w.isolate(1, true); w.isolate(2, true) }, func() { w.isolate(1, false); w.isolate(2, false) }},
		{"one that is killed and restarted", func() { c.replicas[2].kill() }, func() { c.replicas[2].start() }},
		{"a third of all gossip and of all else between them lost", w.lose, w.keep},
		{"three of four die", func() { c.replicas[0].kill(); c.replicas[1].kill(); c.replicas[3].kill() }, func() {
			c.replicas[0].start()
			c.replicas[1].start()
			c.replicas[3].start()
		}},
	} {
		part.do()
		w.churn(15)
		w.agree("during: " + part.name)
		part.undo()
		w.churn(10)
		w.agree("after: " + part.name)
	}
	read, refused := stop()
	t.Logf("%d answers were read, %d requests were refused honestly; a route reached another replica after %s at the median, %s at worst (of %d)",
		read, refused, w.lag(0.5), w.lag(1), len(w.lags))
	t.Logf("%d sandboxes got an address that another had before", c.node.usedAgain())
	if read < 100 {
		t.Errorf("only %d answers were read: the prober proves nothing", read)
	}
}

// clusterFixture is what should be.
type clusterFixture struct {
	*cluster
	rng  *rand.Rand
	lags []time.Duration

	mu    sync.Mutex
	alive map[string]bool // sandbox IDs; false once killed; +checklocks:mu
}

// up are the replicas that run.
func (w *clusterFixture) up() (up []*replica) {
	for _, r := range w.replicas {
		if r.cmd != nil {
			up = append(up, r)
		}
	}
	return up
}

func (w *clusterFixture) any() *replica {
	up := w.up()
	return up[w.rng.IntN(len(up))]
}

// create makes a sandbox by one replica and measures when another one's gateway has its route.
func (w *clusterFixture) create() {
	w.t.Helper()
	made, err := w.any().rest.Create(w.t.Context(), client.CreateOptions{TemplateID: "base", Timeout: 10 * time.Minute})
	if err != nil {
		w.t.Fatalf("create: %v", err)
	}
	began := time.Now()
	w.mu.Lock()
	w.alive[made.SandboxID] = true
	w.mu.Unlock()
	other := w.any()
	eventually.NoError(w.t, "the route of a new sandbox at another replica", func() error { return w.knows(other, made.SandboxID, true) })
	w.lags = append(w.lags, time.Since(began))
}

func (w *clusterFixture) lag(p float64) time.Duration {
	sorted := slices.Sorted(slices.Values(w.lags))
	return sorted[int(p*float64(len(sorted)-1))].Round(100 * time.Microsecond)
}

// kill ends a sandbox by one replica.
func (w *clusterFixture) kill() {
	w.t.Helper()
	live := w.living()
	if len(live) == 0 {
		return
	}
	id := live[w.rng.IntN(len(live))]
	by := w.any()
	eventually.NoError(w.t, "kill "+id, func() error { return by.rest.Kill(w.t.Context(), id) }) // its cache may not have it yet
	w.mu.Lock()
	w.alive[id] = false
	w.mu.Unlock()
}

// knows verifies a sandbox's route at the gateway of a replica.
func (w *clusterFixture) knows(r *replica, id string, lives bool) error {
	status, body, err := r.query(w.t.Context(), id, "/")
	switch {
	case err != nil:
		return err
	case lives && (status != http.StatusOK || body != secretOf(id)), !lives && status != http.StatusBadGateway:
		return fmt.Errorf("%d %q", status, body)
	}
	return nil
}

func (w *clusterFixture) living() (ids []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, lives := range w.alive {
		if lives {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

func (w *clusterFixture) churn(n int) {
	w.t.Helper()
	for range n {
		w.kill()
		w.create()
	}
}

// agree waits until all running gateways have the right route of each sandbox.
func (w *clusterFixture) agree(when string) {
	w.t.Helper()
	w.mu.Lock()
	want := maps.Clone(w.alive)
	w.mu.Unlock()
	for _, r := range w.up() {
		for id, lives := range want {
			eventually.NoError(w.t, fmt.Sprintf("%s: replica %d knows of %s, which lives: %v", when, r.n, id, lives), func() error { return w.knows(r, id, lives) })
		}
	}
}

// probe requests all sandboxes at all gateways, deleted ones too, until it is stopped. It fails the test
// as soon as an answer is another sandbox's.
func (w *clusterFixture) probe() (stop func() (read, refused int64)) {
	ctx, cancel := context.WithCancel(context.Background())
	var read, refused atomic.Int64
	var running sync.WaitGroup
	for _, r := range w.replicas {
		running.Go(func() {
			for ctx.Err() == nil {
				w.mu.Lock()
				ids := make([]string, 0, len(w.alive))
				for id := range w.alive {
					ids = append(ids, id)
				}
				w.mu.Unlock()
				for _, id := range ids {
					status, body, err := r.query(ctx, id, "/")
					switch {
					case err != nil: // it is down
						select {
						case <-ctx.Done():
							return
						case <-time.After(10 * time.Millisecond):
						}
					case status != http.StatusOK:
						refused.Add(1)
					case body == secretOf(""): // the moment between two owners
					case body != secretOf(id):
						w.t.Errorf("replica %d gave for sandbox %s what another answers: %q", r.n, id, body)
					default:
						read.Add(1)
					}
				}
			}
		})
	}
	return func() (int64, int64) {
		cancel()
		running.Wait()
		return read.Load(), refused.Load()
	}
}

// isolate keeps a replica from those that are isolated too; the API server and the sandboxes it
// still reaches.
func (w *clusterFixture) isolate(n int, on bool) {
	w.t.Helper()
	state := map[bool]string{true: "on", false: "off"}[on]
	if err := w.run("bridge", fmt.Sprintf("link set dev %sr%dh isolated %s", w.tag, n, state)); err != nil {
		w.t.Fatal(err)
	}
}

// lose drops a third of the packets between replicas. This kernel has no netem, and so nothing is
// put out of order but what retransmission does.
func (w *clusterFixture) lose() {
	w.t.Helper()
	if err := nft(fmt.Sprintf(`
		add table bridge %[1]s
		add chain bridge %[1]s lossy { type filter hook forward priority 0; }
		add rule bridge %[1]s lossy ip saddr %[2]s.11-%[2]s.15 ip daddr %[2]s.11-%[2]s.15 numgen random mod 3 0 drop
	`, w.tag, w.net)); err != nil {
		w.t.Fatal(err)
	}
}

func (w *clusterFixture) keep() {
	w.t.Helper()
	if err := nft("delete table bridge " + w.tag); err != nil {
		w.t.Fatal(err)
	}
}

func nft(rules string) error {
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		return errors.Join(fmt.Errorf("nft: %w: %s", err, out), errors.New(rules))
	}
	return nil
}
