package cache

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

// Volume returns one volume by name.
func (c *Cache) Volume(ctx context.Context, key types.NamespacedName) (*barchan.Volume, error) {
	return read(ctx, c.memory(), key, &barchan.Volume{})
}

// VolumeByID returns the volume that has the ID.
func (c *Cache) VolumeByID(ctx context.Context, id string) (*barchan.Volume, error) {
	found, err := shared[*barchan.Volume](ctx, c, indexVolumeID, id)
	if err != nil {
		return nil, fmt.Errorf("find volume: %w", err)
	}
	return first(found, "volume")
}

// Volumes returns the volumes of a namespace, or of all if it is empty.
func (c *Cache) Volumes(ctx context.Context, namespace string) ([]barchan.Volume, error) {
	return copies(shared[*barchan.Volume](ctx, c, toolscache.NamespaceIndex, namespace))
}

// WaitVolume is [Wait] for a volume.
func (c *Cache) WaitVolume(ctx context.Context, key types.NamespacedName, done func(*barchan.Volume) (bool, error)) (*barchan.Volume, error) {
	return Wait(ctx, c, key, done)
}

// Mounting returns the sandboxes that mount a volume, paused ones too. The cache shares them: the caller must not change them.
func (c *Cache) Mounting(ctx context.Context, volume types.NamespacedName) ([]*agents.Sandbox, error) {
	found, err := shared[*agents.Sandbox](ctx, c, indexMounts, volume.Name)
	return in(volume.Namespace, found), err
}
