// Package health holds the failed conditions of a running server by name, and reports whether it may
// begin new work. It detects nothing itself: the monitors of a disk, a program or a store set
// conditions. It stops nothing either: each part checks the gate before it begins deferrable work.
package health

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// RetryAfter is how long a rejected client should wait before a retry.
const RetryAfter = 5 * time.Second

// Condition is one failure.
type Condition struct {
	// Name is one word or two for the part, such as "disk".
	Name string
	// Reason is for all users: the public text of the error that was set.
	Reason string
	// Detail is the whole error, for the operator.
	Detail string
	// Since is when it began.
	Since time.Time
}

// Gate holds the conditions. While there is one, new work is rejected. A nil Gate has none and accepts
// none. It is safe for concurrent use.
type Gate struct {
	log   *slog.Logger
	gauge *prometheus.GaugeVec // nil: no metric

	closed atomic.Pointer[error] // what Err returns; nil while nothing is wrong; +checklocksignore

	mu         sync.Mutex
	conditions map[string]Condition // +checklocks:mu
}

// NewGate returns an open gate. metrics may be nil; if not, the gauge barchan_health_condition
// is 1 for each condition, and 0 for one that has passed.
func NewGate(log *slog.Logger, metrics prometheus.Registerer) (*Gate, error) {
	g := &Gate{log: log.With(telemetry.Component, "health"), conditions: map[string]Condition{}}
	if metrics == nil {
		return g, nil
	}
	g.gauge = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Namespace: "barchan", Subsystem: "health", Name: "condition",
		Help: "1 while the named condition, such as a full disk, makes the server refuse new work; 0 after it has passed.",
	}, []string{"condition"})
	if err := metrics.Register(g.gauge); err != nil {
		return nil, fmt.Errorf("register the metrics of health: %w", err)
	}
	return g, nil
}

// Set sets the condition of a part: nil means healthy. Only changes are logged, and a condition that
// stays keeps its start time. Users see the public text of an error ([errs.Public]); of others the
// name alone. Setting nil on a healthy part costs one atomic load, so it may be called on every write.
func (g *Gate) Set(name string, err error) {
	if g == nil || (err == nil && g.closed.Load() == nil) {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	was, there := g.conditions[name]
	switch {
	case err == nil && !there:
		return
	case err == nil:
		delete(g.conditions, name)
		g.log.Info("condition has passed", "condition", name, telemetry.Duration, time.Since(was.Since))
	default:
		now := Condition{Name: name, Reason: reason(err), Detail: err.Error(), Since: time.Now()}
		if there {
			now.Since = was.Since
		} else {
			g.log.Warn("new work is refused", "condition", name, telemetry.Error, err)
		}
		g.conditions[name] = now
	}
	g.count(name, err != nil)
	g.closed.Store(closure(g.sortedLocked()))
}

func reason(err error) string {
	if text, ok := errs.PublicMessage(err); ok {
		return text
	}
	return ""
}

func (g *Gate) count(name string, wrong bool) {
	if g.gauge == nil {
		return
	}
	value := 0.0
	if wrong {
		value = 1
	}
	g.gauge.WithLabelValues(name).Set(value)
}

// Err returns nil while new work may begin; else an errs.ErrUnavailable whose text for users lists all
// conditions. It is one atomic load.
func (g *Gate) Err() error {
	if g == nil {
		return nil
	}
	if err := g.closed.Load(); err != nil {
		return *err
	}
	return nil
}

// Conditions lists the conditions by name.
func (g *Gate) Conditions() []Condition {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.sortedLocked()
}

// +checklocks:g.mu
func (g *Gate) sortedLocked() []Condition {
	return slices.SortedFunc(maps.Values(g.conditions), func(a, b Condition) int { return strings.Compare(a.Name, b.Name) })
}

// closure is the error of a gate with these conditions.
func closure(list []Condition) *error {
	if len(list) == 0 {
		return nil
	}
	var public, whole []string
	for _, c := range list {
		text := c.Name
		if c.Reason != "" {
			text += ": " + c.Reason
		}
		public = append(public, text)
		whole = append(whole, c.Name+": "+c.Detail)
	}
	cause := fmt.Errorf("new work is refused: %s: %w", strings.Join(whole, "; "), errs.ErrUnavailable)
	err := errs.Public(cause, "new work is refused; running sandboxes continue ("+strings.Join(public, "; ")+")")
	return &err
}
