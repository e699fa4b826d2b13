// Package oom keeps a gVisor sandbox alive when its programs take more memory than it may have. To the host a sandbox is
// one process, which the kernel would end as a whole. So the node takes the limit over: the kernel's limit is above the
// sandbox's, because the sandbox's own kernel ends where it gets no memory for a thread. While more than the sandbox's limit is in
// use, except the cache of files, the agent kills the process with the most memory. An agent that does not help leaves the
// sandbox to the kernel's OOM killer.
package oom

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
)

const (
	// headroom is by how much the kernel's limit is above the sandbox's, in bytes. step is by how much it is raised at a time while
	// processes are killed, when less than near is left, and maxRaised by how much at most; soon is how much of that is given
	// without delay.
	headroom  = 64 << 20
	near      = 32 << 20
	step      = 32 << 20
	soon      = 512 << 20
	maxRaised = 1 << 30
	// lookAbove is the pause between two looks while only the cache of files is above the limit.
	lookAbove = 100 * time.Millisecond
	// look is the pause between two looks at the use of memory. raiseEvery is the least pause between two raises up to soon: what
	// waits must run before it is known whether it needs more, and the sandbox's kernel ends where it waits for long. Beyond that raises are
	// rare: where many processes took all of it before the first was killed, each lets the agent go on.
	look       = 2 * time.Millisecond
	raiseEvery = 10 * time.Millisecond
	raiseLate  = 500 * time.Millisecond
	// freeing is how long a sandbox's kernel has to free the memory of a killed process, if nothing waits for memory.
	freeing = 500 * time.Millisecond
	// inTime is how long the agent has for a kill, and alone how many kills are enough, before all other processes are stopped.
	inTime = 100 * time.Millisecond
	alone  = 2
	// patience is how long no process may be killed, and whole how long all of it may take.
	patience = 30 * time.Second
	whole    = 2 * time.Minute
)

// Limit is a memory limit that was reached; cgroups.OOM implements it.
type Limit interface {
	// Wait returns when more came into use than the sandbox's limit.
	Wait(ctx context.Context) error
	Use() (cgroups.Use, error)
	// Raised is how much greater than the sandbox's the kernel's limit is.
	Raised() int64
	// Raise makes the kernel's limit that much greater than the sandbox's. It fails while more is in use.
	Raise(bytes int64) error
}

// Guard guards one sandbox.
type Guard struct {
	Limit Limit
	// Kill has the agent kill the process with the most memory. Errors are for good only once nothing has freed memory for long: the agent
	// finds nothing to kill while the sandbox's kernel still frees what was killed, and answers late beside many processes.
	Kill func(ctx context.Context) (envd.OOMKilled, error)
	// Hold stops all processes of the sandbox but the agent, or continues them: so that the agent gets processor time beside many that
	// need memory.
	Hold func(ctx context.Context, stopped bool) error
	// Killed receives each process that was killed.
	Killed func(envd.OOMKilled)
}

// Run guards until ctx is done; or it returns why it gives up, and the limit may be a raised one.
func (g *Guard) Run(ctx context.Context) error {
	if g.Limit.Raised() > headroom {
		if err := g.Hold(ctx, false); err != nil {
			return err
		}
	}
	if err := g.Limit.Raise(headroom); err != nil && !errors.Is(err, syscall.EBUSY) {
		return err
	}
	for {
		use, err := g.Limit.Use()
		if err == nil && over(use) {
			err = g.free(ctx)
		} else if err == nil {
			err = g.wait(ctx, use)
		}
		if err != nil {
			return err
		}
	}
}

func over(use cgroups.Use) bool { return use.Over > 0 || use.Left == 0 }

func (g *Guard) wait(ctx context.Context, use cgroups.Use) error {
	if !use.Above {
		return g.Limit.Wait(ctx)
	}
	short, cancel := context.WithTimeout(ctx, lookAbove)
	defer cancel()
	if err := g.Limit.Wait(short); err != nil && (ctx.Err() != nil || short.Err() == nil) {
		return err
	}
	return nil
}

func (g *Guard) kill(ctx context.Context) error {
	p, err := g.Kill(ctx)
	if err == nil {
		g.Killed(p)
	}
	return err
}

