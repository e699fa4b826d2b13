package kubecluster

import (
	"bytes"
	"sync"
)

// tailSize is how much of a program's output is kept for failures.
const tailSize = 8 << 10

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	text []byte // +checklocks:mu
}

// Write implements io.Writer.
func (l *tail) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, p...)
	l.text = bytes.Clone(l.text[max(0, len(l.text)-tailSize):])
	return len(p), nil
}

// String returns what was kept.
func (l *tail) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text)
}
