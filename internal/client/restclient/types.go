// Package restclient is a typed client of the part of the E2B REST API that the command line uses. It
// works with any server of that API, and stores nothing.
package restclient

import (
	"net/http"
	"strconv"
	"time"
)

// NewSandbox is the request for a sandbox.
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
	// VolumeMounts are volumes by their names.
	VolumeMounts []VolumeMount `json:"volumeMounts,omitempty"`
	// QueueTimeout is for how many seconds the request may wait for the quota of its namespace; zero: it is refused at once.
	QueueTimeout int64 `json:"-"`
}

func (n NewSandbox) headers() http.Header {
	h := http.Header{}
	if n.QueueTimeout > 0 {
		h.Set("Barchan-Queue-Timeout", strconv.FormatInt(n.QueueTimeout, 10))
	}
	return h
}

// NewSnapshot is the request for a snapshot.
type NewSnapshot struct {
	// Name may have a tag; empty: the server's choice.
	Name string `json:"name,omitempty"`
	// Memory false keeps files only.
	Memory *bool `json:"memory,omitempty"`
	// TTL in seconds; zero: no expiry.
	TTL int64 `json:"ttl,omitempty"`
}

// Snapshot is a snapshot of a sandbox.
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

// SnapshotListOptions filters a list of snapshots; its zero value is everything.
type SnapshotListOptions struct {
	SandboxID, Name string
	// Limit bounds the whole list; zero: unlimited.
	Limit int
}

// Template is a template in a list.
type Template struct {
	TemplateID string   `json:"templateID"`
	Aliases    []string `json:"aliases"`
}

// NewFork is the request for forks of a sandbox.
type NewFork struct {
	Count        int               `json:"count,omitempty"`   // zero: one
	Timeout      int64             `json:"timeout,omitempty"` // seconds; zero: the server's default
	Metadata     map[string]string `json:"metadata,omitempty"`
	AllowSecrets bool              `json:"allowSecrets,omitempty"`
}

// Forked is one fork: a sandbox, or an error.
type Forked struct {
	Sandbox *Sandbox   `json:"sandbox,omitempty"`
	Error   *ForkError `json:"error,omitempty"`
}

// ForkError is the error of a fork.
type ForkError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// Sandbox is the response to create, connect and resume.
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

// Detail is one sandbox with the fields for its owner.
type Detail struct {
	Listed
	AgentToken string    `json:"envdAccessToken,omitempty"`
	Internet   *bool     `json:"allowInternetAccess,omitempty"`
	Domain     string    `json:"domain,omitempty"`
	Network    *Network  `json:"network,omitempty"`
	Lifecycle  Lifecycle `json:"lifecycle"`
	// Memory is where the memory of a paused sandbox is: RAM or Disk; empty without saved memory.
	Memory string `json:"memory,omitempty"`
}

// Network is a sandbox's egress policy.
type Network struct {
	AllowPublicTraffic *bool    `json:"allowPublicTraffic,omitempty"`
	AllowOut           []string `json:"allowOut,omitempty"`
	DenyOut            []string `json:"denyOut,omitempty"`
	MaskRequestHost    string   `json:"maskRequestHost,omitempty"`
}

// Lifecycle is the action at a sandbox's timeout.
type Lifecycle struct {
	AutoResume bool   `json:"autoResume"`
	OnTimeout  string `json:"onTimeout"` // kill or pause
}

// ListOptions filters a list; its zero value is everything.
type ListOptions struct {
	States   []string
	Metadata map[string]string
	Template string
	// Name is the name of one sandbox.
	Name string
	// Limit bounds the whole list; zero: unlimited.
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

// LogOptions selects the lines to read.
type LogOptions struct {
	// Since is the time of the first line; zero: all stored lines.
	Since time.Time
	Limit int
}
