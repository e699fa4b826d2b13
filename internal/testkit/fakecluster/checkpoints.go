package fakecluster

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Checkpoints lists a namespace.
func (c *Cluster) Checkpoints(ctx context.Context, namespace string) ([]barchan.Checkpoint, error) {
	var list barchan.CheckpointList
	err := c.List(ctx, &list, client.InNamespace(namespace))
	return list.Items, err
}

// Checkpoint reads one checkpoint.
func (c *Cluster) Checkpoint(ctx context.Context, key types.NamespacedName) (*barchan.Checkpoint, error) {
	return get(ctx, c.Client, key, &barchan.Checkpoint{})
}

// TemplateBuilds lists a namespace.
func (c *Cluster) TemplateBuilds(ctx context.Context, namespace string) ([]barchan.TemplateBuild, error) {
	var list barchan.TemplateBuildList
	err := c.List(ctx, &list, client.InNamespace(namespace))
	return list.Items, err
}

// WaitCheckpoint waits as the cache does.
func (c *Cluster) WaitCheckpoint(ctx context.Context, key types.NamespacedName, done func(*barchan.Checkpoint) (bool, error)) (*barchan.Checkpoint, error) {
	return wait(ctx, c, "checkpoint", key, func() *barchan.Checkpoint { return &barchan.Checkpoint{} }, done)
}

func (c *Cluster) captureAll(ctx context.Context) (err error) {
	all, err := c.Checkpoints(ctx, "")
	for i := range all {
		err = errors.Join(err, Capture(ctx, c.Client, &all[i]))
	}
	return err
}

// Capture sets the status of a checkpoint at once to what its spec requests. c may be any
// cluster's client.
func Capture(ctx context.Context, c client.Client, ckpt *barchan.Checkpoint) error {
	if ckpt.DeletionTimestamp != nil {
		ckpt.Finalizers = slices.DeleteFunc(ckpt.Finalizers, func(f string) bool { return f == barchan.NodeFinalizer })
		return client.IgnoreNotFound(c.Update(ctx, ckpt))
	}
	if ckpt.Status.Phase == barchan.CheckpointReady || ckpt.Status.Phase == barchan.CheckpointFailed {
		return nil
	}
	s, err := get(ctx, c, types.NamespacedName{Namespace: ckpt.Namespace, Name: ckpt.Spec.SandboxName}, &agents.Sandbox{})
	switch {
	case errors.Is(err, errs.ErrNotFound):
		fail(ckpt, "the sandbox is gone")
	case err != nil:
		return err
	case imageOf(s) == ImageUncapturable:
		fail(ckpt, "the disk is full")
	default:
		if err := take(ckpt, s); err != nil {
			return err
		}
	}
	return client.IgnoreNotFound(c.Status().Update(ctx, ckpt))
}

func fail(ckpt *barchan.Checkpoint, why string) {
	ckpt.Status.Phase = barchan.CheckpointFailed
	meta.SetStatusCondition(&ckpt.Status.Conditions, metav1.Condition{
		Type: barchan.ConditionReady, Status: metav1.ConditionFalse, Reason: barchan.ReasonFailed, Message: why,
	})
}

// take writes what is known of a source, as the checkpoint's controller does.
func take(ckpt *barchan.Checkpoint, s *agents.Sandbox) error {
	policies := s.Spec.Barchan.DeepCopy()
	if policies == nil {
		policies = &agents.BarchanSpec{}
	}
	policies.Metadata = nil
	blueprint, err := json.Marshal(s.Spec.SandboxBlueprint)
	if err != nil {
		return err
	}
	rest, err := json.Marshal(policies)
	if err != nil {
		return err
	}
	ckpt.Status = barchan.CheckpointStatus{
		SnapshotID: ckpt.SnapshotID(),
		Phase:      barchan.CheckpointReady, Content: ckpt.Spec.Content, Size: resource.NewQuantity(3<<20, resource.BinarySI), CompletedAt: new(metav1.Now()),
		Source: &barchan.CheckpointSource{
			ID: string(sandbox.IDOf(s.UID)), UID: s.UID, TemplateName: s.Annotations[agents.AnnotationTemplateRef],
			TemplateID: s.Annotations[pool.AnnotationTemplateID], TemplateNamespace: s.Annotations[pool.AnnotationTemplateNamespace],
			Blueprint: runtime.RawExtension{Raw: blueprint}, Policies: runtime.RawExtension{Raw: rest},
		},
	}
	pool.NoteSecrets(ckpt.Status.Source, s)
	if ckpt.Spec.Content == barchan.ContentMemoryAndFiles {
		ckpt.Status.MemorySize = resource.NewQuantity(2<<20, resource.BinarySI)
	}
	meta.SetStatusCondition(&ckpt.Status.Conditions, metav1.Condition{Type: barchan.ConditionReady, Status: metav1.ConditionTrue, Reason: barchan.ReasonWritten})
	return nil
}

// origin returns why a sandbox cannot start from its checkpoint, now or ever; empty if it can.
func origin(ctx context.Context, c client.Client, s *agents.Sandbox) (reason, message string, err error) {
	if s.Spec.Barchan == nil || s.Spec.Barchan.Restore == nil || sandbox.Started(s) {
		return "", "", nil
	}
	ckpt := &barchan.Checkpoint{}
	err = c.Get(ctx, types.NamespacedName{Namespace: s.Namespace, Name: s.Spec.Barchan.Restore.CheckpointName}, ckpt)
	switch {
	case apierrors.IsNotFound(err):
		return agents.ReasonPodFailed, "its checkpoint is gone", nil
	case err != nil:
		return "", "", err
	case ckpt.Status.Phase == barchan.CheckpointFailed:
		return agents.ReasonPodFailed, "its checkpoint failed", nil
	case ckpt.Status.Phase != barchan.CheckpointReady:
		return agents.ReasonDependenciesNotReady, "waits for its checkpoint", nil
	case ckpt.Status.Source != nil && ckpt.Status.Source.Secrets && !pool.AllowsSecrets(s):
		return sandbox.ReasonSecrets, "its checkpoint holds secrets", nil
	}
	return "", "", nil
}

func fromFiles(s *agents.Sandbox) bool {
	return s.Spec.Barchan != nil && s.Spec.Barchan.Resume == agents.ResumeFiles
}
