package cache

import (
	"maps"
	"reflect"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Waiting returns how many objects callers wait for.
func Waiting(c *Cache) int {
	c.waits.mu.Lock()
	defer c.waits.mu.Unlock()
	return len(c.waits.waiters)
}

// IndexValues returns the values of an object by the name of the index.
func IndexValues(o client.Object) map[string]string {
	all := map[string]string{}
	for _, ix := range indexes() {
		for _, v := range ix.values(o) {
			all[ix.name] = v
		}
	}
	return all
}

// Indexes returns the names of the indexes of a kind, in order.
func Indexes[T client.Object](c *Cache) []string {
	return slices.Sorted(maps.Keys(c.stores[reflect.TypeFor[T]()].GetIndexers()))
}
