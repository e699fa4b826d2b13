package manager

import (
	"cmp"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// CreatedBy is the value of the label [agents.LabelCreatedBy] on what a manager makes.
const CreatedBy = "barchan-manager"

// Never is the end of a sandbox that has none.
var Never = time.Date(9999, time.December, 31, 23, 59, 59, 0, time.UTC)

// State is how clients see a sandbox that lives.
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
	// TemplateID and TemplateName are empty if it was made without a template.
	TemplateID, TemplateName string
	State                    State
	Phase                    sandbox.Phase
	// Memory is where the memory of a paused sandbox is; empty where none is kept.
	Memory    agents.MemoryPlace
	StartedAt time.Time
	// EndAt is Never for one that is not bounded; of a paused one it is when it was paused.
	EndAt    time.Time
	Size     Size
	Metadata map[string]string
	// AgentToken is empty unless the sandbox is secure, TrafficToken unless its traffic is not public.
	AgentToken, TrafficToken string
	PublicTraffic            bool
	MaskRequestHost          string
	// Network is nil where nothing was asked for.
	Network    *agents.EgressPolicy
	OnTimeout  agents.TimeoutAction
	AutoResume bool
}

func (m *Manager) view(s *agents.Sandbox) Sandbox {
	id := sandbox.IDOf(s.UID)
	v := Sandbox{
		ID: id, Namespace: s.Namespace, Name: s.Name,
		TemplateID:    s.Annotations[pool.AnnotationTemplateID],
		TemplateName:  cmp.Or(s.Annotations[pool.AnnotationTemplateName], s.Annotations[agents.AnnotationTemplateRef]),
		State:         stateOf(s),
		Phase:         sandbox.PhaseOf(s),
		StartedAt:     startedAt(s),
		EndAt:         endAt(s),
		Size:          m.size(&s.Spec.PodTemplate.Spec),
		PublicTraffic: true,
		OnTimeout:     agents.TimeoutShutdown,
	}
	if b := s.Status.Barchan; b != nil && v.State == StatePaused {
		v.Memory = b.Memory
	}
	if s.Spec.AgentSecured() {
		v.AgentToken = m.cfg.Tokens.Agent(id)
	}
	b := s.Spec.Barchan
	if b == nil {
		return v
	}
	v.Metadata, v.Network = maps.Clone(b.Metadata), b.Network.DeepCopy()
	if b.OnTimeout != "" {
		v.OnTimeout = b.OnTimeout
	}
	v.AutoResume = b.Wake != nil && b.Wake.OnTraffic
	if a := b.Access; a != nil {
		v.PublicTraffic = a.PublicTraffic == nil || *a.PublicTraffic
		v.MaskRequestHost = a.MaskRequestHost
		if !v.PublicTraffic {
			v.TrafficToken = m.cfg.Tokens.Traffic(id)
		}
	}
	return v
}

// stateOf is meant for sandboxes that live. One that is on its way to sleep is paused already.
func stateOf(s *agents.Sandbox) State {
	if p := sandbox.PhaseOf(s); p == sandbox.Paused || p == sandbox.Pausing {
		return StatePaused
	}
	return StateRunning
}

// listed reports whether lists show a sandbox: not while it starts for the first time, when
// nobody has it yet, nor as a pool's member that nobody has claimed.
func listed(s *agents.Sandbox) bool {
	if pool.MemberOf(s) != "" || sandbox.DeadForGood(s) {
		return false
	}
	if p := sandbox.PhaseOf(s); p != sandbox.Pending && p != sandbox.Starting {
		return true
	}
	return s.Status.Barchan != nil && s.Status.Barchan.StartedAt != nil
}

// startedAt is when a sandbox last began to run, but no time before its owner got it or resumed it. Objects
// keep seconds, in which lists would have no order; what the API wrote has nanoseconds.
func startedAt(s *agents.Sandbox) time.Time {
	at := s.CreationTimestamp.UTC()
	if b := s.Status.Barchan; b != nil && b.StartedAt != nil {
		at = b.StartedAt.UTC()
	}
	for _, name := range []string{pool.AnnotationClaimedAt, pool.AnnotationResumedAt} {
		if exact := instant(s, name); exact.After(at) {
			at = exact
		}
	}
	return at
}

// createdAt is when an object was made: to the nanosecond where the API has noted it.
func createdAt(obj metav1.Object) time.Time {
	if exact := instant(obj, barchan.AnnotationCreatedAt); !exact.IsZero() {
		return exact
	}
	return obj.GetCreationTimestamp().UTC()
}

// instant reads an annotation that holds a time; the zero time where it holds none.
func instant(obj metav1.Object, annotation string) time.Time {
	at, err := time.Parse(time.RFC3339Nano, obj.GetAnnotations()[annotation])
	if err != nil {
		return time.Time{}
	}
	return at.UTC()
}

// exactly is the present as such an annotation holds it.
func exactly() string { return time.Now().UTC().Format(time.RFC3339Nano) }

func endAt(s *agents.Sandbox) time.Time {
	if s.Spec.ShutdownTime != nil {
		return s.Spec.ShutdownTime.UTC()
	}
	if c := meta.FindStatusCondition(s.Status.Conditions, agents.ConditionSuspended); c != nil && c.Status == metav1.ConditionTrue {
		return c.LastTransitionTime.UTC()
	}
	return Never
}

// size adds up the limits of a Pod's containers.
func (m *Manager) size(pod *corev1.PodSpec) Size {
	var cpu, memory, disk resource.Quantity
	for i := range pod.Containers {
		limits := pod.Containers[i].Resources.Limits
		cpu.Add(limits[corev1.ResourceCPU])
		memory.Add(limits[corev1.ResourceMemory])
		disk.Add(limits[corev1.ResourceEphemeralStorage])
	}
	const mib = 1 << 20
	size := Size{CPUs: int(cpu.Value()), MemoryMB: memory.Value() / mib, DiskMB: disk.Value() / mib}
	setIfZero(&size.CPUs, m.cfg.DefaultSize.CPUs)
	setIfZero(&size.MemoryMB, m.cfg.DefaultSize.MemoryMB)
	setIfZero(&size.DiskMB, m.cfg.DefaultSize.DiskMB)
	return size
}
