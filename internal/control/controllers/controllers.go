// Package controllers reconciles Sandbox objects with the sandboxes of a node. Each reconciler is
// level-triggered: it reads the desired state, observes the actual state, takes one step and writes the
// result to status. It keeps no state that it can observe, and does not retry errors that only a user can fix.
package controllers

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"time"

	"go.opentelemetry.io/otel/trace"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/assumecache"
)

const (
	retryFirst = 200 * time.Millisecond
	retryMost  = time.Minute
	// firstStatusDelay is the age from which a member of a cluster has a status, if it has not run by then.
	firstStatusDelay = 10 * time.Second
	// longestStart is how long the start of a pool member keeps others waiting: the pull of its image may take half an hour.
	longestStart = 10 * time.Second
)

// Runner runs sandboxes on a node; package node implements it. All methods are idempotent and safe for
// concurrent use, in any order.
type Runner interface {
	// Ensure starts a sandbox, or adopts a running one.
	Ensure(ctx context.Context, s *agents.Sandbox) (sandbox.Observed, error)
	// Bind applies to a running sandbox what a claim has added to its object, and persists it. It returns
	// at once if nothing is missing.
	Bind(ctx context.Context, s *agents.Sandbox) error
	// SetEgress applies the object's network policy to an existing sandbox. The policy is in force when it
	// returns. It returns at once if nothing has changed.
	SetEgress(ctx context.Context, s *agents.Sandbox) error
	// Suspend pauses a sandbox and keeps the state that mode selects; empty means agents.SuspendMemory.
	// Resume resumes it; filesOnly discards its memory permanently.
	Suspend(ctx context.Context, ref sandbox.Ref, mode agents.SuspendMode) (sandbox.Observed, error)
	Resume(ctx context.Context, ref sandbox.Ref, filesOnly bool) (sandbox.Observed, error)
	// Remove deletes all resources of a sandbox; nil means that none are left.
	Remove(ctx context.Context, ref sandbox.Ref) error
	// ObjectDeleted removes leftover resources of a deleted object. They exist if the finalizer was removed
	// by force before Remove was called.
	ObjectDeleted(namespace, name string)
	// Observe returns the actual state of a sandbox.
	Observe(ctx context.Context, ref sandbox.Ref) (sandbox.Observed, error)
}

// SandboxConfig configures NewSandbox. Log, Client, Cache and Runner are required.
type SandboxConfig struct {
	Log    *slog.Logger
	Client client.Client
	Cache  cache.Cache
	Runner Runner
	// Node is the Runner's name in status.nodeName. Sandboxes of other nodes are ignored. Empty: the Runner is a cluster's. It
	// runs all sandboxes, and Kubernetes collects what they own, so that they need no finalizer.
	Node string
	// Origins delays sandboxes until the checkpoint that they start from is ready; nil leaves that to the Runner.
	Origins Origins
	// References finds the sandboxes that refer to a Secret or ConfigMap: they are reconciled when it changes. Nil: a
	// cluster's kubelet does that.
	References References
	// ForkSecrets allows all sandboxes to start from checkpoints that hold other claims' variables.
	ForkSecrets bool
	// Changes delivers sandboxes whose container changed on the node.
	Changes <-chan sandbox.Ref
	// Sources has other events that reconcile sandboxes.
	Sources []source.Source
	// Events records Kubernetes events; nil records none.
	Events events.EventRecorder
	// Workers is the number of concurrent reconciles, and Share how many of them one namespace may have, see Fits. Defaults 64 and 16.
	Workers, Share int
	// Starts bounds concurrent starts of pool members. Default half the processors, at least 1: the others
	// remain for claims.
	Starts int
	// LastWarmClaim, if set, returns the time of the last claim that left ready members in its pool. Members
	// start, and claimed ones are bound, 100 ms after it, and at most two seconds late, so that neither slows a burst of claims
	// or their first commands.
	LastWarmClaim func() time.Time
	// Assumed has sandboxes that this process has written and the cache may not show yet; nil: the cache is believed. A Pod's event
	// comes before that of the status which the Pod's last one led to, and a status over the older version would be refused.
	Assumed *assumecache.Sandboxes
	// Tracing continues the traces of requests that have changed sandboxes; nil: none is.
	Tracing trace.TracerProvider
}

// NewSandbox returns the controller of sandboxes on a node. Its Start blocks until ctx is done.
func NewSandbox(cfg SandboxConfig) (controller.Controller, error) {
	if cfg.Log == nil || cfg.Client == nil || cfg.Cache == nil || cfg.Runner == nil {
		return nil, fmt.Errorf("sandbox controller: Log, Client, Cache and Runner are required: %w", errs.ErrInvalid)
	}
	cfg.Log, cfg.Workers, cfg.Share = cfg.Log.With(telemetry.Component, "sandbox-controller"), cmp.Or(cfg.Workers, 64), cmp.Or(cfg.Share, 16)
	starts := cmp.Or(cfg.Starts, max(1, runtime.NumCPU()/2))
	members := newStartLimiter(func(own, _ int) bool { return own < starts }, longestStart, nil)
	r := &sandboxReconciler{SandboxConfig: cfg, cache: cfg.Cache, members: members, refused: newRefusals()}
	sources := []source.Source{
		source.Kind(cfg.Cache, &agents.Sandbox{}, &handler.TypedEnqueueRequestForObject[*agents.Sandbox]{}),
		changes(cfg.Changes),
		members.source(),
	}
	sources = append(sources, cfg.Sources...)
	if cfg.Origins != nil {
		sources = append(sources, r.ready(cfg.Cache))
	}
	if cfg.References != nil {
		sources = append(sources, r.referred(podsource.KindSecret, &corev1.Secret{}), r.referred(podsource.KindConfigMap, &corev1.ConfigMap{}))
	}
	return New(Work{Name: "sandbox", Log: cfg.Log, Workers: cfg.Workers, Share: cfg.Share, RetryFirst: retryFirst, RetryMost: retryMost, Reconciler: r, Sources: sources})
}

// changes enqueues the sandboxes that the node reports.
func changes(refs <-chan sandbox.Ref) source.Source {
	return source.Func(func(ctx context.Context, queue Queue) error {
		go func() { // ends with the controller's context, which outlives every reconcile
			for {
				select {
				case ref := <-refs:
					queue.Add(reconcile.Request{NamespacedName: client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}})
				case <-ctx.Done():
					return
				}
			}
		}()
		return nil
	})
}
