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
	// settleTimeout bounds the read that finds out what became of a write. A Pick may outlast
	// its context by that.
	settleTimeout = 5 * time.Second
	// maxUnsure is how many writes of unknown outcome one claim makes before it gives up.
	maxUnsure = 3
)

// adopt writes a held member for a claim. Neither a sandbox nor an error: the member is not to
// be had, try another. The member is held no longer.
func (p *Picker) adopt(ctx context.Context, req *Request, t *waiter, m *member, revision string) (*agents.Sandbox, error) {
	done := false
	defer func() {
		if !done {
			p.putBack(m)
		}
	}()
	if ctx.Err() != nil {
		return nil, timeout(ctx, nil)
	}
	seen := p.seen(m)
	if seen == nil || !pool.Fits(seen, revision) || !pool.Spare(seen) {
		return nil, nil
	}
	want := req.Adopt(seen.DeepCopy())
	if want == nil || pool.MemberOf(want) != "" || want.Annotations[pool.AnnotationClaimedAt] == "" {
		return nil, fmt.Errorf("pick a member: Adopt left %s/%s in its pool: %w", seen.Namespace, seen.Name, errs.ErrInvalid)
	}
	want.Namespace, want.Name, want.UID, want.ResourceVersion = seen.Namespace, seen.Name, seen.UID, seen.ResourceVersion
	wrote := markOf(want)
	failpoint.Reach("claim/held")
	err := p.cfg.Writer.Update(ctx, want)
	done = true
	switch {
	case err == nil:
		failpoint.Reach("claim/written")
		p.gave(m, want)
		return want, nil
	case apierrors.IsConflict(err) || apierrors.IsNotFound(err):
		p.metrics.picks.WithLabelValues(resultConflict).Inc()
		p.setAside(m, seen)
		return nil, nil
	}
	if kind := refusal(err); kind != nil {
		p.putBack(m)
		return nil, fmt.Errorf("adopt sandbox %s/%s: %w: %w", seen.Namespace, seen.Name, kind, err)
	}
	return p.settle(ctx, t, m, wrote, err)
}

// refusal is the kind of an answer by which the API server says that it wrote nothing.
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

// seen is a held member as it was last seen; nil if it has ended.
func (p *Picker) seen(m *member) *agents.Sandbox {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m.ended {
		return nil
	}
	return m.seen
}

// gave notes that a held member has its owner. It is remembered until the event that says so.
func (p *Picker) gave(m *member, s *agents.Sandbox) {
	p.mu.Lock()
	defer p.mu.Unlock()
	// Only its name and version matter from here on; the rest is the caller's.
	m.seen = &agents.Sandbox{}
	m.seen.Namespace, m.seen.Name, m.seen.UID, m.seen.ResourceVersion = s.Namespace, s.Name, s.UID, s.ResourceVersion
	p.putLocked(m, past)
}

// setAside ends the hold on a member that somebody else has written since it was tried.
func (p *Picker) setAside(m *member, tried *agents.Sandbox) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m.ended || tried == nil || newer(m.seen, tried) {
		p.putBackLocked(m)
		return
	}
	p.putLocked(m, outdated)
}

// settle finds out what became of a write whose answer was lost, in a time of its own.
func (p *Picker) settle(ctx context.Context, t *waiter, m *member, wrote mark, cause error) (*agents.Sandbox, error) {
	look, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleTimeout)
	defer cancel()
	unread := p.fetch(look, m)
	s := p.resolveWrite(m, wrote, unread == nil)
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
	if t.unsure++; unread != nil || t.unsure >= maxUnsure {
		return nil, fmt.Errorf("adopt a member: its outcome is unknown: %w: %w", errs.ErrUnavailable, errors.Join(cause, unread))
	}
	return nil, nil
}

// resolveWrite ends the hold on a member after a write of unknown outcome. It returns the member if
// the write took; else the write may still do so, and the doubt is kept.
func (p *Picker) resolveWrite(m *member, wrote mark, read bool) *agents.Sandbox {
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

// orphaned tells the owner of the picker of a sandbox that nobody will use.
func (p *Picker) orphaned(s *agents.Sandbox) {
	p.log.Warn("a member was adopted for a claim that had ended", telemetry.Namespace, s.Namespace, telemetry.Name, s.Name, telemetry.UID, string(s.UID))
	if p.cfg.Orphaned != nil {
		p.cfg.Orphaned(s)
	}
}
