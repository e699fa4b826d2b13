package claim

import "sync"

// maxTemplates bounds the names of templates in the labels of metrics: tenants choose them, and a label's series stay.
const maxTemplates = 1000

// templateLabels are the names that are labels. The zero value is ready.
type templateLabels struct {
	mu    sync.Mutex
	names map[string]struct{} // +checklocks:mu
}

// label returns the label of a template.
func (l *templateLabels) label(name string) string {
	if name == "" {
		return "__unknown__" // agent-sandbox's
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.names[name]; known {
		return name
	}
	if len(l.names) >= maxTemplates {
		return "__other__"
	}
	if l.names == nil {
		l.names = map[string]struct{}{}
	}
	l.names[name] = struct{}{}
	return name
}
