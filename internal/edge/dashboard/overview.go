package dashboard

import (
	"maps"
	"net/http"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/edge/dashboard/timeline"
)

type poolView struct {
	Name       string                            `json:"name"`
	Template   string                            `json:"template"`
	Namespace  string                            `json:"templateNamespace,omitempty"`
	Desired    int32                             `json:"desired"`
	Ready      int32                             `json:"ready"`
	Replicas   int32                             `json:"replicas"`
	Revision   string                            `json:"revision"`
	Status     *extensions.WarmPoolBarchanStatus `json:"status,omitempty"`
	Conditions any                               `json:"conditions"`
	Autoscale  *extensions.PoolAutoscale         `json:"autoscale,omitempty"`
	// AtOnce, Waited and Cold count the live sandboxes that were claimed through the pool, by what their claims got: a member that
	// was ready, one that was not yet, or none.
	AtOnce int `json:"atOnce"`
	Waited int `json:"waited"`
	Cold   int `json:"cold"`
	// Waits are the newest claims that waited, for whatever reason.
	Waits []timeline.Wait `json:"waits"`
}

// maxWaits is how many claims of a pool the page lists.
const maxWaits = 8

// pools shows the pools of the session's namespace.
func (s *Server) pools(w http.ResponseWriter, r *http.Request, who caller) error {
	var list extensions.SandboxWarmPoolList
	if err := s.cfg.Objects.List(r.Context(), &list, client.InNamespace(who.Namespace)); err != nil {
		return err
	}
	all, err := s.cfg.Cache.Sandboxes(r.Context(), who.Namespace)
	if err != nil {
		return err
	}
	views := make([]poolView, len(list.Items))
	for i := range list.Items {
		p := &list.Items[i]
		v := poolView{
			Name: p.Name, Template: p.Spec.SandboxTemplateRef.Name, Replicas: p.Status.Replicas, Ready: p.Status.ReadyReplicas,
			Revision: p.Status.CurrentRevision, Status: p.Status.Barchan, Conditions: p.Status.Conditions,
		}
		if p.Spec.Replicas != nil {
			v.Desired = *p.Spec.Replicas
		}
		if b := p.Spec.Barchan; b != nil {
			v.Namespace, v.Autoscale = b.TemplateNamespace, b.Autoscale
		}
		v.count(all, p.UID)
		views[i] = v
	}
	return writeJSON(w, views)
}

// count adds the claims of a pool.
func (v *poolView) count(all []*agents.Sandbox, uid types.UID) {
	v.Waits = []timeline.Wait{}
	for _, o := range all {
		if pool.OriginOf(o) != uid || pool.MemberOf(o) != "" {
			continue
		}
		x := timeline.WaitOf(o)
		switch {
		case x.Cold:
			v.Cold++
		case x.Member > 0:
			v.Waited++
		default:
			v.AtOnce++
		}
		if x.Cold || x.Member > 0 || x.Quota > 0 {
			v.Waits = append(v.Waits, x)
		}
	}
	slices.SortFunc(v.Waits, func(a, b timeline.Wait) int { return b.At.Compare(a.At) })
	v.Waits = v.Waits[:min(len(v.Waits), maxWaits)]
}

type snapshotView struct {
	ID       string    `json:"id"` // empty for one that the server made for its own use
	Object   string    `json:"object"`
	Sandbox  string    `json:"sandbox"` // of which it was taken
	Phase    string    `json:"phase"`
	Size     int64     `json:"size"`
	Memory   int64     `json:"memory"`
	Template string    `json:"template,omitempty"`
	Created  time.Time `json:"created"`
}

// snapshots shows the checkpoints. With the rows of sandboxes they are the tree of forks.
func (s *Server) snapshots(w http.ResponseWriter, r *http.Request, who caller) error {
	var list barchan.CheckpointList
	if err := s.cfg.Objects.List(r.Context(), &list, client.InNamespace(who.Namespace)); err != nil {
		return err
	}
	views := make([]snapshotView, 0, len(list.Items))
	for i := range list.Items {
		c := &list.Items[i]
		v := snapshotView{ID: c.SnapshotID(), Object: c.Name, Phase: string(c.Status.Phase), Created: barchan.CreatedAt(c)}
		if c.Status.Size != nil {
			v.Size = c.Status.Size.Value()
		}
		if c.Status.MemorySize != nil {
			v.Memory = c.Status.MemorySize.Value()
		}
		if src := c.Status.Source; src != nil {
			v.Sandbox, v.Template = src.ID, src.TemplateName
		}
		views = append(views, v)
	}
	return writeJSON(w, views)
}