// relief is one overrun of the limit until the limit is kept again.
type relief struct {
	*Guard
	raised   int64
	raisedAt time.Time
	kills    int
	progress time.Time // the last kill, or the beginning
	began    time.Time // of the last kill
	killedAt time.Time
	// killing and holding are true while a kill, and a change of what is held, is under way. held is true once processes may be stopped.
	killing, holding, held bool
	killed, changed        chan error
	failed                 error // of the last kill or change, if it failed
	running                sync.WaitGroup
}

// free kills processes until the limit is kept.
func (g *Guard) free(ctx context.Context) (err error) {
	limited, cancel := context.WithTimeoutCause(ctx, whole, fmt.Errorf("too much memory was in use for %s", whole))
	r := &relief{Guard: g, raised: headroom, progress: time.Now(), killed: make(chan error, 1), changed: make(chan error, 1)}
	err = r.run(limited)
	cancel()
	r.running.Wait()
	if r.held || r.holding {
		err = errors.Join(err, g.Hold(context.WithoutCancel(ctx), false))
	}
	if err != nil {
		err = errors.Join(err, r.failed)
	}
	return err
}

// run raises the limit all the time: neither the agent nor what changes a sandbox's processes ends while something waits for memory.
func (r *relief) run(ctx context.Context) error {
	for {
		r.take()
		use, err := r.Limit.Use()
		if err != nil {
			return err
		}
		switch {
		case over(use):
			r.act(ctx, use)
		case r.killing || r.holding:
		case r.held:
			r.change(ctx, false)
		case r.lower():
			return nil
		}
		if err := r.raise(use.Left); err != nil {
			return err
		}
		if time.Since(r.progress) > patience {
			return fmt.Errorf("no process was killed for %s, with the limit raised by %d MiB and %d left", patience, r.raised>>20, use.Left>>20)
		}
		if !lifecycle.Sleep(ctx, look) {
			return context.Cause(ctx)
		}
	}
}

// take takes the results of what has ended.
func (r *relief) take() {
	select {
	case r.failed = <-r.killed:
		if r.killing, r.killedAt = false, time.Now(); r.failed == nil {
			r.kills, r.progress = r.kills+1, r.killedAt
		}
	case r.failed = <-r.changed:
		r.holding = false
		r.held = r.held || r.failed != nil // what could not be continued is still stopped
	default:
	}
}

func (r *relief) act(ctx context.Context, use cgroups.Use) {
	if !r.killing && (use.Left == 0 && r.failed == nil || time.Since(r.killedAt) > freeing) {
		r.killing, r.began = true, time.Now()
		r.running.Go(func() { r.killed <- r.kill(ctx) })
	}
	if r.killing && !r.holding && !r.held && (time.Since(r.began) > inTime || r.kills >= alone) {
		r.change(ctx, true)
	}
}

// change stops processes, or continues them. Without the stop the agent may still be in time, so that an error of it is none.
func (r *relief) change(ctx context.Context, stopped bool) {
	r.holding, r.held = true, stopped
	if stopped { // a raised limit shows a later guard that this one may have stopped processes
		r.raised += step
		_ = r.Limit.Raise(r.raised)
	}
	r.running.Go(func() {
		err := r.Hold(ctx, stopped)
		if stopped {
			err = nil
		}
		r.changed <- err
	})
}

// raise lets the sandbox's kernel and the agent go on with a kill.
func (r *relief) raise(left int64) error {
	pause := raiseEvery
	if r.raised >= headroom+soon {
		pause = raiseLate
	}
	if left > near || r.raised >= headroom+maxRaised || time.Since(r.raisedAt) < pause {
		return nil
	}
	r.raised, r.raisedAt = r.raised+step, time.Now()
	return r.Limit.Raise(r.raised)
}

// lower takes what was raised back, and reports whether it could. Else it takes one step: so much memory is in use.
func (r *relief) lower() bool {
	if r.Limit.Raise(headroom) == nil {
		return true
	}
	if less := r.raised - step; less > headroom && r.Limit.Raise(less) == nil {
		r.raised = less
	}
	return false
}
