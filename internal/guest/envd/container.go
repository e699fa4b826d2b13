package envd

import (
	"context"
	"net/http"
)

// Values of Config.Restart, as in Kubernetes.
const (
	RestartAlways    = "Always"
	RestartOnFailure = "OnFailure"
)

// ContainerSocket is where the agent of a container beside the first listens: an abstract socket of the sandbox's network
// namespace, which its containers share. It takes no port from them, and cannot be reached from outside.
func ContainerSocket(container string) string { return "@barchan/container/" + container }

// Container returns a client of the agent of another container of the sandbox.
func (c *Client) Container(name string) (*Client, error) {
	cfg := c.cfg
	cfg.BaseURL += PathContainers + name
	return NewClient(cfg)
}

// Restart ends the entrypoint of a container whose agent starts it again.
func (c *Client) Restart(ctx context.Context) error {
	return c.call(ctx, http.MethodPost, PathRestart, nil, nil)
}
