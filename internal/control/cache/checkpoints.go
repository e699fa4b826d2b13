package cache

import (
	"context"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

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
	return c.checkpoints(ctx, client.InNamespace(namespace))
}

// Unfinished returns the checkpoints that are still to be taken of a sandbox.
func (c *Cache) Unfinished(ctx context.Context, source types.NamespacedName) ([]barchan.Checkpoint, error) {
	return c.checkpoints(ctx, client.InNamespace(source.Namespace), client.MatchingFields{indexUnfinished: source.Name})
}

// WarmCheckpoints returns the checkpoints of a template's warm-up, of any revision and in any phase, in a
// namespace, or in all if that is empty.
func (c *Cache) WarmCheckpoints(ctx context.Context, namespace string, template types.NamespacedName) ([]barchan.Checkpoint, error) {
	return c.checkpoints(ctx, client.InNamespace(namespace), client.MatchingFields{indexWarm: template.String()})
}

func (c *Cache) checkpoints(ctx context.Context, opts ...client.ListOption) ([]barchan.Checkpoint, error) {
	var list barchan.CheckpointList
	return items(ctx, c, &list, &list.Items, "checkpoints", opts...)
}

// RestoringFrom returns the sandboxes whose specification names a checkpoint, started or not.
func (c *Cache) RestoringFrom(ctx context.Context, checkpoint types.NamespacedName) ([]agents.Sandbox, error) {
	return c.sandboxes(ctx, client.InNamespace(checkpoint.Namespace), client.MatchingFields{indexRestore: checkpoint.Name})
}

// TemplatesFrom returns the templates whose sandboxes start from a checkpoint.
func (c *Cache) TemplatesFrom(ctx context.Context, checkpoint types.NamespacedName) ([]extensions.SandboxTemplate, error) {
	var list extensions.SandboxTemplateList
	return items(ctx, c, &list, &list.Items, "templates of checkpoint "+checkpoint.String(), client.InNamespace(checkpoint.Namespace), client.MatchingFields{indexTemplateOrigin: checkpoint.Name})
}
