package artifact

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/client/cli/terminal"
)

// CheckpointCommand is the former noun for snapshots as objects, for scripts.
func CheckpointCommand(a *app.App) *cobra.Command {
	cmd := app.NounCommand("checkpoint", "Deprecated: use `barchan snapshot`",
		app.ListCommand(a, snapshotObjects()), a.RemoveCommand("Delete snapshots", app.CheckpointKind()), checkpointShowCommand(a),
		snapshotExportCommand(a), snapshotImportCommand(a))
	cmd.Hidden = true
	return cmd
}

// snapshotObjects lists snapshots of any namespace as objects, with the server's own checkpoints.
func snapshotObjects() app.Lister[barchan.Checkpoint] {
	return app.Lister[barchan.Checkpoint]{
		Short: "List checkpoints",
		Find:  app.AllOf[barchan.Checkpoint](app.CheckpointsResource),
		Columns: app.Columns[barchan.Checkpoint]{
			Header: []string{"NAMESPACE", "ID", "NAME", "SANDBOX", "TEMPLATE", "PHASE", "CONTENT", "SIZE", "PURPOSE", "AGE", "STATUS"},
			Row: func(c *barchan.Checkpoint) []string {
				return []string{
					c.Namespace, terminal.Dash(c.SnapshotID()), c.Name, c.Spec.SandboxName, terminal.Dash(templateOf(c)), checkpointPhase(c), terminal.Dash(string(c.Status.Content)),
					quantity(c.Status.Size), terminal.Dash(c.Labels[barchan.LabelPurpose]), terminal.Since(c.CreationTimestamp.Time), checkpointMessage(c),
				}
			},
		},
	}
}

func checkpointPhase(c *barchan.Checkpoint) string {
	if c.DeletionTimestamp != nil {
		return "Deleting"
	}
	return terminal.Dash(string(c.Status.Phase))
}

// templateOf returns the template of the source; of an import, that on the source machine.
func templateOf(c *barchan.Checkpoint) string {
	if c.Status.Source == nil {
		return ""
	}
	return c.Status.Source.TemplateName
}

func quantity(q *resource.Quantity) string {
	if q == nil {
		return "-"
	}
	return terminal.Size(q.Value())
}

// checkpointMessage returns the controller's message about one in progress or failed.
func checkpointMessage(c *barchan.Checkpoint) string {
	ready := meta.FindStatusCondition(c.Status.Conditions, barchan.ConditionReady)
	if ready == nil || (c.Status.Phase == barchan.CheckpointReady && c.DeletionTimestamp == nil) {
		return ""
	}
	return ready.Message
}

func checkpointShowCommand(a *app.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "show SNAPSHOT", Short: "Show one snapshot",
		Long: "Show one snapshot, and what is needed to restore it. --json prints the object.",
	}
	a.JSONFlag(cmd)
	return a.ObjectCommand(cmd, func(ctx context.Context, k *app.Kube, namespace, text string) error {
		return showSnapshotObject(ctx, a, k, namespace, text)
	})
}

// showSnapshotObject shows a snapshot with the fields for cluster administrators.
func showSnapshotObject(ctx context.Context, a *app.App, k *app.Kube, namespace, text string) error {
	name, err := k.SnapshotObject(ctx, namespace, text)
	if err != nil {
		return err
	}
	if a.JSON {
		return app.CheckpointKind().Missing(a.ShowObject(ctx, k, app.CheckpointsResource, namespace, name), namespace, text)
	}
	c, err := app.Get[barchan.Checkpoint](ctx, k, app.CheckpointsResource, namespace, name)
	if err != nil {
		return app.CheckpointKind().Missing(err, namespace, text)
	}
	showCheckpoint(a, &c)
	return nil
}

func showCheckpoint(a *app.App, c *barchan.Checkpoint) {
	line := func(name, value string) { a.Field(11, name, value) }
	line("ID", c.SnapshotID())
	line("Checkpoint", c.Namespace+"/"+c.Name)
	line("Purpose", c.Labels[barchan.LabelPurpose])
	line("Phase", checkpointPhase(c))
	line("Status", checkpointMessage(c))
	line("Content", string(c.Status.Content))
	line("Size", quantity(c.Status.Size)+", of which memory "+quantity(c.Status.MemorySize))
	line("Digest", c.Status.Digest)
	line("Image", c.Status.Image)
	line("Runtime", strings.TrimSpace(c.Status.Runtime+" "+c.Status.RuntimeBuild))
	line("CPU needs", strings.Join(c.Status.CPUFeatures, " "))
	line("Sandbox", c.Spec.SandboxName)
	if from := c.Status.Source; from != nil {
		line("Its ID", from.ID)
		line("Template", strings.TrimPrefix(from.TemplateNamespace+"/"+from.TemplateName, "/"))
		line("Node", from.Node)
		line("Secrets", yesNo(from.Secrets))
	}
	if at := c.Status.CompletedAt; at != nil {
		line("Made", at.Local().Format("2006-01-02 15:04:05")+", "+terminal.Since(at.Time)+" ago")
		if ttl := c.Spec.TTLSeconds; ttl != nil {
			line("Ends in", terminal.Until(at.Add(time.Duration(*ttl)*time.Second)))
		}
	}
}
