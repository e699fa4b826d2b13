package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

// Phase is one named step of the boot.
type Phase struct {
	Name string        `json:"name"`
	Took time.Duration `json:"took"` // zero while it runs
	Done bool          `json:"done"`
}

// phases runs the boot's steps in order and tells how far it is.
type phases struct {
	log *slog.Logger
	// health tells what is wrong; nil: nothing.
	health *health.Gate
	// serves says whether a server that has booted leads to sandboxes; nil: it does.
	serves func() bool

	mu sync.Mutex
	// +checklocks:mu
	list []Phase
	// +checklocks:mu
	ready bool
	// +checklocks:mu
	stopping bool
}

// do runs one phase. Nothing later starts before it is done; its error ends the boot.
func (p *phases) do(ctx context.Context, name string, step func(ctx context.Context) error) error {
	start := time.Now()
	p.mu.Lock()
	p.list = append(p.list, Phase{Name: name})
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

func (p *phases) setReady() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ready = true
}

func (p *phases) setStopping() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ready, p.stopping = false, true
}

// snapshot returns whether the server is ready, the name of what it waits for, and all phases.
func (p *phases) snapshot() (ready bool, current string, all []Phase) {
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
	return p.ready, current, append([]Phase(nil), p.list...)
}

// ServeHTTP answers /readyz: 200 once the boot is over, else 503 with the phase. What is wrong with
// a server that is ready is listed, and it stays ready: what runs is served. A replica that may not
// serve it, because it is cut off, is not ready.
func (p *phases) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	ready, current, all := p.snapshot()
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
	if list := p.health.Conditions(); len(list) > 0 {
		wrong := map[string]string{}
		for _, c := range list {
			wrong[c.Name] = c.Reason
		}
		body["degraded"] = wrong
	}
	_ = json.NewEncoder(w).Encode(body) // the client has gone
}
