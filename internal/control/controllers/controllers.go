// Package controllers makes the world what the objects say. Each reconciler is level-based:
// it reads what is wanted, looks at what is, does one step towards it, and writes what it saw
// into status. It never remembers what it could observe, and never retries what only a user
// can mend.
package controllers

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"time"

	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const (
	retryFirst = 200 * time.Millisecond
	retryMost  = time.Minute
	// calm is how long after a claim a member may be started, and patience how long one waits for
	// that at most. Both are above the resolution of what they are measured by: patience is of the
	// object's age, in whole seconds.
	calm     = 100 * time.Millisecond
	patience = 2 * time.Second
)

// Runner is the machine that runs sandboxes; package node has it. Every method may be called
// any number of times, in any order, and from several goroutines.
type Runner interface {
	// Ensure makes the sandbox run, or adopts it if it does.
	Ensure(ctx context.Context, s *agents.Sandbox) (sandbox.Observed, error)
	// Bind gives one that runs what its object has got since it was made, and makes it last.
	// Where nothing is missing, it does nothing, quickly.
	Bind(ctx context.Context, s *agents.Sandbox) error
	// SetEgress has one that is there reach what its object says, from the moment that it returns.
	// Where that is so already, it does nothing, quickly.
	SetEgress(ctx context.Context, s *agents.Sandbox) error
	// Suspend puts it to sleep with what the mode keeps; empty means agents.SuspendMemory. Resume
	// wakes it; filesOnly gives up its memory, for good.
	Suspend(ctx context.Context, ref sandbox.Ref, mode agents.SuspendMode) (sandbox.Observed, error)
	Resume(ctx context.Context, ref sandbox.Ref, filesOnly bool) (sandbox.Observed, error)
	// Remove returns nil only when nothing of the sandbox is left.
	Remove(ctx context.Context, ref sandbox.Ref) error
	// ObjectDeleted says that the object of a name is gone, which a finalizer taken away by force does
	// before Remove was asked for: what is left of it is found out about, and removed.
	ObjectDeleted(namespace, name string)
	// Observe tells what is there.
	Observe(ctx context.Context, ref sandbox.Ref) (sandbox.Observed, error)
}

// SandboxConfig is what NewSandbox needs; every field is required unless it says so.
type SandboxConfig struct {
	Log    *slog.Logger
	Client client.Client
	Cache  cache.Cache
	Runner Runner
	// Node is the name by which the Runner's machine stands in status.nodeName. Sandboxes of other
	// nodes are left alone.
	Node string
	// Origins lets sandboxes that start from a checkpoint wait for it; nil leaves that to the Runner.
	Origins Origins
	// ForkSecrets lets all sandboxes start from checkpoints that hold what the claims of others brought.
	ForkSecrets bool
	// Changes tells of sandboxes whose container changed by itself.
	Changes <-chan sandbox.Ref
	// Events records what users should see beside the object; nil records nothing.
	Events events.EventRecorder
	// Workers bounds how many sandboxes are worked on at once. Default 16.
	Workers int
	// Starts bounds how many members of pools are started at once. Default half the processors, at
	// least 1, which leaves the others to those who wait.
	Starts int
	// Served, if set, tells when a claim was last served of a stock that has not run out. Members are
	// not started within a tenth of a second after it, but within two seconds in any case, so that
	// refills do not hold up claims that follow each other.
	Served func() time.Time
}

// NewSandbox returns the controller of sandboxes on a node. Its Start blocks until ctx is done.
func NewSandbox(cfg SandboxConfig) (controller.Controller, error) {
	if cfg.Workers == 0 {
		cfg.Workers = 16
	}
	if cfg.Log == nil || cfg.Client == nil || cfg.Cache == nil || cfg.Runner == nil || cfg.Node == "" {
		return nil, fmt.Errorf("sandbox controller: Log, Client, Cache, Runner and Node are required: %w", errs.ErrInvalid)
	}
	if cfg.Starts == 0 {
		cfg.Starts = max(1, runtime.NumCPU()/2)
	}
	log, members := cfg.Log.With("component", "sandbox-controller"), newGate(cfg.Starts)
	r := &sandboxReconciler{
		log: log, client: cfg.Client, cache: cfg.Cache, runner: cfg.Runner, node: cfg.Node, events: cfg.Events, members: members, served: cfg.Served,
		origins: cfg.Origins, forkSecrets: cfg.ForkSecrets, refused: newRefusals(),
	}
	sources := []source.Source{
		source.Kind(cfg.Cache, &agents.Sandbox{}, &handler.TypedEnqueueRequestForObject[*agents.Sandbox]{}),
		changes(cfg.Changes),
		members.source(),
	}
	if cfg.Origins != nil {
		sources = append(sources, r.ready(cfg.Cache))
	}
	return New(Work{Name: "sandbox", Log: log, Workers: cfg.Workers, RetryFirst: retryFirst, RetryMost: retryMost, Reconciler: r, Sources: sources})
}

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// changes feeds the node's news into the queue.
func changes(news <-chan sandbox.Ref) source.Source {
	return source.Func(func(ctx context.Context, queue queue) error {
		go func() { // ends with the controller's context, which outlives every reconcile
			for {
				select {
				case ref := <-news:
					queue.Add(reconcile.Request{NamespacedName: client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}})
				case <-ctx.Done():
					return
				}
			}
		}()
		return nil
	})
}
