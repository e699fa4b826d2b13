// Package inflight counts by key what is in progress, and bounds it: connections of a client, requests of a tenant.
//
// Its lock is a leaf.
package inflight

import "sync"

// Counter counts by key. The zero value is ready. It is safe for concurrent use.
type Counter[K comparable] struct {
	mu sync.Mutex
	n  map[K]int // +checklocks:mu
}

// Take counts one more of a key, unless there are most already. earlier is how many there were.
func (c *Counter[K]) Take(key K, most int) (earlier int, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if earlier = c.n[key]; earlier >= most {
		return earlier, false
	}
	if c.n == nil {
		c.n = map[K]int{}
	}
	c.n[key]++
	return earlier, true
}

// Release ends one that Take has counted.
func (c *Counter[K]) Release(key K) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n[key]--; c.n[key] == 0 {
		delete(c.n, key)
	}
}
