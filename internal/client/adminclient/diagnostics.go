package adminclient

import (
	"context"
	"time"
)

// PathDiagnostics is the route of a server's [Diagnostics].
const PathDiagnostics = "/v1/diagnostics"

// Diagnostics describe the inside of a running server, for a bug report. They have no values of users.
type Diagnostics struct {
	// Goroutines are the stacks of the server's goroutines, equal ones together, without arguments.
	Goroutines string `json:"goroutines"`
	// Journal are the rows of the node; nil where the process runs no sandboxes, or boots.
	Journal []JournalRow `json:"journal"`
}

// JournalRow is the state of one sandbox in the node's journal, without its content.
type JournalRow struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	ID        string `json:"id"`
	// Stage is a stage of the journal; empty if this version cannot read the row, which then has the UID alone.
	Stage     string    `json:"stage"`
	StartedAt time.Time `json:"startedAt,omitzero"`
	PausedAt  time.Time `json:"pausedAt,omitzero"`
}

// Diagnostics returns the inside of the server.
func (c *Client) Diagnostics(ctx context.Context) (Diagnostics, error) {
	return get[Diagnostics](ctx, c, PathDiagnostics)
}
