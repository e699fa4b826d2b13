package cache

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
)

// Checkpoint returns one checkpoint by name.
func (c *Cache) Checkpoint(ctx context.Context, key types.NamespacedName) (*barchan.Checkpoint, error) {
	return read(ctx, c.memory(), key, &barchan.Checkpoint{})
}

// Checkpoints returns the checkpoints of a namespace, or of all if it is empty.
func (c *Cache) Checkpoints(ctx context.Context, namespace string) ([]barchan.Checkpoint, error) {
	return copies(shared[*barchan.Checkpoint](ctx, c, toolscache.NamespaceIndex, namespace))
}

// Unfinished returns the checkpoints that are still to be taken of a sandbox.
func (c *Cache) Unfinished(ctx context.Context, source types.NamespacedName) ([]barchan.Checkpoint, error) {
	found, err := shared[*barchan.Checkpoint](ctx, c, indexUnfinished, source.Name)
	return copies(in(source.Namespace, found), err)
}

// WarmCheckpoints returns the checkpoints of a template's warm-up, of any revision and in any phase, in a
// namespace, or in all if that is empty.
func (c *Cache) WarmCheckpoints(ctx context.Context, namespace string, template types.NamespacedName) ([]barchan.Checkpoint, error) {
	found, err := shared[*barchan.Checkpoint](ctx, c, indexWarm, template.String())
	return copies(in(namespace, found), err)
}

// RestoringFrom returns the sandboxes whose specification names a checkpoint, started or not.
func (c *Cache) RestoringFrom(ctx context.Context, checkpoint types.NamespacedName) ([]agents.Sandbox, error) {
	found, err := shared[*agents.Sandbox](ctx, c, indexRestore, checkpoint.Name)
	return copies(in(checkpoint.Namespace, found), err)
}

// TemplatesFrom returns the templates whose sandboxes start from a checkpoint.
func (c *Cache) TemplatesFrom(ctx context.Context, checkpoint types.NamespacedName) ([]extensions.SandboxTemplate, error) {
	found, err := shared[*extensions.SandboxTemplate](ctx, c, indexTemplateOrigin, checkpoint.Name)
	return copies(in(checkpoint.Namespace, found), err)
}
