package manager

import (
	"fmt"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
)

func TestList(t *testing.T) {
	f := newFixture(t)
	ctx := t.Context()
	old := time.Now().Add(-time.Hour).Truncate(time.Second)
	var made []sandboxes.Sandbox
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
	if err := f.Sandboxes.Pause(ctx, team, string(made[6].ID), nil); err != nil {
		t.Fatal(err)
	}
	for name, give := range map[string]struct {
		req         sandboxes.ListRequest
		enqueueDial string
		running     int
	}{
		"all":           {sandboxes.ListRequest{}, "6543210", 6},
		"oldest first":  {sandboxes.ListRequest{OldestFirst: true}, "0123456", 6},
		"metadata":      {sandboxes.ListRequest{Metadata: map[string]string{"half": "0", "käse & co": "a+b=c%"}}, "3210", 4},
		"none matches":  {sandboxes.ListRequest{Metadata: map[string]string{"half": "0", "n": "5"}}, "", 0},
		"running":       {sandboxes.ListRequest{States: []sandboxes.State{sandboxes.StateRunning}}, "543210", 6},
		"paused":        {sandboxes.ListRequest{States: []sandboxes.State{sandboxes.StatePaused}}, "6", 6},
		"template":      {sandboxes.ListRequest{Template: "sized"}, "531", 3},
		"alias":         {sandboxes.ListRequest{Template: "default-base"}, "6420", 3},
		"template ID":   {sandboxes.ListRequest{Template: made[1].TemplateID}, "531", 3},
		"name":          {sandboxes.ListRequest{Name: made[4].Name}, "4", 1},
		"no name":       {sandboxes.ListRequest{Name: string(made[4].ID)}, "", 0},
		"no template":   {sandboxes.ListRequest{Template: "nope"}, "", 0},
		"started after": {sandboxes.ListRequest{StartedAfter: old.Add(4 * time.Minute)}, "654", 2},
	} {
		t.Run(name, func(t *testing.T) {
			give.req.Namespace = team
			for _, limit := range []int{0, 1, 3} {
				give.req.Limit, give.req.Cursor = limit, ""
				got := ""
				for {
					page, err := f.Sandboxes.List(ctx, give.req)
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
	_, err := f.Sandboxes.List(ctx, sandboxes.ListRequest{Namespace: team, Cursor: "bogus!"})
	wantKind(t, err, errs.ErrInvalid, "nextToken")
	oldest, err := f.Sandboxes.List(ctx, sandboxes.ListRequest{Namespace: team, OldestFirst: true, Limit: 1})
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Sandboxes.List(ctx, sandboxes.ListRequest{Namespace: team, Cursor: oldest.Next}) // of the other order
	wantKind(t, err, errs.ErrInvalid, "nextToken")
	_, err = f.Sandboxes.List(ctx, sandboxes.ListRequest{Namespace: team, Limit: 1001})
	wantKind(t, err, errs.ErrInvalid, "limit")
}
