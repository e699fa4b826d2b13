package capture

import (
	"context"
	"errors"
	"net/http"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/operation"
)

// silence answers nothing.
type silence struct{}

func (silence) RoundTrip(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// TestSilentAgentKeepsNoSlot: what waits for an agent, which a tenant may have replaced, keeps no other checkpoint waiting.
func TestSilentAgentKeepsNoSlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host := operation.NewHost(operation.HostConfig{Log: telemetry.Discard()})
		host.Agents.HTTP = &http.Client{Transport: silence{}}
		m, began := New(Config{Host: host}), time.Now()
		var hostile sync.WaitGroup
		for range maxConcurrent {
			hostile.Go(func() {
				p := &work{Operation: host.Operation(&journal.Row{Stage: journal.Live, Address: netip.MustParseAddr("10.0.0.2")}), m: m}
				if err := p.enter(t.Context()); err != nil {
					t.Error(err)
				}
				defer p.leave()
				if err := p.withoutMemory(t.Context()); !errors.Is(err, errs.ErrUnavailable) {
					t.Errorf("a silent agent: %v", err)
				}
			})
		}
		synctest.Wait()
		for range maxConcurrent {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			quiet := &work{m: m}
			if err := quiet.enter(ctx); err != nil {
				t.Errorf("beside silent agents: %v", err)
			}
			cancel()
			defer quiet.leave()
		}
		hostile.Wait()
		if took := time.Since(began); took > time.Minute {
			t.Errorf("the agents held their checkpoints for %s", took)
		}
	})
}
