package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// gossip is the admin API's peers: this replica, and another that has the first key alone.
type gossip struct{ *server }

func (g gossip) Peers(context.Context) ([]adminclient.Replica, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	began := time.Now().Add(-90 * time.Minute)
	return []adminclient.Replica{
		{Name: "n1", Gossip: "10.0.0.5:7701", Push: "10.0.0.5:4000", Self: true, Keys: append([]string{"k1"}, g.peerKeys...), Since: began},
		{Name: "n2", Gossip: "10.0.0.6:7701", Push: "10.0.0.6:4000", Keys: []string{"k1"}, Since: began},
	}, nil
}

func (g gossip) AddKey(_ context.Context, key string) (adminclient.PeerKey, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.peerKeys) > 0 {
		return adminclient.PeerKey{}, errs.Public(errs.ErrConflict, "2 are held already")
	}
	if key == "" {
		g.peerKeys = append(g.peerKeys, "new")
		return adminclient.PeerKey{ID: "new", Key: "secret"}, nil
	}
	g.peerKeys = append(g.peerKeys, "id-of-"+key)
	return adminclient.PeerKey{ID: "id-of-" + key}, nil
}

func (g gossip) UseKey(_ context.Context, id string) error {
	return fmt.Errorf("use gossip key %s: n2 does not hold it yet: %w", id, errs.ErrConflict)
}

func (g gossip) RemoveKey(_ context.Context, id string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.peerKeys = slices.DeleteFunc(g.peerKeys, func(k string) bool { return k == id })
	return nil
}

func TestPeers(t *testing.T) {
	s := newServer(t, nil)
	s.run("", "peers", "key", "add").want(t, 0, "secret\n", "key new; it is a secret, and is not shown again:")
	s.run("", "peers", "ls").want(t, 0, ""+
		"NAME        GOSSIP          PUSH            KEYS      FOR\n"+
		"n1 (this)   10.0.0.5:7701   10.0.0.5:4000   k1, new   90m\n"+
		"n2          10.0.0.6:7701   10.0.0.6:4000   k1        90m\n", "")
	var list []adminclient.Replica
	if r := s.run("", "peers", "ls", "--json"); json.Unmarshal([]byte(r.stdout), &list) != nil || len(list) != 2 || !list[0].Self || list[1].Keys[0] != "k1" {
		t.Errorf("%s", r.stdout)
	}
	s.run("", "peers", "key", "use", "new").want(t, 1, "", "barchan: use gossip key new: n2 does not hold it yet")
	s.run("other\n", "peers", "key", "add", "-").want(t, 1, "", "barchan: 2 are held already\n")
	s.run("", "peers", "key", "rm", "new").want(t, 0, "", "")
	s.run("other\n", "peers", "key", "add", "-").want(t, 0, "id-of-other\n", "")
	s.run("", "peers", "key", "rm", "id-of-other").want(t, 0, "", "")
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, []byte(" third \n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.run("", "peers", "key", "add", file).want(t, 0, "id-of-third\n", "")
	s.run("", "peers", "key", "add", file+".none").want(t, 2, "", "FILE: ")
	s.run("", "peers", "key", "add", "-").want(t, 2, "", "FILE: - is empty")
	s.run("", "peers", "key", "use").want(t, 2, "", "ID is missing")
	s.run("", "peers").want(t, 2, "", "one of key, ls")
}
