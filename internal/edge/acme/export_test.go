package acme

import "time"

// SetPause sets the least time between two tries.
func SetPause(m *Manager, d time.Duration) { m.pause = d }

// SetFailures has a manager believe that tries have failed before.
func SetFailures(m *Manager, id string, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tries[id] = orderAttempt{Failures: n}
}
