package adminclient

import "context"

// PathRotateSecrets is the route that replaces the key of Secrets.
const PathRotateSecrets = "/v1/secrets/rotate"

// Rotation is what became of the key of Secrets.
type Rotation struct {
	// Written is how many Secrets were encrypted again.
	Written int `json:"written"`
}

// RotateSecrets replaces the key that encrypts Secrets in the object store. Repeating it makes another key.
func (c *Client) RotateSecrets(ctx context.Context) (Rotation, error) {
	return post[Rotation](ctx, c, PathRotateSecrets, struct{}{})
}
