package sandboxes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/manager/templates"
	"github.com/barchan-dev/barchan/internal/control/paging"
)

// CreatedBy is the value of the label [agents.LabelCreatedBy] on objects that the manager creates.
const CreatedBy = "barchan-manager"

// Never is the end of a sandbox without one.
var Never = time.Date(9999, time.December, 31, 23, 59, 59, 0, time.UTC)

// State is the state of a sandbox as clients see it.
type State string

// States.
const (
	StateRunning State = "running"
	StatePaused  State = "paused"
)

// Sandbox is one sandbox as its tenant may see it.
type Sandbox struct {
	ID              sandbox.ID
	Namespace, Name string
	// TemplateID and TemplateName are empty for one without a template.
	TemplateID, TemplateName string
	State                    State
	Phase                    sandbox.Phase
	// Memory is where the memory of a paused sandbox is; empty where none is kept.
	Memory agents.MemoryPlace
	// MemorySize is the bytes of that memory on disk.
	MemorySize int64
	// CreatedByKey is the name of the API key whose request created it; empty: none did.
	CreatedByKey string
	// Containers are those besides the first.
	Containers []agents.ContainerStatus
	// Operations are the last ones of the node of each type, oldest first.
	Operations []agents.OperationStatus
	StartedAt  time.Time
	// EndAt is Never for an unbounded one; for a paused one, when it was paused.
	EndAt    time.Time
	Size     templates.Size
	Metadata map[string]string
	// AgentToken is empty unless the sandbox is secure, TrafficToken unless its traffic is not public. Lists have neither.
	AgentToken, TrafficToken string
	PublicTraffic            bool
	MaskRequestHost          string
	// Network is nil without a policy.
	Network    *agents.EgressPolicy
	OnTimeout  agents.TimeoutAction
	AutoResume bool
	// VolumeMounts name the objects of volumes.
	VolumeMounts []sandbox.VolumeMount
}

// View returns what a sandbox's tenant sees.
func (st *Store) View(s *agents.Sandbox) Sandbox {
	v := st.listItem(s)
	if s.Spec.AgentSecured() {
		v.AgentToken = st.Tokens.Agent(v.ID)
	}
	if !v.PublicTraffic {
		v.TrafficToken = st.Tokens.Traffic(v.ID)
	}
	return v
}

// listItem is View without tokens.
func (st *Store) listItem(s *agents.Sandbox) Sandbox {
	v := Sandbox{
		ID: sandbox.IDOf(s.UID), Namespace: s.Namespace, Name: s.Name,
		TemplateID:    s.Annotations[pool.AnnotationTemplateID],
		TemplateName:  cmp.Or(s.Annotations[pool.AnnotationTemplateName], s.Annotations[agents.AnnotationTemplateRef]),
		Phase:         sandbox.PhaseOf(s),
		StartedAt:     pool.StartedAt(s),
		EndAt:         endAt(s),
		Size:          st.Templates.SizeOf(&s.Spec.PodTemplate.Spec),
		PublicTraffic: true,
		OnTimeout:     agents.TimeoutShutdown,
		VolumeMounts:  sandbox.VolumeMounts(&s.Spec.PodTemplate.Spec),
		CreatedByKey:  s.Annotations[pool.AnnotationCreatedByKey],
	}
	v.State = stateOf(v.Phase)
	if b := s.Status.Barchan; b != nil {
		v.Containers, v.Operations = b.Containers, b.Operations
		if v.State == StatePaused {
			v.Memory = b.Memory
			if b.MemorySize != nil {
				v.MemorySize = b.MemorySize.Value()
			}
		}
	}
	b := s.Spec.Barchan
	if b == nil {
		return v
	}
	v.Metadata, v.Network = maps.Clone(b.Metadata), b.Network.DeepCopy()
	v.OnTimeout = cmp.Or(b.OnTimeout, v.OnTimeout)
	v.AutoResume = b.Wake != nil && b.Wake.OnTraffic
	if a := b.Access; a != nil {
		v.PublicTraffic = a.PublicTraffic == nil || *a.PublicTraffic
		v.MaskRequestHost = a.MaskRequestHost
	}
	return v
}

func stateOf(p sandbox.Phase) State {
	if p == sandbox.Paused || p == sandbox.Pausing {
		return StatePaused
	}
	return StateRunning
}

// listed reports whether lists show a sandbox. They omit unclaimed members, and sandboxes during their first
// start, which no create has returned yet.
func listed(s *agents.Sandbox) bool {
	if pool.MemberOf(s) != "" || sandbox.DeadForGood(s) {
		return false
	}
	if p := sandbox.PhaseOf(s); p != sandbox.Pending && p != sandbox.Starting {
		return true
	}
	return s.Status.Barchan != nil && s.Status.Barchan.StartedAt != nil
}

func endAt(s *agents.Sandbox) time.Time {
	if s.Spec.ShutdownTime != nil {
		return s.Spec.ShutdownTime.UTC()
	}
	if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionSuspended); c != nil && c.Status == metav1.ConditionTrue {
		return c.LastTransitionTime.UTC()
	}
	return Never
}

// ListRequest selects sandboxes of a tenant. Its zero value but for Namespace is the first page of all, newest
// first.
type ListRequest struct {
	Namespace string
	// Metadata has pairs that must all match exactly.
	Metadata map[string]string
	// States: none means all.
	States []State
	// Template is a template's ID, name or alias.
	Template string
	// Name is the name of the sandbox's object.
	Name string
	// StartedAfter includes the instant itself.
	StartedAfter time.Time
	OldestFirst  bool
	// Limit is from 1 to paging.MaxPage; 0 means paging.DefaultPage.
	Limit int
	// Cursor is a Page's Next.
	Cursor string
}

