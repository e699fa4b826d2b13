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

// Capture asks for a checkpoint of a sandbox.
type Capture struct {
	Checkpoint CheckpointRef
	Source     Ref
	// FilesOnly leaves out the memory; that of a sandbox of class runc is always left out.
	FilesOnly bool
}

// Captured is what the node has of a checkpoint. Its data are durable.
type Captured struct {
	Checkpoint CheckpointRef
	// Memory says that it holds memory, and not files alone.
	Memory bool
	// MemorySize and FilesSize are bytes on disk; the files' are those beyond the image.
	MemorySize, FilesSize int64
	// Digest of the memory's data, "sha256:" and 64 hex digits; empty where there is none.
	Digest string
	// Runtime is the class: gvisor or runc. RuntimeBuild is the version and SHA-256 of the program
	// that alone can restore the memory, on a processor with at least CPUFeatures.
	Runtime, RuntimeBuild string
	CPUFeatures           []string
	// Image is the digest of the image that the files lie on.
	Image string
	// Node is the name of the machine, Created when the sandbox was as it is kept.
	Node    string
	Created time.Time
	// Paused is how long the sandbox stood still for it; zero for one that did not run.
	Paused time.Duration
}
