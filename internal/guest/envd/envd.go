// Package envd is the contract between a sandbox's agent and its clients:
// names and numbers of E2B's envd protocol, the signatures of file URLs,
// the agent's configuration, and a client. It serves nothing and decides
// nothing about sandboxes.
package envd

//go:generate ./generate.sh

import (
	"log/slog"
	"path"
	"slices"
	"strings"
	"time"
)

// Port is where an agent listens unless its Config sets another port.
const Port = 49983

// Version is the protocol version that the agent reports and that the E2B
// SDKs compare to switch features on.
const Version = "0.6.13"

// DefaultUser runs requests that name no user.
const DefaultUser = "user"

// Header names of the protocol.
const (
	HeaderAccessToken   = "X-Access-Token"
	HeaderVersion       = "X-Envd-Version"
	HeaderKeepalive     = "Keepalive-Ping-Interval" // seconds
	HeaderSandboxID     = "E2b-Sandbox-Id"
	HeaderSandboxPort   = "E2b-Sandbox-Port"
	HeaderTrafficToken  = "E2b-Traffic-Access-Token"
	HeaderConnectMillis = "Connect-Timeout-Ms"
	// HeaderExitCode comes with the error of a program that cannot be started: 127 if there is none, 126 if
	// it may not be or cannot be executed, as shells count. It is our addition to the protocol.
	HeaderExitCode = "X-Exit-Code"
	// HeaderMetadataPrefix begins the header of a file's metadata at upload;
	// XattrMetadataPrefix begins the extended attribute that keeps it.
	HeaderMetadataPrefix = "X-Metadata-"
	XattrMetadataPrefix  = "user.e2b."
)

// Serves is the message that an agent logs, and so prints, once its port is open.
const Serves = "agent serves"

// Routes that are not RPCs.
const (
	PathHealth  = "/health"
	PathMetrics = "/metrics"
	// PathMetricsHistory answers GET with the kept Metrics, oldest first, from the second QuerySince on.
	PathMetricsHistory = "/metrics/history"
	// QuerySince is a time in seconds since 1970.
	QuerySince  = "since"
	PathEnvs    = "/envs"
	PathFiles   = "/files"
	PathCompose = "/files/compose"
	PathInit    = "/init"
	PathFreeze  = "/freeze"
	// PathOOMKill kills the process that has the most memory, see [OOMKilled].
	PathOOMKill  = "/internal/oom-kill"
	PathUnfreeze = "/unfreeze"
	// PathRestored notifies an agent that its sandbox was restored from a checkpoint, maybe as another
	// one. It is our addition to the protocol.
	PathRestored   = "/restored"
	PathEntrypoint = "/internal/entrypoint"
	PathLogs       = "/internal/logs"
	// PathRestart ends the entrypoint, so that an agent with Config.Restart starts it again.
	PathRestart = "/internal/restart"
	// PathContainers has the routes of the agents of a sandbox's other containers, each below the container's name.
	PathContainers = "/internal/containers/"
)

// internalRoutes are for the control plane alone; so is all below /internal/.
var internalRoutes = []string{
	PathInit, "/upgrade", PathFreeze, PathUnfreeze, PathRestored, "/collapse", "/fsfreeze", "/fsthaw", "/internal",
}

// IsInternal reports whether an URL path is for the control plane alone, so
// that a gateway must answer with 404. It judges the cleaned path,
// in any case of letters, as a lenient server might read it.
func IsInternal(urlPath string) bool {
	clean := strings.ToLower(path.Clean("/" + urlPath))
	return strings.HasPrefix(clean, "/internal/") || slices.Contains(internalRoutes, clean)
}

// InitRequest hands the agent what is known only once a sandbox has an owner.
// A field left empty changes nothing.
type InitRequest struct {
	// AccessToken guards all later requests. Once set, another one is taken
	// only from a caller that presents the old one.
	AccessToken string `json:"accessToken,omitempty"`
	// Open has the agent accept requests without the token. With an AccessToken, the agent uses it only to
	// prove its identity. Open is our addition to the protocol, and needs the token.
	Open bool `json:"open,omitempty"`
	// EnvVars are added to those known already, replacing those of the same
	// name. Every process started afterwards has them.
	EnvVars        map[string]string `json:"envVars,omitempty"`
	DefaultUser    string            `json:"defaultUser,omitempty"`
	DefaultWorkdir string            `json:"defaultWorkdir,omitempty"`
	// Timestamp orders requests: one older than the last is accepted and
	// ignored. A request without one is always obeyed.
	Timestamp   *time.Time `json:"timestamp,omitempty"`
	LifecycleID string     `json:"lifecycleID,omitempty"`
	// CABundle is PEM that the sandbox's programs are to trust.
	CABundle string `json:"caBundle,omitempty"`
}

