package checkpoint

import (
	"context"
	"fmt"
	"strings"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// shown is how many users of a checkpoint are named.
const shown = 5

// users says in words who still needs a checkpoint; empty if nobody does. One that is not ready is
// of use to nobody. What the cache knows of no users is asked of the API server: but for a fork,
// whose sandboxes were made by whoever deletes it.
func (r *reconciler) users(ctx context.Context, c *barchan.Checkpoint) (string, error) {
	if c.Status.Phase != barchan.CheckpointReady {
		return "", nil
	}
	key := client.ObjectKeyFromObject(c)
	templates, err := r.objects.TemplatesFrom(ctx, key)
	if err != nil {
		return "", err
	}
	boxes, err := r.objects.RestoringFrom(ctx, key)
	if err != nil {
		return "", err
	}
	if text := usersOf(c, templates, boxes); text != "" || c.Labels[barchan.LabelPurpose] == barchan.PurposeFork {
		return text, nil
	}
	var liveTemplates extensions.SandboxTemplateList
	if err := r.client.List(ctx, &liveTemplates, client.InNamespace(c.Namespace)); err != nil {
		return "", fmt.Errorf("list templates: %w", err)
	}
	var liveBoxes agents.SandboxList
	if err := r.client.List(ctx, &liveBoxes, client.InNamespace(c.Namespace)); err != nil {
		return "", fmt.Errorf("list sandboxes: %w", err)
	}
	return usersOf(c, liveTemplates.Items, liveBoxes.Items), nil
}

// usersOf names those of templates and sandboxes that need a checkpoint: of the sandboxes, those that
// have not run yet.
func usersOf(c *barchan.Checkpoint, templates []extensions.SandboxTemplate, boxes []agents.Sandbox) string {
	var names []string
	for i := range templates {
		if b := templates[i].Spec.Barchan; b != nil && originOf(b.Sandbox) == c.Name && templates[i].DeletionTimestamp == nil {
			names = append(names, "template "+templates[i].Name)
		}
	}
	for i := range boxes {
		if needs(&boxes[i]) == c.Name {
			names = append(names, "sandbox "+boxes[i].Name+", which has not run yet")
		}
	}
	if len(names) == 0 {
		return ""
	}
	more := ""
	if len(names) > shown {
		names, more = names[:shown], fmt.Sprintf(" and %d more", len(names)-shown)
	}
	return "it was deleted, and goes when it is needed no more by " + strings.Join(names, ", ") + more
}

func originOf(b *agents.BarchanSpec) string {
	if b == nil || b.Restore == nil {
		return ""
	}
	return b.Restore.CheckpointName
}

// needs names the checkpoint that a sandbox is yet to start from.
func needs(s *agents.Sandbox) string {
	if sandbox.HasRun(s) || sandbox.DeadForGood(s) {
		return ""
	}
	return originOf(s.Spec.Barchan)
}
