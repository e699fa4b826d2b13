package apiserver

import (
	"context"
	"reflect"

	"k8s.io/apimachinery/pkg/runtime"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// shareParts returns what has the objects of a watch cache share parts.
func shareParts() func(runtime.Object) {
	blueprints := sandbox.NewBlueprints()
	return func(o runtime.Object) {
		if s, ok := o.(*agents.Sandbox); ok {
			blueprints.Share(&s.Spec.SandboxBlueprint)
		}
	}
}

// Same returns an object as the server's watch cache has it, so that a cache in the same process need not hold its parts twice. If the
// watch cache has none of this version it returns the object itself. The caller may change the result, but nothing that it points to.
func (s *Server) Same(ctx context.Context, o client.Object) client.Object {
	l := s.local.Load()
	if l == nil || l.requests.Add(1) != nil {
		return o
	}
	defer l.requests.Done()
	st := l.stores[reflect.TypeOf(o)]
	if st == nil {
		return o
	}
	key, err := st.KeyFunc(genericapirequest.WithNamespace(ctx, o.GetNamespace()), o.GetName())
	if err != nil {
		return o
	}
	found := st.New().(client.Object) //nolint:forcetypeassert // of the same kind
	err = st.Storage.Get(ctx, key, storage.GetOptions{ResourceVersion: "0", IgnoreNotFound: true}, found)
	if err != nil || found.GetUID() != o.GetUID() || found.GetResourceVersion() != o.GetResourceVersion() {
		return o
	}
	found.GetObjectKind().SetGroupVersionKind(o.GetObjectKind().GroupVersionKind())
	return found
}
