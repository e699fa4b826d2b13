package layers

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/controllers"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild/buildlog"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// started is a sandbox of a build that runs.
type started struct {
	*agents.Sandbox
	hold *quota.Reservation
}

// start starts a sandbox from the files so far, and returns it when its agent answers. The caller passes it to remove.
func (w *Work) start(ctx context.Context, blueprint *agents.SandboxBlueprint, policies *agents.BarchanSpec) (*started, error) {
	hold, err := w.r.Quota.Hold(ctx, quota.Request{Namespace: w.Build.Namespace, Size: w.r.Quota.SizeOf(&blueprint.PodTemplate.Spec)})
	if err != nil {
		return nil, err
	}
	s := &started{Sandbox: w.newSandbox(blueprint, policies), hold: hold}
	if err := w.r.Client.Create(ctx, s.Sandbox); err != nil {
		hold.Release()
		return nil, createError("sandbox", err)
	}
	failpoint.Reach("templatebuild/sandbox")
	ctx, stop := context.WithTimeout(ctx, startTimeout)
	defer stop()
	now, err := w.r.Objects.WaitSandbox(ctx, client.ObjectKeyFromObject(s), func(now *agents.Sandbox) (bool, error) {
		switch {
		case now == nil, now.UID != s.UID:
			return false, fmt.Errorf("the sandbox of the build was deleted: %w", errs.ErrUnavailable)
		case sandbox.PhaseOf(now) == sandbox.Dead:
			_, why, _ := sandbox.Failure(now)
			return false, buildlog.Refuse(w.Log.Step, "the sandbox of the build does not start: %s", why)
		}
		return sandbox.PhaseOf(now) == sandbox.Running && len(now.Status.PodIPs) > 0, nil
	})
	if err != nil {
		w.remove(ctx, s)
		return nil, err
	}
	s.Sandbox = now
	return s, nil
}

func (w *Work) newSandbox(blueprint *agents.SandboxBlueprint, policies *agents.BarchanSpec) *agents.Sandbox {
	s := &agents.Sandbox{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: w.Build.Namespace, Name: "build-" + strings.ToLower(rand.Text()[:16]),
			Labels:          map[string]string{agents.LabelWarmPoolSandbox: string(pool.BuildPool), barchan.LabelBuild: w.Build.Name},
			Finalizers:      []string{agents.NodeFinalizer},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(w.Build, barchan.GroupVersion.WithKind("TemplateBuild"))},
		},
		Spec: agents.SandboxSpec{SandboxBlueprint: *blueprint.DeepCopy(), ShutdownPolicy: agents.ShutdownDelete, OperatingMode: agents.ModeRunning},
	}
	if w.checkpoint == "" && len(w.base.pullSecrets) > 0 { // the files of a layer come without the registry
		s.Spec.PodTemplate.Spec.ImagePullSecrets = w.base.pullSecrets
	}
	s.Spec.Barchan = policies.DeepCopy()
	if w.checkpoint != "" {
		if s.Spec.Barchan == nil {
			s.Spec.Barchan = &agents.BarchanSpec{}
		}
		s.Spec.Barchan.Restore = &agents.RestoreSource{CheckpointName: w.checkpoint, FilesOnly: true}
	}
	agents.SetDefaults(s)
	return s
}

// remove deletes a sandbox, without a wait for its end.
func (w *Work) remove(ctx context.Context, s *started) {
	defer s.hold.Release()
	err := w.r.Client.Delete(context.WithoutCancel(ctx), s.Sandbox, client.Preconditions{UID: &s.UID})
	if client.IgnoreNotFound(err) != nil { // removed with the build's others, at its end
		w.Log.Say(builds.LevelDebug, "sandbox %s is not deleted yet: %s", s.Name, errs.Text(err))
	}
}

// RemoveSandboxes deletes all sandboxes of a build.
func (r *Runner) RemoveSandboxes(ctx context.Context, b *barchan.TemplateBuild) error {
	members, err := r.Objects.Members(ctx, pool.BuildPool)
	if err != nil {
		return fmt.Errorf("read the sandboxes of builds: %w", err)
	}
	for _, s := range members {
		if s.Namespace != b.Namespace || s.Labels[barchan.LabelBuild] != b.Name || s.DeletionTimestamp != nil {
			continue
		}
		if err := r.Client.Delete(ctx, s, client.Preconditions{UID: &s.UID}); client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
			return fmt.Errorf("delete sandbox %s: %w", s.Name, err)
		}
	}
	return nil
}

