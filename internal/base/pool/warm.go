package pool

import (
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

const (
	// SeedPool is the pool UID of seeds; no such pool exists. A seed is a sandbox in which a
	// template's warm-up is run once, for the checkpoint from which the template's sandboxes are
	// restored. As it is in no real pool it is never handed out; as an unclaimed member, clients do
	// not see it, quotas do not count it, and it has no route.
	SeedPool types.UID = "warm-up"
	// warmInfix and warmNamed make the name of a warm-up's checkpoint; maxWarmName bounds the
	// template's part of it.
	warmInfix   = "-warm-"
	warmNamed   = 10
	maxWarmName = 200
)

// BuildPool is the pool UID of the sandboxes in which template builds run their steps; no such pool exists. They are like seeds,
// but their builds hold the namespace's quota.
const BuildPool types.UID = "template-build"

// IsInternal reports whether a sandbox is for the server's own use, a seed or that of a build, and no member of a pool.
func IsInternal(s *agents.Sandbox) bool { return IsSeed(s) || MemberOf(s) == BuildPool }

// IsSeed reports whether a sandbox exists only for its template's warm-up.
func IsSeed(s *agents.Sandbox) bool { return MemberOf(s) == SeedPool }

// WarmUpOf returns what is run in each sandbox of a template before it is ready; nil for nothing.
func WarmUpOf(t *extensions.SandboxTemplate) *agents.WarmUp {
	if t.Spec.Barchan == nil || t.Spec.Barchan.Sandbox == nil {
		return nil
	}
	return t.Spec.Barchan.Sandbox.WarmUp
}

// KeepsWarmMemory reports whether sandboxes of a template may be restored from one in which its
// warm-up has run: it has one, and its class is not known to keep files only.
func KeepsWarmMemory(t *extensions.SandboxTemplate) bool {
	class := t.Spec.PodTemplate.Spec.RuntimeClassName
	return WarmUpOf(t) != nil && (class == nil || *class != agents.RuntimeRunc)
}

// WarmName returns the name of a template's seed, and of its checkpoint, for one revision.
func WarmName(template, revision string) string {
	revision = revision[:min(warmNamed, len(revision))]
	template = template[:min(len(template), maxWarmName)]
	return strings.TrimRight(template, "-.") + warmInfix + revision
}

// NewSeed returns a template's seed in a namespace, not written yet. owner, if any, controls it.
func NewSeed(t *extensions.SandboxTemplate, revision, namespace string, owner *metav1.OwnerReference) *agents.Sandbox {
	s := NewSandbox(t, revision, namespace)
	s.Name = WarmName(t.Name, revision)
	s.Labels[agents.LabelWarmPoolSandbox] = string(SeedPool)
	if owner != nil {
		s.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	return s
}

// NewWarmCheckpoint returns the checkpoint of a template's seed, not written yet.
func NewWarmCheckpoint(t *extensions.SandboxTemplate, revision, namespace string, owner *metav1.OwnerReference) *barchan.Checkpoint {
	c := &barchan.Checkpoint{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: WarmName(t.Name, revision),
			Labels: map[string]string{barchan.LabelPurpose: barchan.PurposeWarm, agents.LabelTemplateHash: revision},
			Annotations: map[string]string{
				agents.AnnotationTemplateRef: t.Name, AnnotationTemplateID: TemplateID(t), AnnotationTemplateNamespace: t.Namespace,
			},
			Finalizers: []string{barchan.NodeFinalizer},
		},
		Spec: barchan.CheckpointSpec{SandboxName: WarmName(t.Name, revision), KeepRunning: true, Content: barchan.ContentMemoryAndFiles},
	}
	if owner != nil {
		c.OwnerReferences = []metav1.OwnerReference{*owner}
	}
	barchan.SetCheckpointDefaults(c)
	return c
}

// IsWarm reports whether a checkpoint is that of the warm-up of a template at a revision, in any
// phase.
func IsWarm(c *barchan.Checkpoint, t *extensions.SandboxTemplate, revision string) bool {
	return c.Labels[barchan.LabelPurpose] == barchan.PurposeWarm && c.Labels[agents.LabelTemplateHash] == revision &&
		c.Annotations[AnnotationTemplateID] == TemplateID(t)
}

// WarmCheckpoint returns the name of the checkpoint from which a new sandbox of a template should
// start instead of running the warm-up; empty if there is none. all are the checkpoints of the
// sandbox's namespace, or the one of them that is called [WarmName].
func WarmCheckpoint(t *extensions.SandboxTemplate, revision string, all []barchan.Checkpoint) string {
	if !KeepsWarmMemory(t) {
		return ""
	}
	for i := range all {
		c := &all[i]
		if IsWarm(c, t, revision) && c.DeletionTimestamp == nil && c.Status.Phase == barchan.CheckpointReady && c.Status.Content == barchan.ContentMemoryAndFiles {
			return c.Name
		}
	}
	return ""
}

// StartWarm makes a sandbox that is not written yet start from the result of [WarmCheckpoint]; an
// empty name changes nothing. From a checkpoint with memory no warm-up is run again.
func StartWarm(s *agents.Sandbox, checkpoint string) {
	if checkpoint == "" {
		return
	}
	if s.Spec.Barchan == nil {
		s.Spec.Barchan = &agents.BarchanSpec{}
	}
	s.Spec.Barchan.Restore = &agents.RestoreSource{CheckpointName: checkpoint}
	agents.SetDefaults(s)
}
