package adminapi

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// ring behaves like a replica alone.
type ring struct {
	keys []string
	away error
}

func (r *ring) Peers(context.Context) ([]adminclient.Replica, error) {
	return []adminclient.Replica{{Name: "a", Self: true, Keys: r.keys}}, r.away
}

func (r *ring) AddKey(_ context.Context, key string) (adminclient.PeerKey, error) {
	r.keys = append(r.keys, "id of "+key)
	return adminclient.PeerKey{ID: "id of " + key}, r.away
}

func (r *ring) UseKey(_ context.Context, id string) error {
	if r.keys[0] != id {
		r.keys = []string{id, r.keys[0]}
	}
	return r.away
}

func (r *ring) RemoveKey(_ context.Context, id string) error {
	if r.keys[0] == id {
		return errs.Public(errs.ErrConflict, "it is in use")
	}
	r.keys = r.keys[:1]
	return r.away
}

func TestPeers(t *testing.T) {
	r := &ring{keys: []string{"old"}}
	client, _, _ := startWith(t, func(cfg *Config) { cfg.Peers = r })
	key, err := client.AddPeerKey(t.Context(), "x/y")
	if err != nil || key.ID != "id of x/y" || key.Key != "" {
		t.Errorf("add: %+v, %v", key, err)
	}
	if err := client.UsePeerKey(t.Context(), key.ID); err != nil || r.keys[0] != key.ID {
		t.Errorf("use: %v, %v", err, r.keys)
	}
	if err := client.RemovePeerKey(t.Context(), key.ID); !errors.Is(err, errs.ErrConflict) || !strings.Contains(err.Error(), "it is in use") {
		t.Errorf("remove what is in use: %v", err)
	}
	if err := client.RemovePeerKey(t.Context(), "old"); err != nil {
		t.Error(err)
	}
	list, err := client.Peers(t.Context())
	if err != nil || len(list) != 1 || len(list[0].Keys) != 1 || list[0].Keys[0] != key.ID {
		t.Errorf("peers %+v, %v", list, err)
	}
	r.away = errs.Public(errs.ErrUnavailable, "the server is not ready (peers)")
	if _, err := client.Peers(t.Context()); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("during the boot: %v", err)
	}
	if err := client.UsePeerKey(t.Context(), key.ID); !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("during the boot: %v", err)
	}
}
