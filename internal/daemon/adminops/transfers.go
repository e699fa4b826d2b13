package adminops

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/base/portable"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
)

// transfers lets checkpoints leave the machine and come to it, for the admin API.
type transfers struct{ Server }

const (
	// importWrites bounds each write of an import's object.
	importWrites = 15 * time.Second
	// importReady bounds the wait for the controller to see the data.
	importReady = time.Minute
)

// progressEvery is the interval of progress events before an export is sent.
const progressEvery = 200 * time.Millisecond

// Export describes a checkpoint that is ready.
func (t transfers) Export(
	ctx context.Context, req adminclient.CheckpointExport, progress func(adminclient.Event),
) (*portable.Layout, []string, func(), error) {
	p, err := t.own(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	c := &barchan.Checkpoint{}
	err = p.Cache.Live().Get(ctx, types.NamespacedName{Namespace: req.Namespace, Name: req.Name}, c)
	if apierrors.IsNotFound(err) {
		return nil, nil, nil, fmt.Errorf("checkpoint %s/%s: %w", req.Namespace, req.Name, errs.ErrNotFound)
	} else if err != nil {
		return nil, nil, nil, fmt.Errorf("read checkpoint %s/%s: %w", req.Namespace, req.Name, err)
	}
	source := c.Status.Source
	if c.Status.Phase != barchan.CheckpointReady || c.DeletionTimestamp != nil || source == nil {
		return nil, nil, nil, fmt.Errorf("checkpoint %s/%s is not ready (%s): %w", req.Namespace, req.Name, c.Status.Phase, errs.ErrConflict)
	}
	if source.Secrets && !req.AllowSecrets {
		return nil, nil, nil, fmt.Errorf("checkpoint %s/%s holds what the claim of its sandbox brought, and spec.barchan.fork.secrets does not let others have it; allowSecrets exports it all the same: %w",
			req.Namespace, req.Name, errs.ErrForbidden)
	}
	l, release, err := p.Machine.Node.ExportCheckpoint(ctx, sandbox.CheckpointRef{Namespace: c.Namespace, Name: c.Name, UID: c.UID}, portable.Config{
		Version: t.cfg.Version, Name: c.Name,
		Source: portable.Source{
			SandboxName: c.Spec.SandboxName, ID: source.ID, TemplateName: source.TemplateName, Blueprint: source.Blueprint.Raw, Policies: source.Policies.Raw, Secrets: source.Secrets,
		},
	}, !req.WithoutImage, measuring(progress))
	if err != nil {
		return nil, nil, nil, err
	}
	var warnings []string
	if l.Config.Memory != nil {
		warnings = append(warnings, "its memory contains the sandbox's secrets, such as keys and passwords; share it only with recipients who may have them")
	}
	return l, warnings, release, nil
}

// measuring reports at intervals how much of a checkpoint has been read.
func measuring(progress func(adminclient.Event)) func(done, total int64) {
	var last time.Time
	return func(done, total int64) {
		if now := time.Now(); now.Sub(last) >= progressEvery {
			last = now
			progress(adminclient.Event{Step: "measure", Done: min(done, total), Total: total, Bytes: true})
		}
	}
}

// Import makes an object, brings the data to the node under its UID, and waits until its controller has
// seen them.
func (t transfers) Import(
	ctx context.Context, req adminclient.CheckpointImport, tar io.Reader, progress func(adminclient.Event),
) (made adminclient.Imported, err error) {
	p, err := t.own(ctx)
	if err := errors.Join(err, t.cfg.Gate.Err()); err != nil {
		return made, err
	}
	in, err := portable.Read(tar)
	if err != nil {
		return made, err
	}
	warnings, err := p.Machine.Node.CheckImport(ctx, in.Head)
	if err != nil {
		return made, err
	}
	c, err := makeImport(ctx, p, req, in.Head)
	if err != nil {
		return made, err
	}
	progress(adminclient.Event{Step: "import"})
	ref := sandbox.CheckpointRef{Namespace: c.Namespace, Name: c.Name, UID: c.UID}
	if _, err := p.Machine.Node.ImportCheckpoint(ctx, ref, in); err != nil {
		return made, errors.Join(err, dropImport(ctx, p, c))
	}
	if err := t.finishImport(ctx, p, c); err != nil {
		return made, err
	}
	return adminclient.Imported{Namespace: c.Namespace, Name: c.Name, UID: string(c.UID), Warnings: warnings}, nil
}

// makeImport makes the object of an import, with what is known of its source.
func makeImport(ctx context.Context, p Parts, req adminclient.CheckpointImport, h *portable.Head) (*barchan.Checkpoint, error) {
	ctx, cancel := context.WithTimeout(ctx, importWrites)
	defer cancel()
	source, err := importedSource(h)
	if err != nil {
		return nil, err
	}
	c := &barchan.Checkpoint{ObjectMeta: metav1.ObjectMeta{Namespace: req.Namespace, Name: req.Name, Finalizers: []string{barchan.NodeFinalizer}}}
	if c.Name == "" {
		c.Name = h.Config.Name
	}
	c.Spec.SandboxName, c.Spec.Origin = h.Config.Source.SandboxName, barchan.OriginImport
	if h.Config.Memory == nil {
		c.Spec.Content = barchan.ContentFiles
	}
	barchan.SetCheckpointDefaults(c)
	noteImport(c)
	live := p.Cache.Live()
	switch err := live.Create(ctx, c); {
	case apierrors.IsAlreadyExists(err):
		return nil, fmt.Errorf("there is a checkpoint %s/%s already; choose another name: %w", c.Namespace, c.Name, errs.ErrConflict)
	case apierrors.IsInvalid(err), apierrors.IsNotFound(err), apierrors.IsBadRequest(err):
		return nil, fmt.Errorf("make checkpoint %s/%s: %w: %w", c.Namespace, c.Name, err, errs.ErrInvalid)
	case err != nil:
		return nil, fmt.Errorf("make checkpoint %s/%s: %w", c.Namespace, c.Name, err)
	}
	failpoint.Reach("import/made")
	err = change(ctx, p, c, func() error {
		c.Status.Source = source
		return live.Status().Update(ctx, c)
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("write the source of checkpoint %s/%s: %w", c.Namespace, c.Name, err), dropImport(ctx, p, c))
	}
	return c, nil
}

// change retries write on conflicts, each time on the current object.
func change(ctx context.Context, p Parts, c *barchan.Checkpoint, write func() error) error {
	uid := c.UID
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if err := p.Cache.Live().Get(ctx, client.ObjectKeyFromObject(c), c); err != nil {
			return err
		}
		if c.UID != uid {
			return fmt.Errorf("another one has its name: %w", errs.ErrConflict)
		}
		return write()
	})
}

