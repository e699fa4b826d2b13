package cache

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/watch"
)

const (
	// shortGap is longer than what lies between two watches of which the second resumes the first without trouble.
	shortGap = 200 * time.Millisecond
	// catchUp is how long after a longer gap, or from a list, the cache may lack what there was before.
	catchUp = 5 * time.Second
)

// continuity tells whether the watch of a kind has been cut off lately. One that is open brings changes within milliseconds.
type continuity struct {
	mu       sync.Mutex
	open     int       // +checklocks:mu
	ended    time.Time // when the last one did; zero before the first; +checklocks:mu
	caughtUp time.Time // +checklocks:mu
}

// follow returns the watch, whose Stop its reader calls however it ends. lists means that it begins with all objects, or follows a list of them.
func (c *continuity) follow(w watch.Interface, lists bool) watch.Interface {
	if c == nil {
		return w
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := time.Now(); lists || c.open == 0 && now.Sub(c.ended) >= shortGap {
		c.caughtUp = now.Add(catchUp)
	}
	c.open++
	return &followedWatch{Interface: w, stopped: sync.OnceFunc(c.stopped)}
}

func (c *continuity) stopped() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open--
	c.ended = time.Now()
}

// broken reports whether the cache may lack older changes than the last ones.
func (c *continuity) broken() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.open == 0 || time.Now().Before(c.caughtUp)
}

type followedWatch struct {
	watch.Interface
	stopped func()
}

// Stop implements watch.Interface.
func (w *followedWatch) Stop() {
	w.Interface.Stop()
	w.stopped()
}
