package picker

import (
	"context"
	"errors"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// Request is a claim of these tests. Package claiming has the production loop.
type Request struct {
	Pool     types.UID
	Template types.NamespacedName
	Current  func(ctx context.Context) (revision string, err error)
	Adopt    func(member *agents.Sandbox) *agents.Sandbox
}

// Pick leases members, as package claiming does, until one is committed.
func (p *Picker) Pick(ctx context.Context, req Request) (*agents.Sandbox, error) {
	pick := p.Begin(req.Pool, req.Template)
	revision, err := req.Current(ctx)
	for err == nil {
		l, failed := pick.Reserve(ctx, revision)
		if pick.Waited() && (failed == nil || errors.Is(failed, ErrNone)) {
			now, unread := req.Current(ctx)
			if unread != nil || now != revision {
				l.Release()
				revision, err = now, unread
				continue
			}
		}
		if failed != nil {
			return nil, failed
		}
		member := l.Sandbox()
		if member == nil {
			l.Release()
			continue
		}
		var want *agents.Sandbox
		if req.Adopt != nil {
			want = req.Adopt(member)
		}
		if s, failed := l.Commit(ctx, want); !errors.Is(failed, ErrLost) {
			return s, failed
		}
	}
	return nil, err
}

// drain returns the orphans reported so far.
func drain(p *Picker) (all []*agents.Sandbox) {
	for {
		select {
		case s := <-p.Orphans():
			all = append(all, s)
		default:
			return all
		}
	}
}
