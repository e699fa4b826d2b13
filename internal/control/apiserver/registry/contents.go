package registry

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
)

// leastSize is what an object counts for at least, in bytes: caches hold it decoded.
const leastSize = 4 << 10

// Size returns the bytes of an object as JSON.
func Size(obj runtime.Object) int64 {
	text, err := json.Marshal(obj)
	if err != nil {
		return math.MaxInt32
	}
	return int64(len(text))
}

// contents has the sizes of the objects in the namespaces that were asked for; a namespace is listed once. What expires by itself
// does not count, nor does a status that was written later.
type contents struct {
	mu         sync.Mutex
	namespaces map[string]*namespaceContents // +checklocks:mu
}

// namespaceContents are those of one namespace; guarded by contents.mu.
type namespaceContents struct {
	sizes map[objectKey]int64 // 0 for what was deleted while the namespace was listed
	bytes int64
	// listed is closed when sizes is complete, or listing failed with err.
	listed chan struct{}
	done   bool
	err    error
}

type objectKey struct{ kind, name string }

// Contents returns the sum of the sizes of a namespace's objects, in bytes. Each counts for at least 4 KiB.
func (r *Registry) Contents(ctx context.Context, namespace string) (int64, error) {
	c := &r.contents
	c.mu.Lock()
	n := c.namespaces[namespace]
	if n == nil {
		n = &namespaceContents{sizes: map[objectKey]int64{}, listed: make(chan struct{})}
		c.namespaces[namespace] = n
		c.mu.Unlock()
		r.listContents(ctx, namespace, n)
	} else {
		c.mu.Unlock()
	}
	select {
	case <-n.listed:
	case <-ctx.Done():
		return 0, fmt.Errorf("list namespace %s: %w", namespace, context.Cause(ctx))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return n.bytes, n.err
}

// listContents fills n from the stores. Writes meanwhile are newer than what is listed.
func (r *Registry) listContents(ctx context.Context, namespace string, n *namespaceContents) {
	listed, err := map[objectKey]int64{}, error(nil)
	for _, s := range r.Stores {
		if err != nil || !s.counts() {
			continue
		}
		var list runtime.Object
		if list, err = s.List(genericapirequest.WithNamespace(ctx, namespace), &metainternalversion.ListOptions{}); err == nil {
			err = meta.EachListItem(list, func(o runtime.Object) error {
				listed[objectKey{s.Kind.Kind, o.(metav1.Object).GetName()}] = max(Size(o), leastSize)
				return nil
			})
		}
	}
	c := &r.contents
	c.mu.Lock()
	defer c.mu.Unlock()
	defer close(n.listed)
	if err != nil {
		n.err = fmt.Errorf("list namespace %s: %w", namespace, err)
		delete(c.namespaces, namespace) // the next one lists it again
		return
	}
	for key, size := range listed {
		if _, newer := n.sizes[key]; !newer {
			n.set(key, size)
		}
	}
	for key, size := range n.sizes {
		if size == 0 {
			delete(n.sizes, key)
		}
	}
	n.done = true
}

func (n *namespaceContents) set(key objectKey, size int64) {
	n.bytes += size - n.sizes[key]
	if n.sizes[key] = size; size == 0 && n.done {
		delete(n.sizes, key)
	}
}

// note records a write of an object, or with gone its deletion.
func (c *contents) note(kind string, obj runtime.Object, gone bool) {
	o := obj.(metav1.Object)
	c.mu.Lock()
	listed := c.namespaces[o.GetNamespace()] != nil
	c.mu.Unlock()
	if !listed {
		return
	}
	size := int64(0)
	if !gone {
		size = max(Size(obj), leastSize)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := c.namespaces[o.GetNamespace()]; n != nil {
		n.set(objectKey{kind, o.GetName()}, size)
	}
}

// counts reports whether objects of the store count.
func (s *Store) counts() bool { return s.Kind.Namespaced && s.Kind.TTLSeconds == 0 }

// countInto has what is written counted.
func (s *Store) countInto(c *contents) {
	switch {
	case s.isNamespaces():
		s.AfterDelete = func(obj runtime.Object, o *metav1.DeleteOptions) {
			if len(o.DryRun) > 0 {
				return
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			delete(c.namespaces, obj.(metav1.Object).GetName())
		}
	case s.counts():
		note := func(obj runtime.Object, dryRun []string, gone bool) {
			if len(dryRun) == 0 {
				c.note(s.Kind.Kind, obj, gone)
			}
		}
		s.AfterCreate = func(obj runtime.Object, o *metav1.CreateOptions) { note(obj, o.DryRun, false) }
		s.AfterUpdate = func(obj runtime.Object, o *metav1.UpdateOptions) { note(obj, o.DryRun, false) }
		s.AfterDelete = func(obj runtime.Object, o *metav1.DeleteOptions) { note(obj, o.DryRun, true) }
	}
}
