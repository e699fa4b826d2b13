// Package paging cuts lists into pages. A cursor names a position in the order, not a number of items: an
// item that is added or removed between two pages moves no other twice or past a page. It keeps no state.
package paging

import (
	"cmp"
	"encoding/base64"
	"iter"
	"slices"
	"strconv"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

// The items of one page: E2B's number unless a request names another, of which E2B allows no more. A client that lists
// thousands asks for larger pages.
const (
	DefaultPage = 100
	MaxPage     = 1000
)

// Cursor is the position of an item in a list: by key, then by ID.
type Cursor struct {
	Key int64
	ID  string
}

// Compare orders cursors.
func (p Cursor) Compare(q Cursor) int {
	return cmp.Or(cmp.Compare(p.Key, q.Key), cmp.Compare(p.ID, q.ID))
}

// Direction is 1 for an ascending list, and -1 for a descending one.
func Direction(ascending bool) int {
	if ascending {
		return 1
	}
	return -1
}

// Parse checks a client's request for a page. after is nil on the first page.
func Parse(limit int, cursor string, dir int) (int, *Cursor, error) {
	if limit < 0 || limit > MaxPage {
		return 0, nil, apistatus.Refuse(errs.ErrInvalid, "limit: must be from 1 to %d", MaxPage)
	}
	if limit == 0 {
		limit = DefaultPage
	}
	if cursor == "" {
		return limit, nil, nil
	}
	after, cursorDir, err := parseCursor(cursor)
	if err != nil {
		return 0, nil, err
	}
	if cursorDir != dir {
		return 0, nil, apistatus.Refuse(errs.ErrInvalid, "nextToken: belongs to a list in the other order")
	}
	return limit, &after, nil
}

// Cut returns the items of one page in order, and the cursor of the next.
func Cut[T any](items []T, limit int, after *Cursor, dir int, at func(*T) Cursor) ([]T, string) {
	type entry struct {
		cursor Cursor
		item   int
	}
	entries := make([]entry, 0, len(items))
	for i := range items {
		if c := at(&items[i]); after == nil || dir*c.Compare(*after) > 0 {
			entries = append(entries, entry{c, i})
		}
	}
	slices.SortFunc(entries, func(a, b entry) int { return dir * a.cursor.Compare(b.cursor) })
	next := ""
	if len(entries) > limit {
		entries = entries[:limit]
		next = formatCursor(entries[limit-1].cursor, dir)
	}
	page := make([]T, len(entries))
	for i, e := range entries {
		page[i] = items[e.item]
	}
	return page, next
}

// Take returns the items of one page, and the cursor of the next, of items that are in order and begin behind a cursor. It reads no more
// than one of the next page.
func Take[T any](items iter.Seq[T], limit, dir int, at func(T) Cursor) (page []T, next string) {
	for item := range items {
		if len(page) == limit {
			return page, formatCursor(at(page[limit-1]), dir)
		}
		page = append(page, item)
	}
	return page, ""
}

const cursorVersion = "1"

func formatCursor(p Cursor, dir int) string {
	text := strings.Join([]string{cursorVersion, strconv.Itoa(dir), strconv.FormatInt(p.Key, 36), p.ID}, ":")
	return base64.RawURLEncoding.EncodeToString([]byte(text))
}

func parseCursor(cursor string) (p Cursor, dir int, err error) {
	bad := apistatus.Refuse(errs.ErrInvalid, "nextToken: is not one that a list has returned")
	const longest = 512
	if len(cursor) > longest {
		return Cursor{}, 0, bad
	}
	text, err := base64.RawURLEncoding.DecodeString(cursor)
	if err != nil {
		return Cursor{}, 0, bad
	}
	parts := strings.SplitN(string(text), ":", 4)
	if len(parts) != 4 || parts[0] != cursorVersion || (parts[1] != "1" && parts[1] != "-1") {
		return Cursor{}, 0, bad
	}
	key, err := strconv.ParseInt(parts[2], 36, 64)
	if err != nil {
		return Cursor{}, 0, bad
	}
	return Cursor{key, parts[3]}, Direction(parts[1] == "1"), nil
}
