package builds

import (
	"cmp"
	"context"
	"log/slog"
	"math"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/control/builds"
)

// MaxEntries is the most log entries of one answer.
const MaxEntries = 100

// State is a build's stage as clients see it.
type State string

// States of builds.
const (
	StateWaiting  State = "waiting" // for its steps
	StateBuilding State = "building"
	StateReady    State = "ready"
	StateError    State = "error"
)

// stateOf returns building at once after the trigger.
func stateOf(b *barchan.TemplateBuild) State {
	switch {
	case b.Status.Phase == barchan.BuildReady:
		return StateReady
	case b.Status.Phase == barchan.BuildFailed:
		return StateError
	case b.Spec.From != nil:
		return StateBuilding
	default:
		return StateWaiting
	}
}

// Status is what a client that waits for a build is told.
type Status struct {
	TemplateID, BuildID string
	State               State
	// Entries are the next ones of the log.
	Entries []builds.Entry
	// Message and Step say why a build failed, and where; Step may be "base" or "finalize".
	Message, Step string
}

// StatusRequest selects entries of a build's log.
type StatusRequest struct {
	// Offset is how many entries to leave out. Limit is from 1 to MaxEntries; 0 means MaxEntries.
	Offset, Limit int
	// AtLeast keeps entries of this level and above, which Offset counts.
	AtLeast slog.Level
}

// Status returns a build's state, and the next entries of its log.
func (s *Service) Status(ctx context.Context, namespace, templateID, buildID string, req StatusRequest) (Status, error) {
	limit, err := checkLimit(req.Limit)
	if err != nil {
		return Status{}, err
	}
	if req.Offset < 0 {
		return Status{}, apistatus.Refuse(errs.ErrInvalid, "logsOffset: must be 0 or more")
	}
	b, err := s.find(ctx, namespace, templateID, buildID)
	if err != nil {
		return Status{}, err
	}
	v := Status{TemplateID: templateIDOf(b), BuildID: b.Name, State: stateOf(b)}
	if v.State == StateError {
		v.Step = b.Status.FailedStep
		if c := meta.FindStatusCondition(b.Status.Conditions, barchan.ConditionReady); c != nil {
			v.Message = c.Message
		}
	}
	// The log is read last: that of an ended build is complete.
	if req.AtLeast <= slog.LevelDebug {
		v.Entries, err = s.Files.Entries(b.UID, req.Offset, limit)
		return v, err
	}
	all, err := s.Files.Entries(b.UID, 0, math.MaxInt)
	all = slices.DeleteFunc(all, func(e builds.Entry) bool { return Severity(e.Level) < req.AtLeast })
	all = all[min(req.Offset, len(all)):]
	v.Entries = all[:min(limit, len(all))]
	return v, err
}

func checkLimit(limit int) (int, error) {
	if limit < 0 || limit > MaxEntries {
		return 0, apistatus.Refuse(errs.ErrInvalid, "limit: must be from 1 to %d", MaxEntries)
	}
	return cmp.Or(limit, MaxEntries), nil
}

// LogRequest selects entries of a build's log. Its zero value is the first MaxEntries from info on.
type LogRequest struct {
	// From is where to begin, inclusive: the oldest entry, or with Backward the newest. Zero is open.
	From time.Time
	// Backward returns the newest entry first.
	Backward bool
	// Limit is from 1 to MaxEntries; 0 means MaxEntries.
	Limit int
	// AtLeast keeps entries of this level and above.
	AtLeast slog.Level
}

// Severity returns the level of an entry.
func Severity(level string) slog.Level {
	switch level {
	case builds.LevelDebug:
		return slog.LevelDebug
	case builds.LevelWarn:
		return slog.LevelWarn
	case builds.LevelError:
		return slog.LevelError
	}
	return slog.LevelInfo
}

// Entries returns entries of a build's log.
func (s *Service) Entries(ctx context.Context, namespace, templateID, buildID string, req LogRequest) ([]builds.Entry, error) {
	limit, err := checkLimit(req.Limit)
	if err != nil {
		return nil, err
	}
	b, err := s.find(ctx, namespace, templateID, buildID)
	if err != nil {
		return nil, err
	}
	entries, err := s.Files.Entries(b.UID, 0, math.MaxInt)
	if err != nil {
		return nil, err
	}
	if req.Backward {
		slices.Reverse(entries)
	}
	entries = slices.DeleteFunc(entries, func(e builds.Entry) bool {
		outside := !req.From.IsZero() && ((req.Backward && e.Timestamp.After(req.From)) || (!req.Backward && e.Timestamp.Before(req.From)))
		return outside || Severity(e.Level) < req.AtLeast
	})
	return entries[:min(len(entries), limit)], nil
}

// Build is one of a template's builds.
type Build struct {
	ID                   string
	State                State
	CreatedAt, UpdatedAt time.Time
	// EndedAt is nil before its end.
	EndedAt *time.Time
	// CPUs and MemoryMB are those that its client chose; 0 for none.
	CPUs     int
	MemoryMB int64
}

// List returns the newest builds of a template, at most MaxEntries.
func (s *Service) List(ctx context.Context, template types.NamespacedName) ([]Build, error) {
	own, err := s.buildsOf(ctx, template)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(own, func(a, b barchan.TemplateBuild) int {
		return cmp.Or(barchan.CreatedAt(&b).Compare(barchan.CreatedAt(&a)), cmp.Compare(a.Name, b.Name))
	})
	views := make([]Build, min(len(own), MaxEntries))
	for i := range views {
		views[i] = view(&own[i])
	}
	return views, nil
}

func view(b *barchan.TemplateBuild) Build {
	v := Build{ID: b.Name, State: stateOf(b), CreatedAt: barchan.CreatedAt(b).UTC()}
	if q := b.Spec.CPU; q != nil {
		v.CPUs = int(q.Value())
	}
	if q := b.Spec.Memory; q != nil {
		v.MemoryMB = q.Value() >> 20
	}
	v.UpdatedAt = v.CreatedAt
	if at := b.Status.StartedAt; at != nil {
		v.UpdatedAt = at.UTC()
	}
	if at := b.Status.CompletedAt; at != nil {
		v.UpdatedAt, v.EndedAt = at.UTC(), new(at.UTC())
	}
	return v
}