// keep writes the checkpoint of a sandbox under a name, and returns when it is durable. Another build may have made it.
func (w *Work) keep(ctx context.Context, s *started, name string, content barchan.CheckpointContent) (*barchan.Checkpoint, error) {
	ctx, stop := context.WithTimeout(ctx, captureTimeout)
	defer stop()
	c := &barchan.Checkpoint{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: w.Build.Namespace, Name: name, Finalizers: []string{barchan.NodeFinalizer},
			Labels:      map[string]string{barchan.LabelPurpose: barchan.PurposeBuild, barchan.LabelBuild: w.Build.Name},
			Annotations: map[string]string{barchan.AnnotationUsedAt: barchan.ExactNow()},
		},
		Spec: barchan.CheckpointSpec{SandboxName: s.Name, KeepRunning: true, Content: content},
	}
	barchan.SetCheckpointDefaults(c)
	if err := w.r.Client.Create(ctx, c); err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, createError("checkpoint", err)
	}
	failpoint.Reach("templatebuild/checkpoint")
	done, err := w.r.Objects.WaitCheckpoint(ctx, client.ObjectKeyFromObject(c), func(now *barchan.Checkpoint) (bool, error) {
		switch {
		case now == nil, now.DeletionTimestamp != nil:
			return false, fmt.Errorf("checkpoint %s was deleted before it was complete: %w", name, errs.ErrUnavailable)
		case now.Status.Phase == barchan.CheckpointFailed:
			return false, errCapture
		}
		return now.Status.Phase == barchan.CheckpointReady, nil
	})
	if errors.Is(err, errCapture) {
		return nil, w.dropFailed(ctx, done, name)
	}
	return done, err
}

var errCapture = errors.New("the checkpoint failed")

// dropFailed deletes a checkpoint that failed, so that the next attempt makes it again, and returns why it failed.
func (w *Work) dropFailed(ctx context.Context, c *barchan.Checkpoint, name string) error {
	if c == nil {
		return fmt.Errorf("checkpoint %s failed: %w", name, errs.ErrUnavailable)
	}
	err := w.r.Client.Delete(ctx, c, client.Preconditions{UID: &c.UID})
	return errors.Join(fmt.Errorf("keep the files: %s: %w", controllers.ReasonOf(c.Status.Conditions, barchan.ConditionReady), errs.ErrUnavailable), client.IgnoreNotFound(err))
}

// createError gives an error of a create its kind.
func createError(what string, err error) error {
	if apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) {
		return buildlog.Refuse(barchan.BuildStepBase, "%s", err.Error())
	}
	return fmt.Errorf("create %s: %w", what, err)
}

// limited returns the base's blueprint with the build's limits, in which layers are run.
func (w *Work) limited() *agents.SandboxBlueprint {
	b := w.base.blueprint.DeepCopy()
	c := &b.PodTemplate.Spec.Containers[0]
	for name, value := range map[corev1.ResourceName]*resource.Quantity{corev1.ResourceCPU: w.Build.Spec.CPU, corev1.ResourceMemory: w.Build.Spec.Memory} {
		if value == nil {
			continue
		}
		if c.Resources.Limits == nil {
			c.Resources.Limits = corev1.ResourceList{}
		}
		c.Resources.Limits[name] = *value
		delete(c.Resources.Requests, name)
	}
	return b
}

// blueprint returns what the template's sandboxes are made by.
func (w *Work) blueprint() *agents.SandboxBlueprint {
	b := w.limited()
	c := &b.PodTemplate.Spec.Containers[0]
	c.WorkingDir = w.settings.Workdir
	for _, name := range slices.Sorted(maps.Keys(w.settings.Env)) {
		v := corev1.EnvVar{Name: name, Value: strings.ReplaceAll(w.settings.Env[name], "$", "$$")} // "$(NAME)" would be expanded
		if i := slices.IndexFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == name }); i >= 0 {
			c.Env[i] = v
		} else {
			c.Env = append(c.Env, v)
		}
	}
	return b
}

// policies returns the spec.barchan of the template's sandboxes, without what they start from.
func (w *Work) policies() *agents.BarchanSpec {
	p := w.base.policies.DeepCopy()
	if p == nil {
		p = &agents.BarchanSpec{}
	}
	p.DefaultUser = w.settings.User
	return p
}
