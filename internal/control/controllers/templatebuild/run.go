package templatebuild

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/builds"
)

// Reasons of the condition Ready of a build.
const (
	reasonBuilding = "Building"
	reasonWaiting  = "Waiting"
	reasonBuilt    = "Built"
	reasonFailed   = "Failed"
)

// work is one attempt at a build.
type work struct {
	r     *reconciler
	build *barchan.TemplateBuild
	log   *log
	// chain is the one that is worked at.
	*chain
	stages map[string]*chain
	// mask are secrets, which no line of the log has.
	mask masks
}

// run runs a build and records its end. An error is to be tried again.
func (r *reconciler) run(ctx context.Context, b *barchan.TemplateBuild) error {
	began := time.Now()
	w := &work{r: r, build: b, chain: &chain{}, mask: masksOf(r.Store.Secrets(b.UID)), log: &log{r: r, build: b.UID, step: barchan.BuildStepBase, level: builds.LevelInfo}}
	if b.Status.Phase == barchan.BuildBuilding && !r.tried(b.UID) {
		w.log.say(builds.LevelInfo, "the server was started anew; the build goes on")
	}
	if err := r.removeSandboxes(ctx, b); err != nil { // of an earlier process
		return err
	}
	err := w.do(ctx)
	defer func() { // also of one that was canceled
		last, stop := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer stop()
		if err := r.removeSandboxes(last, b); err != nil {
			r.Log.WarnContext(last, "sandbox of a template build not removed", telemetry.Namespace, b.Namespace, telemetry.Name, b.Name, telemetry.Error, err)
		}
	}()
	failed, is := errors.AsType[*failure](err)
	switch {
	case err == nil:
		r.Log.InfoContext(ctx, "template built", telemetry.Namespace, b.Namespace, telemetry.Name, b.Name, telemetry.Template, b.Spec.TemplateName, telemetry.Duration, time.Since(began))
		return nil
	case errors.Is(context.Cause(ctx), errCanceled):
		return err
	case ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded): // shutdown: the next process goes on
		return err
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		failed = &failure{step: w.log.step, message: fmt.Sprintf("the build took longer than %s", buildTimeout)}
	case !is && r.attempt(b.UID, err):
		w.log.say(builds.LevelWarn, "%s; it is tried again", errs.Text(err))
		return errors.Join(err, w.wait(ctx, errs.Text(err)))
	case !is:
		failed = &failure{step: w.log.step, message: errs.Text(err)}
	}
	return w.fail(context.WithoutCancel(ctx), failed)
}

// do runs the layers that are missing, and writes the template.
func (w *work) do(ctx context.Context) (err error) {
	if err := w.begin(ctx); err != nil {
		return err
	}
	own, err := w.chains(ctx)
	if err != nil {
		return err
	}
	if err := w.checkTags(ctx); err != nil { // before any work
		return err
	}
	if err := w.finishChain(ctx, own); err != nil {
		return err
	}
	w.log.step = barchan.BuildStepFinalize
	return w.finish(ctx)
}

// begin records that the build runs.
func (w *work) begin(ctx context.Context) error {
	status := w.build.Status.DeepCopy()
	status.Phase, status.CachedSteps, status.FailedStep = barchan.BuildBuilding, 0, ""
	if status.StartedAt == nil {
		status.StartedAt = new(metav1.Now())
		w.log.say(builds.LevelInfo, "building template %s", w.build.Spec.TemplateName)
	}
	w.ready(status, metav1.ConditionFalse, reasonBuilding, "its steps are run")
	return w.write(ctx, status)
}

// findBase finds what the build, or a stage, starts from.
func (w *work) findBase(ctx context.Context, from *barchan.BuildSource) (*base, error) {
	if from.Image != "" {
		digest := ""
		if w.r.ImageDigest != nil {
			var err error
			var secrets []string
			for _, ref := range from.ImagePullSecrets {
				secrets = append(secrets, ref.Name)
			}
			digest, err = w.r.ImageDigest(ctx, w.build.Namespace, from.Image, secrets)
			if errors.Is(err, errs.ErrNotFound) || errors.Is(err, errs.ErrInvalid) || errors.Is(err, errs.ErrForbidden) {
				return nil, refuse(barchan.BuildStepBase, "spec.from.image: %s", errs.Text(err))
			} else if err != nil {
				return nil, fmt.Errorf("find image %s: %w", from.Image, err)
			}
		}
		w.log.say(builds.LevelInfo, "%s", w.started("image "+from.Image))
		b := imageBase(from.Image, digest)
		b.pullSecrets = from.ImagePullSecrets
		return b, nil
	}
	for _, namespace := range []string{w.build.Namespace, w.r.PublicNamespace} {
		t, revision, err := w.r.Objects.CurrentTemplate(ctx, types.NamespacedName{Namespace: namespace, Name: from.TemplateName})
		if errors.Is(err, errs.ErrNotFound) || (err == nil && namespace != w.build.Namespace && (t.Spec.Barchan == nil || !t.Spec.Barchan.Public)) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read template %s/%s: %w", namespace, from.TemplateName, err)
		}
		w.log.say(builds.LevelInfo, "%s", w.started("template "+from.TemplateName))
		return templateBase(t, revision, w.build.Namespace)
	}
	return nil, refuse(barchan.BuildStepBase, "spec.from.templateName: template '%s' not found", from.TemplateName)
}

