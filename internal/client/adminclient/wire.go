// Package adminclient has the wire types of a server's administration, and the
// client that speaks them over a unix socket. It starts and stops no process.
package adminclient

import (
	"time"
)

// Routes of the administration. What changes something streams Events.
const (
	PathStatus    = "/v1/status"
	PathDoctor    = "/v1/doctor"
	PathShutdown  = "/v1/shutdown"
	PathImages    = "/v1/images"
	PathBuildBase = "/v1/images/build-base"
	PathPull      = "/v1/images/pull"
	PathImport    = "/v1/images/import"
)

// Status is a server at one moment.
type Status struct {
	Version   string    `json:"version"`
	PID       int       `json:"pid"`
	Node      string    `json:"node"`
	StartedAt time.Time `json:"startedAt"`
	// Ready is true once the boot is over.
	Ready bool `json:"ready"`
	// Phase is what the server waits for; "ready" once it is.
	Phase     string    `json:"phase"`
	Phases    []Phase   `json:"phases"`
	Addresses Addresses `json:"addresses"`
	DataDir   string    `json:"dataDir"`
	// Sandboxes counts sandboxes by their phase.
	Sandboxes map[string]int `json:"sandboxes"`
	// Conditions are what is wrong now; while there is any, new work is refused.
	Conditions []Condition `json:"conditions,omitempty"`
	// Components are the programs that the server relies on.
	Components []Component `json:"components"`
	// Peers are the other replicas that are here now.
	Peers []Peer `json:"peers,omitempty"`
	// Certificates are those that an ACME authority is asked for.
	Certificates []Certificate `json:"certificates,omitempty"`
}

// Certificate is one of the server's, as an authority issues it.
type Certificate struct {
	Names []string `json:"names"`
	// Expires is zero while there is none.
	Expires time.Time `json:"expires,omitzero"`
	Issuer  string    `json:"issuer,omitempty"`
	// Next is when it is asked for next; zero: now.
	Next     time.Time `json:"next,omitzero"`
	Failures int       `json:"failures,omitempty"` // since the last success
	Failure  string    `json:"failure,omitempty"`  // the last
}

// Peer is another replica of manager and gateway.
type Peer struct {
	Name   string `json:"name"`
	Gossip string `json:"gossip"` // host:port
	Push   string `json:"push"`   // host:port
}

// Condition is one thing that is wrong with a server that runs.
type Condition struct {
	Name string `json:"name"`
	// Reason is what users are told, Detail the whole of it.
	Reason string    `json:"reason"`
	Detail string    `json:"detail"`
	Since  time.Time `json:"since"`
}

// Phase is one named step of the boot.
type Phase struct {
	Name  string  `json:"name"`
	Done  bool    `json:"done"`
	Milli float64 `json:"milliseconds"` // zero while it runs
}

// Addresses are where the server really listens, and the files that its clients need.
type Addresses struct {
	HTTP string `json:"http"`          // host:port
	TLS  string `json:"tls,omitempty"` // host:port; empty: not served
	Kube string `json:"kube"`          // host:port; of a replica the URL of the API server
	// Domain is E2B's: with the port, if clients need it.
	Domain string `json:"domain"`
	// CAFile has the local CA; empty if TLS has a certificate of its own.
	CAFile     string `json:"caFile,omitempty"`
	Kubeconfig string `json:"kubeconfig"`
	APIKeyFile string `json:"apiKeyFile"`
}

// Component is a program that the server relies on.
type Component struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	State   string `json:"state"`          // one word, such as running
	Path    string `json:"path,omitempty"` // program or socket
}

// Check is one finding of a doctor.
type Check struct {
	Name string `json:"name"`
	// State is CheckOK, CheckWarning or CheckFailed.
	State  string `json:"state"`
	Detail string `json:"detail,omitempty"`
	// Remedy says what to do; empty if all is well.
	Remedy string `json:"remedy,omitempty"`
}

// States of a Check.
const (
	CheckOK      = "ok"
	CheckWarning = "warning"
	CheckFailed  = "failed"
)

// Image is one image that sandboxes can run.
type Image struct {
	Ref       string    `json:"ref"`
	Digest    string    `json:"digest"`
	Size      int64     `json:"size"` // bytes, compressed
	CreatedAt time.Time `json:"createdAt"`
}

// Event is one line of a stream: progress, or the last line, which has a
// Result or an Error.
type Event struct {
	// Step names the part of the work that goes on.
	Step string `json:"step,omitempty"`
	// Message is a line for people.
	Message string `json:"message,omitempty"`
	// Done of Total, in bytes or in percent; Total zero: nobody knows.
	Done  int64 `json:"done,omitempty"`
	Total int64 `json:"total,omitempty"`
	// Bytes tells that Done and Total are bytes.
	Bytes  bool    `json:"bytes,omitempty"`
	Result *Result `json:"result,omitempty"`
	Error  *Error  `json:"error,omitempty"`
}

// Result ends a stream that succeeded.
type Result struct {
	Images []Image `json:"images,omitempty"`
	// Checkpoint is one that was imported.
	Checkpoint *Imported `json:"checkpoint,omitempty"`
}

// Error is a refusal, in a body or at the end of a stream.
type Error struct {
	Code int `json:"code"` // as of HTTP
	// Text is for people.
	Text string `json:"message"`
}

// Error is the text.
func (e *Error) Error() string { return e.Text }

// BuildBaseRequest asks for the base image.
type BuildBaseRequest struct {
	// Force makes it again even if it is there.
	Force bool `json:"force,omitempty"`
}

// PullRequest asks for an image of a registry.
type PullRequest struct {
	Ref string `json:"ref"`
	// Username and Password are for a registry that asks for them.
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
}

// ShutdownRequest ends the server.
type ShutdownRequest struct {
	// All also ends every sandbox and removes what is on the node of it.
	All bool `json:"all,omitempty"`
}
