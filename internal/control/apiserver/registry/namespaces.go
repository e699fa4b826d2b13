package registry

import (
	"context"
	"errors"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// namespaceGate refuses creations in a namespace that does not exist or is being deleted. A
// creation holds mu for reading while it writes, so closing a namespace waits for it.
type namespaceGate struct {
	namespaces *Store // set before the first request

	mu      sync.RWMutex
	closing map[string]types.UID // +checklocks:mu
}

// hold keeps namespaces from being closed until release is called.
// +checklocksignore
func (g *namespaceGate) hold() (release func()) {
	g.mu.RLock()
	return g.mu.RUnlock
}

// check returns why an object cannot be created in a namespace. The caller holds the gate. A
// refusal by the watch cache is verified in storage.
// +checklocksread:g.mu
func (g *namespaceGate) checkLocked(ctx context.Context, name string) error {
	if g.checkAtLocked(ctx, name, "0") == nil {
		return nil
	}
	return g.checkAtLocked(ctx, name, "")
}

// +checklocksread:g.mu
func (g *namespaceGate) checkAtLocked(ctx context.Context, name, resourceVersion string) error {
	o, err := g.namespaces.Get(ctx, name, &metav1.GetOptions{ResourceVersion: resourceVersion})
	if apierrors.IsNotFound(err) { // the registry would name the resource of the request
		return apierrors.NewNotFound(corev1.Resource("namespaces"), name)
	}
	if err != nil {
		return err
	}
	ns := o.(*corev1.Namespace)
	if ns.DeletionTimestamp == nil && g.closing[name] != ns.UID {
		return nil
	}
	refusal := apierrors.NewForbidden(corev1.Resource("namespaces"), name, errors.New("the namespace is being deleted; nothing can be created in it"))
	refusal.ErrStatus.Details.Causes = append(refusal.ErrStatus.Details.Causes, metav1.StatusCause{
		Type: corev1.NamespaceTerminatingCause, Message: "namespace " + name + " is being terminated", Field: "metadata.namespace",
	})
	return refusal
}
