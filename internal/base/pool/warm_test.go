package pool_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	checkpoints "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
)

// warming is a template with a warm-up.
func warming() *extensions.SandboxTemplate {
	t := rich()
	t.Name, t.Namespace, t.UID = "py", "default", "template"
	t.Spec.Barchan.Sandbox.WarmUp = &agents.WarmUp{Command: []string{"load"}}
	return t
}

// A member keeps the checkpoint that it was restored from, whatever the template names; a new sandbox
// starts from the template's.
func TestRefreshKeepsTheOrigin(t *testing.T) {
	of := warming()
	member := pool.NewMember(&extensions.SandboxWarmPool{}, of, revision(t, of))
	pool.StartWarm(member, "py-warm-1")
	member.UID = "m"
	claimed := pool.Adopt(member, nil)
	pool.Refresh(claimed, of)
	if diff := cmp.Diff(&agents.RestoreSource{CheckpointName: "py-warm-1"}, claimed.Spec.Barchan.Restore); diff != "" {
		t.Error(diff)
	}
	of.Spec.Barchan.Sandbox.Restore = &agents.RestoreSource{CheckpointName: "base"}
	pool.Refresh(claimed, of)
	if claimed.Spec.Barchan.Restore.CheckpointName != "py-warm-1" {
		t.Error("what cannot change was changed")
	}
	if s := pool.NewSandbox(of, revision(t, of), "default"); s.Spec.Barchan.Restore.CheckpointName != "base" {
		t.Errorf("a new sandbox starts from %v", s.Spec.Barchan.Restore)
	}
	of.Spec.Barchan.Sandbox = nil
	pool.Refresh(claimed, of)
	if claimed.Spec.Barchan.Restore == nil {
		t.Error("the origin went with the template's own part")
	}
	plain := pool.NewMember(&extensions.SandboxWarmPool{}, of, "r")
	plain.UID = "p"
	if pool.Refresh(plain, of); plain.Spec.Barchan != nil {
		t.Errorf("it got %+v", plain.Spec.Barchan)
	}
}

func TestWarmCheckpoint(t *testing.T) {
	of := warming()
	now, r := metav1.Now(), revision(t, of)
	for name, tt := range map[string]struct {
		change func(*extensions.SandboxTemplate, *checkpoints.Checkpoint)
		fits   bool
	}{
		"ready": {func(*extensions.SandboxTemplate, *checkpoints.Checkpoint) {}, true},
		"being written": {func(_ *extensions.SandboxTemplate, c *checkpoints.Checkpoint) {
			c.Status.Phase = checkpoints.CheckpointWriting
		}, false},
		"going": {func(_ *extensions.SandboxTemplate, c *checkpoints.Checkpoint) { c.DeletionTimestamp = &now }, false},
		"files alone": {func(_ *extensions.SandboxTemplate, c *checkpoints.Checkpoint) {
			c.Status.Content = checkpoints.ContentFiles
		}, false},
		"of an older": {func(_ *extensions.SandboxTemplate, c *checkpoints.Checkpoint) {
			c.Labels[agents.LabelTemplateHash] = "old"
		}, false},
		"a person's": {func(_ *extensions.SandboxTemplate, c *checkpoints.Checkpoint) {
			delete(c.Labels, checkpoints.LabelPurpose)
		}, false},
		"of another":     {func(of *extensions.SandboxTemplate, _ *checkpoints.Checkpoint) { of.UID = "other" }, false},
		"no warm-up now": {func(of *extensions.SandboxTemplate, _ *checkpoints.Checkpoint) { of.Spec.Barchan.Sandbox.WarmUp = nil }, false},
		"keeps files alone": {func(of *extensions.SandboxTemplate, _ *checkpoints.Checkpoint) {
			of.Spec.PodTemplate.Spec.RuntimeClassName = new("runc")
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			of := warming()
			c := pool.NewWarmCheckpoint(of, r, "default", nil)
			c.Status.Phase, c.Status.Content = checkpoints.CheckpointReady, checkpoints.ContentMemoryAndFiles
			tt.change(of, c)
			got := pool.WarmCheckpoint(of, r, []checkpoints.Checkpoint{{}, *c})
			if (got == c.Name) != tt.fits || (got == "") == tt.fits {
				t.Errorf("WarmCheckpoint = %q", got)
			}
		})
	}
}

// A seed has no owner and no pool, and its checkpoint has its name.
func TestSeed(t *testing.T) {
	of := warming()
	owner := metav1.OwnerReference{Kind: "SandboxTemplate", Name: "py", UID: of.UID}
	r := revision(t, of)
	s, c := pool.NewSeed(of, r, "default", &owner), pool.NewWarmCheckpoint(of, r, "default", &owner)
	if !pool.IsSeed(s) || pool.MemberOf(s) == "" || pool.OriginOf(s) != "" || s.Spec.Barchan.Restore != nil || s.Spec.Barchan.WarmUp == nil {
		t.Errorf("the seed is %+v", s)
	}
	if want := "py-warm-" + r[:10]; s.Name != want || c.Name != want || c.Spec.SandboxName != want || !c.Spec.KeepRunning {
		t.Errorf("they are called %s and %s, of %s", s.Name, c.Name, c.Spec.SandboxName)
	}
	if diff := cmp.Diff(s.OwnerReferences, c.OwnerReferences); diff != "" || len(s.OwnerReferences) != 1 {
		t.Errorf("owners: %s", diff)
	}
	if long := pool.WarmName(strings.Repeat("a", 199)+".b", r); len(long) > 253 || strings.Contains(long, ".-") {
		t.Errorf("a long name becomes %q", long)
	}
	if m := pool.NewMember(&extensions.SandboxWarmPool{}, of, r); pool.IsSeed(m) {
		t.Error("a member is a seed")
	}
}
