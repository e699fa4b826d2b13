package adminclient

import "context"

// PathAudit is the route of a server's [Finding]s.
const PathAudit = "/v1/audit"

// Finding is an orphan, or an entry with a missing counterpart.
type Finding struct {
	// Where it was found: one of the words below.
	Where string `json:"where"`
	// What is its name there.
	What string `json:"what"`
	// Remedy is the fix.
	Remedy string `json:"remedy"`
}

// Where a Finding can be.
const (
	OnMachine = "machine" // kernel, containerd, the runtimes, and the lease table
	InObjects = "objects" // the API server
	InRoutes  = "routes"  // the gateway's routes
	InFiles   = "files"   // the data directory
)

// Audit compares the machine, the journal, the objects and the routes. No findings means consistent.
// It scans twice, to exclude what is being created or removed.
func (c *Client) Audit(ctx context.Context) ([]Finding, error) {
	return get[[]Finding](ctx, c, PathAudit)
}
