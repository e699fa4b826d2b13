// Package registry has one handle for each sandbox of the node: its lock, its row of the journal, and its
// observed status. It also runs the node's background tasks, and queues the references of changed sandboxes. It does
// nothing to a sandbox: packages above it act, while they hold the lock of the handle.
//
// Lock order: the lock of a checkpoint, then that of a sandbox (Handle.Acquire), then Registry.mu or Handle.mu. Neither
// of those two is held while the other is locked, nor for a call out of this package.
package registry

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/keyedlock"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
)

// Config configures a Registry. All fields are required.
type Config struct {
	Journal *journal.Journal
	// Absent is the status of a sandbox that is not on the node.
	Absent sandbox.Observed
	// Journalled receives the result of each write of the journal.
	Journalled func(error)
	// ObserveStep receives the time of each write.
	ObserveStep func(class oci.Class, step string, took time.Duration)
}

// Registry has the handles of the sandboxes on the node.
type Registry struct {
	cfg   Config
	locks keyedlock.Lock[types.UID]

	mu      sync.Mutex
	handles map[types.UID]*Handle // +checklocks:mu
	// The same handles by what else they are looked for. An operation on one sandbox must not visit all.
	byID      map[sandbox.ID]*Handle             // +checklocks:mu
	byName    map[types.NamespacedName][]*Handle // +checklocks:mu
	byAddress map[netip.Addr][]*Handle           // of those with a row; +checklocks:mu
	// unread are the sandboxes with unreadable rows of the journal, and the errors.
	unread map[types.UID]error // +checklocks:mu
	// blockedIDs are the IDs whose creation is blocked; each channel is closed at the end.
	blockedIDs map[string]chan struct{} // +checklocks:mu
}

// New returns a registry without sandboxes.
func New(cfg Config) *Registry {
	return &Registry{
		cfg: cfg, handles: map[types.UID]*Handle{}, byID: map[sandbox.ID]*Handle{}, byName: map[types.NamespacedName][]*Handle{},
		byAddress: map[netip.Addr][]*Handle{}, unread: map[types.UID]error{}, blockedIDs: map[string]chan struct{}{},
	}
}

// SetUnread records an unreadable row.
func (g *Registry) SetUnread(uid types.UID, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.unread[uid] = err
}

// ForgetUnread removes the record of an unreadable row.
func (g *Registry) ForgetUnread(uid types.UID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.unread, uid)
}

// Lookup finds a handle; nil if there is none.
func (g *Registry) Lookup(uid types.UID) *Handle {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.handles[uid]
}

// Of returns the handle of a sandbox, and creates it if necessary.
func (g *Registry) Of(ref sandbox.Ref) *Handle {
	g.mu.Lock()
	defer g.mu.Unlock()
	u := g.handles[ref.UID]
	if u == nil {
		u = &Handle{Ref: ref, ID: sandbox.IDOf(ref.UID), registry: g, seen: g.cfg.Absent}
		g.handles[ref.UID], g.byID[u.ID] = u, u
		add(g.byName, nameOf(ref), u)
	}
	return u
}

// Drop removes a handle, which has no row any more.
func (g *Registry) Drop(u *Handle) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.handles[u.Ref.UID] == u {
		delete(g.handles, u.Ref.UID)
		delete(g.byID, u.ID)
		remove(g.byName, nameOf(u.Ref), u)
	}
}

// moved records that the row of a handle has another address; an invalid one is none.
func (g *Registry) moved(u *Handle, from, to netip.Addr) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if from.IsValid() {
		remove(g.byAddress, from, u)
	}
	if to.IsValid() {
		add(g.byAddress, to, u)
	}
}

// At returns the handles whose rows have an address: one, unless something is wrong.
func (g *Registry) At(addr netip.Addr) []*Handle {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.byAddress[addr])
}

// named returns the handles of a name: one, and those of earlier sandboxes of that name that are not removed yet.
func (g *Registry) named(name types.NamespacedName) []*Handle {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.byName[name])
}

