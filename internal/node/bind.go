package node

import (
	"context"
	"fmt"
	"slices"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation/field"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/registry"
)

// Bind applies changes of an object to its existing sandbox: the container's environment, and whether the agent
// requires a token. Later processes and restarts of the container have them; running processes keep theirs. It also
// updates the files of Secrets, ConfigMaps and the object's fields. Without a change it writes nothing.
//
// A claim sends its variables to the agent first, for speed; Bind persists them, and sends only what the agent lacks.
// The order is the agent's configuration on disk, the agent, the journal: after a crash in between the journal is
// behind, and the next Bind repeats all.
//
// A paused or absent sandbox is left alone, and bound when it runs. Kinds of error: errs.ErrInvalid for a forbidden
// value; errs.ErrUnavailable, where a retry may help.
func (n *Node) Bind(ctx context.Context, s *agents.Sandbox) error {
	if err := n.awaitAdopted(ctx); err != nil {
		return err
	}
	u := n.handles.Lookup(s.UID)
	if u == nil || !unbound(u.Row(), s) && !refreshes(u.Row()) {
		return nil
	}
	at := field.NewPath("spec", "podTemplate", "spec")
	if problems := sandbox.CheckRunnable(&s.Spec.PodTemplate.Spec, at); len(problems) > 0 {
		return fmt.Errorf("%w: %w", problems.ToAggregate(), errs.ErrInvalid)
	}
	ctx, done, err := u.Acquire(ctx)
	if err != nil {
		return err
	}
	defer done()
	r := u.Row()
	if !u.IsRemoved() && refreshes(r) {
		if err := n.refresh(ctx, r, s); err != nil {
			return fmt.Errorf("update volumes of sandbox %s/%s: %w", s.Namespace, s.Name, err)
		}
	}
	if u.IsRemoved() || !unbound(r, s) {
		return nil
	}
	if err := n.bind(ctx, u, r, s); err != nil {
		return fmt.Errorf("bind sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	n.log.InfoContext(ctx, "sandbox bound to its object", telemetry.Namespace, s.Namespace, telemetry.Sandbox, s.Name)
	return nil
}

// unbound reports whether a running sandbox differs from its object.
func unbound(r *journal.Row, s *agents.Sandbox) bool {
	if r == nil || (r.Stage != journal.Live && r.Stage != journal.Restarting) || len(s.Spec.PodTemplate.Spec.Containers) == 0 {
		return false
	}
	env := s.Spec.PodTemplate.Spec.Containers[0].Env
	return r.Plan.Secure != s.Spec.AgentSecured() || !apiequality.Semantic.DeepEqual(r.Plan.Env, env)
}

// refreshes reports whether a sandbox that runs has files that may have changed.
func refreshes(r *journal.Row) bool {
	return r != nil && (r.Stage == journal.Live || r.Stage == journal.Capturing) && len(r.Plan.Projections) > 0
}

// refresh updates the projected volumes. The caller holds the sandbox's lock.
func (n *Node) refresh(ctx context.Context, r *journal.Row, s *agents.Sandbox) error {
	w := n.host.Operation(new(*r))
	w.Row.Plan.SetOwn(s)
	return w.FillProjected(ctx)
}

// bind implements Bind; the caller holds the sandbox's lock.
func (n *Node) bind(ctx context.Context, u *registry.Handle, r *journal.Row, s *agents.Sandbox) (err error) {
	ctx, end := telemetry.StartSpan(ctx, "node bind", telemetry.OfSandbox(string(u.ID)))
	defer func() { end(err) }()
	w := n.host.Operation(new(*r))
	w.Row.Plan.Env = slices.Clone(s.Spec.PodTemplate.Spec.Containers[0].Env)
	w.Row.Plan.Secure = s.Spec.AgentSecured()
	if err := w.Bind(ctx, r.Stage == journal.Live); err != nil { // a restarting agent reads its configuration
		return err
	}
	if err := w.Timed("journal", func() error { return n.handles.Note(u, w.Row, r.Stage) }); err != nil {
		return err
	}
	u.Finished(w.Status(agents.OperationBind))
	return nil
}
