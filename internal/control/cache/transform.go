package cache

import (
	"crypto/sha256"
	"encoding/json"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// newTransform returns what is done to each object before the cache holds it.
func newTransform(trim bool) toolscache.TransformFunc {
	blueprints := &interner{known: map[[sha256.Size]byte]agents.SandboxBlueprint{}}
	return func(o any) (any, error) {
		if x, ok := o.(client.Object); ok && trim {
			x.SetManagedFields(nil)
		}
		if s, ok := o.(*agents.Sandbox); ok {
			blueprints.share(&s.Spec.SandboxBlueprint)
		}
		switch x := o.(type) { // what is secret does not stay in memory
		case *corev1.Secret:
			x.Data = nil
			delete(x.Annotations, corev1.LastAppliedConfigAnnotation)
		case *metav1.PartialObjectMetadata:
			delete(x.Annotations, corev1.LastAppliedConfigAnnotation)
		}
		return o, nil
	}
}

// maxBlueprints bounds the blueprints that later sandboxes may share.
const maxBlueprints = 1024

// interner has sandboxes with equal blueprints share one: nearly all of a template have the template's.
type interner struct {
	mu    sync.Mutex
	known map[[sha256.Size]byte]agents.SandboxBlueprint // by the hash of the JSON; +checklocks:mu
}

// share replaces a blueprint by an equal one that others have.
func (n *interner) share(b *agents.SandboxBlueprint) {
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
