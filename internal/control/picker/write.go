package picker

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	// settleTimeout bounds the read that finds the outcome of a write. A Commit may outlast its context by
	// that.
	settleTimeout = 5 * time.Second
	// maxUnsure is how many writes of unknown outcome one claim makes before it fails.
	maxUnsure = 3
	// leaseTimeout ends a lease whose holder neither commits nor releases it.
	leaseTimeout = 30 * time.Second
)

// Lease is a member that no other claim of this picker gets. Commit or Release ends it, as do the end of
// the context that reserved it and leaseTimeout: then the member goes back to its queue.
type Lease struct {
	pick     *Pick
	m        *member
	revision string
	unhook   func()

	// Guarded by the picker's mutex.
	ended bool
	base  *agents.Sandbox // the state that Sandbox returned last
}

func newLease(ctx context.Context, k *Pick, m *member, revision string) *Lease {
	l := &Lease{pick: k, m: m, revision: revision}
	bounded, cancel := context.WithTimeout(ctx, leaseTimeout)
	stop := context.AfterFunc(bounded, l.putBack)
	l.unhook = func() { stop(); cancel() }
	return l
}

// Sandbox returns a copy of the member as it was last seen, on whose version Commit is conditional; nil
// if the lease or the member has ended.
func (l *Lease) Sandbox() *agents.Sandbox {
	p := l.pick.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.ended || l.m.ended {
		return nil
	}
	l.base = l.m.seen
	return l.base.DeepCopy()
}

// Release returns the member to its queue. On nil, and on a lease that has ended, it does nothing.
func (l *Lease) Release() {
	if l == nil {
		return
	}
	l.unhook()
	l.putBack()
}

// putBack ends a lease that was not committed.
func (l *Lease) putBack() {
	p := l.pick.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if !l.ended {
		l.ended = true
		p.putBackLocked(l.m)
	}
}

// end ends a lease for its commit. base is nil if the lease had ended before, or is of another template or revision
// than was reserved: the last check before the write.
func (l *Lease) end() (base *agents.Sandbox) {
	p := l.pick.p
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.ended {
		return nil
	}
	l.ended = true
	if seen := l.m.seen; l.base == nil || l.m.ended || !pool.Fits(seen, l.pick.template, l.revision) || !pool.Spare(seen) {
		p.putBackLocked(l.m)
		return nil
	}
	return l.base
}

// Commit writes the member as the claim's, over the version that Sandbox returned last, and returns it as
// it was written. It ends the lease. Build want on pool.Adopt.
//
// The error is [ErrLost] if another lease may succeed; an errs.ErrTimeout when ctx ended; an
// errs.ErrUnavailable when the outcome of the write is unknown. With each, the caller owns nothing.
func (l *Lease) Commit(ctx context.Context, want *agents.Sandbox) (s *agents.Sandbox, err error) {
	defer func() { l.pick.count(err) }()
	if want == nil || pool.MemberOf(want) != "" || want.Annotations[pool.AnnotationClaimedAt] == "" {
		l.Release()
		return nil, fmt.Errorf("commit a lease: the sandbox to write is still in its pool: %w", errs.ErrInvalid)
	}
	l.unhook()
	base := l.end()
	switch {
	case base == nil && ctx.Err() != nil:
		return nil, timeout(ctx, nil)
	case base == nil:
		return nil, ErrLost
	case ctx.Err() != nil:
		l.pick.p.putBack(l.m)
		return nil, timeout(ctx, nil)
	}
	return l.pick.p.write(ctx, l, base, want)
}

// write makes a held member the claim's, by one conditional update, and ends the hold.
func (p *Picker) write(ctx context.Context, l *Lease, base, want *agents.Sandbox) (*agents.Sandbox, error) {
	want.Namespace, want.Name, want.UID, want.ResourceVersion = base.Namespace, base.Name, base.UID, base.ResourceVersion
	if p.cfg.Identity != "" {
		want.Annotations[pool.AnnotationClaimedBy] = p.cfg.Identity
	}
	wrote := adoptionOf(want)
	failpoint.Reach("claim/held")
	err := p.cfg.Writer.Update(ctx, want)
	switch {
	case err == nil:
		failpoint.Reach("claim/written")
		p.gave(l.m, want)
		return want, nil
	case apierrors.IsConflict(err) || apierrors.IsNotFound(err):
		p.metrics.picks.WithLabelValues(resultConflict).Inc()
		p.setAside(l.m, base)
		return nil, ErrLost
	}
	if kind := refusal(err); kind != nil {
		p.putBack(l.m)
		return nil, fmt.Errorf("adopt sandbox %s/%s: %w: %w", base.Namespace, base.Name, kind, err)
	}
	return p.settle(ctx, l, wrote, err)
}