func nameOf(ref sandbox.Ref) types.NamespacedName {
	return types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}
}

func add[K comparable](index map[K][]*Handle, key K, u *Handle) { index[key] = append(index[key], u) }

func remove[K comparable](index map[K][]*Handle, key K, u *Handle) {
	if index[key] = slices.DeleteFunc(index[key], func(other *Handle) bool { return other == u }); len(index[key]) == 0 {
		delete(index, key)
	}
}

// All returns the handles, in any order.
func (g *Registry) All() []*Handle {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Collect(maps.Values(g.handles))
}

// UnreadIDs are the IDs of sandboxes with unreadable rows of the journal.
func (g *Registry) UnreadIDs() map[string]types.UID {
	g.mu.Lock()
	defer g.mu.Unlock()
	ids := map[string]types.UID{}
	for uid := range g.unread {
		ids[string(sandbox.IDOf(uid))] = uid
	}
	return ids
}

// CheckRead refuses a sandbox with an unreadable row of the journal: its leftovers may run, and must not be
// created twice.
func (g *Registry) CheckRead(ref sandbox.Ref) error {
	g.mu.Lock()
	err := g.unread[ref.UID]
	g.mu.Unlock()
	if err == nil {
		return nil
	}
	return fmt.Errorf("journal row of sandbox %s/%s cannot be read and is kept (%w); delete the sandbox to remove it: %w",
		ref.Namespace, ref.Name, err, errs.ErrUnavailable)
}

// BlockCreate prevents the creation of a sandbox with an ID until done is called. It fails if there is a
// handle.
func (g *Registry) BlockCreate(id string) (done func(), ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.byID[sandbox.ID(id)] != nil {
		return nil, false
	}
	ended := make(chan struct{})
	g.blockedIDs[id] = ended
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.blockedIDs, id)
		close(ended)
	}, true
}

// AwaitUnblocked waits until creation of an ID is not blocked.
func (g *Registry) AwaitUnblocked(ctx context.Context, id sandbox.ID) error {
	g.mu.Lock()
	blocked := g.blockedIDs[string(id)]
	g.mu.Unlock()
	if blocked == nil {
		return nil
	}
	select {
	case <-blocked:
		return nil
	case <-ctx.Done():
		return errs.Retryable(context.Cause(ctx))
	}
}

// Note writes a row with a stage to the journal.
func (g *Registry) Note(u *Handle, r *journal.Row, s journal.Stage) error {
	if err := g.Write(r, s); err != nil {
		return err
	}
	r.Stage = s
	u.SetRow(new(*r))
	return nil
}

// Write writes a row with a stage to the journal, and leaves the handle's as it is.
func (g *Registry) Write(r *journal.Row, s journal.Stage) error {
	began := time.Now()
	err := g.cfg.Journal.Move(r, s)
	g.cfg.Journalled(err)
	if err != nil {
		return errs.Retryable(err)
	}
	failpoint.ReachIn("row", string(s))
	g.cfg.ObserveStep(r.Plan.Class, "journal", time.Since(began))
	return nil
}

// RowOf returns the row of a sandbox on the node, by its ID; nil if there is none.
func (g *Registry) RowOf(id sandbox.ID) *journal.Row {
	g.mu.Lock()
	u := g.byID[id]
	g.mu.Unlock()
	if u == nil {
		return nil
	}
	return u.Row()
}

// ClearDesiredByName makes the orphan scan check other sandboxes with the name of a sandbox.
func (g *Registry) ClearDesiredByName(ref sandbox.Ref) {
	for _, u := range g.named(nameOf(ref)) {
		if u.Ref.UID != ref.UID {
			u.clearDesired()
		}
	}
}

// ClearDesired records that the object of a name was deleted. The orphan scan then checks whether the
// sandboxes of that name exist.
func (g *Registry) ClearDesired(namespace, name string) {
	for _, u := range g.named(types.NamespacedName{Namespace: namespace, Name: name}) {
		u.clearDesired()
	}
}
