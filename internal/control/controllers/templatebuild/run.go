package templatebuild

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/builds"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild/buildlog"
	"github.com/barchan-dev/barchan/internal/control/controllers/templatebuild/layers"
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
	*layers.Work
	r *reconciler
}

// run runs a build and records its end. An error is to be tried again.
func (r *reconciler) run(ctx context.Context, b *barchan.TemplateBuild) error {
	began := time.Now()
	w := &work{r: r}
	w.Work = r.layers.Begin(b, layers.Callbacks{FindBase: w.findBase, Write: w.write})
	if b.Status.Phase == barchan.BuildBuilding && !r.tried(b.UID) {
		w.Log.Say(builds.LevelInfo, "the server was started anew; the build goes on")
	}
	if err := r.layers.RemoveSandboxes(ctx, b); err != nil { // of an earlier process
		return err
	}
	err := w.do(ctx)
	defer func() { // also of one that was canceled
		last, stop := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer stop()
		if err := r.layers.RemoveSandboxes(last, b); err != nil {
			r.Log.WarnContext(last, "sandbox of a template build not removed", telemetry.Namespace, b.Namespace, telemetry.Name, b.Name, telemetry.Error, err)
		}
	}()
	failed, is := errors.AsType[*buildlog.Failure](err)
	switch {
	case err == nil:
		r.Log.InfoContext(ctx, "template built", telemetry.Namespace, b.Namespace, telemetry.Name, b.Name, telemetry.Template, b.Spec.TemplateName, telemetry.Duration, time.Since(began))
		return nil
	case errors.Is(context.Cause(ctx), errCanceled):
		return err
	case ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded): // shutdown: the next process goes on
		return err
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		failed = &buildlog.Failure{Step: w.Log.Step, Message: fmt.Sprintf("the build took longer than %s", buildTimeout)}
	case !is && r.attempt(b.UID, err):
		w.Log.Say(builds.LevelWarn, "%s; it is tried again", errs.Text(err))
		return errors.Join(err, w.wait(ctx, errs.Text(err)))
	case !is:
		failed = &buildlog.Failure{Step: w.Log.Step, Message: errs.Text(err)}
	}
	return w.fail(context.WithoutCancel(ctx), failed)
}

// do runs the layers that are missing, and writes the template.
func (w *work) do(ctx context.Context) error {
	if err := w.begin(ctx); err != nil {
		return err
	}
	if err := w.Plan(ctx); err != nil {
		return err
	}
	if err := w.checkTags(ctx); err != nil { // before any work
		return err
	}
	if err := w.Run(ctx); err != nil {
		return err
	}
	return w.finish(ctx)
}

// begin records that the build runs.
func (w *work) begin(ctx context.Context) error {
	status := w.Build.Status.DeepCopy()
	status.Phase, status.CachedSteps, status.FailedStep = barchan.BuildBuilding, 0, ""
	if status.StartedAt == nil {
		status.StartedAt = new(metav1.Now())
		w.Log.Say(builds.LevelInfo, "building template %s", w.Build.Spec.TemplateName)
	}
	w.ready(status, metav1.ConditionFalse, reasonBuilding, "its steps are run")
	return w.write(ctx, status)
}

// findBase finds what the build, or a stage, starts from.
func (w *work) findBase(ctx context.Context, from *barchan.BuildSource) (*layers.Base, error) {
	if from.Image != "" {
		digest := ""
		if w.r.ImageDigest != nil {
			var err error
			var secrets []string
			for _, ref := range from.ImagePullSecrets {
				secrets = append(secrets, ref.Name)
			}
			digest, err = w.r.ImageDigest(ctx, w.Build.Namespace, from.Image, secrets)
			if errors.Is(err, errs.ErrNotFound) || errors.Is(err, errs.ErrInvalid) || errors.Is(err, errs.ErrForbidden) {
				return nil, buildlog.Refuse(barchan.BuildStepBase, "spec.from.image: %s", errs.Text(err))
			} else if err != nil {
				return nil, fmt.Errorf("find image %s: %w", from.Image, err)
			}
		}
		w.Starts("image " + from.Image)
		return layers.ImageBase(from.Image, digest, from.ImagePullSecrets...), nil
	}
	for _, namespace := range []string{w.Build.Namespace, w.r.PublicNamespace} {
		t, revision, err := w.r.Objects.CurrentTemplate(ctx, types.NamespacedName{Namespace: namespace, Name: from.TemplateName})
		if errors.Is(err, errs.ErrNotFound) || (err == nil && namespace != w.Build.Namespace && (t.Spec.Barchan == nil || !t.Spec.Barchan.Public)) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read template %s/%s: %w", namespace, from.TemplateName, err)
		}
		w.Starts("template " + from.TemplateName)
		return layers.TemplateBase(t, revision, w.Build.Namespace)
	}
	return nil, buildlog.Refuse(barchan.BuildStepBase, "spec.from.templateName: template '%s' not found", from.TemplateName)
}

// wait records why a build is tried again.
func (w *work) wait(ctx context.Context, why string) error {
	status := w.Build.Status.DeepCopy()
	w.ready(status, metav1.ConditionFalse, reasonWaiting, why)
	return w.write(ctx, status)
}

func (w *work) fail(ctx context.Context, f *buildlog.Failure) error {
	w.Log.Step = f.Step
	w.Log.Say(builds.LevelError, "%s", f.Message)
	status := w.Build.Status.DeepCopy()
	status.Phase, status.FailedStep, status.CompletedAt = barchan.BuildFailed, f.Step, new(metav1.Now())
	w.ready(status, metav1.ConditionFalse, reasonFailed, f.Message)
	if err := w.write(ctx, status); err != nil {
		return err
	}
	w.r.Log.InfoContext(ctx, "template build failed", telemetry.Namespace, w.Build.Namespace, telemetry.Name, w.Build.Name, "step", f.Step, telemetry.Reason, f.Message)
	if w.r.Events != nil {
		w.r.Events.Eventf(w.Build, nil, corev1.EventTypeWarning, reasonFailed, "Build", "%s", f.Message)
	}
	return nil
}

func (w *work) ready(status *barchan.TemplateBuildStatus, is metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: barchan.ConditionReady, Status: is, Reason: reason, Message: message, ObservedGeneration: w.Build.Generation,
	})
}

// write writes a changed status with the last lines of the log, conditional on the version read: that of another write that was between is read again.
func (w *work) write(ctx context.Context, status *barchan.TemplateBuildStatus) error {
	status.Log = w.Log.Tail()
	if apiequality.Semantic.DeepEqual(&w.Build.Status, status) {
		return nil
	}
	b := w.Build.DeepCopy()
	b.Status = *status
	err := w.r.Client.Status().Update(ctx, b)
	for range writeTries { // a label, say, is written by others; the status is not
		if !apierrors.IsConflict(err) {
			break
		}
		now := &barchan.TemplateBuild{}
		if err := w.r.Client.Get(ctx, client.ObjectKeyFromObject(b), now); err != nil {
			return fmt.Errorf("read build %s again: %w", b.Name, err)
		}
		if now.UID != b.UID {
			return fmt.Errorf("write status of build %s: another has its name: %w", b.Name, err)
		}
		b.ObjectMeta = now.ObjectMeta
		err = w.r.Client.Status().Update(ctx, b)
	}
	if err != nil {
		return fmt.Errorf("write status of build %s: %w", b.Name, err)
	}
	w.Build = b
	failpoint.Reach("templatebuild/status")
	return nil
}
