package route

import (
	"net/netip"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// Route is the destination of one sandbox's traffic, as of one version of its object. It holds no
// secret. It is a plain value: the caller owns its copy.
type Route struct {
	ID        sandbox.ID
	Namespace string
	Name      string
	UID       types.UID
	// State is the phase that the object had.
	State sandbox.Phase
	// Address is invalid while the sandbox has none.
	Address netip.Addr
	Access  Access
	Wake    Wake
	Idle    Idle
	// EpochKey identifies an epoch: it changes with UID, address and start.
	EpochKey string
	// ResourceVersion orders the versions of one object.
	ResourceVersion string
}

// Access is the access policy of a sandbox. Unlike in the object, the zero value of PublicTraffic
// means private.
type Access struct {
	Secure          bool   // the agent requires its token
	PublicTraffic   bool   // ports other than the agent's need no traffic token
	MaskRequestHost string // the Host that services see, if not empty
	// RequestsPerSecond bounds the requests; 0 leaves it to the gateway.
	RequestsPerSecond int
}

// narrowed returns the access that both allow, otherwise as the first has it.
func (a Access) narrowed(by Access) Access {
	a.Secure = a.Secure || by.Secure
	a.PublicTraffic = a.PublicTraffic && by.PublicTraffic
	return a
}

// Wake is whether traffic wakes the sandbox when it is paused.
type Wake struct {
	OnTraffic bool
	// Timeout is the new time to live after such a wake; zero means the default.
	Timeout time.Duration
}

// Idle is the action after a time without traffic. The zero value: none.
type Idle struct {
	After    time.Duration
	Shutdown bool // else it is paused
}

// Reachable reports whether traffic can be sent. That includes a sandbox that runs but is not ready:
// its ports may respond.
func (r *Route) Reachable() bool {
	return r.Address.IsValid() && (r.State == sandbox.Running || r.State == sandbox.Starting)
}

// Asleep reports whether the sandbox is paused, pausing or resuming.
func (r *Route) Asleep() bool {
	return r.State == sandbox.Paused || r.State == sandbox.Pausing || r.State == sandbox.Resuming
}

// FromSandbox makes the route of an object. It is the one predicate for all writers: keep is false
// when the sandbox is dead for good, and its route must be deleted; a paused one stays. An unclaimed
// member of a pool has no route either: it gets one with the version that gives it an owner.
func FromSandbox(s *agents.Sandbox) (r Route, keep bool) {
	r = Route{
		ID:              sandbox.IDOf(s.UID),
		Namespace:       s.Namespace,
		Name:            s.Name,
		UID:             s.UID,
		State:           sandbox.PhaseOf(s),
		Access:          Access{PublicTraffic: true, Secure: s.Spec.AgentSecured()},
		ResourceVersion: s.ResourceVersion,
	}
	if len(s.Status.PodIPs) > 0 {
		if addr, err := netip.ParseAddr(s.Status.PodIPs[0]); err == nil {
			r.Address = addr.Unmap()
		}
	}
	r.EpochKey = epochKey(s, r.Address)
	if b := s.Spec.Barchan; b != nil {
		r.applyPolicies(b)
	}
	_, unclaimed := s.Labels[agents.LabelWarmPoolSandbox]
	return r, !unclaimed && !sandbox.DeadForGood(s)
}

func (r *Route) applyPolicies(b *agents.BarchanSpec) {
	if a := b.Access; a != nil {
		r.Access.PublicTraffic = a.PublicTraffic == nil || *a.PublicTraffic
		r.Access.MaskRequestHost = a.MaskRequestHost
		r.Access.RequestsPerSecond = int(a.RequestsPerSecond)
	}
	if i := b.Idle; i != nil {
		r.Idle = Idle{After: time.Duration(i.AfterSeconds) * time.Second, Shutdown: i.Action == agents.TimeoutShutdown}
	}
	if w := b.Wake; w != nil {
		r.Wake = Wake{OnTraffic: w.OnTraffic, Timeout: time.Duration(w.TimeoutSeconds) * time.Second}
	}
}

func epochKey(s *agents.Sandbox, addr netip.Addr) string {
	var started int64
	if b := s.Status.Barchan; b != nil && b.StartedAt != nil {
		started = b.StartedAt.UnixNano()
	}
	return string(s.UID) + "/" + addr.String() + "/" + strconv.FormatInt(started, 36)
}
