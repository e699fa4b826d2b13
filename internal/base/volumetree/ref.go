package volumetree

import (
	"k8s.io/apimachinery/pkg/types"
)

// Ref identifies a volume. Its files lie under the name, which no other volume can have before they are gone.
type Ref struct {
	Namespace, Name string
	UID             types.UID
}

// Key is the volume's name with its namespace.
func (r Ref) Key() types.NamespacedName {
	return types.NamespacedName{Namespace: r.Namespace, Name: r.Name}
}
