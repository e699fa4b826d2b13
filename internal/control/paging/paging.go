// Package paging cuts lists into pages. A cursor names a position in the order, not a number of items: an
// item that is added or removed between two pages moves no other twice or past a page. It keeps no state.
package paging

import (
	"cmp"
	"encoding/base64"
	"slices"
	"strconv"
	"strings"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
)

// MaxPage bounds the items of one page.
const MaxPage = 100

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
		limit = MaxPage
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

// Cut sorts items and returns those of one page, and the cursor of the next.
func Cut[T any](items []T, limit int, after *Cursor, dir int, at func(*T) Cursor) ([]T, string) {
	slices.SortFunc(items, func(a, b T) int { return dir * at(&a).Compare(at(&b)) })
	if after != nil {
		first := slices.IndexFunc(items, func(x T) bool { return dir*at(&x).Compare(*after) > 0 })
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
