package route

import "sync"

// Epoch is one run of one sandbox at one address. It ends once, and does not begin again.
type Epoch struct {
	key  string
	gone chan struct{}

	mu    sync.Mutex
	ended bool     // +checklocks:mu
	hooks []func() // +checklocks:mu
}

func newEpoch(key string) *Epoch { return &Epoch{key: key, gone: make(chan struct{})} }

// endedEpoch is the epoch of unreachable routes.
func endedEpoch(key string) *Epoch {
	l := newEpoch(key)
	l.end()
	return l
}

// Key returns the route's EpochKey.
func (l *Epoch) Key() string { return l.key }

// Done is closed when the epoch has ended: the sandbox died, paused, moved or was created again.
func (l *Epoch) Done() <-chan struct{} { return l.gone }

// Ended reports whether the epoch has ended.
func (l *Epoch) Ended() bool {
	select {
	case <-l.gone:
		return true
	default:
		return false
	}
}

// OnEnd runs f when the epoch ends, or now if it has. f runs in the goroutine of the table's writer,
// which holds no lock then; it must not block.
func (l *Epoch) OnEnd(f func()) {
	l.mu.Lock()
	if !l.ended {
		l.hooks = append(l.hooks, f)
		l.mu.Unlock()
		return
	}
	l.mu.Unlock()
	f()
}

func (l *Epoch) end() {
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
