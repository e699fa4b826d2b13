package sandbox

import (
	"crypto/sha256"
	"encoding/json"
	"sync"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// maxBlueprints bounds the blueprints that later sandboxes may share.
const maxBlueprints = 1024

// Blueprints has sandboxes of a cache with equal blueprints share one: nearly all of a template have the template's.
type Blueprints struct {
	mu    sync.Mutex
	known map[[sha256.Size]byte]agents.SandboxBlueprint // by the hash of the JSON; +checklocks:mu
}

// NewBlueprints returns an empty set.
func NewBlueprints() *Blueprints {
	return &Blueprints{known: map[[sha256.Size]byte]agents.SandboxBlueprint{}}
}

// Share replaces a blueprint by an equal one that others have. Callers must not change what it points to afterwards.
func (n *Blueprints) Share(b *agents.SandboxBlueprint) {
	text, err := json.Marshal(b)
	if err != nil {
		return // it stays as it is
	}
	hash := sha256.Sum256(text)
	n.mu.Lock()
	defer n.mu.Unlock()
	if known, ok := n.known[hash]; ok {
		*b = known
		return
	}
	if len(n.known) >= maxBlueprints {
		for any := range n.known {
			delete(n.known, any)
			break
		}
	}
	n.known[hash] = *b
}
