package route

import "sync"

// Life is one run of one sandbox at one address. It ends once, and does not begin again.
type Life struct {
	key  string
	gone chan struct{}

	mu    sync.Mutex
	ended bool     // +checklocks:mu
	hooks []func() // +checklocks:mu
}

func newLife(key string) *Life { return &Life{key: key, gone: make(chan struct{})} }

// endedLife stands in routes that are not reachable.
func endedLife(key string) *Life {
	l := newLife(key)
	l.end()
	return l
}

// Key is the route's LifeKey.
func (l *Life) Key() string { return l.key }

// Gone is closed when the life has ended: the sandbox died, paused, moved or was made anew.
func (l *Life) Gone() <-chan struct{} { return l.gone }

// Over reports whether the life has ended.
func (l *Life) Over() bool {
	select {
	case <-l.gone:
		return true
	default:
		return false
	}
}

// OnEnd has f run when the life ends, or now if it has. It runs in the goroutine of the table's
// writer, which holds no lock then; f must not block.
func (l *Life) OnEnd(f func()) {
	l.mu.Lock()
	if !l.ended {
		l.hooks = append(l.hooks, f)
		l.mu.Unlock()
		return
	}
	l.mu.Unlock()
	f()
}

func (l *Life) end() {
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		return
	}
	l.ended = true
	hooks := l.hooks
	l.hooks = nil
	close(l.gone)
	l.mu.Unlock()
	for _, f := range hooks {
		f()
	}
}
