package fakecluster

import (
	"context"
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Volume reads one volume.
func (c *Cluster) Volume(ctx context.Context, key types.NamespacedName) (*barchan.Volume, error) {
	return get(ctx, c.Client, key, &barchan.Volume{})
}

// Volumes lists a namespace.
func (c *Cluster) Volumes(ctx context.Context, namespace string) ([]barchan.Volume, error) {
	var list barchan.VolumeList
	err := c.List(ctx, &list, client.InNamespace(namespace))
	return list.Items, err
}

// VolumeByID reads one volume.
func (c *Cluster) VolumeByID(ctx context.Context, id string) (*barchan.Volume, error) {
	all, err := c.Volumes(ctx, "")
	for i := range all {
		if sandbox.VolumeIDOf(all[i].UID) == id {
			return &all[i], nil
		}
	}
	return nil, errors.Join(err, fmt.Errorf("volume: %w", errs.ErrNotFound))
}

// WaitVolume waits as the cache does.
func (c *Cluster) WaitVolume(ctx context.Context, key types.NamespacedName, done func(*barchan.Volume) (bool, error)) (*barchan.Volume, error) {
	return wait(ctx, c, "volume", key, func() *barchan.Volume { return &barchan.Volume{} }, done)
}
