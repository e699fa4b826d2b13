package events

import (
	"slices"
	"time"
)

// Type is a type of E2B's events.
type Type string

// The types.
const (
	Created      Type = "sandbox.lifecycle.created"
	Updated      Type = "sandbox.lifecycle.updated"
	Paused       Type = "sandbox.lifecycle.paused"
	Resumed      Type = "sandbox.lifecycle.resumed"
	Checkpointed Type = "sandbox.lifecycle.checkpointed"
	Killed       Type = "sandbox.lifecycle.killed"
)

// Types returns all types.
func Types() []Type { return []Type{Created, Updated, Paused, Resumed, Checkpointed, Killed} }

// Known reports whether there is such a type.
func (t Type) Known() bool { return slices.Contains(Types(), t) }

// version is that of the form of events.
const version = "v2"

// Event is one change of a sandbox, as the API and webhooks show it.
type Event struct {
	Version string `json:"version"`
	// ID is the same in all deliveries of an event.
	ID          string    `json:"id"`
	Type        Type      `json:"type"`
	Data        *Data     `json:"eventData"`
	BuildID     string    `json:"sandboxBuildId"`
	ExecutionID string    `json:"sandboxExecutionId"`
	SandboxID   string    `json:"sandboxId"`
	Namespace   string    `json:"sandboxTeamId"`
	TemplateID  string    `json:"sandboxTemplateId"`
	Timestamp   time.Time `json:"timestamp"`
}

// Data is what a type of event has besides.
type Data struct {
	Metadata map[string]string `json:"sandbox_metadata,omitempty"`
	// Execution is of events that end one: paused and killed.
	Execution *Execution `json:"execution,omitempty"`
	// SetTimeout is the new end; SetNetwork and SetMetadata are whether those have changed. The last two are ours.
	SetTimeout  *time.Time `json:"set_timeout,omitempty"`
	SetNetwork  bool       `json:"set_network,omitempty"`
	SetMetadata bool       `json:"set_metadata,omitempty"`
	// SnapshotID is of a checkpointed sandbox.
	SnapshotID string `json:"snapshot_id,omitempty"`
}

// Execution is one time that a sandbox ran, from its start or resume.
type Execution struct {
	StartedAt time.Time `json:"started_at"`
	CPUs      int       `json:"vcpu_count"`
	MemoryMB  int64     `json:"memory_mb"`
	// Milliseconds is how long it ran.
	Milliseconds int64 `json:"execution_time"`
}
