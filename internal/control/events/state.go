package events

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"time"

	"github.com/google/uuid"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// maxMetadata bounds the metadata in an event, in bytes. Larger ones are left out.
const maxMetadata = 16 << 10

// Size is what a sandbox may use.
type Size struct {
	CPUs     int   `json:"cpus"`
	MemoryMB int64 `json:"memoryMB"`
}

// state is what the last event of a sandbox left.
type state struct {
	Namespace string `json:"namespace"`
	Template  string `json:"template,omitempty"`
	Build     string `json:"build,omitempty"`
	Paused    bool   `json:"paused,omitempty"`
	// Pending means that its create is not complete, and will set the end.
	Pending   bool              `json:"pending,omitempty"`
	StartedAt time.Time         `json:"startedAt"`
	EndAt     time.Time         `json:"endAt,omitzero"`
	Size      Size              `json:"size"`
	Metadata  map[string]string `json:"metadata,omitempty"`
	Network   string            `json:"network,omitempty"`
}

// shown reports whether clients may know of a sandbox: a member of a pool, a sandbox during its first start and one that a
// build or a warm-up uses are not theirs.
func shown(s *agents.Sandbox) bool {
	if pool.MemberOf(s) != "" || s.Labels[barchan.LabelPurpose] != "" || sandbox.DeadForGood(s) {
		return false
	}
	p := sandbox.PhaseOf(s)
	return p != sandbox.Pending && p != sandbox.Starting || s.Status.Barchan != nil && s.Status.Barchan.StartedAt != nil
}

// observed returns the state that an object shows; Paused is that of was while a sandbox moves.
func (r *Recorder) observed(s *agents.Sandbox, was *state) state {
	now := state{
		Namespace: s.Namespace, Template: s.Annotations[pool.AnnotationTemplateID], Build: s.Labels[barchan.LabelBuild],
		StartedAt: pool.StartedAt(s), Size: r.cfg.SizeOf(s), Pending: s.Annotations[pool.AnnotationPending] != "",
	}
	if now.Build == "" {
		now.Build = pool.RevisionOf(s)
	}
	if s.Spec.ShutdownTime != nil {
		now.EndAt = s.Spec.ShutdownTime.UTC()
	}
	if b := s.Spec.Barchan; b != nil {
		now.Metadata = bounded(b.Metadata)
		if b.Network != nil {
			text, _ := json.Marshal(b.Network) // has strings alone
			sum := sha256.Sum256(text)
			now.Network = hex.EncodeToString(sum[:8])
		}
	}
	switch sandbox.PhaseOf(s) { //nolint:exhaustive // the others are between
	case sandbox.Paused:
		now.Paused = true
	case sandbox.Running:
	default:
		now.Paused = was != nil && was.Paused
	}
	return now
}

func bounded(m map[string]string) map[string]string {
	n := 0
	for k, v := range m {
		n += len(k) + len(v)
	}
	if n > maxMetadata {
		return nil
	}
	return m
}

// between returns the events between two states of a sandbox; nil is one that clients do not know, before and after.
// version is that of the object.
func between(uid types.UID, version string, was, now *state, at time.Time) []Event {
	switch {
	case was == nil && now == nil:
		return nil
	case was == nil:
		begun := []Event{now.event(uid, Created, now.StartedAt)}
		if now.Paused {
			begun = append(begun, now.ended(uid, Paused, at))
		}
		return begun
	case now == nil:
		return []Event{was.ended(uid, Killed, at)}
	case !was.Paused && now.Paused:
		now.StartedAt = was.StartedAt
		return []Event{now.ended(uid, Paused, at)}
	case was.Paused && !now.Paused:
		if !now.StartedAt.After(was.StartedAt) { // resumed by other means than the API
			now.StartedAt = at
		}
		return []Event{now.event(uid, Resumed, at)}
	}
	now.StartedAt = was.StartedAt
	return now.updated(uid, version, was, at)
}

// updated compares what clients can set. While a sandbox is paused or moves, its end changes without their doing.
func (now *state) updated(uid types.UID, version string, was *state, at time.Time) []Event {
	e := now.event(uid, Updated, at)
	e.ID = idOf(e.ID + version) // an execution has several
	if !now.Paused && !was.Pending && !now.EndAt.Equal(was.EndAt) && !now.EndAt.IsZero() && !was.EndAt.IsZero() {
		e.Data.SetTimeout = &now.EndAt
	}
	e.Data.SetNetwork = now.Network != was.Network
	e.Data.SetMetadata = !maps.Equal(now.Metadata, was.Metadata)
	if e.Data.SetTimeout == nil && !e.Data.SetNetwork && !e.Data.SetMetadata {
		return nil
	}
	return []Event{e}
}

// event returns an event whose ID every process that records it derives alike, as the replicas of a cluster do.
func (now *state) event(uid types.UID, t Type, at time.Time) Event {
	execution := idOf(string(uid) + now.StartedAt.Format(time.RFC3339Nano))
	return Event{
		Version: version, ID: idOf(execution + string(t)), Type: t, Data: &Data{Metadata: now.Metadata}, BuildID: now.Build,
		ExecutionID: execution,
		SandboxID:   string(sandbox.IDOf(uid)), Namespace: now.Namespace, TemplateID: now.Template, Timestamp: at.UTC(),
	}
}

func idOf(what string) string { return uuid.NewSHA1(uuid.NameSpaceOID, []byte(what)).String() }

// ended returns an event that ends the execution, if it runs.
func (now *state) ended(uid types.UID, t Type, at time.Time) Event {
	e := now.event(uid, t, at)
	if t == Killed && now.Paused {
		return e
	}
	e.Data.Execution = &Execution{
		StartedAt: now.StartedAt, CPUs: now.Size.CPUs, MemoryMB: now.Size.MemoryMB, Milliseconds: max(at.Sub(now.StartedAt).Milliseconds(), 0),
	}
	return e
}
