package machine

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node"
)

// stock is a machine with one sandbox and one checkpoint, and their objects.
type stock struct {
	box        *agents.Sandbox
	checkpoint *barchan.Checkpoint
}

func (s stock) List(context.Context) ([]node.Status, error) {
	return []node.Status{{Ref: sandbox.Ref{Namespace: "a", Name: "s", UID: "u1"}}}, nil
}

func (s stock) Checkpoints(context.Context) ([]sandbox.Captured, error) {
	return []sandbox.Captured{{Checkpoint: sandbox.CheckpointRef{Namespace: "a", Name: "c", UID: "u2"}}}, nil
}

func (s stock) Sandboxes(context.Context, string) (all []*agents.Sandbox, err error) {
	if s.box != nil {
		all = append(all, s.box)
	}
	return all, nil
}

func (s stock) Checkpoint(_ context.Context, key types.NamespacedName) (*barchan.Checkpoint, error) {
	if s.checkpoint == nil {
		return nil, fmt.Errorf("checkpoint %s: %w", key, errs.ErrNotFound)
	}
	return s.checkpoint, nil
}

// A renamed machine would ignore its own sandboxes, so its server does not start.
func TestRenamedNodeIsRefused(t *testing.T) {
	box := func(uid types.UID, on string) *agents.Sandbox {
		s := &agents.Sandbox{}
		s.Namespace, s.Name, s.UID, s.Status.NodeName = "a", "s", uid, on
		return s
	}
	checkpoint := func(on string) *barchan.Checkpoint {
		c := &barchan.Checkpoint{}
		c.Namespace, c.Name, c.UID, c.Status.Source = "a", "c", "u2", &barchan.CheckpointSource{Node: on}
		return c
	}
	for name, tt := range map[string]struct {
		has  stock
		want string // in the error
	}{
		"same name":             {stock{box("u1", "new"), checkpoint("new")}, ""},
		"never started":         {stock{box("u1", ""), checkpoint("")}, ""},
		"objects gone":          {stock{}, ""},
		"another of the name":   {stock{box("u9", "old"), nil}, ""},
		"renamed":               {stock{box("u1", "old"), nil}, "sandbox a/s"},
		"renamed, a checkpoint": {stock{nil, checkpoint("old")}, "checkpoint a/c"},
	} {
		t.Run(name, func(t *testing.T) {
			err := CheckNodeName(t.Context(), "new", tt.has, tt.has)
			if tt.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if !errors.Is(err, errs.ErrInvalid) || !strings.HasPrefix(err.Error(), "nodeName: ") || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "set nodeName: old") {
				t.Errorf("refused with %v", err)
			}
		})
	}
}
