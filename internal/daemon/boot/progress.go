package boot

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// PhaseStatus is how far one phase is.
type PhaseStatus struct {
	Name string        `json:"name"`
	Took time.Duration `json:"took"` // zero while it runs
	Done bool          `json:"done"`
}

// Progress records how far a boot is, and serves it as /readyz.
type Progress struct {
	log *slog.Logger
	// gate has the conditions that degrade the server; nil: none.
	gate *health.Gate
	// serves reports whether a ready server may route to sandboxes; nil: it may.
	serves func() bool

	mu sync.Mutex
	// +checklocks:mu
	list []PhaseStatus
	// +checklocks:mu
	ready bool
	// +checklocks:mu
	stopping bool
}

// NewProgress returns the progress of a boot that has not begun. gate and serves may be nil.
func NewProgress(log *slog.Logger, gate *health.Gate, serves func() bool) *Progress {
	return &Progress{log: log, gate: gate, serves: serves}
}

// Do runs one phase and records it.
func (p *Progress) Do(ctx context.Context, name string, step func(ctx context.Context) error) error {
	start := time.Now()
	p.mu.Lock()
	p.list = append(p.list, PhaseStatus{Name: name})
	at := len(p.list) - 1
	p.mu.Unlock()
	if err := step(ctx); err != nil {
		return fmt.Errorf("boot phase %q: %w", name, err)
	}
	took := time.Since(start)
	p.mu.Lock()
	p.list[at].Took, p.list[at].Done = took, true
	p.mu.Unlock()
	p.log.InfoContext(ctx, "boot phase done", "phase", name, telemetry.Duration, took)
	return nil
}

// SetReady records the end of the boot.
func (p *Progress) SetReady() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ready = true
}

// SetStopping records that the server stops.
func (p *Progress) SetStopping() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ready, p.stopping = false, true
}

// Snapshot returns whether the server is ready, the name of the current phase, and all phases so far.
func (p *Progress) Snapshot() (ready bool, current string, all []PhaseStatus) {
	p.mu.Lock()
	defer p.mu.Unlock()
	current = "start"
	for _, x := range p.list {
		if !x.Done {
			current = x.Name
		}
	}
	switch {
	case p.stopping:
		current = "stopping"
	case p.ready:
		current = "ready"
	}
	return p.ready, current, append([]PhaseStatus(nil), p.list...)
}

// ServeHTTP serves /readyz: 200 after the boot, else 503 with the phase. A degraded server lists its conditions and stays ready,
// because running sandboxes are served. A replica that is cut off is not ready.
func (p *Progress) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	ready, current, all := p.Snapshot()
	ready = ready && (p.serves == nil || p.serves())
	type row struct {
		Name  string  `json:"name"`
		Done  bool    `json:"done"`
		Milli float64 `json:"milliseconds"`
	}
	rows := make([]row, len(all))
	for i, x := range all {
		rows[i] = row{x.Name, x.Done, float64(x.Took.Microseconds()) / 1000}
	}
	w.Header().Set("Content-Type", "application/json")
	if !ready {
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	body := map[string]any{"ready": ready, "phase": current, "phases": rows}
	if list := p.gate.Conditions(); len(list) > 0 {
		wrong := map[string]string{}
		for _, c := range list {
			wrong[c.Name] = c.Reason
		}
		body["degraded"] = wrong
	}
	_ = json.NewEncoder(w).Encode(body) // the client has gone
}

// Brief serves /readyz to clients that are not the operator: the same status, without phases and conditions.
func (p *Progress) Brief(w http.ResponseWriter, _ *http.Request) {
	ready, _, _ := p.Snapshot()
	ready = ready && (p.serves == nil || p.serves())
	w.Header().Set("Content-Type", "application/json")
	if !ready {
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(map[string]bool{"ready": ready}) // the client has gone
}

// Err returns an errs.ErrUnavailable with the current phase unless the server is ready.
func (p *Progress) Err() error {
	if ready, current, _ := p.Snapshot(); !ready {
		return errs.Public(errs.ErrUnavailable, fmt.Sprintf("the server is not ready (%s)", current))
	}
	return nil
}

// Handler serves /healthz and a brief /readyz, and refuses all else with 503 and the phase.
func (p *Progress) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", Healthz)
	mux.HandleFunc("GET /readyz", p.Brief)
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		_, current, _ := p.Snapshot()
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Retry-After", "1")
		w.WriteHeader(http.StatusServiceUnavailable)
		message := "the server is starting (" + current + ")"
		if text, wrong := errs.PublicMessage(p.gate.Err()); wrong {
			message += ": " + text
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"code": http.StatusServiceUnavailable, "message": message}) // the client has gone
	})
	return mux
}

// Healthz answers that the process runs.
func Healthz(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain")
	fmt.Fprintln(w, "ok")
}
