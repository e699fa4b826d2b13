package cpushare

import (
	"maps"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	base "github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/plan"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// Stored sandboxes have no cgroup to look at; all others may, whatever their stage.
func TestStoredSandboxesAreNotLookedAt(t *testing.T) {
	handles := registry.New(registry.Config{})
	add := func(name string, stage journal.Stage, limits oci.Limits) {
		ref := base.Ref{Namespace: "default", Name: name, UID: types.UID(name)}
		handles.Of(ref).SetRow(&journal.Row{Stage: stage, Plan: plan.Plan{Ref: ref, ID: base.IDOf(ref.UID), Limits: limits}})
	}
	names := map[string]string{}
	var want []string
	for _, stage := range []journal.Stage{
		journal.Making, journal.Live, journal.Pausing, journal.Paused, journal.Resuming, journal.Storing, journal.Waking, journal.Restarting, journal.Capturing, journal.Ended,
	} {
		add(string(stage), stage, oci.Limits{})
		names[string(base.IDOf(types.UID(stage)))] = string(stage)
		want = append(want, string(stage))
	}
	add("asleep", journal.Stored, oci.Limits{})
	add("weighted", journal.Live, oci.Limits{CPUShares: 512})
	b := New(Config{Registry: handles, Cgroup: func(id string) string { return names[id] }})
	got := slices.Sorted(maps.Keys(b.running()))
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("looked at %q, want %q", got, want)
	}
}
