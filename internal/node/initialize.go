package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/podsource"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
)

// initializations are the creates of sandboxes with init containers. They run in the background, because a container may
// take as long as it likes, and a caller of Ensure must not.
type initializations struct {
	mu  sync.Mutex
	all map[sandbox.Ref]*initialization // +checklocks:mu
}

// initialization is the create of one sandbox: what it does, or how the last attempt has failed.
type initialization struct {
	running  bool
	message  string // what it does
	err      error  // of the last attempt
	unread   bool   // no Ensure has returned err yet
	failures int
	until    time.Time // no attempt begins before
}

// The first attempt after a failure begins at once. Pauses then double from minInitPause to maxInitPause, as those of kubelet.
const (
	minInitPause = time.Second
	maxInitPause = 5 * time.Minute
)

// begin returns the create of a sandbox. first means that the caller has to run it. A failure is unread once.
func (x *initializations) begin(ref sandbox.Ref) (now initialization, first bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.all == nil {
		x.all = map[sandbox.Ref]*initialization{}
	}
	it := x.all[ref]
	if it == nil {
		it = &initialization{}
		x.all[ref] = it
	}
	now = *it
	switch {
	case it.unread:
		it.unread = false
	case !it.running && !time.Now().Before(it.until):
		it.running, it.message, first = true, "its init containers run", true
		now = *it
	}
	return now, first
}

func (x *initializations) show(ref sandbox.Ref, message string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if it := x.all[ref]; it != nil {
		it.message = message
	}
}

// end records the result of an attempt, and returns the pause before the next. That of a success is the sandbox; what is
// missing is awaited by its event.
func (x *initializations) end(ref sandbox.Ref, err error) (pause time.Duration) {
	x.mu.Lock()
	defer x.mu.Unlock()
	it := x.all[ref]
	if err == nil || it == nil {
		delete(x.all, ref)
		return 0
	}
	it.running, it.err, it.unread = false, err, true
	if _, missing := errors.AsType[*podsource.Missing](err); missing {
		return 0
	}
	if it.failures > 0 {
		pause = min(minInitPause<<min(it.failures-1, 10), maxInitPause)
	}
	it.failures++
	it.until = time.Now().Add(pause)
	return pause
}

// forget drops the failures of a deleted object.
func (x *initializations) forget(namespace, name string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for ref, it := range x.all {
		if ref.Namespace == namespace && ref.Name == name && !it.running {
			delete(x.all, ref)
		}
	}
}

// initializes reports whether a sandbox is to be created with init containers.
func (n *Node) initializes(s *agents.Sandbox) bool {
	if len(s.Spec.PodTemplate.Spec.InitContainers) == 0 {
		return false
	}
	u := n.handles.Lookup(s.UID)
	if u == nil {
		return true
	}
	r := u.Row()
	return r == nil || r.Stage == journal.Making || r.Stage == journal.Removing || r.KeepsClaims()
}

// ensureInitialized implements Ensure for a sandbox with init containers. It begins the create and returns; the end is a
// change of the sandbox, whose next Ensure returns the result.
func (n *Node) ensureInitialized(ctx context.Context, s *agents.Sandbox, ref sandbox.Ref) (sandbox.Observed, error) {
	it, first := n.inits.begin(ref)
	if it.unread {
		return n.absent(), it.err
	}
	if first {
		s = s.DeepCopy()
		n.tasks.Start(func(task context.Context) { n.initialize(telemetry.WithSpanOf(task, ctx), s, ref) })
	}
	seen := n.absent()
	seen.State, seen.Reason, seen.Message = sandbox.ContainerPending, sandbox.ReasonInitializing, it.message
	if !it.running {
		seen.Reason, seen.Message = sandbox.ReasonInitFailed, errs.Text(it.err)
	}
	return seen, nil
}

// initialize makes an attempt to create a sandbox, and has its object reconciled after it and after the pause.
func (n *Node) initialize(ctx context.Context, s *agents.Sandbox, ref sandbox.Ref) {
	_, err := n.ensureLocked(ctx, s, ref)
	pause := n.inits.end(ref, err)
	n.dirty.Mark(ref)
	if pause > 0 && lifecycle.Sleep(ctx, pause) {
		n.dirty.Mark(ref)
	}
}

// initializing shows which init container runs.
func (n *Node) initializing(ref sandbox.Ref) func(name string, number, of int) {
	return func(name string, number, of int) {
		n.inits.show(ref, fmt.Sprintf("init container %s runs (%d of %d)", name, number, of))
		n.dirty.Mark(ref)
	}
}
