package cli

import (
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
)

// checkpointCommand has what people may do to Checkpoint objects, beyond what `snapshot` does for a key.
func (a *app) checkpointCommand() *cobra.Command {
	return nounCommand("checkpoint", "Memory and files of sandboxes, of all namespaces",
		a.checkpointLsCommand(), a.rmCommand("Delete checkpoints", checkpointsResource()), a.checkpointShowCommand(),
		a.checkpointExportCommand(), a.checkpointImportCommand())
}

func (a *app) checkpointLsCommand() *cobra.Command {
	return lsCommand(a, lister[barchan.Checkpoint]{
		short: "List checkpoints",
		long: "List checkpoints. PURPOSE is fork or warm-up for those that the server makes and deletes by itself, and else the\n" +
			"ID by which the API knows a snapshot; STATUS says what one waits for that is not ready, or is deleted and still needed.",
		find:    allOf[barchan.Checkpoint](checkpointsResource()),
		columns: []string{"NAMESPACE", "NAME", "SANDBOX", "TEMPLATE", "PHASE", "CONTENT", "SIZE", "PURPOSE", "AGE", "STATUS"},
		states:  4,
		row: func(c *barchan.Checkpoint) []string {
			return []string{
				c.Namespace, c.Name, c.Spec.SandboxName, dash(templateOf(c)), checkpointPhase(c), dash(string(c.Status.Content)), quantity(c.Status.Size),
				dash(purpose(c)), since(c.CreationTimestamp.Time), checkpointMessage(c),
			}
		},
	})
}

func checkpointPhase(c *barchan.Checkpoint) string {
	if c.DeletionTimestamp != nil {
		return "Deleting"
	}
	return dash(string(c.Status.Phase))
}

// templateOf is the template that the source was made of; of one that was imported, where it came from.
func templateOf(c *barchan.Checkpoint) string {
	if c.Status.Source == nil {
		return ""
	}
	return c.Status.Source.TemplateName
}

// purpose is who wants a checkpoint.
func purpose(c *barchan.Checkpoint) string {
	if p := c.Labels[barchan.LabelPurpose]; p != "" {
		return p
	}
	if name := c.Labels[barchan.LabelSnapshot]; name != "" {
		return name + ":" + c.Labels[barchan.LabelTag]
	}
	return ""
}

func quantity(q *resource.Quantity) string {
	if q == nil {
		return "-"
	}
	return size(q.Value())
}

// checkpointMessage is what its controller says about one that is not at rest.
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
		Use: "show NAME", Short: "Show one checkpoint",
		Long: "Show one checkpoint, and what is needed to restore it. --json prints the object.",
		Args: exactly("NAME"),
	}
	s.flags(cmd, false)
	a.jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if a.json {
			return a.showObject(cmd.Context(), checkpointsResource(), s.namespace, args[0])
		}
		k, err := a.kube(cmd.Context())
		if err != nil {
			return err
		}
		c, err := getAs[barchan.Checkpoint](cmd.Context(), k, checkpointsResource(), s.namespace, args[0])
		if err != nil {
			return err
		}
		a.showCheckpoint(&c)
		return nil
	}
	return cmd
}

func (a *app) showCheckpoint(c *barchan.Checkpoint) {
	line := func(name, value string) { a.field(11, name, value) }
	line("Checkpoint", c.Namespace+"/"+c.Name)
	line("Purpose", purpose(c))
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
