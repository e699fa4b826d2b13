package manager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Limits of what one request may ask the node for.
const (
	MaxMetricsIDs = 100
	MaxLogLines   = 1000
	askAtOnce     = 8
)

// Metrics returns the samples of the interval; a zero bound is open. Nothing is sampled ahead
// of time: there is one, of now, if the sandbox runs and the interval holds it.
func (m *Manager) Metrics(ctx context.Context, namespace, id string, from, to time.Time) ([]envd.Metrics, error) {
	if !from.IsZero() && !to.IsZero() && from.After(to) {
		return nil, apistatus.Refuse(errs.ErrInvalid, "start: must not be after end")
	}
	s, err := m.find(ctx, namespace, id)
	if err != nil {
		return nil, err
	}
	if sandbox.PhaseOf(s) != sandbox.Running {
		return nil, nil
	}
	stats, err := m.cfg.Witness.Stats(ctx, s)
	if err != nil {
		return nil, fmt.Errorf("ask for the usage of sandbox %s: %w", id, err)
	}
	if err := m.setDisk(ctx, s, &stats); err != nil {
		return nil, err
	}
	at := time.Unix(stats.Timestamp, 0)
	if (!from.IsZero() && at.Before(from.Truncate(time.Second))) || (!to.IsZero() && at.After(to.Add(time.Second))) {
		return nil, nil
	}
	return []envd.Metrics{stats}, nil
}

// setDisk replaces what the agent says of the disk, which is the machine's, by the sandbox's own: its
// limit, and what it has written, where that is known here.
func (m *Manager) setDisk(ctx context.Context, s *agents.Sandbox, stats *envd.Metrics) error {
	stats.DiskTotal, stats.DiskUsed = uint64(m.size(&s.Spec.PodTemplate.Spec).DiskMB)<<20, 0
	if m.cfg.DiskUsed == nil {
		return nil
	}
	used, err := m.cfg.DiskUsed(ctx, sandbox.Ref{Namespace: s.Namespace, Name: s.Name, UID: s.UID})
	if err != nil {
		return fmt.Errorf("measure the disk of sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	stats.DiskUsed = uint64(used)
	return nil
}

// MetricsOf returns the newest sample of each of the named sandboxes that run, by the ID as it
// was given. Those that do not live, and those that do not answer, are left out.
func (m *Manager) MetricsOf(ctx context.Context, namespace string, ids []string) (map[string]envd.Metrics, error) {
	if len(ids) > MaxMetricsIDs {
		return nil, apistatus.Refuse(errs.ErrInvalid, "sandbox_ids: name at most %d sandboxes", MaxMetricsIDs)
	}
	ids = slices.Compact(slices.Sorted(slices.Values(ids)))
	samples := make([]*envd.Metrics, len(ids))
	var group errgroup.Group
	group.SetLimit(askAtOnce)
	for i, id := range ids {
		group.Go(func() error {
			got, err := m.Metrics(ctx, namespace, id, time.Time{}, time.Time{})
			if len(got) > 0 {
				samples[i] = &got[0]
			}
			if err != nil && !errors.Is(err, errs.ErrNotFound) {
				m.log.DebugContext(ctx, "sandbox does not tell its usage", telemetry.Sandbox, id, telemetry.Error, err)
			}
			return ctx.Err()
		})
	}
	if err := group.Wait(); err != nil {
		return nil, fmt.Errorf("ask for usage: %w", err)
	}
	all := map[string]envd.Metrics{}
	for i, id := range ids {
		if samples[i] != nil {
			all[id] = *samples[i]
		}
	}
	return all, nil
}

// LogRequest says which lines of a sandbox to return. Its zero value is the first MaxLogLines.
type LogRequest struct {
	// From is where to begin, inclusive: the oldest line, or with Backward the newest. Zero is open.
	From time.Time
	// Backward returns the newest line first.
	Backward bool
	// Limit is from 1 to MaxLogLines; 0 means MaxLogLines.
	Limit int
	// Contains keeps lines with this text; AtLeast those of this level and above. Its zero value keeps
	// what programs write, which has no level below it.
	Contains string
	AtLeast  slog.Level
}

// Logs returns what the programs of a sandbox's template and its agent wrote.
func (m *Manager) Logs(ctx context.Context, namespace, id string, req LogRequest) ([]envd.LogLine, error) {
	if req.Limit < 0 || req.Limit > MaxLogLines {
		return nil, apistatus.Refuse(errs.ErrInvalid, "limit: must be from 1 to %d", MaxLogLines)
	}
	setIfZero(&req.Limit, MaxLogLines)
	s, err := m.find(ctx, namespace, id)
	if err != nil {
		return nil, err
	}
	since := req.From
	if req.Backward {
		since = time.Time{}
	}
	if sandbox.PhaseOf(s) == sandbox.Paused { // its agent, which has them, does not run
		return nil, isPaused(id)
	}
	lines, err := m.cfg.Witness.Logs(ctx, s, since)
	if err != nil {
		return nil, fmt.Errorf("ask for the logs of sandbox %s: %w", id, err)
	}
	if req.Backward {
		slices.Reverse(lines)
	}
	lines = slices.DeleteFunc(lines, func(l envd.LogLine) bool {
		outside := !req.From.IsZero() && ((req.Backward && l.Timestamp.After(req.From)) || (!req.Backward && l.Timestamp.Before(req.From)))
		return outside || !strings.Contains(l.Line, req.Contains) || l.Severity() < req.AtLeast
	})
	return lines[:min(len(lines), req.Limit)], nil
}
