// Package restclient is a typed client of the E2B REST API, as far as the command
// line needs it. It talks to any server of that API, and keeps nothing.
package restclient

import (
	"time"
)

// NewSandbox is what to create.
type NewSandbox struct {
	TemplateID string            `json:"templateID"`
	Timeout    int64             `json:"timeout,omitempty"` // seconds; zero: the server's default
	AutoPause  bool              `json:"autoPause,omitempty"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	EnvVars    map[string]string `json:"envVars,omitempty"`
	// Internet nil is the server's default.
	Internet *bool `json:"allow_internet_access,omitempty"`
	// Network nil is the template's.
	Network *Network `json:"network,omitempty"`
	// Memory false starts from a snapshot's files only.
	Memory *bool `json:"memory,omitempty"`
	// AllowSecrets starts from a snapshot although it holds variables of its sandbox.
	AllowSecrets bool `json:"allowSecrets,omitempty"`
}

// NewSnapshot is what to keep of a sandbox.
type NewSnapshot struct {
	// Name may have a tag; empty: the server's choice.
	Name string `json:"name,omitempty"`
	// Memory false keeps files only.
	Memory *bool `json:"memory,omitempty"`
	// TTL in seconds; zero: for ever.
	TTL int64 `json:"ttl,omitempty"`
}

// Snapshot is what is kept of a sandbox.
type Snapshot struct {
	SnapshotID  string     `json:"snapshotID"`
	Names       []string   `json:"names"`
	SandboxID   string     `json:"sandboxID"`
	TemplateID  string     `json:"templateID"`
	CreatedAt   time.Time  `json:"createdAt"`
	ExpiresAt   *time.Time `json:"expiresAt,omitempty"`
	SizeBytes   int64      `json:"sizeBytes"`
	MemoryBytes int64      `json:"memoryBytes"`
	Memory      bool       `json:"memory"`
	Secrets     bool       `json:"secrets"`
}

// SnapshotListOptions narrows a list of snapshots; its zero value is everything.
type SnapshotListOptions struct {
	SandboxID, Name string
	// Limit bounds the whole list; zero: no bound.
	Limit int
}

// Template is what sandboxes can be created from.
type Template struct {
	TemplateID string   `json:"templateID"`
	Aliases    []string `json:"aliases"`
}

// NewFork is how often to multiply a sandbox.
type NewFork struct {
	Count        int               `json:"count,omitempty"`   // zero: one
	Timeout      int64             `json:"timeout,omitempty"` // seconds; zero: the server's default
	Metadata     map[string]string `json:"metadata,omitempty"`
	AllowSecrets bool              `json:"allowSecrets,omitempty"`
}

// Forked is one fork: a sandbox, or why there is none.
type Forked struct {
	Sandbox *Sandbox   `json:"sandbox,omitempty"`
	Error   *ForkError `json:"error,omitempty"`
}

// ForkError is why there is no fork.
type ForkError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// Sandbox answers create, connect and resume.
type Sandbox struct {
	SandboxID    string `json:"sandboxID"`
	TemplateID   string `json:"templateID"`
	Alias        string `json:"alias,omitempty"`
	EnvdVersion  string `json:"envdVersion"`
	AgentToken   string `json:"envdAccessToken,omitempty"`
	TrafficToken string `json:"trafficAccessToken,omitempty"`
	Domain       string `json:"domain,omitempty"`
}

// States of a listed sandbox.
const (
	StateRunning = "running"
	StatePaused  = "paused"
)

// Listed is a sandbox in a list.
type Listed struct {
	SandboxID string `json:"sandboxID"`
	// Name is unique in the namespace; other servers of this API have none.
	Name        string            `json:"name,omitempty"`
	TemplateID  string            `json:"templateID"`
	Alias       string            `json:"alias,omitempty"`
	StartedAt   time.Time         `json:"startedAt"`
	EndAt       time.Time         `json:"endAt"`
	CPUCount    int32             `json:"cpuCount"`
	MemoryMB    int64             `json:"memoryMB"`
	DiskSizeMB  int64             `json:"diskSizeMB"`
	State       string            `json:"state"`
	EnvdVersion string            `json:"envdVersion"`
	Metadata    map[string]string `json:"metadata,omitempty"`
}

// Detail is one sandbox with what its owner may know.
type Detail struct {
	Listed
	AgentToken string    `json:"envdAccessToken,omitempty"`
	Internet   *bool     `json:"allowInternetAccess,omitempty"`
	Domain     string    `json:"domain,omitempty"`
	Network    *Network  `json:"network,omitempty"`
	Lifecycle  Lifecycle `json:"lifecycle"`
	// Memory is where the memory of a paused sandbox is: RAM or Disk; empty where none is kept.
	Memory string `json:"memory,omitempty"`
}

// Network says what a sandbox may reach.
type Network struct {
	AllowPublicTraffic *bool    `json:"allowPublicTraffic,omitempty"`
	AllowOut           []string `json:"allowOut,omitempty"`
	DenyOut            []string `json:"denyOut,omitempty"`
	MaskRequestHost    string   `json:"maskRequestHost,omitempty"`
}

// Lifecycle says what happens when a sandbox's time is over.
type Lifecycle struct {
	AutoResume bool   `json:"autoResume"`
	OnTimeout  string `json:"onTimeout"` // kill or pause
}

// ListOptions narrows a list; its zero value is everything.
type ListOptions struct {
	States   []string
	Metadata map[string]string
	Template string
	// Name is that of one sandbox.
	Name string
	// Limit bounds the whole list; zero: no bound.
	Limit int
}

// Metric is one sample of a sandbox's usage; sizes are bytes.
type Metric struct {
	Timestamp  time.Time `json:"timestamp"`
	CPUCount   int32     `json:"cpuCount"`
	CPUUsedPct float64   `json:"cpuUsedPct"`
	MemUsed    uint64    `json:"memUsed"`
	MemTotal   uint64    `json:"memTotal"`
	DiskUsed   uint64    `json:"diskUsed"`
	DiskTotal  uint64    `json:"diskTotal"`
}

// LogEntry is one line of a sandbox's log.
type LogEntry struct {
	Timestamp time.Time         `json:"timestamp"`
	Level     string            `json:"level"`
	Message   string            `json:"message"`
	Fields    map[string]string `json:"fields,omitempty"`
}

// LogOptions says which lines to read.
type LogOptions struct {
	// Since is the time of the first line; zero: all that is kept.
	Since time.Time
	Limit int
}
