package sandboxes

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/control/paging"
)

// ListRequest selects sandboxes of a tenant. Its zero value but for Namespace is the first page of all, newest
// first.
type ListRequest struct {
	Namespace string
	// Metadata has pairs that must all match exactly.
	Metadata map[string]string
	// States: none means all.
	States []State
	// Template is a template's ID, name or alias.
	Template string
	// Name is the name of the sandbox's object.
	Name string
	// StartedAfter includes the instant itself.
	StartedAfter time.Time
	OldestFirst  bool
	// Limit is from 1 to paging.MaxPage; 0 means MaxPage.
	Limit int
	// Cursor is a Page's Next.
	Cursor string
}

// Page is a part of a list.
type Page struct {
	Items []Sandbox
	// Next is the cursor of the following page, and empty on the last one.
	Next string
	// Running counts the matching running sandboxes of all pages, whatever States selects.
	Running int
}

// Get returns one sandbox that is not dead.
func (st *Store) Get(ctx context.Context, namespace, id string) (Sandbox, error) {
	s, err := st.find(ctx, namespace, id)
	if err != nil {
		return Sandbox{}, err
	}
	return st.View(s), nil
}

// List returns one page. The cursor is a position in the order, not a number of items, so a create or a kill
// between two pages neither repeats nor skips an item.
func (st *Store) List(ctx context.Context, req ListRequest) (Page, error) {
	limit, after, err := paging.Parse(req.Limit, req.Cursor, paging.Direction(req.OldestFirst))
	if err != nil {
		return Page{}, err
	}
	all, err := st.Cache.Sandboxes(ctx, req.Namespace)
	if err != nil {
		return Page{}, fmt.Errorf("list sandboxes: %w", err)
	}
	all = st.Assumed.Merge(all, func(s *agents.Sandbox) bool { return s.Namespace == req.Namespace })
	templateID := ""
	if req.Template != "" {
		t, err := st.Templates.Resolve(ctx, req.Namespace, req.Template)
		if err == nil {
			templateID = pool.TemplateID(t)
		} else if !errors.Is(err, errs.ErrNotFound) { // a deleted template may have sandboxes left
			return Page{}, err
		}
	}
	var page Page
	var keep []Sandbox
	for i := range all {
		s := &all[i]
		if !listed(s) || !matches(s, &req, templateID) {
			continue
		}
		v := st.View(s)
		if v.State == StateRunning {
			page.Running++
		}
		if len(req.States) == 0 || slices.Contains(req.States, v.State) {
			keep = append(keep, v)
		}
	}
	page.Items, page.Next = paging.Cut(keep, limit, after, paging.Direction(req.OldestFirst), func(v *Sandbox) paging.Cursor {
		return paging.Cursor{Key: v.StartedAt.UnixNano(), ID: string(v.ID)}
	})
	return page, nil
}

func matches(s *agents.Sandbox, req *ListRequest, templateID string) bool {
	if req.Name != "" && req.Name != s.Name {
		return false
	}
	if len(req.Metadata) > 0 && s.Spec.Barchan == nil {
		return false
	}
	for k, v := range req.Metadata {
		if has, ok := s.Spec.Barchan.Metadata[k]; !ok || has != v {
			return false
		}
	}
	if t := req.Template; t != "" {
		id := s.Annotations[pool.AnnotationTemplateID]
		if t != id && t != s.Annotations[agents.AnnotationTemplateRef] && t != s.Annotations[pool.AnnotationTemplateName] && (templateID == "" || templateID != id) {
			return false
		}
	}
	return req.StartedAfter.IsZero() || !startedAt(s).Before(req.StartedAfter.Truncate(time.Second))
}
