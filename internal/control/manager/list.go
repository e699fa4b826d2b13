package manager

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

// MaxPage is the most that one page of a list holds.
const MaxPage = 100

// ListRequest says which sandboxes of a tenant to list. Its zero value but for Namespace is
// the first page of all, newest first.
type ListRequest struct {
	Namespace string
	// Metadata lists pairs that must all match exactly.
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
	// Limit is from 1 to MaxPage; 0 means MaxPage.
	Limit int
	// Cursor is a Page's Next.
	Cursor string
}

// Page is a part of a list.
type Page struct {
	Items []Sandbox
	// Next is the cursor of the following page, and empty on the last one.
	Next string
	// Running counts the running sandboxes that match, on all pages, whatever States asks for.
	Running int
}

// List returns one page. The cursor names a place in the order, not a number of items: what is
// made or killed between two pages moves nothing twice or past it.
func (m *Manager) List(ctx context.Context, req ListRequest) (Page, error) {
	limit, after, err := paging(req.Limit, req.Cursor, direction(req.OldestFirst))
	if err != nil {
		return Page{}, err
	}
	all, err := m.cache.Sandboxes(ctx, req.Namespace)
	if err != nil {
		return Page{}, fmt.Errorf("list sandboxes: %w", err)
	}
	all = m.assumed.Merge(all, func(s *agents.Sandbox) bool { return s.Namespace == req.Namespace })
	templateID := ""
	if req.Template != "" {
		t, err := m.resolve(ctx, req.Namespace, req.Template)
		if err == nil {
			templateID = pool.TemplateID(t)
		} else if !errors.Is(err, errs.ErrNotFound) { // a template that is gone may have sandboxes left
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
		v := m.view(s)
		if v.State == StateRunning {
			page.Running++
		}
		if len(req.States) == 0 || slices.Contains(req.States, v.State) {
			keep = append(keep, v)
		}
	}
	page.Items, page.Next = cut(keep, limit, after, direction(req.OldestFirst), func(v *Sandbox) pageCursor {
		return pageCursor{v.StartedAt.UnixNano(), string(v.ID)}
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

// pageCursor is where an item stands in a list: by key, then by ID.
type pageCursor struct {
	key int64
	id  string
}

func (p pageCursor) compare(q pageCursor) int {
	return cmp.Or(cmp.Compare(p.key, q.key), cmp.Compare(p.id, q.id))
}

func direction(ascending bool) int {
	if ascending {
		return 1
	}
	return -1
}

// paging checks what a client says about the page that it wants. after is nil on the first.
func paging(limit int, cursor string, dir int) (int, *pageCursor, error) {
	if limit < 0 || limit > MaxPage {
		return 0, nil, refuse(errs.ErrInvalid, "limit: must be from 1 to %d", MaxPage)
	}
	setIfZero(&limit, MaxPage)
	if cursor == "" {
		return limit, nil, nil
	}
	after, cursorDir, err := parseCursor(cursor)
	if err != nil {
		return 0, nil, err
	}
	if cursorDir != dir {
		return 0, nil, refuse(errs.ErrInvalid, "nextToken: belongs to a list in the other order")
	}
	return limit, &after, nil
}

// cut sorts items and returns those of one page, and the cursor of the next.
func cut[T any](items []T, limit int, after *pageCursor, dir int, at func(*T) pageCursor) ([]T, string) {
	slices.SortFunc(items, func(a, b T) int { return dir * at(&a).compare(at(&b)) })
	if after != nil {
		first := slices.IndexFunc(items, func(x T) bool { return dir*at(&x).compare(*after) > 0 })
		if first < 0 {
			return nil, ""
		}
		items = items[first:]
	}
	if len(items) <= limit {
		return items, ""
	}
	return items[:limit], formatCursor(at(&items[limit-1]), dir)
}

const cursorVersion = "1"

func formatCursor(p pageCursor, dir int) string {
	text := strings.Join([]string{cursorVersion, strconv.Itoa(dir), strconv.FormatInt(p.key, 36), p.id}, ":")
	return base64.RawURLEncoding.EncodeToString([]byte(text))
}

func parseCursor(cursor string) (p pageCursor, dir int, err error) {
	bad := refuse(errs.ErrInvalid, "nextToken: is not one that a list has returned")
	const longest = 512
	if len(cursor) > longest {
		return pageCursor{}, 0, bad
	}
	text, err := base64.RawURLEncoding.DecodeString(cursor)
	if err != nil {
		return pageCursor{}, 0, bad
	}
	parts := strings.SplitN(string(text), ":", 4)
	if len(parts) != 4 || parts[0] != cursorVersion || (parts[1] != "1" && parts[1] != "-1") {
		return pageCursor{}, 0, bad
	}
	key, err := strconv.ParseInt(parts[2], 36, 64)
	if err != nil {
		return pageCursor{}, 0, bad
	}
	return pageCursor{key, parts[3]}, direction(parts[1] == "1"), nil
}
