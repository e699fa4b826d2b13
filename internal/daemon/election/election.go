// Package election runs work in one process of several: in the one that holds a Lease of the cluster. It knows
// nothing of the work.
//
// It has no locks.
package election

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordination "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// ErrLost means that the Lease went to another process, or could not be renewed in time. What this process has in memory may
// be out of date, so it is to end.
var ErrLost = errors.New("the Lease was lost to another process or could not be renewed in time")

// Config names the Lease and this process. All but the times is required.
type Config struct {
	Leases          coordination.LeasesGetter
	Namespace, Name string
	// Identity is this process's; no other has it.
	Identity string
	// A leader that dies is followed within Duration; one that cannot renew stops after Renew, before another may
	// lead; the others look every Retry. Default 15, 10 and 2 seconds, as in kube-controller-manager.
	Duration, Renew, Retry time.Duration
}

// Run waits for the Lease, calls lead, and releases the Lease once lead has returned. The context of lead ends with
// ctx, and when the Lease is lost; Run then returns [ErrLost]. It returns nil if ctx ends, and else what lead returns.
func Run(ctx context.Context, cfg Config, lead func(ctx context.Context) error) error {
	if cfg.Duration == 0 {
		cfg.Duration, cfg.Renew, cfg.Retry = 15*time.Second, 10*time.Second, 2*time.Second
	}
	elected := make(chan context.Context, 1)
	lock := &resourcelock.LeaseLock{
		LeaseMeta: metav1.ObjectMeta{Namespace: cfg.Namespace, Name: cfg.Name}, Client: cfg.Leases,
		LockConfig: resourcelock.ResourceLockConfig{Identity: cfg.Identity},
	}
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: lock, LeaseDuration: cfg.Duration, RenewDeadline: cfg.Renew, RetryPeriod: cfg.Retry, Name: cfg.Name,
		// ReleaseOnCancel would have a leader that cannot renew work on while it tries to release, for longer than the Lease
		// lasts.
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(leading context.Context) { elected <- leading },
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return fmt.Errorf("election: %w: %w", err, errs.ErrInvalid)
	}
	// The Lease is renewed until lead has returned, so for longer than ctx.
	held, stopRenewing := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan struct{})
	go func() { // received below
		defer close(ended)
		elector.Run(held)
	}()
	defer func() {
		stopRenewing()
		<-ended
		release(held, lock, cfg.Renew)
	}()
	var leading context.Context
	select {
	case leading = <-elected:
	case <-ctx.Done():
		return nil
	}
	working, stop := context.WithCancel(leading)
	defer stop()
	defer context.AfterFunc(ctx, stop)()
	err = lead(working) //nolint:contextcheck // the election's context, which ends with ctx
	switch {
	case leading.Err() != nil:
		return fmt.Errorf("%s/%s: %w: %w", cfg.Namespace, cfg.Name, ErrLost, errs.ErrConflict)
	case ctx.Err() != nil:
		return nil
	}
	return err
}

// release gives the Lease up if this process holds it, so that another need not wait for its end. If that fails, it does wait.
func release(ctx context.Context, lock *resourcelock.LeaseLock, timeout time.Duration) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	defer cancel()
	record, _, err := lock.Get(ctx)
	if err != nil || record.HolderIdentity != lock.Identity() {
		return
	}
	record.HolderIdentity, record.LeaseDurationSeconds = "", 1
	_ = lock.Update(ctx, *record) // on condition of the version that was read
}
