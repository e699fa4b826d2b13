package cache

// Waiting is how many objects are waited for.
func Waiting(c *Cache) int {
	c.waits.mu.Lock()
	defer c.waits.mu.Unlock()
	return len(c.waits.bells)
}
