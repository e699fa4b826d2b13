package templatebuild

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

const (
	// keptBuilds is how many ended builds of a template are kept that no tag refers to, triggerTTL how long one that nobody starts.
	keptBuilds = 10
	triggerTTL = 24 * time.Hour
	// layerTTL is how long a layer that no template starts from is kept after its last use, maxKept how many of a namespace. One with
	// memory, of which each build has its own, is kept for memoryTTL.
	layerTTL  = 7 * 24 * time.Hour
	memoryTTL = time.Hour
	maxKept   = 200
)

// prune removes what no build and no template needs any more: old builds and layers of a namespace, and logs of builds that are gone.
func (r *reconciler) prune(ctx context.Context, namespace string) error {
	return errors.Join(r.pruneLogs(ctx), r.pruneBuilds(ctx, namespace), r.pruneLayers(ctx, namespace))
}

// pruneLogs reads the logs before the builds, for a log is younger than its build.
func (r *reconciler) pruneLogs(ctx context.Context) error {
	logs, err := r.Store.Builds()
	if err != nil {
		return fmt.Errorf("list logs of builds: %w", err)
	}
	all, err := r.Objects.TemplateBuilds(ctx, "")
	if err != nil {
		return fmt.Errorf("list builds: %w", err)
	}
	known := sets.New[types.UID]()
	for i := range all {
		known.Insert(all[i].UID)
	}
	for _, uid := range logs {
		if !known.Has(uid) {
			err = errors.Join(err, r.Store.RemoveLog(uid))
		}
	}
	return err
}

func (r *reconciler) pruneBuilds(ctx context.Context, namespace string) error {
	all, err := r.Objects.TemplateBuilds(ctx, namespace)
	if err != nil {
		return fmt.Errorf("list builds: %w", err)
	}
	for i := range all {
		if b := &all[i]; b.Spec.From == nil && b.DeletionTimestamp == nil && time.Since(b.CreationTimestamp.Time) > triggerTTL {
			err = errors.Join(err, r.remove(ctx, b))
		}
	}
	all = slices.DeleteFunc(all, func(b barchan.TemplateBuild) bool { return !b.Ended() || b.DeletionTimestamp != nil })
	slices.SortFunc(all, func(a, b barchan.TemplateBuild) int {
		return cmp.Or(b.CreationTimestamp.Compare(a.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	templates, listErr := r.Objects.Templates(ctx, namespace)
	if listErr != nil {
		return errors.Join(err, fmt.Errorf("list templates: %w", listErr))
	}
	tagged := sets.New[string]()
	for i := range templates {
		tagged.Insert(templates[i].Labels[barchan.LabelBuild])
	}
	count := map[string]int{}
	for i := range all {
		b := &all[i]
		if tagged.Has(b.Name) {
			continue
		}
		if count[b.Spec.TemplateName]++; count[b.Spec.TemplateName] > keptBuilds {
			err = errors.Join(err, r.remove(ctx, b))
		}
	}
	return err
}

func (r *reconciler) pruneLayers(ctx context.Context, namespace string) error {
	all, err := r.Objects.Checkpoints(ctx, namespace)
	if err != nil {
		return fmt.Errorf("list checkpoints: %w", err)
	}
	used := sets.New[string]()
	templates, err := r.Objects.Templates(ctx, namespace)
	if err != nil {
		return fmt.Errorf("list templates: %w", err)
	}
	for i := range templates {
		if b := templates[i].Spec.Barchan; b != nil && b.Sandbox != nil && b.Sandbox.Restore != nil {
			used.Insert(b.Sandbox.Restore.CheckpointName)
		}
	}
	for _, c := range unused(all, used, time.Now()) {
		err = errors.Join(err, r.remove(ctx, &c))
	}
	return err
}

// unused returns the layers to remove: those that no template uses, and that were not used for long, or are too many.
func unused(all []barchan.Checkpoint, used sets.Set[string], now time.Time) (gone []barchan.Checkpoint) {
	layers := slices.DeleteFunc(slices.Clone(all), func(c barchan.Checkpoint) bool {
		return c.Labels[barchan.LabelPurpose] != barchan.PurposeBuild || c.DeletionTimestamp != nil || used.Has(c.Name)
	})
	slices.SortFunc(layers, func(a, b barchan.Checkpoint) int { return usedAt(&b).Compare(usedAt(&a)) })
	for i, c := range layers {
		ttl := layerTTL
		if c.Spec.Content == barchan.ContentMemoryAndFiles {
			ttl = memoryTTL
		}
		if i >= maxKept || now.Sub(usedAt(&c)) > ttl {
			gone = append(gone, c)
		}
	}
	return gone
}

func usedAt(c *barchan.Checkpoint) time.Time {
	if at := barchan.ExactTime(c, barchan.AnnotationUsedAt); !at.IsZero() {
		return at
	}
	return c.CreationTimestamp.Time
}

// remove deletes an object, unless it has changed.
func (r *reconciler) remove(ctx context.Context, o client.Object) error {
	uid, version := o.GetUID(), o.GetResourceVersion()
	err := r.Client.Delete(ctx, o, client.Preconditions{UID: &uid, ResourceVersion: &version})
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete %s: %w", o.GetName(), err)
	}
	return nil
}
