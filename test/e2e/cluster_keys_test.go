package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestClusterKeys rotates the gossip key of three replicas in three rounds. They stay together, and
// one that restarts afterwards joins the others.
func TestClusterKeys(t *testing.T) {
	t.Parallel()
	c := newCluster(t, 3, restTime)
	for _, r := range c.replicas {
		r.env = append(r.env, fmt.Sprintf("BARCHAN_PEER_DIR=%s/own-peers-%d", c.dir, r.n))
	}
	first := c.replicas[0]
	first.start()
	for _, r := range c.replicas[1:] { // each has a directory of its own, as on other machines
		if err := c.run("cp", fmt.Sprintf("-r %s/own-peers-1 %s/own-peers-%d", c.dir, c.dir, r.n)); err != nil {
			t.Fatal(err)
		}
		r.start()
	}
	together := func(keys ...string) {
		t.Helper()
		for _, r := range c.replicas {
			eventually.NoError(t, fmt.Sprintf("replica %d sees three replicas with %v", r.n, keys), func() error {
				out, err := r.barchan("", "peers", "ls", "--json")
				if err != nil {
					return err
				}
				var list []adminclient.Replica
				if err := json.Unmarshal([]byte(out), &list); err != nil || len(list) != 3 {
					return fmt.Errorf("%s: %w", out, err)
				}
				for _, m := range list {
					if len(keys) > 0 && !slices.Equal(m.Keys, keys) {
						return fmt.Errorf("%s has %v", m.Name, m.Keys)
					}
				}
				return nil
			})
		}
	}
	together()
	out, err := first.barchan("", "peers", "ls", "--json")
	if err != nil {
		t.Fatal(err)
	}
	var list []adminclient.Replica
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatal(err)
	}
	old := list[0].Keys[0]
	key, err := first.barchan("", "peers", "key", "add")
	if err != nil {
		t.Fatal(err)
	}
	var id string
	for _, r := range c.replicas[1:] {
		if id, err = r.barchan(key, "peers", "key", "add", "-"); err != nil {
			t.Fatal(err)
		}
	}
	id = strings.TrimSpace(id)
	if _, err := first.barchan("", "peers", "key", "rm", old); err == nil || !strings.Contains(err.Error(), "it is in use") {
		t.Errorf("the key in use was removed: %v", err)
	}
	together(old, id)
	for _, step := range []struct{ verb, key string }{{"use", id}, {"rm", old}} {
		for _, r := range c.replicas {
			eventually.NoError(t, fmt.Sprintf("replica %d: %s", r.n, step.verb), func() error {
				_, err := r.barchan("", "peers", "key", step.verb, step.key)
				return err
			})
		}
	}
	together(id)
	first.kill()
	first.start()
	together(id)
}

// barchan runs a command beside the replica, and returns what it wrote.
func (r *replica) barchan(stdin string, args ...string) (string, error) {
	cmd := exec.CommandContext(r.c.t.Context(), programs.barchan, args...)
	cmd.Env, cmd.Stdin = r.env, strings.NewReader(stdin)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("barchan %s: %w: %s", strings.Join(args, " "), err, stderr.String())
	}
	return out.String(), nil
}
