package manager

import (
	"fmt"
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
	oldest, err := f.List(ctx, ListRequest{Namespace: team, OldestFirst: true, Limit: 1})
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.List(ctx, ListRequest{Namespace: team, Cursor: oldest.Next}) // of the other order
	wantKind(t, err, errs.ErrInvalid, "nextToken")
	_, err = f.List(ctx, ListRequest{Namespace: team, Limit: 101})
	wantKind(t, err, errs.ErrInvalid, "limit")
}