// refusal is the kind of a response by which the API server reports that it wrote nothing.
func refusal(err error) error {
	switch {
	case apierrors.IsInvalid(err), apierrors.IsBadRequest(err), apierrors.IsRequestEntityTooLargeError(err), apierrors.IsMethodNotSupported(err):
		return errs.ErrInvalid
	case apierrors.IsForbidden(err):
		return errs.ErrForbidden
	case apierrors.IsUnauthorized(err):
		return errs.ErrUnauthenticated
	case apierrors.IsTooManyRequests(err):
		return errs.ErrUnavailable
	}
	return nil
}

// seen returns the last seen state of a held member; nil if it has ended.
func (p *Picker) seen(m *member) *agents.Sandbox {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m.ended {
		return nil
	}
	return m.seen
}

// gave records that a held member has its owner, until the event that shows it.
func (p *Picker) gave(m *member, s *agents.Sandbox) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// The rest of the object is the caller's from here on.
	m.seen = &agents.Sandbox{}
	m.seen.Namespace, m.seen.Name, m.seen.UID, m.seen.ResourceVersion = s.Namespace, s.Name, s.UID, s.ResourceVersion
	p.putLocked(m, past)
}

// setAside ends the hold on a member that another writer has changed since it was tried.
func (p *Picker) setAside(m *member, tried *agents.Sandbox) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m.ended || tried == nil || newer(m.seen, tried) {
		p.putBackLocked(m)
		return
	}
	p.putLocked(m, outdated)
}

// settle finds the outcome of a write whose response was lost, in a time of its own.
func (p *Picker) settle(ctx context.Context, l *Lease, wrote adoption, cause error) (*agents.Sandbox, error) {
	look, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	unread := p.fetch(look, l.m)
	s := p.resolveWrite(l.m, wrote, unread == nil)
	left := ctx.Err() != nil
	switch {
	case s != nil && !left:
		return s, nil
	case s != nil:
		p.orphaned(s)
		return nil, timeout(ctx, cause)
	case left:
		return nil, timeout(ctx, cause)
	}
	if l.pick.unsure++; unread != nil || l.pick.unsure >= maxUnsure {
		return nil, fmt.Errorf("adopt a member: its outcome is unknown: %w: %w", errs.ErrUnavailable, errors.Join(cause, unread))
	}
	return nil, ErrLost
}

// resolveWrite ends the hold on a member after a write of unknown outcome. It returns the member if the
// write took effect; otherwise it still may, and stays unconfirmed.
func (p *Picker) resolveWrite(m *member, wrote adoption, read bool) *agents.Sandbox {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !m.gone && matches(m.seen, wrote) {
		s := m.seen
		p.putLocked(m, past)
		return s.DeepCopy()
	}
	m.unconfirmed = append(m.unconfirmed, wrote)
	if read || m.ended {
		p.putBackLocked(m)
	} else {
		p.putLocked(m, outdated)
	}
	return nil
}

// fetch reads a held member from the API server. No error means that m.seen is no older than
// the call, or that the member has ended.
func (p *Picker) fetch(ctx context.Context, m *member) error {
	seen := p.seen(m)
	if seen == nil {
		return nil
	}
	live := &agents.Sandbox{}
	err := p.cfg.Writer.Get(ctx, client.ObjectKeyFromObject(seen), live)
	gone := apierrors.IsNotFound(err) || err == nil && live.UID != seen.UID
	if err != nil && !gone {
		if ctx.Err() != nil {
			return timeout(ctx, err)
		}
		return fmt.Errorf("read sandbox %s/%s: %w: %w", seen.Namespace, seen.Name, errs.ErrUnavailable, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case gone:
		m.ended, m.gone = true, true
	case newer(live, m.seen):
		if !over(live) {
			m.unconfirmed = nil
		}
		m.seen = live
	}
	return nil
}

// orphaned hands a member that no caller uses to the reader of Orphans. A full queue drops it.
func (p *Picker) orphaned(s *agents.Sandbox) {
	p.log.Warn("member adopted for an ended claim", telemetry.Namespace, s.Namespace, telemetry.Name, s.Name, telemetry.UID, string(s.UID))
	select {
	case p.orphans <- s.DeepCopy():
	default: // its timeout, which is in its object, ends it
	}
}
