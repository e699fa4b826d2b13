package cache

import "sigs.k8s.io/controller-runtime/pkg/client"

// Waiting is how many objects are waited for.
func Waiting(c *Cache) int {
	c.waits.mu.Lock()
	defer c.waits.mu.Unlock()
	return len(c.waits.bells)
}

// IndexValues are the values by which an object is found, by the name of the index.
func IndexValues(o client.Object) map[string]string {
	all := map[string]string{}
	for _, ix := range indexes() {
		for _, v := range ix.values(o) {
			all[ix.name] = v
		}
	}
	return all
}
