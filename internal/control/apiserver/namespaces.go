package apiserver

import (
	"context"
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// SystemNamespace is where Barchan keeps what belongs to no tenant.
const SystemNamespace = "barchan-system"

// namespaceGate sees to it that nothing is created in a namespace that is not there, or is
// going: creations hold their namespace open while they write, and whoever empties it closes
// it first, which waits for them.
type namespaceGate struct {
	namespaces *store // set before the first request

	mu      sync.Mutex
	holds   map[string]*sync.RWMutex // +checklocks:mu
	users   map[string]int           // +checklocks:mu
	closing map[string]types.UID     // +checklocks:mu
}

func newNamespaceGate() *namespaceGate {
	return &namespaceGate{holds: map[string]*sync.RWMutex{}, users: map[string]int{}, closing: map[string]types.UID{}}
}

func (g *namespaceGate) take(ns string) *sync.RWMutex {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.holds[ns] == nil {
		g.holds[ns] = &sync.RWMutex{}
	}
	g.users[ns]++
	return g.holds[ns]
}

func (g *namespaceGate) give(ns string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.users[ns]--; g.users[ns] == 0 {
		delete(g.users, ns)
		delete(g.holds, ns)
	}
}

// hold keeps the namespace from being emptied until leave is called.
// +checklocksignore
func (g *namespaceGate) hold(ns string) (leave func()) {
	l := g.take(ns)
	l.RLock()
	return func() {
		l.RUnlock()
		g.give(ns)
	}
}

// shut refuses further creations in this very namespace and returns when those under way have
// ended. A namespace of the same name that is made later is another.
func (g *namespaceGate) shut(ns string, uid types.UID) {
	g.mu.Lock()
	g.closing[ns] = uid
	g.mu.Unlock()
	l := g.take(ns)
	l.Lock()
	l.Unlock() //nolint:staticcheck // to have held it once is the point
	g.give(ns)
}

// reopen forgets a namespace that is gone.
func (g *namespaceGate) reopen(ns string, uid types.UID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closing[ns] == uid {
		delete(g.closing, ns)
	}
}

func (g *namespaceGate) isClosing(ns string, uid types.UID) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.closing[ns] == uid
}

// check says why nothing may be created in a namespace. It is called while the namespace is
// held. What the cache says for it counts; what it says against it is asked of storage.
func (g *namespaceGate) check(ctx context.Context, name string) error {
	if err := g.judge(ctx, name, "0"); err == nil {
		return nil
	}
	return g.judge(ctx, name, "")
}

func (g *namespaceGate) judge(ctx context.Context, name, resourceVersion string) error {
	o, err := g.namespaces.Get(ctx, name, &metav1.GetOptions{ResourceVersion: resourceVersion})
	if apierrors.IsNotFound(err) { // the registry would name the resource of the request
		return apierrors.NewNotFound(corev1.Resource("namespaces"), name)
	}
	if err != nil {
		return err
	}
	ns := o.(*corev1.Namespace)
	if ns.DeletionTimestamp == nil && !g.isClosing(name, ns.UID) {
		return nil
	}
	refusal := apierrors.NewForbidden(corev1.Resource("namespaces"), name, fmt.Errorf("the namespace is being deleted; nothing can be created in it"))
	refusal.ErrStatus.Details.Causes = append(refusal.ErrStatus.Details.Causes, metav1.StatusCause{
		Type: corev1.NamespaceTerminatingCause, Message: "namespace " + name + " is being terminated", Field: "metadata.namespace",
	})
	return refusal
}
