// Package volume has Volumes made, measured and removed by the node.
//
// A volume becomes Ready when the quota of its namespace has room for it and the node has its files; status.capacity is what
// counts against the quota, so a larger spec.capacity waits for room. One that is deleted keeps its files, and its name,
// while a sandbox mounts it: also a paused one, which mounts it again when it resumes. The API server, not a cache, decides that none does.
//
// The space of a mounted volume is measured again and again, that of others after uploads: what sandboxes write is bounded by this alone.
//
// reconciler.mu is held over no call; admitting lets one volume at a time take room.
package volume

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	crcache "sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/base/volumetree"
	"github.com/barchan-dev/barchan/internal/control/controllers"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

const (
	workers = 4
	// share is how many of them one namespace may have, since object stores and NFS servers of a tenant may be silent; see
	// controllers.Fits.
	share      = 2
	retryFirst = 100 * time.Millisecond
	retryMost  = time.Minute
	// measureEvery is the least time between two measurements of one volume; a long one is repeated more rarely, so that it takes
	// at most a twentieth of the time.
	measureEvery = 5 * time.Second
	measureShare = 20
	// remoteEvery is the time between two checks of a volume that is elsewhere.
	remoteEvery = 5 * time.Second
	// soon is how long after an upload a volume is measured.
	soon = time.Second
)

// Runner keeps the files of volumes; package volumes of the node implements it. All methods are idempotent.
type Runner interface {
	// Make makes a volume of a capacity in bytes, and mounts the files that are elsewhere: again if they are lost. A
	// volumetree.RemoteError says why they cannot be reached.
	Make(ctx context.Context, v volumetree.Ref, capacity int64, at *volumetree.Remote) error
	// Remove removes a volume's files; an errs.ErrConflict names the sandboxes that mount it on the node.
	Remove(ctx context.Context, v volumetree.Ref) error
	// Measure counts a volume's files, and takes note of its capacity in bytes.
	Measure(ctx context.Context, v volumetree.Ref, capacity int64) (volumetree.Usage, error)
	// Changes delivers volumes that uploads have changed.
	Changes() <-chan types.NamespacedName
}

// Objects reads from memory; package cache implements it.
type Objects interface {
	Volume(ctx context.Context, key types.NamespacedName) (*barchan.Volume, error)
	Mounting(ctx context.Context, volume types.NamespacedName) ([]*agents.Sandbox, error)
}

// Quotas has the limits of namespaces; package quota implements it.
type Quotas interface {
	Limits(ctx context.Context, namespace string) (quota.Limits, error)
}

// Config configures New; every field is required.
type Config struct {
	Log *slog.Logger
	// Client reads and writes the API server directly.
	Client client.Client
	// Cache provides the watches, and Objects reads it.
	Cache   crcache.Cache
	Objects Objects
	Runner  Runner
	Quotas  Quotas
}

// New returns the controller of volumes. Its Start blocks until ctx is done.
func New(cfg Config) (controller.Controller, error) {
	if cfg.Log == nil || cfg.Client == nil || cfg.Cache == nil || cfg.Objects == nil || cfg.Runner == nil || cfg.Quotas == nil {
		return nil, fmt.Errorf("volume controller: all fields are required: %w", errs.ErrInvalid)
	}
	cfg.Log = cfg.Log.With(telemetry.Component, "volume-controller")
	r := &reconciler{Config: cfg, admitting: make(chan struct{}, 1), measured: map[types.UID]measurement{}}
	return controllers.New(controllers.Work{
		Name: "volume", Log: cfg.Log, Workers: workers, Share: share, RetryFirst: retryFirst, RetryMost: retryMost, Reconciler: r, Sources: r.sources(),
	})
}

type reconciler struct {
	Config
	admitting chan struct{}

	mu sync.Mutex
	// measured has the last measurement of each volume.
	// +checklocks:mu
	measured map[types.UID]measurement
}

// measurement is the time of one, and how long it took.
type measurement struct {
	at   time.Time
	took time.Duration
}

func (r *reconciler) sources() []source.Source {
	return []source.Source{
		source.Kind(r.Cache, &barchan.Volume{}, &handler.TypedEnqueueRequestForObject[*barchan.Volume]{}, controllers.SpecChanges[*barchan.Volume]()),
		controllers.Watch(r.Cache, &barchan.Volume{}, func(ctx context.Context, old, now *barchan.Volume, q controllers.Queue) {
			if now == nil || (old != nil && old.Generation != now.Generation) { // others may have room now
				r.enqueueWaiting(ctx, old.Namespace, q)
			}
		}),
		controllers.Watch(r.Cache, &agents.Sandbox{}, func(_ context.Context, old, now *agents.Sandbox, q controllers.Queue) {
			if old != nil && now != nil && sandbox.DeadForGood(old) == sandbox.DeadForGood(now) {
				return
			}
			for _, s := range []*agents.Sandbox{old, now} {
				if s == nil {
					continue
				}
				for _, name := range sandbox.VolumesOf(s) {
					q.Add(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: s.Namespace, Name: name}})
				}
			}
		}),
		source.Func(func(ctx context.Context, q controllers.Queue) error {
			go func() { // ends with the controller's context
				for {
					select {
					case key := <-r.Runner.Changes():
						q.AddAfter(reconcile.Request{NamespacedName: key}, soon)
					case <-ctx.Done():
						return
					}
				}
			}()
			return nil
		}),
	}
}

// enqueueWaiting enqueues the volumes of a namespace that wait for room.
func (r *reconciler) enqueueWaiting(ctx context.Context, namespace string, q controllers.Queue) {
	var list barchan.VolumeList
	if err := r.Cache.List(ctx, &list, client.InNamespace(namespace)); err != nil {
		r.Log.ErrorContext(ctx, "cannot list volumes", telemetry.Namespace, namespace, telemetry.Error, err)
	}
	for i := range list.Items {
		if wants(&list.Items[i]) {
			q.Add(controllers.RequestFor(&list.Items[i]))
		}
	}
}

// refOf returns how the node knows a volume.
func refOf(v *barchan.Volume) volumetree.Ref {
	return volumetree.Ref{Namespace: v.Namespace, Name: v.Name, UID: v.UID}
}