// RestoredRequest has the time of a restore. It carries nothing else: what has changed is in
// the configuration, which only the node can write, so the request needs no token.
type RestoredRequest struct {
	// Timestamp is the restorer's time. Requests of one restore have the same, so that a repeated
	// one ends no request that came after the first. None is a restore of its own.
	Timestamp *time.Time `json:"timestamp,omitempty"`
}

// RestoredText is the error of requests that were in flight at the checkpoint.
const RestoredText = "the sandbox was restored from a checkpoint"

// TrailerError has, after the body of a stream that is no RPC, why it ended before its time.
const TrailerError = "X-Barchan-Error"

// The agent measures at each MetricsInterval and keeps MaxMetrics of what it measures, an hour's.
const (
	MetricsInterval = 10 * time.Second
	MaxMetrics      = 360
)

// Metrics is the resource usage of a sandbox; sizes are bytes.
type Metrics struct {
	Timestamp  int64   `json:"ts"` // seconds
	CPUCount   int     `json:"cpu_count"`
	CPUUsedPct float64 `json:"cpu_used_pct"`
	MemTotal   uint64  `json:"mem_total"`
	MemUsed    uint64  `json:"mem_used"`
	MemCache   uint64  `json:"mem_cache"`
	DiskUsed   uint64  `json:"disk_used"`
	DiskTotal  uint64  `json:"disk_total"`
}

// FileInfo answers an upload.
type FileInfo struct {
	Path     string            `json:"path"`
	Name     string            `json:"name"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// ComposeRequest joins files into one and removes the sources.
type ComposeRequest struct {
	SourcePaths []string `json:"source_paths"`
	Destination string   `json:"destination"`
	Username    string   `json:"username,omitempty"`
}

// Entrypoint is the state of the template's own program.
type Entrypoint struct {
	// Configured is false when the template has none.
	Configured bool       `json:"configured"`
	Running    bool       `json:"running"`
	PID        int        `json:"pid,omitempty"`
	ExitCode   *int       `json:"exitCode,omitempty"`
	StartedAt  *time.Time `json:"startedAt,omitempty"`
	FinishedAt *time.Time `json:"finishedAt,omitempty"`
	// Error is why it could not be started, or the signal that ended it.
	Error string `json:"error,omitempty"`
	// Restarts counts its starts after the first; Last is the run before the present one, and Again when it is started next.
	Restarts int32       `json:"restarts,omitempty"`
	Last     *Entrypoint `json:"last,omitempty"`
	Again    *time.Time  `json:"again,omitempty"`
}

// OOMKilled is a process that was killed for its memory.
type OOMKilled struct {
	PID  int    `json:"pid"`
	Name string `json:"name"`
	// Bytes is its resident set, with that of the others.
	Bytes int64 `json:"bytes"`
	// Others is how many processes of its session were killed with it.
	Others int `json:"others,omitempty"`
}

// Sources and streams of log lines.
const (
	SourceEntrypoint = "entrypoint"
	SourceAgent      = "agent"

	StreamStdout = "stdout"
	StreamStderr = "stderr"
)

// Ended reports whether the program has ended, or could not be started.
func (e *Entrypoint) Ended() bool { return !e.Running && (e.ExitCode != nil || e.Error != "") }

// Failed reports whether it has ended, and not by exit code 0.
func (e *Entrypoint) Failed() bool { return e.Ended() && (e.ExitCode == nil || *e.ExitCode != 0) }

// LogLine is one line of output.
type LogLine struct {
	Timestamp time.Time `json:"timestamp"`
	Source    string    `json:"source"`
	Stream    string    `json:"stream"`
	Line      string    `json:"line"`
	// Level is the slog level of the agent's own lines; empty for others.
	Level string `json:"level,omitempty"`
}

// Severity is the line's level. A program's line has one by its stream.
func (l *LogLine) Severity() slog.Level {
	var level slog.Level // info
	if level.UnmarshalText([]byte(l.Level)) != nil && l.Source != SourceAgent && l.Stream == StreamStderr {
		level = slog.LevelError
	}
	return level
}

// errorBody is the error reply of routes that are not RPCs.
type errorBody struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}