// topmost returns how many layers exist already.
func (w *work) topmost(ctx context.Context, layers []layer) (int, error) {
	for n := len(layers); n > 0; n-- {
		c, err := w.r.Objects.Checkpoint(ctx, w.key(layers[n-1].checkpoint()))
		if err == nil && c.DeletionTimestamp == nil && c.Status.Phase == barchan.CheckpointReady {
			return n, w.touch(ctx, c)
		} else if err != nil && !errors.Is(err, errs.ErrNotFound) {
			return 0, err
		}
	}
	return 0, nil
}

// cached logs the steps whose result is taken.
func (w *work) cached(c *chain, layers []layer) {
	for i := range layers {
		for k, step := range layers[i].steps {
			w.log.step = c.step(strconv.Itoa(layers[i].first + k + 1))
			w.log.say(builds.LevelInfo, "CACHED %s", textOf(&step))
			w.build.Status.CachedSteps++
		}
	}
}

// key is of an object of the build's namespace.
func (w *work) key(name string) client.ObjectKey {
	return client.ObjectKey{Namespace: w.build.Namespace, Name: name}
}

// touch notes that a layer is used.
func (w *work) touch(ctx context.Context, c *barchan.Checkpoint) error {
	now := c.DeepCopy()
	if now.Annotations == nil {
		now.Annotations = map[string]string{}
	}
	now.Annotations[barchan.AnnotationUsedAt] = barchan.ExactNow()
	if err := w.r.Client.Patch(ctx, now, client.MergeFrom(c)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("note the use of checkpoint %s: %w", c.Name, err)
	}
	return nil
}

// wait records why a build is tried again.
func (w *work) wait(ctx context.Context, why string) error {
	status := w.build.Status.DeepCopy()
	w.ready(status, metav1.ConditionFalse, reasonWaiting, why)
	return w.write(ctx, status)
}

func (w *work) fail(ctx context.Context, f *failure) error {
	w.log.step = f.step
	w.log.say(builds.LevelError, "%s", f.message)
	status := w.build.Status.DeepCopy()
	status.Phase, status.FailedStep, status.CompletedAt = barchan.BuildFailed, f.step, new(metav1.Now())
	w.ready(status, metav1.ConditionFalse, reasonFailed, f.message)
	if err := w.write(ctx, status); err != nil {
		return err
	}
	w.r.Log.InfoContext(ctx, "template build failed", telemetry.Namespace, w.build.Namespace, telemetry.Name, w.build.Name, "step", f.step, telemetry.Reason, f.message)
	if w.r.Events != nil {
		w.r.Events.Eventf(w.build, nil, corev1.EventTypeWarning, reasonFailed, "Build", "%s", f.message)
	}
	return nil
}

func (w *work) ready(status *barchan.TemplateBuildStatus, is metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: barchan.ConditionReady, Status: is, Reason: reason, Message: message, ObservedGeneration: w.build.Generation,
	})
}

// write writes a changed status, conditional on the version read.
func (w *work) write(ctx context.Context, status *barchan.TemplateBuildStatus) error {
	if apiequality.Semantic.DeepEqual(&w.build.Status, status) {
		return nil
	}
	b := w.build.DeepCopy()
	b.Status = *status
	if err := w.r.Client.Status().Update(ctx, b); err != nil {
		return fmt.Errorf("write status of build %s: %w", b.Name, err)
	}
	w.build = b
	failpoint.Reach("templatebuild/status")
	return nil
}

// templateBase returns the base of a template, with its files alone. The settings are those that its sandboxes have.
func templateBase(t *extensions.SandboxTemplate, revision, namespace string) (*base, error) {
	b := &base{blueprint: *t.Spec.SandboxBlueprint.DeepCopy(), key: hashOf(form, "template", t.Namespace, t.Name, revision), prepared: true}
	if n := len(b.blueprint.PodTemplate.Spec.Containers); n != 1 {
		return nil, refuse(barchan.BuildStepBase, "spec.from.templateName: template '%s' has %d containers; a build starts from one of a single container", t.Name, n)
	}
	if len(b.blueprint.VolumeClaimTemplates) > 0 {
		return nil, refuse(barchan.BuildStepBase, "spec.from.templateName: template '%s' has volumes, which a build does not keep", t.Name)
	}
	if s := t.Spec.Barchan; s != nil && s.Sandbox != nil {
		b.policies = s.Sandbox.DeepCopy()
		if from := b.policies.Restore; from != nil {
			if t.Namespace != namespace {
				return nil, refuse(barchan.BuildStepBase, "spec.from.templateName: template '%s' starts from a checkpoint of another namespace", t.Name)
			}
			b.checkpoint = from.CheckpointName
		}
		b.settings.User = b.policies.DefaultUser
		b.policies.Restore, b.policies.WarmUp = nil, nil
	}
	c := &b.blueprint.PodTemplate.Spec.Containers[0]
	b.settings.Workdir = c.WorkingDir
	return b, nil
}
