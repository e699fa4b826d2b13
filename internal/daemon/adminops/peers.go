package adminops

import (
	"context"
	"errors"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/edge/peers"
)

// gossip lists the replicas and manages their keys.
type gossip struct{ Server }

func (g gossip) replica() (*peers.Replica, error) {
	p, err := g.ready()
	if err != nil {
		return nil, err
	}
	if p.Peers == nil {
		return nil, errs.Public(errs.ErrNotFound, "this server has no peers; start it with --peer-addr")
	}
	return p.Peers, nil
}

// Peers lists the replicas that are here, this one first.
func (g gossip) Peers(context.Context) ([]adminclient.Replica, error) {
	r, err := g.replica()
	if err != nil {
		return nil, err
	}
	out := []adminclient.Replica{replicaOf(r.Self())}
	out[0].Self = true
	for _, m := range r.Members() {
		out = append(out, replicaOf(m))
	}
	return out, nil
}

func replicaOf(m peers.Member) adminclient.Replica {
	return adminclient.Replica{Name: m.Name, Gossip: m.Gossip.String(), Push: m.Push.String(), Keys: m.Keys, Since: m.Since}
}

// AddKey has this replica understand a key, which is made if there is none.
func (g gossip) AddKey(ctx context.Context, key string) (adminclient.PeerKey, error) {
	var out adminclient.PeerKey
	r, err := g.replica()
	if err != nil {
		return out, err
	}
	if key == "" {
		key = peers.NewKey()
		out.Key = key
	}
	if out.ID, err = peers.KeyID(key); err == nil {
		err = withAdvice(r.AddKey(ctx, key))
	}
	if err != nil {
		return adminclient.PeerKey{}, err // a key that was not accepted is not returned
	}
	return out, nil
}

// UseKey makes this replica encrypt with a key.
func (g gossip) UseKey(ctx context.Context, id string) error {
	r, err := g.replica()
	if err != nil {
		return err
	}
	return withAdvice(r.UseKey(ctx, id))
}

// RemoveKey has this replica forget a key.
func (g gossip) RemoveKey(ctx context.Context, id string) error {
	r, err := g.replica()
	if err != nil {
		return err
	}
	return withAdvice(r.RemoveKey(ctx, id))
}

// withAdvice makes a conflict public, with what to do.
func withAdvice(err error) error {
	if errors.Is(err, errs.ErrConflict) {
		return errs.Public(err, err.Error()+"; `barchan peers ls` on each shows the keys of all")
	}
	return err
}
