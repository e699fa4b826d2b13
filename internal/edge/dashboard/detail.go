package dashboard

import (
	"context"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/dashboard/timeline"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
)

// maxEvents bounds the objects that are read for one timeline.
const maxEvents = 500

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
		"addresses": o.Status.PodIPs, "publicTraffic": v.PublicTraffic, "network": v.Network, "reachable": s.cfg.Reachable, "autoResume": v.AutoResume,
		"onTimeout": v.OnTimeout, "volumeMounts": v.VolumeMounts, "diskMB": v.Size.DiskMB, "memorySize": v.MemorySize, "now": time.Now(),
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

func (s *Server) timeline(ctx context.Context, o *agents.Sandbox) []timeline.Moment {
	return s.history.Of(o, s.eventsOf(ctx, o))
}

// eventsOf are the Events of an object. The timeline does without them where they cannot be read.
func (s *Server) eventsOf(ctx context.Context, o *agents.Sandbox) []timeline.Moment {
	var list corev1.EventList
	if err := s.cfg.Live.List(ctx, &list, client.InNamespace(o.Namespace), client.MatchingFields{"involvedObject.uid": string(o.UID)}, client.Limit(maxEvents)); err != nil {
		s.Log.DebugContext(ctx, "events not read", "error", err)
		return nil
	}
	return timeline.Events(list.Items)
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
