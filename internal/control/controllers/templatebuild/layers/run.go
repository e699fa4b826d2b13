package layers

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/builds"
)

// topmost returns how many layers exist already.
func (w *Work) topmost(ctx context.Context, layers []layer) (int, error) {
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
func (w *Work) cached(c *chain, layers []layer) {
	for i := range layers {
		for k, step := range layers[i].steps {
			w.Log.Step = c.step(strconv.Itoa(layers[i].first + k + 1))
			w.Log.Say(builds.LevelInfo, "CACHED %s", textOf(&step))
			w.Build.Status.CachedSteps++
		}
	}
}

// key is of an object of the build's namespace.
func (w *Work) key(name string) client.ObjectKey {
	return client.ObjectKey{Namespace: w.Build.Namespace, Name: name}
}

// touch notes that a layer is used.
func (w *Work) touch(ctx context.Context, c *barchan.Checkpoint) error {
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
