package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/barchan-dev/barchan/client/internal/rest"
)

// SSHAccess is how to reach sandboxes over SSH.
type SSHAccess struct {
	Port int `json:"port"`
	// HostKey is the server's public key, as in known_hosts.
	HostKey string `json:"hostKey"`
}

// SSHKey is a public key that opens sandboxes.
type SSHKey struct {
	Fingerprint string `json:"fingerprint"`
	Comment     string `json:"comment"`
	PublicKey   string `json:"publicKey"`
}

// SSH returns how to reach sandboxes over SSH; an [ErrNotFound] if the server does not serve it.
func (c *Client) SSH(ctx context.Context) (SSHAccess, error) {
	return rest.Fetch[SSHAccess](ctx, &c.api, http.MethodGet, "/ssh", nil)
}

// SSHKeys lists the public keys of the API key.
func (c *Client) SSHKeys(ctx context.Context) ([]SSHKey, error) {
	return rest.Fetch[[]SSHKey](ctx, &c.api, http.MethodGet, "/ssh-keys", nil)
}

// AddSSHKey adds a public key, a line of authorized_keys, to the API key.
func (c *Client) AddSSHKey(ctx context.Context, line string) (SSHKey, error) {
	return rest.Fetch[SSHKey](ctx, &c.api, http.MethodPost, "/ssh-keys", map[string]string{"publicKey": line})
}

// DeleteSSHKey removes a public key from the API key.
func (c *Client) DeleteSSHKey(ctx context.Context, fingerprint string) error {
	return c.Call(ctx, http.MethodDelete, "/ssh-keys?"+url.Values{"fingerprint": {fingerprint}}.Encode(), nil, nil, nil)
}