// server shows what the server tells of itself, with the quota of the session's namespace.
func (s *Server) server(w http.ResponseWriter, r *http.Request, who caller) error {
	limits, err := s.cfg.Quotas.Limits(r.Context(), who.Namespace)
	if err != nil {
		return err
	}
	running, paused := s.cfg.Quotas.Used(who.Namespace)
	conditions := []map[string]any{}
	if s.cfg.Conditions != nil {
		for _, c := range s.cfg.Conditions() { // the detail is for the operator
			conditions = append(conditions, map[string]any{"name": c.Name, "reason": c.Reason, "since": c.Since})
		}
	}
	lines := []any{
		use("Sandboxes", "count", limits.Sandboxes, running.Sandboxes, paused.Sandboxes),
		use("CPU", "millicores", limits.MilliCPU, running.MilliCPU, paused.MilliCPU),
		use("Memory", "bytes", limits.Memory, running.Memory, paused.Memory),
		total("Stored on disk", "bytes", limits.Stored, s.cfg.Quotas.Stored(who.Namespace)),
	}
	for _, kind := range quota.Kinds() {
		lines = append(lines, total(kind.Title(), "count", limits.Objects[kind], s.cfg.Quotas.Objects(who.Namespace, kind)))
	}
	all, err := s.cfg.Cache.Sandboxes(r.Context(), who.Namespace)
	if err != nil {
		return err
	}
	return writeJSON(w, map[string]any{
		"nodes": s.nodes(all),
		"about": s.cfg.About, "now": time.Now(), "conditions": conditions,
		"quota":        lines,
		"countsPaused": limits.CountPaused,
	})
}

// nodeView is a machine, and what the sandboxes of the session's namespace have there.
type nodeView struct {
	Name     string `json:"name"`
	Running  int    `json:"running"`
	Paused   int    `json:"paused"`
	CPUs     int    `json:"cpus"` // of those that run, by their limits
	MemoryMB int64  `json:"memoryMB"`
}

// nodes are those that run sandboxes of the namespace, and the server's own.
func (s *Server) nodes(all []*agents.Sandbox) []nodeView {
	byName := map[string]*nodeView{}
	of := func(name string) *nodeView {
		if byName[name] == nil {
			byName[name] = &nodeView{Name: name}
		}
		return byName[name]
	}
	if s.cfg.About.Node != "" {
		of(s.cfg.About.Node)
	}
	for _, o := range all {
		if o.Status.NodeName == "" {
			continue
		}
		switch n := of(o.Status.NodeName); sandbox.PhaseOf(o) {
		case sandbox.Paused:
			n.Paused++
		case sandbox.Running, sandbox.Starting, sandbox.Resuming, sandbox.Pausing:
			size := s.cfg.View(o).Size
			n.Running++
			n.CPUs += size.CPUs
			n.MemoryMB += size.MemoryMB
		case sandbox.Pending, sandbox.Stopping, sandbox.Dead:
		}
	}
	views := make([]nodeView, 0, len(byName))
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		views = append(views, *byName[name])
	}
	return views
}

// total is a line of a quota that no sandbox runs for: it has one sum.
func total(name, unit string, limit quota.Limit, used int64) map[string]any {
	line := map[string]any{"name": name, "unit": unit, "used": used}
	if limit.Set {
		line["most"] = limit.Most
	}
	return line
}

// use is one line of a quota; without a limit it has no most.
func use(name, unit string, limit quota.Limit, running, paused int64) map[string]any {
	line := map[string]any{"name": name, "unit": unit, "running": running, "paused": paused}
	if limit.Set {
		line["most"] = limit.Most
	}
	return line
}
