package operation

import (
	"context"
	"net/http"
	"net/netip"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/checkpoint"
	"github.com/barchan-dev/barchan/internal/node/journal"
)

// silence answers nothing.
type silence struct{}

func (silence) RoundTrip(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// TestSilentAgentKeepsNoRestoreWaiting: one that a tenant has replaced once kept a slot for the whole wait.
func TestSilentAgentKeepsNoRestoreWaiting(t *testing.T) {
	self, err := lifecycle.ProcessOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		const startTimeout = 30 * time.Second
		h := NewHost(HostConfig{StartTimeout: startTimeout, Log: telemetry.Discard()})
		h.Agents.HTTP = &http.Client{Transport: silence{}}
		began, ended := time.Now(), make(chan error)
		for range cap(h.restores) {
			w := h.Operation(&journal.Row{Address: netip.MustParseAddr("10.0.0.2"), Process: self})
			w.Origin = &checkpoint.Origin{WithMemory: true}
			if err := w.Origin.AwaitSlot(t.Context(), h.restores); err != nil {
				t.Fatal(err)
			}
			go func() { ended <- w.awaitNewAgent(t.Context()) }()
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*slotTimeout)
		defer cancel()
		other := &checkpoint.Origin{}
		if err := other.AwaitSlot(ctx, h.restores); err != nil {
			t.Errorf("beside silent agents: %v", err)
		} else {
			other.ReleaseSlot()
		}
		for range cap(h.restores) {
			if err := <-ended; err == nil {
				t.Error("a silent agent was awaited")
			}
		}
		if took := time.Since(began); took != startTimeout || len(h.restores) != 0 {
			t.Errorf("ended after %s with %d slots taken", took, len(h.restores))
		}
	})
}
