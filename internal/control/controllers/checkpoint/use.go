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

// shown is the maximum number of users in a message.
const shown = 5

// users describes the users of a checkpoint; empty without any. A checkpoint that is not ready has none. If the
// cache shows none, the API server is read too, except for a fork: its creator also deletes it.
func (r *reconciler) users(ctx context.Context, c *barchan.Checkpoint) (string, error) {
	if c.Status.Phase != barchan.CheckpointReady {
		return "", nil
	}
	key := client.ObjectKeyFromObject(c)
	templates, err := r.Objects.TemplatesFrom(ctx, key)
	if err != nil {
		return "", err
	}
	boxes, err := r.Objects.RestoringFrom(ctx, key)
	if err != nil {
		return "", err
	}
	if text := usersOf(c, templates, boxes); text != "" || c.Labels[barchan.LabelPurpose] == barchan.PurposeFork {
		return text, nil
	}
	var liveTemplates extensions.SandboxTemplateList
	if err := r.Client.List(ctx, &liveTemplates, client.InNamespace(c.Namespace)); err != nil {
		return "", fmt.Errorf("list templates: %w", err)
	}
	var liveBoxes agents.SandboxList
	if err := r.Client.List(ctx, &liveBoxes, client.InNamespace(c.Namespace)); err != nil {
		return "", fmt.Errorf("list sandboxes: %w", err)
	}
	return usersOf(c, liveTemplates.Items, liveBoxes.Items), nil
}

// usersOf returns the names of the templates, and of the sandboxes that have not run yet, that use a checkpoint.
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

// needs returns the checkpoint from which a sandbox has yet to start.
func needs(s *agents.Sandbox) string {
	if sandbox.HasRun(s) || sandbox.DeadForGood(s) {
		return ""
	}
	return originOf(s.Spec.Barchan)
}
