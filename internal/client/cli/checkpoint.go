package cli

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

// checkpointCommand is the former noun for snapshots as objects, for scripts.
func (a *app) checkpointCommand() *cobra.Command {
	cmd := nounCommand("checkpoint", "Deprecated: use `barchan snapshot`",
		lsCommand(a, snapshotObjects()), a.rmCommand("Delete snapshots", checkpointKind()), a.checkpointShowCommand(),
		a.snapshotExportCommand(), a.snapshotImportCommand())
	cmd.Hidden = true
	return cmd
}

// snapshotObjects lists snapshots of any namespace as objects, with the server's own checkpoints.
func snapshotObjects() lister[barchan.Checkpoint] {
	return lister[barchan.Checkpoint]{
		short: "List checkpoints",
		find:  allOf[barchan.Checkpoint](checkpointsResource()),
		columns: columns[barchan.Checkpoint]{
			header: []string{"NAMESPACE", "ID", "NAME", "SANDBOX", "TEMPLATE", "PHASE", "CONTENT", "SIZE", "PURPOSE", "AGE", "STATUS"},
			row: func(c *barchan.Checkpoint) []string {
				return []string{
					c.Namespace, dash(c.SnapshotID()), c.Name, c.Spec.SandboxName, dash(templateOf(c)), checkpointPhase(c), dash(string(c.Status.Content)),
					quantity(c.Status.Size), dash(c.Labels[barchan.LabelPurpose]), since(c.CreationTimestamp.Time), checkpointMessage(c),
				}
			},
		},
	}
}

func checkpointPhase(c *barchan.Checkpoint) string {
	if c.DeletionTimestamp != nil {
		return "Deleting"
	}
	return dash(string(c.Status.Phase))
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
	return size(q.Value())
}

// checkpointMessage returns the controller's message about one in progress or failed.
func checkpointMessage(c *barchan.Checkpoint) string {
	ready := meta.FindStatusCondition(c.Status.Conditions, barchan.ConditionReady)
	if ready == nil || (c.Status.Phase == barchan.CheckpointReady && c.DeletionTimestamp == nil) {
		return ""
	}
	return ready.Message
}

func (a *app) checkpointShowCommand() *cobra.Command {
	var s scope
	cmd := &cobra.Command{
		Use: "show SNAPSHOT", Short: "Show one snapshot",
		Long: "Show one snapshot, and what is needed to restore it. --json prints the object.",
		Args: exactly("SNAPSHOT"),
	}
	s.flags(cmd, false)
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.showSnapshotObject(cmd.Context(), s.namespace, args[0])
	}
	return cmd
}

// showSnapshotObject shows a snapshot with the fields for cluster administrators.
func (a *app) showSnapshotObject(ctx context.Context, namespace, text string) error {
	k, err := a.kube(ctx)
	if err != nil {
		return err
	}
	name, err := k.snapshotObject(ctx, namespace, text)
	if err != nil {
		return err
	}
	if a.json {
		return checkpointKind().missing(a.showObject(ctx, checkpointsResource(), namespace, name), namespace, text)
	}
	c, err := getAs[barchan.Checkpoint](ctx, k, checkpointsResource(), namespace, name)
	if err != nil {
		return checkpointKind().missing(err, namespace, text)
	}
	a.showCheckpoint(&c)
	return nil
}

func (a *app) showCheckpoint(c *barchan.Checkpoint) {
	line := func(name, value string) { a.field(11, name, value) }
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
		line("Made", at.Local().Format("2006-01-02 15:04:05")+", "+since(at.Time)+" ago")
		if ttl := c.Spec.TTLSeconds; ttl != nil {
			line("Ends in", left(at.Add(time.Duration(*ttl)*time.Second)))
		}
	}
}
