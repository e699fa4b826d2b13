package dashboard

import (
	"context"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// Sources of moments: what the time of each is worth.
const (
	fromObject    = "object"    // written with the change, to the nanosecond
	fromWatch     = "watch"     // when this server's watch showed it, to the millisecond
	fromEvents    = "event"     // recorded by a controller
	fromCondition = "condition" // to the second
	fromNode      = "node"      // measured by the node, to the millisecond
)

// moment is one point of a sandbox's timeline.
type moment struct {
	At     time.Time `json:"at"`
	What   string    `json:"what"`
	Detail string    `json:"detail,omitempty"`
	Source string    `json:"source"`
	Bad    bool      `json:"bad,omitempty"`
	// Took is the milliseconds of an operation of the node, and Steps are its parts.
	Took  int64               `json:"took,omitempty"`
	Steps []agents.StepStatus `json:"steps,omitempty"`
}

// maxEvents bounds the objects that are read for one timeline.
const maxEvents = 500

func createdAt(o *agents.Sandbox) time.Time { return barchan.CreatedAt(o) }

// find returns a sandbox of the session's namespace.
func (s *Server) find(ctx context.Context, who caller, id string) (*agents.Sandbox, error) {
	known, err := sandbox.ParseID(id)
	if err != nil {
		return nil, errs.Public(errs.ErrNotFound, "no sandbox has the ID "+id)
	}
	o, err := s.cfg.Cache.SandboxByID(ctx, known)
	if err == nil && o.Namespace != who.Namespace {
		err = errs.ErrNotFound
	}
	if errs.Kind(err) == errs.ErrNotFound { //nolint:errorlint // a kind is compared
		return nil, errs.Public(errs.ErrNotFound, "sandbox "+id+" does not exist any more")
	}
	return o, err
}

// running is find for what needs the agent.
func (s *Server) running(ctx context.Context, who caller, id string) (*agents.Sandbox, error) {
	o, err := s.find(ctx, who, id)
	if err != nil {
		return nil, err
	}
	if phase := sandbox.PhaseOf(o); phase != sandbox.Running && (phase != sandbox.Starting || !sandbox.Started(o)) {
		return nil, errs.Public(errs.ErrConflict, "the sandbox is "+strings.ToLower(string(phase))+"; this needs a running one")
	}
	return o, nil
}

func (s *Server) sandboxDetail(w http.ResponseWriter, r *http.Request, who caller) error {
	o, err := s.find(r.Context(), who, r.PathValue("id"))
	if err != nil {
		return err
	}
	v := s.cfg.View(o)
	d := map[string]any{
		"row": s.rowOf(o), "timeline": s.timeline(r.Context(), o), "conditions": o.Status.Conditions, "node": o.Status.NodeName,
		"addresses": o.Status.PodIPs, "publicTraffic": v.PublicTraffic, "network": v.Network, "autoResume": v.AutoResume,
		"onTimeout": v.OnTimeout, "volumeMounts": v.VolumeMounts, "diskMB": v.Size.DiskMB, "now": time.Now(),
		"containers": containersOf(o), "secured": o.Spec.AgentSecured(),
	}
	if b := o.Status.Barchan; b != nil {
		d["runtime"], d["image"], d["exitCode"], d["startedAt"] = b.Runtime, b.Image, b.ExitCode, b.StartedAt
	}
	if b := o.Spec.Barchan; b != nil {
		d["networkPolicy"], d["idle"] = b.NetworkPolicy, b.Idle
	}
	return writeJSON(w, d)
}

type container struct {
	Name, Image, Command string
	State                string
	Ready                bool
	Restarts             int32
}

func containersOf(o *agents.Sandbox) []container {
	var all []container
	for i := range o.Spec.PodTemplate.Spec.Containers {
		c := &o.Spec.PodTemplate.Spec.Containers[i]
		x := container{Name: c.Name, Image: c.Image, Command: strings.Join(append(slices.Clone(c.Command), c.Args...), " ")}
		if b := o.Status.Barchan; b != nil {
			for j := range b.Containers {
				if st := &b.Containers[j]; st.Name == c.Name {
					x.State, x.Ready, x.Restarts = st.Reason(), st.Ready, st.RestartCount
				}
			}
		}
		all = append(all, x)
	}
	return all
}

// timeline puts together what is known of a sandbox's life, in order.
func (s *Server) timeline(ctx context.Context, o *agents.Sandbox) []moment {
	precise := barchan.ExactTime(o, barchan.AnnotationCreatedAt)
	claimed := barchan.ExactTime(o, pool.AnnotationClaimedAt)
	cold := o.Labels[agents.LabelLaunchType] == agents.LaunchCold && !claimed.IsZero()
	all := []moment{{At: createdAt(o), What: "Created", Source: fromObject}}
	switch {
	case cold: // noted by the create itself
		precise, all[0].At, all[0].Detail = claimed, claimed, coldText(o)
	case precise.IsZero():
		all[0].Source = fromCondition
	}
	if b := o.Spec.Barchan; b != nil && b.Restore != nil {
		all[0].Detail = "from snapshot " + b.Restore.CheckpointName
	}
	all = append(all, s.hub.moments(o)...)
	if !cold && !claimed.IsZero() {
		all = append(all, moment{At: claimed, What: "Claimed", Detail: claimText(o, claimed), Source: fromObject})
	}
	all = append(all, s.eventsOf(ctx, o)...)
	operations := operationMoments(o)
	all = append(all, operations...)
	all = append(all, conditionMoments(o, s.hub.started, operations)...)
	slices.SortStableFunc(all, func(a, b moment) int { return a.At.Compare(b.At) })
	if precise.IsZero() { // the object's second is never later than what followed it
		for i := range all {
			if all[i].What == "Created" && len(all) > 1 && i != 0 {
				all[0], all[i] = all[i], all[0]
			}
		}
	}
	return all
}

func claimText(o *agents.Sandbox, at time.Time) string {
	waits := pool.WaitsOf(o)
	text := "warm: the pool had it ready"
	if rest := at.Sub(o.CreationTimestamp.Time); waits.Member > 0 {
		text = "warm: the pool had none ready, and the claim waited " + waits.Member.String() + " until this one was"
	} else if rest > time.Second {
		text += ", made " + rest.Round(time.Second).String() + " before"
	}
	return text + quotaText(waits)
}

// coldText is why a claim started a sandbox.
func coldText(o *agents.Sandbox) string {
	waits := pool.WaitsOf(o)
	text := "cold start: the template has no pool here"
	switch {
	case waits.Member > 0:
		text = "cold start: the claim waited " + waits.Member.String() + " in vain for a sandbox of the pool"
	case pool.OriginOf(o) != "":
		text = "cold start: the pool had no sandbox that was ready, or soon to be, and fits the claim"
	case o.Spec.Barchan != nil && o.Spec.Barchan.Restore != nil:
		text = "cold start"
	}
	return text + quotaText(waits)
}

func quotaText(w pool.Waits) string {
	if w.Quota == 0 {
		return ""
	}
	return "; it was in the queue of the namespace's quota for " + w.Quota.String()
}

// moments are the changes of phase that the watch showed.
func (h *hub) moments(o *agents.Sandbox) (all []moment) {
	for _, x := range h.stepsOf(o.UID) {
		if x.at.IsZero() || x.phase == sandbox.Pending && x.reason == "" {
			continue
		}
		if n := len(all); n > 0 && all[n-1].What == string(x.phase) && all[n-1].Detail == x.reason {
			continue // it was claimed, which is a moment of its own
		}
		all = append(all, moment{At: x.at, What: string(x.phase), Detail: x.reason, Source: fromWatch, Bad: x.phase == sandbox.Dead})
	}
	return all
}

// operationMoments are what the node did, with its steps.
func operationMoments(o *agents.Sandbox) (all []moment) {
	if o.Status.Barchan == nil {
		return nil
	}
	for _, op := range o.Status.Barchan.Operations {
		all = append(all, moment{At: op.StartedAt.UTC(), What: "Node: " + strings.ToLower(string(op.Operation)), Source: fromNode, Took: op.Milliseconds, Steps: op.Steps})
	}
	return all
}

// conditionMoments are changes that came before the watch. Of one in the second in which an operation ended, that is the time.
func conditionMoments(o *agents.Sandbox, started time.Time, operations []moment) (all []moment) {
	for i := range o.Status.Conditions {
		c := &o.Status.Conditions[i]
		if c.Type == agents.ConditionPodScheduled || c.Status != metav1.ConditionTrue || c.LastTransitionTime.After(started) {
			continue
		}
		at := c.LastTransitionTime.UTC()
		for _, op := range operations {
			if end := op.At.Add(time.Duration(op.Took) * time.Millisecond); end.Truncate(time.Second).Equal(at.Truncate(time.Second)) {
				at = end
			}
		}
		all = append(all, moment{At: at, What: c.Type, Detail: c.Message, Source: fromCondition})
	}
	return all
}

// eventsOf are the Events of an object. The timeline does without them where they cannot be read.
func (s *Server) eventsOf(ctx context.Context, o *agents.Sandbox) (all []moment) {
	var list corev1.EventList
	if err := s.cfg.Live.List(ctx, &list, client.InNamespace(o.Namespace), client.MatchingFields{"involvedObject.uid": string(o.UID)}, client.Limit(maxEvents)); err != nil {
		s.Log.DebugContext(ctx, "events not read", "error", err)
		return nil
	}
	for i := range list.Items {
		e := &list.Items[i]
		at := e.EventTime.Time
		if at.IsZero() {
			at = e.CreationTimestamp.Time
		}
		all = append(all, moment{At: at.UTC(), What: e.Reason, Detail: e.Message, Source: fromEvents, Bad: e.Type == corev1.EventTypeWarning})
	}
	return all
}

// portURL is where a browser reaches a port: a host of its own, or a path where there are no such hosts.
func (s *Server) portURL(r *http.Request, id sandbox.ID, port string) string {
	origin, err := url.Parse(request.Origin(r))
	if err != nil || s.cfg.Domain == "" {
		return "/sandbox/" + string(id) + "/" + port + "/"
	}
	host := port + "-" + string(id) + "." + s.cfg.Domain
	if at := origin.Port(); at != "" {
		host += ":" + at
	}
	return origin.Scheme + "://" + host + "/"
}