// importedSource validates an artifact's source fields: the value must parse as its type.
func importedSource(h *portable.Head) (*barchan.CheckpointSource, error) {
	from := h.Config.Source
	// It is for people, and names nothing here: the template has no namespace, and no ID.
	if name := from.TemplateName; name != "" && len(validation.IsDNS1123Subdomain(name)) > 0 {
		return nil, fmt.Errorf("checkpoint artifact: config.source.templateName: %q is no name: %w", name, errs.ErrInvalid)
	}
	for _, x := range []struct {
		name string
		raw  json.RawMessage
		into any
	}{{"blueprint", from.Blueprint, &agents.SandboxBlueprint{}}, {"policies", from.Policies, &agents.BarchanSpec{}}} {
		if len(x.raw) == 0 {
			continue
		}
		if err := json.Unmarshal(x.raw, x.into); err != nil {
			return nil, fmt.Errorf("checkpoint artifact: config.source.%s: %w: %w", x.name, err, errs.ErrInvalid)
		}
	}
	return &barchan.CheckpointSource{
		ID: from.ID, TemplateName: from.TemplateName, Blueprint: runtime.RawExtension{Raw: from.Blueprint}, Policies: runtime.RawExtension{Raw: from.Policies}, Secrets: from.Secrets,
	}, nil
}

// dropImport removes the object of an import that failed; the node has nothing of it.
func dropImport(ctx context.Context, p Parts, c *barchan.Checkpoint) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), importWrites)
	defer cancel()
	err := p.Cache.Live().Delete(ctx, c, client.Preconditions{UID: &c.UID})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete checkpoint %s/%s: %w", c.Namespace, c.Name, err)
	}
	return nil
}

// noteImport records the time of an import's last action.
func noteImport(c *barchan.Checkpoint) {
	metav1.SetMetaDataAnnotation(&c.ObjectMeta, barchan.AnnotationImport, barchan.ExactNow())
}

// finishImport has the controller look at the data, and waits for its word.
func (t transfers) finishImport(ctx context.Context, p Parts, c *barchan.Checkpoint) error {
	ctx, cancel := context.WithTimeout(ctx, importReady)
	defer cancel()
	err := change(ctx, p, c, func() error {
		noteImport(c)
		return p.Cache.Live().Update(ctx, c)
	})
	if err != nil {
		return fmt.Errorf("notify the controller of checkpoint %s/%s: %w", c.Namespace, c.Name, err)
	}
	failpoint.Reach("import/noted")
	uid := c.UID
	_, err = p.Cache.WaitCheckpoint(ctx, client.ObjectKeyFromObject(c), func(now *barchan.Checkpoint) (bool, error) {
		switch {
		case now == nil || now.UID != uid:
			return false, fmt.Errorf("it was deleted: %w", errs.ErrConflict)
		case now.Status.Phase == barchan.CheckpointFailed:
			return false, fmt.Errorf("%s: %w", failure(now), errs.ErrUnavailable)
		default:
			return now.Status.Phase == barchan.CheckpointReady, nil
		}
	})
	if err != nil {
		return fmt.Errorf("wait for checkpoint %s/%s to be ready: %w", c.Namespace, c.Name, err)
	}
	t.log.InfoContext(ctx, "checkpoint imported", telemetry.Namespace, c.Namespace, telemetry.Name, c.Name)
	return nil
}

// failure is why a checkpoint has failed.
func failure(c *barchan.Checkpoint) string {
	if x := meta.FindStatusCondition(c.Status.Conditions, barchan.ConditionReady); x != nil {
		return x.Message
	}
	return "it has failed"
}
