package paging

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestPagesAreStableUnderChange removes and adds items between pages: each item that was there
// all the time is seen exactly once.
func TestPagesAreStableUnderChange(t *testing.T) {
	at := func(p *Cursor) Cursor { return *p }
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		dir := Direction(seed%2 == 0)
		var items []Cursor
		for range 40 {
			items = append(items, Cursor{r.Int64N(10), fmt.Sprint(r.Uint32())})
		}
		stay, churn := items[:25], slices.Clone(items[25:])
		seen := map[Cursor]int{}
		cursor := ""
		for {
			limit, after, err := Parse(1+r.IntN(5), cursor, dir)
			if err != nil {
				t.Fatal(err)
			}
			page, next := Cut(append(slices.Clone(stay), churn...), limit, after, dir, at)
			if !slices.IsSortedFunc(page, func(a, b Cursor) int { return dir * a.Compare(b) }) {
				t.Fatal("the page is not sorted")
			}
			for _, p := range page {
				seen[p]++
			}
			if cursor = next; cursor == "" {
				break
			}
			churn = append(churn[min(1, len(churn)):], Cursor{r.Int64N(10), fmt.Sprint(r.Uint32())})
		}
		for _, p := range stay {
			if seen[p] != 1 {
				t.Fatalf("seed %d: %v was seen %d times", seed, p, seen[p])
			}
		}
	}
}

func FuzzCursor(f *testing.F) {
	f.Add(formatCursor(Cursor{12345, "iabc"}, 1))
	f.Add(formatCursor(Cursor{-1, ""}, -1))
	f.Add("MTox")
	f.Fuzz(func(t *testing.T, text string) {
		p, dir, err := parseCursor(text)
		if err != nil {
			return
		}
		again, dir2, err := parseCursor(formatCursor(p, dir))
		if err != nil || again != p || dir2 != dir || cmp.Compare(dir*dir, 1) != 0 {
			t.Errorf("%q: %v %d became %v %d, %v", text, p, dir, again, dir2, err)
		}
	})
}
