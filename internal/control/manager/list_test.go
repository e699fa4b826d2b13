package manager

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func TestList(t *testing.T) {
	f := newFixture(t)
	ctx := t.Context()
	old := time.Now().Add(-time.Hour).Truncate(time.Second)
	var made []Sandbox
	for i := range 7 {
		req := request("base")
		if i%2 == 1 {
			req.Template = "sized"
		}
		req.Metadata = map[string]string{"n": fmt.Sprint(i), "half": fmt.Sprint(i / 4), "käse & co": "a+b=c%"}
		v := f.mustCreate(t, req)
		if err := f.cluster.Aged(ctx, v.ID, old.Add(time.Duration(i)*time.Minute)); err != nil {
			t.Fatal(err)
		}
		made = append(made, v)
	}
	if err := f.Pause(ctx, team, string(made[6].ID), nil); err != nil {
		t.Fatal(err)
	}
	for name, give := range map[string]struct {
		req         ListRequest
		enqueueDial string
		running     int
	}{
		"all":           {ListRequest{}, "6543210", 6},
		"oldest first":  {ListRequest{OldestFirst: true}, "0123456", 6},
		"metadata":      {ListRequest{Metadata: map[string]string{"half": "0", "käse & co": "a+b=c%"}}, "3210", 4},
		"none matches":  {ListRequest{Metadata: map[string]string{"half": "0", "n": "5"}}, "", 0},
		"running":       {ListRequest{States: []State{StateRunning}}, "543210", 6},
		"paused":        {ListRequest{States: []State{StatePaused}}, "6", 6},
		"template":      {ListRequest{Template: "sized"}, "531", 3},
		"alias":         {ListRequest{Template: "default-base"}, "6420", 3},
		"template ID":   {ListRequest{Template: made[1].TemplateID}, "531", 3},
		"name":          {ListRequest{Name: made[4].Name}, "4", 1},
		"no name":       {ListRequest{Name: string(made[4].ID)}, "", 0},
		"no template":   {ListRequest{Template: "nope"}, "", 0},
		"started after": {ListRequest{StartedAfter: old.Add(4 * time.Minute)}, "654", 2},
	} {
		t.Run(name, func(t *testing.T) {
			give.req.Namespace = team
			for _, limit := range []int{0, 1, 3} {
				give.req.Limit, give.req.Cursor = limit, ""
				got := ""
				for {
					page, err := f.List(ctx, give.req)
					if err != nil {
						t.Fatal(err)
					}
					if page.Running != give.running {
						t.Errorf("running %d, want %d", page.Running, give.running)
					}
					for _, v := range page.Items {
						got += v.Metadata["n"]
					}
					if give.req.Cursor = page.Next; page.Next == "" {
						break
					}
				}
				if got != give.enqueueDial {
					t.Errorf("limit %d: got %s, want %s", limit, got, give.enqueueDial)
				}
			}
		})
	}
	_, err := f.List(ctx, ListRequest{Namespace: team, Cursor: "bogus!"})
	wantKind(t, err, errs.ErrInvalid, "nextToken")
	_, err = f.List(ctx, ListRequest{Namespace: team, Cursor: formatCursor(pageCursor{1, "x"}, 1)})
	wantKind(t, err, errs.ErrInvalid, "nextToken")
	_, err = f.List(ctx, ListRequest{Namespace: team, Limit: 101})
	wantKind(t, err, errs.ErrInvalid, "limit")
}

// TestPagesAreStableUnderChange removes and adds items between pages: each item that was there
// all the time is seen exactly once.
func TestPagesAreStableUnderChange(t *testing.T) {
	at := func(p *pageCursor) pageCursor { return *p }
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		dir := direction(seed%2 == 0)
		var items []pageCursor
		for range 40 {
			items = append(items, pageCursor{r.Int64N(10), fmt.Sprint(r.Uint32())})
		}
		stay, churn := items[:25], slices.Clone(items[25:])
		seen := map[pageCursor]int{}
		cursor := ""
		for {
			limit, after, err := paging(1+r.IntN(5), cursor, dir)
			if err != nil {
				t.Fatal(err)
			}
			page, next := cut(append(slices.Clone(stay), churn...), limit, after, dir, at)
			if !slices.IsSortedFunc(page, func(a, b pageCursor) int { return dir * a.compare(b) }) {
				t.Fatal("the page is not sorted")
			}
			for _, p := range page {
				seen[p]++
			}
			if cursor = next; cursor == "" {
				break
			}
			churn = append(churn[min(1, len(churn)):], pageCursor{r.Int64N(10), fmt.Sprint(r.Uint32())})
		}
		for _, p := range stay {
			if seen[p] != 1 {
				t.Fatalf("seed %d: %v was seen %d times", seed, p, seen[p])
			}
		}
	}
}

func FuzzCursor(f *testing.F) {
	f.Add(formatCursor(pageCursor{12345, "iabc"}, 1))
	f.Add(formatCursor(pageCursor{-1, ""}, -1))
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