// Page is a part of a list.
type Page struct {
	Items []Sandbox
	// Next is the cursor of the following page, and empty on the last one.
	Next string
	// Running counts the matching running sandboxes of all pages, regardless of States.
	Running int
}

// Get returns one sandbox that is not dead.
func (st *Store) Get(ctx context.Context, namespace, id string) (Sandbox, error) {
	s, err := st.find(ctx, namespace, id)
	if err != nil {
		return Sandbox{}, err
	}
	return st.View(s), nil
}

// List returns one page. The cursor is a position in the order, not a number of items, so a create or a kill
// between two pages neither repeats nor skips an item.
func (st *Store) List(ctx context.Context, req ListRequest) (Page, error) {
	limit, after, err := paging.Parse(req.Limit, req.Cursor, paging.Direction(req.OldestFirst))
	if err != nil {
		return Page{}, err
	}
	return st.page(ctx, req, limit, after)
}

// All returns all items at once. Limit and Cursor of req have no meaning.
func (st *Store) All(ctx context.Context, req ListRequest) ([]Sandbox, error) {
	page, err := st.page(ctx, req, math.MaxInt, nil)
	return page.Items, err
}

func (st *Store) page(ctx context.Context, req ListRequest, limit int, after *paging.Cursor) (Page, error) {
	dir := paging.Direction(req.OldestFirst)
	states := func(state State) bool { return len(req.States) == 0 || slices.Contains(req.States, state) }
	inNamespace := func(s *agents.Sandbox) bool { return s.Namespace == req.Namespace }
	var page Page
	var keep []*agents.Sandbox
	if st.Listing != nil && !req.selects() && !st.Assumed.Has(inNamespace) {
		keep, page.Next, page.Running = st.Listing.page(req.Namespace, states, limit, after, dir)
		return st.viewed(page, keep), nil
	}
	all, err := st.candidates(ctx, &req)
	if err != nil {
		return Page{}, err
	}
	templateID, err := st.selectTemplate(ctx, &req)
	if err != nil {
		return Page{}, err
	}
	for _, s := range all {
		if !listed(s) || !matches(s, &req, templateID) {
			continue
		}
		state := stateOf(sandbox.PhaseOf(s))
		if state == StateRunning {
			page.Running++
		}
		if states(state) {
			keep = append(keep, s)
		}
	}
	keep, page.Next = paging.Cut(keep, limit, after, dir, func(s **agents.Sandbox) paging.Cursor { return positionOf(*s) })
	return st.viewed(page, keep), nil
}

// selects reports whether a request is for less than all sandboxes of a namespace, regardless of their states.
func (r *ListRequest) selects() bool {
	return len(r.Metadata) > 0 || r.Template != "" || r.Name != "" || !r.StartedAfter.IsZero()
}

// candidates returns at least the sandboxes of a namespace that match a request.
func (st *Store) candidates(ctx context.Context, req *ListRequest) ([]*agents.Sandbox, error) {
	var shown []*agents.Sandbox
	if st.Listing != nil && req.Name != "" {
		if s := st.Listing.named(types.NamespacedName{Namespace: req.Namespace, Name: req.Name}); s != nil {
			shown = append(shown, s)
		}
	} else {
		var err error
		if shown, err = st.Cache.Sandboxes(ctx, req.Namespace); err != nil {
			return nil, fmt.Errorf("list sandboxes: %w", err)
		}
	}
	return st.Assumed.Merge(shown, func(s *agents.Sandbox) bool {
		return s.Namespace == req.Namespace && (req.Name == "" || s.Name == req.Name)
	}), nil
}

// selectTemplate returns the ID of the template of a request. For a tag it has the request name the tag's object instead.
func (st *Store) selectTemplate(ctx context.Context, req *ListRequest) (id string, err error) {
	if req.Template == "" {
		return "", nil
	}
	t, err := st.Templates.Resolve(ctx, req.Namespace, req.Template)
	switch {
	case err == nil && strings.Contains(req.Template, ":"): // of the tag alone
		req.Template = t.Name
	case err == nil:
		return pool.TemplateID(t), nil
	case !errors.Is(err, errs.ErrNotFound): // a deleted template may have sandboxes left
		return "", err
	}
	return "", nil
}

// viewed adds the sandboxes of a page.
func (st *Store) viewed(page Page, items []*agents.Sandbox) Page {
	page.Items = make([]Sandbox, len(items))
	for i, s := range items {
		page.Items[i] = st.listItem(s)
	}
	return page
}

func matches(s *agents.Sandbox, req *ListRequest, templateID string) bool {
	if req.Name != "" && req.Name != s.Name {
		return false
	}
	if len(req.Metadata) > 0 && s.Spec.Barchan == nil {
		return false
	}
	for k, v := range req.Metadata {
		if has, ok := s.Spec.Barchan.Metadata[k]; !ok || has != v {
			return false
		}
	}
	if t := req.Template; t != "" {
		id := s.Annotations[pool.AnnotationTemplateID]
		if t != id && t != s.Annotations[agents.AnnotationTemplateRef] && t != s.Annotations[pool.AnnotationTemplateName] && (templateID == "" || templateID != id) {
			return false
		}
	}
	return req.StartedAfter.IsZero() || !pool.StartedAt(s).Before(req.StartedAfter.Truncate(time.Second))
}
