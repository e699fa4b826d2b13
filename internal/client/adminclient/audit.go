package adminclient

import "context"

// PathAudit is where a server is asked for its [Finding]s.
const PathAudit = "/v1/audit"

// Finding is one thing of a server that belongs to nothing, or lacks what it belongs to.
type Finding struct {
	// Where it was found: one of the words below.
	Where string `json:"where"`
	// What it is, by the name that it has there.
	What string `json:"what"`
	// Remedy says what mends it.
	Remedy string `json:"remedy"`
}

// Where a Finding can be.
const (
	OnMachine = "machine" // what the kernel, containerd and the runtimes have, and the node's books
	InObjects = "objects" // what the API server has
	InRoutes  = "routes"  // where the gateway sends requests
	InFiles   = "files"   // the data directory
)

// Audit has the server compare what is on the machine, its journal, its objects and its routes. All is
// well if there are no findings. It takes two looks, so that what is just being made or removed
// is not among them.
func (c *Client) Audit(ctx context.Context) ([]Finding, error) {
	var out []Finding
	return out, c.get(ctx, PathAudit, &out)
}
