package gc

import (
	"slices"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// node is an object in the graph. It is never changed, only replaced.
type node struct {
	kind       schema.GroupKind
	namespace  string
	name       string
	uid        types.UID
	owners     []ref
	deleting   bool
	foreground bool
	orphaning  bool
}

type ref struct {
	uid    types.UID
	blocks bool
}

func newNode(kind schema.GroupKind, o metav1.Object) *node {
	n := &node{
		kind: kind, namespace: o.GetNamespace(), name: o.GetName(), uid: o.GetUID(),
		deleting: o.GetDeletionTimestamp() != nil,
	}
	for _, r := range o.GetOwnerReferences() {
		n.owners = append(n.owners, ref{uid: r.UID, blocks: ptr.Deref(r.BlockOwnerDeletion, false)})
	}
	n.foreground = has(o, metav1.FinalizerDeleteDependents)
	n.orphaning = has(o, metav1.FinalizerOrphanDependents)
	return n
}

func (n *node) deletingForeground() bool { return n.deleting && n.foreground }

func (n *node) blocks(owner types.UID) bool {
	return slices.Contains(n.owners, ref{uid: owner, blocks: true})
}

// graph holds the owner references that the watches have reported.
type graph struct {
	enqueue  func(types.UID) // queues an object; set before the first event
	complete chan struct{}   // closed when every kind has been listed

	mu       sync.Mutex
	unlisted int                 // +checklocks:mu
	nodes    map[types.UID]*node // +checklocks:mu
	// owner to dependents
	owned map[types.UID]map[types.UID]struct{} // +checklocks:mu
}

func newGraph(kinds int) *graph {
	g := &graph{
		complete: make(chan struct{}), unlisted: kinds,
		nodes: map[types.UID]*node{}, owned: map[types.UID]map[types.UID]struct{}{},
	}
	if kinds == 0 {
		close(g.complete)
	}
	return g
}

func (g *graph) get(uid types.UID) (node, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if n := g.nodes[uid]; n != nil {
		return *n, true
	}
	return node{}, false
}

func (g *graph) dependents(uid types.UID) []*node {
	g.mu.Lock()
	defer g.mu.Unlock()
	deps := make([]*node, 0, len(g.owned[uid]))
	for dep := range g.owned[uid] {
		if n := g.nodes[dep]; n != nil {
			deps = append(deps, n)
		}
	}
	return deps
}

// +checklocks:g.mu
func (g *graph) putLocked(n *node) {
	old := g.nodes[n.uid]
	if old != nil {
		g.disownLocked(old)
	}
	g.nodes[n.uid] = n
	for _, o := range n.owners {
		if g.owned[o.uid] == nil {
			g.owned[o.uid] = map[types.UID]struct{}{}
		}
		g.owned[o.uid][n.uid] = struct{}{}
	}
	if old != nil { // one that no longer blocks, or no longer names its owner, may free it
		g.enqueueWaitingLocked(old)
	}
	if g.isDueLocked(n) {
		g.enqueue(n.uid)
	}
}

// +checklocks:g.mu
func (g *graph) removeLocked(uid types.UID) {
	n := g.nodes[uid]
	if n == nil {
		return
	}
	g.disownLocked(n)
	delete(g.nodes, uid)
	for dep := range g.owned[uid] {
		g.enqueue(dep)
	}
	g.enqueueWaitingLocked(n)
}

// +checklocks:g.mu
func (g *graph) disownLocked(n *node) {
	for _, o := range n.owners {
		delete(g.owned[o.uid], n.uid)
		if len(g.owned[o.uid]) == 0 {
			delete(g.owned, o.uid)
		}
	}
}

// enqueueWaitingLocked queues the owners of n that wait for their dependents.
// +checklocks:g.mu
func (g *graph) enqueueWaitingLocked(n *node) {
	for _, o := range n.owners {
		if owner := g.nodes[o.uid]; owner != nil && owner.deletingForeground() {
			g.enqueue(owner.uid)
		}
	}
}

// isDueLocked reports whether n may need work. While kinds are not listed yet none does: every
// owner would look absent.
// +checklocks:g.mu
func (g *graph) isDueLocked(n *node) bool {
	if g.unlisted > 0 {
		return false
	}
	if n.deleting {
		return n.foreground || n.orphaning
	}
	nodes := g.nodes
	return slices.ContainsFunc(n.owners, func(o ref) bool {
		owner := nodes[o.uid]
		return owner == nil || owner.deletingForeground()
	})
}

// listedLocked counts a kind as listed. After the last one it queues all objects that are due.
// +checklocks:g.mu
func (g *graph) listedLocked() {
	if g.unlisted--; g.unlisted > 0 {
		return
	}
	for uid, n := range g.nodes {
		if g.isDueLocked(n) {
			g.enqueue(uid)
		}
	}
	close(g.complete)
}

// feedOf returns what writes the watch of one kind to the graph.
func (g *graph) feedOf(kind schema.GroupKind) feed {
	listed := sync.OnceFunc(g.listedLocked)
	return feed{
		put: func(o metav1.Object) {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.putLocked(newNode(kind, o))
		},
		remove: func(o metav1.Object) {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.removeLocked(o.GetUID())
		},
		replace: func(all []metav1.Object) {
			nodes := map[types.UID]*node{}
			for _, o := range all {
				nodes[o.GetUID()] = newNode(kind, o)
			}
			g.mu.Lock()
			defer g.mu.Unlock()
			for uid, n := range g.nodes {
				if n.kind == kind && nodes[uid] == nil {
					g.removeLocked(uid)
				}
			}
			for _, n := range nodes {
				g.putLocked(n)
			}
			listed()
		},
	}
}

func has(o metav1.Object, finalizer string) bool {
	return slices.Contains(o.GetFinalizers(), finalizer)
}

func dropFinalizer(o metav1.Object, finalizer string) {
	o.SetFinalizers(slices.DeleteFunc(o.GetFinalizers(), func(f string) bool { return f == finalizer }))
}

func dropOwners(o metav1.Object, gone map[types.UID]bool) {
	o.SetOwnerReferences(slices.DeleteFunc(o.GetOwnerReferences(), func(r metav1.OwnerReference) bool { return gone[r.UID] }))
}
