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

// Replica is one of those that serve the same objects.
type Replica struct {
	Name   string `json:"name"`
	Gossip string `json:"gossip"` // host:port
	Push   string `json:"push"`   // host:port
	// Self says that it is the one that was asked.
	Self bool `json:"self"`
	// Keys names the gossip keys that it holds, the one in use first.
	Keys []string `json:"keys"`
	// Since is when the one that was asked last saw it come.
	Since time.Time `json:"since"`
}

// PeerKey is a gossip key.
type PeerKey struct {
	// ID names the key without telling it; it is the same on all replicas.
	ID string `json:"id"`
	// Key is the secret itself. It is in answers only where it was made for this request.
	Key string `json:"key,omitempty"`
}

// Peers lists the replicas that are here now, first the one that is asked.
func (c *Client) Peers(ctx context.Context) ([]Replica, error) {
	var out []Replica
	return out, c.get(ctx, PathPeers, &out)
}

// AddPeerKey has the replica that is asked understand a gossip key, and no other replica. An
// empty one has it make one.
func (c *Client) AddPeerKey(ctx context.Context, key string) (PeerKey, error) {
	var out PeerKey
	return out, c.post(ctx, PathPeerKeys, PeerKey{Key: key}, &out)
}

// UsePeerKey has the replica that is asked speak with a key. It is an errs.ErrConflict while
// another does not understand it.
func (c *Client) UsePeerKey(ctx context.Context, id string) error {
	return c.change(ctx, http.MethodPost, PathPeerKeys+"/"+url.PathEscape(id)+"/use")
}

// RemovePeerKey has the replica that is asked forget a key. It is an errs.ErrConflict while it or
// another speaks with it.
func (c *Client) RemovePeerKey(ctx context.Context, id string) error {
	return c.change(ctx, http.MethodDelete, PathPeerKeys+"/"+url.PathEscape(id))
}

// change is a request that has no body and no answer but that it was done.
func (c *Client) change(ctx context.Context, method, path string) error {
	res, err := c.send(ctx, method, path, nil)
	if err != nil {
		return err
	}
	return res.Body.Close()
}
