package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// staleTime and cutRest stand to each other as 40 s and a minute do in a real cluster. A replica takes no
// staleTime that is shorter.
const (
	staleTime = 12 * time.Second
	cutRest   = 18 * time.Second
)

// TestClusterCutOff: a replica that is cut off from the API server, and from the other replicas,
// does not lead to the next owner of an address. It refuses requests, and recovers
// automatically when it is connected.
func TestClusterCutOff(t *testing.T) {
	skipInFast(t)
	c := newCluster(t, 2, cutRest)
	w := &clusterFixture{cluster: c}
	for _, r := range c.replicas {
		r.env = append(r.env, fmt.Sprintf("BARCHAN_TEST_STALE_AFTER=%s", staleTime))
		w.isolate(r.n, true)
		r.start()
	}
	whole, cut := c.replicas[0], c.replicas[1]
	first := c.create(whole)
	address := c.node.addressOf(first)
	agree := func(r *replica, id string, status int, body string) { // no ID is the replica itself
		t.Helper()
		path := "/"
		if id == "" {
			path = "/readyz"
		}
		eventually.NoError(t, fmt.Sprintf("replica %d answers %d for %q", r.n, status, id), func() error {
			if got, text, err := r.query(t.Context(), id, path); err != nil || got != status || !strings.Contains(text, body) {
				return errors.Join(err, fmt.Errorf("%d %q", got, text))
			}
			return nil
		})
	}
	agree(cut, first, http.StatusOK, secretOf(first))
	c.cutOff(cut, true)
	if err := whole.rest.Kill(t.Context(), first); err != nil {
		t.Fatal(err)
	}
	eventually.NoError(t, "the address has rested", func() error {
		left, err := c.node.freeIn(address)
		if err == nil && left > 0 {
			err = fmt.Errorf("%s is left", left)
		}
		return err
	})
	second := c.create(whole)
	if got := c.node.addressOf(second); got != address {
		t.Fatalf("the second sandbox is at %s, not at %s of the first: nothing is tested", got, address)
	}
	agree(whole, second, http.StatusOK, secretOf(second))
	for range 20 {
		for _, id := range []string{first, second} {
			status, retry, err := cut.refusal(t.Context(), id)
			if err != nil || status != http.StatusServiceUnavailable || retry == "" {
				t.Fatalf("the replica that is cut off answers %d for %s, Retry-After %q: %v", status, id, retry, err)
			}
		}
	}
	agree(cut, "", http.StatusServiceUnavailable, `"ready":false`)
	c.cutOff(cut, false)
	agree(cut, second, http.StatusOK, secretOf(second))
	agree(cut, first, http.StatusBadGateway, "not found")
	agree(cut, "", http.StatusOK, "")                       // it serves sandboxes a moment before it is ready
	agree(whole, first, http.StatusBadGateway, "not found") // its routes were never stale
}

func (c *cluster) create(by *replica) (id string) {
	c.t.Helper()
	made, err := by.rest.Create(c.t.Context(), client.CreateOptions{TemplateID: "base", Timeout: 10 * time.Minute})
	if err != nil {
		c.t.Fatalf("create: %v", err)
	}
	return made.SandboxID
}

// cutOff drops what goes between a replica and the API server.
func (c *cluster) cutOff(r *replica, on bool) {
	c.t.Helper()
	rules := "delete table ip cut"
	if on {
		rules = `
			add table ip cut
			add chain ip cut out { type filter hook output priority 0; }
			add rule ip cut out tcp dport 6443 drop
			add chain ip cut in { type filter hook input priority 0; }
			add rule ip cut in tcp sport 6443 drop
		`
	}
	cmd := exec.Command("ip", "netns", "exec", fmt.Sprintf("%sr%d", c.tag, r.n), "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		c.t.Fatalf("nft: %v: %s", err, out)
	}
}

// refusal requests a sandbox and returns the status, and when to try again.
func (r *replica) refusal(ctx context.Context, id string) (status int, retryAfter string, err error) {
	ctx, cancel := context.WithTimeout(ctx, eventually.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.addr+"/", http.NoBody)
	if err != nil {
		return 0, "", err
	}
	req.Host = fmt.Sprintf("%d-%s.barchan.localhost", servicePort, id)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	return res.StatusCode, res.Header.Get("Retry-After"), res.Body.Close()
}
