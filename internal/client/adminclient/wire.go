// Package adminclient has the wire types of a server's administration, and its client over a unix
// socket. It starts and stops no process.
package adminclient

import (
	"time"
)

// Routes of the administration. Changes stream Events.
const (
	PathStatus     = "/v1/status"
	PathDoctor     = "/v1/doctor"
	PathShutdown   = "/v1/shutdown"
	PathImages     = "/v1/images"
	PathBuildImage = "/v1/images/build"
	PathPull       = "/v1/images/pull"
	PathImport     = "/v1/images/import"
	PathPrune      = "/v1/images/prune"
)

// Status is the state of a server.
type Status struct {
	Version   string    `json:"version"`
	PID       int       `json:"pid"`
	Node      string    `json:"node"`
	Role      string    `json:"role"`
	StartedAt time.Time `json:"startedAt"`
	// Ready is true once the boot has finished.
	Ready bool `json:"ready"`
	// Phase is the current boot phase; "ready" afterwards.
	Phase     string    `json:"phase"`
	Phases    []Phase   `json:"phases"`
	Addresses Addresses `json:"addresses"`
	DataDir   string    `json:"dataDir"`
	// Sandboxes counts sandboxes by their phase.
	Sandboxes map[string]int `json:"sandboxes"`
	// Quotas are the limits of a namespace without its own, keyed by the part of the annotation after `quota-`, in the format of the annotation. A missing key: no limit.
	Quotas map[string]string `json:"quotas"`
	// Conditions are the current failures; while there are any, new work is rejected.
	Conditions []Condition `json:"conditions,omitempty"`
	// Components are the programs that the server depends on.
	Components []Component `json:"components"`
	// Peers are the other replicas that are present now.
	Peers []Peer `json:"peers,omitempty"`
	// Certificates are the certificates from an ACME authority.
	Certificates []Certificate `json:"certificates,omitempty"`
}

// Certificate is one of the server's ACME certificates.
type Certificate struct {
	Names []string `json:"names"`
	// Expires is zero while there is none.
	Expires time.Time `json:"expires,omitzero"`
	Issuer  string    `json:"issuer,omitempty"`
	// Next is when it is ordered next; zero: now.
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

// Condition is one failure of a running server.
type Condition struct {
	Name string `json:"name"`
	// Reason is the text for users, Detail the full error.
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

// Addresses are the server's listening addresses, and the files that its clients need.
type Addresses struct {
	HTTP string `json:"http"`          // host:port
	TLS  string `json:"tls,omitempty"` // host:port; empty: not served
	SSH  string `json:"ssh,omitempty"` // host:port; empty: not served
	Kube string `json:"kube"`          // host:port; of a replica the URL of the API server
	// Domain is the value for E2B's clients: with the port, if they need it.
	Domain string `json:"domain"`
	// CAFile has the local CA; empty if TLS uses another certificate.
	CAFile     string `json:"caFile,omitempty"`
	Kubeconfig string `json:"kubeconfig"`
	APIKeyFile string `json:"apiKeyFile"`
}

// Component is a program that the server depends on.
type Component struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	State   string `json:"state"`          // one word, such as running
	Path    string `json:"path,omitempty"` // program, socket or directory
	PID     int    `json:"pid,omitempty"`
}

// Check is one finding of a doctor.
type Check struct {
	Name string `json:"name"`
	// State is CheckOK, CheckWarning or CheckFailed.
	State  string `json:"state"`
	Detail string `json:"detail,omitempty"`
	// Remedy is the fix; empty for CheckOK.
	Remedy string `json:"remedy,omitempty"`
}

// States of a Check.
const (
	CheckOK      = "ok"
	CheckWarning = "warning"
	CheckFailed  = "failed"
)

// Image is an image on the node.
type Image struct {
	Ref       string    `json:"ref"`
	Digest    string    `json:"digest"`
	Size      int64     `json:"size"` // bytes, compressed
	CreatedAt time.Time `json:"createdAt"`
	LastUsed  time.Time `json:"lastUsed"`
	// Pulled: a registry has it. Others were imported or made here.
	Pulled bool `json:"pulled,omitempty"`
	// Private: namespaces need credentials for it.
	Private bool `json:"private,omitempty"`
}

// PruneRequest requests the removal of images that nothing uses.
type PruneRequest struct {
	// All: also those that were imported or made here.
	All bool `json:"all,omitempty"`
}

// Event is one line of a stream: progress, or the last line, which has a
// Result or an Error.
type Event struct {
	// Step names the current step.
	Step string `json:"step,omitempty"`
	// Message is a line for users.
	Message string `json:"message,omitempty"`
	// Done of Total, in bytes or in percent; Total zero: unknown.
	Done  int64 `json:"done,omitempty"`
	Total int64 `json:"total,omitempty"`
	// Bytes means that Done and Total are bytes.
	Bytes  bool    `json:"bytes,omitempty"`
	Result *Result `json:"result,omitempty"`
	Error  *Error  `json:"error,omitempty"`
}

// Result ends a successful stream.
type Result struct {
	Images []Image `json:"images,omitempty"`
	// Checkpoint is an imported one.
	Checkpoint *Imported `json:"checkpoint,omitempty"`
}

// Error is an error response, in a body or at the end of a stream.
type Error struct {
	Code int `json:"code"` // HTTP status
	// Text is for users.
	Text string `json:"message"`
}

// Error returns the text.
func (e *Error) Error() string { return e.Text }

// Images that a server makes itself.
const (
	ImageBase        = "base"
	ImageInterpreter = "code-interpreter"
)

// BuildImageRequest requests a build of an image.
type BuildImageRequest struct {
	// Image is ImageBase or ImageInterpreter; empty is ImageBase.
	Image string `json:"image,omitempty"`
	// Force rebuilds an existing one.
	Force bool `json:"force,omitempty"`
}

// PullRequest requests an image of a registry.
type PullRequest struct {
	Ref string `json:"ref"`
	// Username and Password are the registry's credentials, if needed.
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
}

// ShutdownRequest stops the server.
type ShutdownRequest struct {
	// All also deletes every sandbox and its resources on the node.
	All bool `json:"all,omitempty"`
}
