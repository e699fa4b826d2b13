// Package eventlog wires the log of sandboxes' events: from the watch to the database, and from there to webhooks. It has no
// rule of its own.
package eventlog

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/events"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/control/webhooks"
)

// Config configures a Log. Every field is required but Metrics and Allowed.
type Config struct {
	// Dir is the log's directory, of this process alone.
	Dir     string
	Cache   *cache.Cache
	Quota   *quota.Quotas
	Size    templates.Size // of a sandbox without limits
	Allowed []netip.Prefix // beside public addresses
	// NoWebhooks is of a process that delivers nothing, and reads no Secrets.
	NoWebhooks bool
	Log        *slog.Logger
	Metrics    prometheus.Registerer
}

// Log records and delivers.
type Log struct {
	Store    *events.Store
	Webhooks *webhooks.Service // nil with NoWebhooks

	cfg       Config
	recorder  *events.Recorder
	deliverer *webhooks.Deliverer
}

// Open opens the database.
func Open(cfg Config) (*Log, error) {
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of events: %w", err)
	}
	store, err := events.Open(cfg.Dir, 0)
	if err != nil {
		return nil, err
	}
	l := &Log{cfg: cfg, Store: store}
	recorded := func() {}
	if !cfg.NoWebhooks {
		recorded, err = l.makeWebhooks()
	}
	if err == nil {
		err = l.makeRecorder(recorded)
	}
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return l, nil
}

// makeWebhooks returns what is called after events are recorded.
func (l *Log) makeWebhooks() (recorded func(), err error) {
	l.Webhooks = &webhooks.Service{Objects: l.cfg.Cache.Live(), Quota: l.cfg.Quota, Allowed: l.cfg.Allowed}
	l.deliverer, err = webhooks.NewDeliverer(webhooks.DelivererConfig{
		Events: l.Store, Allowed: l.cfg.Allowed, Log: l.cfg.Log.With("component", "webhooks"), Metrics: l.cfg.Metrics,
		List: func(ctx context.Context) ([]webhooks.Webhook, error) { return l.Webhooks.List(ctx, "") },
	})
	if err != nil {
		return nil, err
	}
	l.Webhooks.Changed = l.deliverer.Changed
	return l.deliverer.Recorded, nil
}

func (l *Log) makeRecorder(recorded func()) (err error) {
	sizes := &templates.Catalog{DefaultSize: l.cfg.Size}
	l.recorder, err = events.NewRecorder(events.Config{
		Store: l.Store, Objects: l.cfg.Cache, Log: l.cfg.Log.With("component", "events"), Recorded: recorded,
		Gone: func(ctx context.Context, namespace string) (bool, error) {
			err := l.cfg.Cache.Live().Get(ctx, types.NamespacedName{Name: namespace}, &corev1.Namespace{})
			if apierrors.IsNotFound(err) {
				return true, nil
			}
			return false, err
		},
		SizeOf: func(s *agents.Sandbox) events.Size {
			size := sizes.SizeOf(&s.Spec.PodTemplate.Spec)
			return events.Size{CPUs: size.CPUs, MemoryMB: size.MemoryMB}
		},
	})
	return err
}

// Parts returns the store of events and the webhooks of all namespaces. A nil Log has neither.
func (l *Log) Parts() (*events.Store, *webhooks.Service) {
	if l == nil {
		return nil, nil
	}
	return l.Store, l.Webhooks
}

// Observe takes each change of a sandbox.
func (l *Log) Observe(older, newer *agents.Sandbox) { l.recorder.Observe(older, newer) }

// Run records and delivers until ctx is done, and closes the database. The cache must be complete.
func (l *Log) Run(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, l.Store.Close()) }()
	if _, err := cache.On(ctx, l.cfg.Cache, func(older, newer *barchan.Checkpoint) { l.recorder.ObserveCheckpoint(older, newer) }); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return l.recorder.Run(ctx) })
	if l.deliverer != nil {
		group.Go(func() error { return l.deliverer.Run(ctx) })
	}
	return group.Wait()
}
