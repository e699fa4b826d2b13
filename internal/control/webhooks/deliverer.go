package webhooks

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/semaphore"
	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/events"
)

const (
	// listEvery is how often webhooks are listed that another process may have changed.
	listEvery = 15 * time.Second
	// inFlight bounds the requests at one time, of all webhooks.
	inFlight = 32
	// maxAttempts bounds the attempts to deliver one event. With the backoff they take over eight minutes.
	maxAttempts = 10
	backoffMost = 5 * time.Minute
	// disableAfter is how long a webhook may fail without a success between.
	disableAfter = 24 * time.Hour
)

// DelivererConfig configures a Deliverer. Events, List and Log are required.
type DelivererConfig struct {
	Events *events.Store
	// List returns the webhooks of all namespaces.
	List func(ctx context.Context) ([]Webhook, error)
	// Allowed are networks beside the public ones that webhooks may reach.
	Allowed []netip.Prefix
	Log     *slog.Logger
	Metrics prometheus.Registerer
	// Backoff returns the wait after so many failed attempts. Default: 1 s, doubled each time, to 5 min.
	Backoff func(attempts int) time.Duration
}

// Deliverer delivers events to webhooks.
type Deliverer struct {
	cfg    DelivererConfig
	client *http.Client
	slots  *semaphore.Weighted
	sent   *prometheus.CounterVec

	changed, recorded chan struct{}

	// workers are Run's alone, by webhook.
	workers map[types.UID]*worker
	running sync.WaitGroup
}

// Metrics registers the metrics of a deliverer without one, for their reference.
func Metrics(to prometheus.Registerer) error {
	_, err := newMetrics(to)
	return err
}

func newMetrics(to prometheus.Registerer) (*prometheus.CounterVec, error) {
	sent := prometheus.NewCounterVec(prometheus.CounterOpts{
		Namespace: telemetry.MetricsNamespace, Name: "webhook_deliveries_total", Help: "Attempts to deliver an event to a webhook, by result: `ok`, or `error`, after which it is delivered again.",
	}, []string{"result"})
	return sent, telemetry.Register(to, sent)
}

// NewDeliverer checks the configuration.
func NewDeliverer(cfg DelivererConfig) (*Deliverer, error) {
	if cfg.Events == nil || cfg.List == nil || cfg.Log == nil {
		return nil, fmt.Errorf("webhooks: a required part is missing: %w", errs.ErrInvalid)
	}
	if cfg.Backoff == nil {
		cfg.Backoff = func(attempts int) time.Duration { return min(time.Second<<min(attempts-1, 20), backoffMost) }
	}
	sent, err := newMetrics(cfg.Metrics)
	if err != nil {
		return nil, fmt.Errorf("webhooks: %w", err)
	}
	d := &Deliverer{
		cfg: cfg, client: newClient(cfg.Allowed, net.InterfaceAddrs), slots: semaphore.NewWeighted(inFlight),
		changed: make(chan struct{}, 1), recorded: make(chan struct{}, 1), workers: map[types.UID]*worker{},
		sent: sent,
	}
	return d, nil
}

// Changed has the webhooks listed again.
func (d *Deliverer) Changed() { signal(d.changed) }

// Recorded has new events delivered.
func (d *Deliverer) Recorded() { signal(d.recorded) }

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Run delivers until ctx is done. A webhook that fails holds up no other.
func (d *Deliverer) Run(ctx context.Context) error {
	defer d.client.CloseIdleConnections()
	defer d.running.Wait()
	tick := time.NewTicker(listEvery)
	defer tick.Stop()
	for list := true; ; {
		if list {
			if err := d.follow(ctx); err != nil && ctx.Err() == nil {
				d.cfg.Log.WarnContext(ctx, "webhooks not listed", telemetry.Error, err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			list = true
		case <-d.changed:
			list = true
		case <-d.recorded:
			list = false
			for _, w := range d.workers {
				signal(w.wake)
			}
		}
	}
}

// follow begins and ends workers as there are webhooks.
func (d *Deliverer) follow(ctx context.Context) error {
	all, err := d.cfg.List(ctx)
	if err != nil {
		return err
	}
	exists, enabled := map[types.UID]bool{}, map[types.UID]bool{}
	for _, hook := range all {
		exists[hook.UID] = true
		if !hook.Enabled {
			continue
		}
		enabled[hook.UID] = true
		w := d.workers[hook.UID]
		if w == nil {
			w = &worker{d: d, wake: make(chan struct{}, 1), changed: make(chan struct{}, 1)}
			w.hook.Store(&hook)
			var running context.Context
			running, w.stop = context.WithCancel(ctx)
			d.workers[hook.UID] = w
			d.running.Go(func() { w.run(running) })
			continue
		}
		if old := w.hook.Swap(&hook); !old.same(&hook) {
			signal(w.changed)
		}
	}
	for uid, w := range d.workers {
		if !enabled[uid] {
			w.stop()
			delete(d.workers, uid)
		}
	}
	return d.cfg.Events.KeepCursors(func(uid types.UID) bool { return exists[uid] })
}
