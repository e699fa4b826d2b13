package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// BenchmarkPeers is from the answer to a create, which one replica gave, until the gateways of all
// others lead to the sandbox: real processes, each in a network namespace of its own, over a node
// that is played. They get requests over kept connections; own is the same
// with the gateway that gave the answer, which knows at once: what one such question takes.
func BenchmarkPeers(b *testing.B) {
	c := newCluster(b, 3, restTime)
	for _, r := range c.replicas {
		r.start()
	}
	made := c.create(c.replicas[0])
	for _, r := range c.replicas {
		eventually.NoError(b, "the first sandbox is known", func() error { return r.leads(made) })
	}
	eventually.NoError(b, "all are together", func() error {
		out, err := c.replicas[0].barchan("", "peers", "ls")
		for _, r := range c.replicas[1:] {
			if !slices.Contains(strings.Fields(out), fmt.Sprintf("r%d", r.n)) {
				err = errors.Join(err, fmt.Errorf("replica %d is not there: %s", r.n, out))
			}
		}
		return err
	})
	b.Run("own", func(b *testing.B) { c.benchmarkPeers(b, c.replicas[:1]) })
	b.Run("others", func(b *testing.B) { c.benchmarkPeers(b, c.replicas[1:]) })
}

func (c *cluster) benchmarkPeers(b *testing.B, gateways []*replica) {
	took := make([]time.Duration, b.N)
	var made []string
	sweep := func() {
		for _, id := range made {
			if err := c.replicas[0].rest.Kill(b.Context(), id); err != nil {
				b.Fatal(err)
			}
		}
		made = nil
		eventually.NoError(b, "the addresses have rested", func() error { return c.node.allRested(boxes - 1) })
	}
	for i := range took {
		if len(made) == boxes/2 {
			b.StopTimer()
			sweep()
			b.StartTimer()
		}
		id := c.create(c.replicas[0])
		made = append(made, id)
		began := time.Now()
		var wg sync.WaitGroup
		for _, r := range gateways {
			wg.Go(func() {
				for err := r.leads(id); err != nil; err = r.leads(id) {
					if b.Context().Err() != nil || time.Since(began) > eventually.Patience {
						b.Errorf("replica %d: %v", r.n, err)
						return
					}
				}
			})
		}
		wg.Wait()
		took[i] = time.Since(began)
	}
	b.StopTimer()
	sweep()
	slices.Sort(took)
	at := func(p float64) float64 { return float64(took[int(float64(len(took)-1)*p)].Microseconds()) }
	b.ReportMetric(at(0.5), "p50-µs")
	b.ReportMetric(at(0.99), "p99-µs")
}

// leads queries the replica's gateway once, over a connection that is kept.
func (r *replica) leads(id string) error {
	ctx, cancel := context.WithTimeout(context.Background(), eventually.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.addr+"/", http.NoBody)
	if err != nil {
		return err
	}
	req.Host = fmt.Sprintf("%d-%s.barchan.localhost", servicePort, id)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err == nil && (res.StatusCode != http.StatusOK || string(body) != secretOf(id)) {
		err = fmt.Errorf("%d %q", res.StatusCode, body)
	}
	return err
}

// allRested fails as long as fewer addresses than want may be handed out.
func (n *playedNode) allRested(want int) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	ready := 0
	for _, x := range n.free {
		if time.Since(x.since) >= n.rest {
			ready++
		}
	}
	if ready < want {
		return fmt.Errorf("%d of %d have rested", ready, want)
	}
	return nil
}
