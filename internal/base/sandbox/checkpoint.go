package sandbox

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// CheckpointRef names a checkpoint for the parts that keep its data.
type CheckpointRef struct {
	Namespace, Name string
	UID             types.UID
}

// Capture requests a checkpoint of a sandbox.
type Capture struct {
	Checkpoint CheckpointRef
	Source     Ref
	// FilesOnly leaves out the memory; class runc never has it.
	FilesOnly bool
}

// Captured describes a stored checkpoint. Its data are durable.
type Captured struct {
	Checkpoint CheckpointRef
	// Memory means that it holds memory, and not files alone.
	Memory bool
	// MemorySize and FilesSize are bytes on disk; the files' exclude the image.
	MemorySize, FilesSize int64
	// Digest of the memory's data, "sha256:" and 64 hex digits; empty without memory.
	Digest string
	// Runtime is the class: gvisor or runc. RuntimeBuild is the version and SHA-256 of the only
	// program that can restore the memory, on a processor with at least CPUFeatures.
	Runtime, RuntimeBuild string
	CPUFeatures           []string
	// Image is the digest of the base image of the files.
	Image string
	// Node is the name of the machine, Created when the sandbox was as it is kept.
	Node    string
	Created time.Time
	// Paused is how long the sandbox was stopped for it; zero for one that did not run.
	Paused time.Duration
}
