package client

import (
	"net/http"
	"strconv"
	"time"
)

// CreateOptions describe a new sandbox.
type CreateOptions struct {
	// TemplateID is a template by its name or ID, or a snapshot; empty: base.
	TemplateID string `json:"templateID"`
	// Timeout is the sandbox's life; zero: the server's default, five minutes.
	Timeout time.Duration `json:"-"`
	// AutoPause pauses the sandbox at its timeout; without it, it is deleted.
	AutoPause bool              `json:"autoPause,omitempty"`
	Metadata  map[string]string `json:"metadata,omitempty"`
	EnvVars   map[string]string `json:"envVars,omitempty"`
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
	// QueueTimeout is how long the request may wait for the quota of its namespace; zero: it is refused at once.
	QueueTimeout time.Duration `json:"-"`
	// IdempotencyKey makes the request safe to repeat: while the sandbox lives, the same request with the same key returns it. From 1 to
	// 255 printable ASCII characters; empty: each request creates a sandbox.
	IdempotencyKey string `json:"-"`
}

// createWire is CreateOptions as the API takes them.
type createWire struct {
	CreateOptions
	Timeout int64 `json:"timeout,omitempty"` // seconds
}

func (n createWire) Headers() http.Header {
	h := http.Header{}
	if n.QueueTimeout > 0 {
		h.Set("Barchan-Queue-Timeout", strconv.FormatInt(seconds(n.QueueTimeout), 10))
	}
	if n.IdempotencyKey != "" {
		h.Set("Idempotency-Key", n.IdempotencyKey)
	}
	return h
}

// ConnectOptions are those of [Client.Connect].
type ConnectOptions struct {
	// Timeout is the least life from now on; zero: the server's default, five minutes.
	Timeout time.Duration
	// DiscardMemory restarts a paused sandbox from its files, and deletes its memory.
	DiscardMemory bool
}

// PauseOptions are those of [Client.Pause].
type PauseOptions struct {
	// FilesOnly keeps the files and ends the programs.
	FilesOnly bool
}

// SnapshotOptions describe a snapshot.
type SnapshotOptions struct {
	// Name may have a tag; empty: the server's choice.
	Name string `json:"name,omitempty"`
	// Memory false keeps files only.
	Memory *bool `json:"memory,omitempty"`
	// TTL is its life; zero: no expiry.
	TTL time.Duration `json:"-"`
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

// SnapshotsOptions filters a list of snapshots; its zero value is everything.
type SnapshotsOptions struct {
	SandboxID, Name string
	// Limit bounds the whole list; zero: unlimited.
	Limit int
}

// Template is a template in a list.
type Template struct {
	TemplateID string   `json:"templateID"`
	Aliases    []string `json:"aliases"`
}

// ForkOptions are those of [Client.Fork].
type ForkOptions struct {
	Count int `json:"count,omitempty"` // zero: one
	// Timeout is the life of each; zero: the server's default.
	Timeout time.Duration `json:"-"`
	// Metadata is kept with each, beside the sandbox's own.
	Metadata map[string]string `json:"metadata,omitempty"`
	// AllowSecrets forks a sandbox although it has variables of its own, which the forks get.
	AllowSecrets bool `json:"allowSecrets,omitempty"`
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

// States of a listed sandbox.
const (
	StateRunning = "running"
	StatePaused  = "paused"
)

// SandboxInfo is a sandbox in a list.
type SandboxInfo struct {
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

// SandboxDetail is one sandbox with the fields for its owner.
type SandboxDetail struct {
	SandboxInfo
	AgentToken string    `json:"envdAccessToken,omitempty"`
	Internet   *bool     `json:"allowInternetAccess,omitempty"`
	Domain     string    `json:"domain,omitempty"`
	Network    *Network  `json:"network,omitempty"`
	Lifecycle  Lifecycle `json:"lifecycle"`
	// Memory is where the memory of a paused sandbox is: RAM or Disk; empty without saved memory.
	Memory string `json:"memory,omitempty"`
	// MemoryBytes is the size of that memory on disk; 0 in RAM.
	MemoryBytes int64 `json:"memoryBytes,omitempty"`
	// CreatedByKey is the name of the API key that created the sandbox; empty where none did.
	CreatedByKey string `json:"createdByKey,omitempty"`
	// Containers are those besides the first.
	Containers []Container `json:"containers,omitempty"`
	// Operations are what the node did with the sandbox: the last of each type, oldest first.
	Operations []Operation `json:"operations,omitempty"`
}

// Operation is what a node did with a sandbox.
type Operation struct {
	// Operation is its type: Create, Restore, Restart, Resume, Suspend, Store or Bind.
	Operation    string    `json:"operation"`
	StartedAt    time.Time `json:"startedAt"`
	Milliseconds int64     `json:"milliseconds"`
	// Steps are in the order in which they began. Some run at the same time, or are a part of another.
	Steps []OperationStep `json:"steps,omitempty"`
}

// OperationStep is one step of an Operation.
type OperationStep struct {
	Name string `json:"name"`
	// After is when the step began, in milliseconds since the operation's start.
	After        int64 `json:"after"`
	Milliseconds int64 `json:"milliseconds"`
}

// Container is a container besides the first of a sandbox.
type Container struct {
	Name string `json:"name"`
	// State is Running, or kubelet's reason.
	State        string `json:"state"`
	Ready        bool   `json:"ready"`
	RestartCount int32  `json:"restartCount"`
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
	// Container is one besides the first; empty: that.
	Container string
}

// seconds rounds a time up for the API.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }
