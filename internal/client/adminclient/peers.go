package adminclient

import (
	"context"
	"net/http"
	"net/url"
	"time"
)

// Routes of the administration of peers.
const (
	PathPeers    = "/v1/peers"
	PathPeerKeys = "/v1/peers/keys" // POST; POST PathPeerKeys/{id}/use; DELETE PathPeerKeys/{id}
)

// Replica is one of the replicas for the same objects.
type Replica struct {
	Name   string `json:"name"`
	Gossip string `json:"gossip"` // host:port
	Push   string `json:"push"`   // host:port
	// Self marks the replica that responded.
	Self bool `json:"self"`
	// Keys are the IDs of its gossip keys, the one in use first.
	Keys []string `json:"keys"`
	// Since is when the responding replica last saw it join.
	Since time.Time `json:"since"`
}

// PeerKey is a gossip key.
type PeerKey struct {
	// ID identifies the key without revealing it; it is the same on all replicas.
	ID string `json:"id"`
	// Key is the secret itself, only in the response to the request that created it.
	Key string `json:"key,omitempty"`
}

// Peers lists the replicas that are present now, the responding one first.
func (c *Client) Peers(ctx context.Context) ([]Replica, error) {
	return get[[]Replica](ctx, c, PathPeers)
}

// AddPeerKey adds a gossip key to this replica only. If empty, a new key is made.
func (c *Client) AddPeerKey(ctx context.Context, key string) (PeerKey, error) {
	return post[PeerKey](ctx, c, PathPeerKeys, PeerKey{Key: key})
}

// UsePeerKey makes this replica encrypt with a key. It is an errs.ErrConflict while another replica
// does not hold it.
func (c *Client) UsePeerKey(ctx context.Context, id string) error {
	return c.change(ctx, http.MethodPost, PathPeerKeys+"/"+url.PathEscape(id)+"/use")
}

// RemovePeerKey removes a key from this replica. It is an errs.ErrConflict while this or another
// replica encrypts with it.
func (c *Client) RemovePeerKey(ctx context.Context, id string) error {
	return c.change(ctx, http.MethodDelete, PathPeerKeys+"/"+url.PathEscape(id))
}
