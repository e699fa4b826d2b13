package sandboxes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apistatus"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Limits of one request.
const (
	MaxMetricsIDs = 100
	MaxLogLines   = 1000
	statsAtOnce   = 8
	// statsTimeout bounds the samples of one request: 100 silent agents would hold it for a minute.
	statsTimeout = 10 * time.Second
)

// Metrics returns the samples of the interval, oldest first; a zero bound is open. The sandbox itself keeps those of an hour, one
// for every envd.MetricsInterval, and the present is sampled. One that does not run has none.
func (st *Store) Metrics(ctx context.Context, namespace, id string, from, to time.Time) ([]envd.Metrics, error) {
	if !from.IsZero() && !to.IsZero() && from.After(to) {
		return nil, apistatus.Refuse(errs.ErrInvalid, "start: must not be after end")
	}
	s, err := st.find(ctx, namespace, id)
	if err != nil {
		return nil, err
	}
	if sandbox.PhaseOf(s) != sandbox.Running {
		return nil, nil
	}
	if from.Before(s.CreationTimestamp.Time) {
		from = s.CreationTimestamp.Time // a fork has the samples of its origin
	}
	from = from.Truncate(time.Second)
	all, err := st.Agents.StatsHistory(ctx, s, from)
	if err != nil {
		return nil, fmt.Errorf("read usage of sandbox %s: %w", id, err)
	}
	if len(all) == 0 {
		return nil, nil
	}
	now := &all[len(all)-1]
	if err := st.setDisk(ctx, s, now); err != nil {
		return nil, err
	}
	for i := range all[:len(all)-1] {
		if m := &all[i]; m.DiskTotal > now.DiskTotal+now.DiskTotal/4 { // the machine's, where the sandbox has no disk of its own
			m.DiskUsed = now.DiskUsed
		}
		all[i].DiskTotal = now.DiskTotal
	}
	return slices.DeleteFunc(all, func(m envd.Metrics) bool {
		at := time.Unix(m.Timestamp, 0)
		return at.Before(from) || (!to.IsZero() && at.After(to.Add(time.Second)))
	}), nil
}

// setDisk replaces the agent's numbers, which are the machine's, by the sandbox's own limit and written bytes.
func (st *Store) setDisk(ctx context.Context, s *agents.Sandbox, stats *envd.Metrics) error {
	stats.DiskTotal, stats.DiskUsed = uint64(st.Templates.SizeOf(&s.Spec.PodTemplate.Spec).DiskMB)<<20, 0
	if st.DiskUsed == nil {
		return nil
	}
	used, err := st.DiskUsed(ctx, sandbox.Ref{Namespace: s.Namespace, Name: s.Name, UID: s.UID})
	if err != nil {
		return fmt.Errorf("measure disk of sandbox %s/%s: %w", s.Namespace, s.Name, err)
	}
	stats.DiskUsed = uint64(used)
	return nil
}

// MetricsOf returns the newest sample of each named running sandbox, by the given ID. It omits dead sandboxes and
// those whose agents do not respond in time.
func (st *Store) MetricsOf(ctx context.Context, namespace string, ids []string) (map[string]envd.Metrics, error) {
	if len(ids) > MaxMetricsIDs {
		return nil, apistatus.Refuse(errs.ErrInvalid, "sandbox_ids: name at most %d sandboxes", MaxMetricsIDs)
	}
	ids = slices.Compact(slices.Sorted(slices.Values(ids)))
	var mu sync.Mutex
	all := map[string]envd.Metrics{}
	bounded, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	var group errgroup.Group
	group.SetLimit(statsAtOnce)
	for _, id := range ids {
		group.Go(func() error {
			got, err := st.sample(bounded, namespace, id)
			if got != (envd.Metrics{}) {
				mu.Lock()
				all[id] = got
				mu.Unlock()
			}
			if err != nil && !errors.Is(err, errs.ErrNotFound) {
				st.Log.DebugContext(ctx, "sandbox usage not read", telemetry.Sandbox, id, telemetry.Error, err)
			}
			return ctx.Err()
		})
	}
	if err := group.Wait(); err != nil {
		return nil, fmt.Errorf("read usage: %w", err)
	}
	return all, nil
}

// sample returns the present usage of a sandbox; zero if it does not run.
func (st *Store) sample(ctx context.Context, namespace, id string) (envd.Metrics, error) {
	s, err := st.find(ctx, namespace, id)
	if err != nil || sandbox.PhaseOf(s) != sandbox.Running {
		return envd.Metrics{}, err
	}
	m, err := st.Agents.Stats(ctx, s)
	if err == nil {
		err = st.setDisk(ctx, s, &m)
	}
	if err != nil {
		return envd.Metrics{}, err
	}
	return m, nil
}

// LogRequest selects log lines of a sandbox. Its zero value is the first MaxLogLines.
type LogRequest struct {
	// From is where to begin, inclusive: the oldest line, or with Backward the newest. Zero is open.
	From time.Time
	// Backward returns the newest line first.
	Backward bool
	// Limit is from 1 to MaxLogLines; 0 means MaxLogLines.
	Limit int
	// Contains keeps lines with this text; AtLeast those of this level and above. Zero keeps the lines of programs.
	Contains string
	// Container is one besides the first; empty: that.
	Container string
	AtLeast   slog.Level
}

// Logs returns lines of the agent and of the template's programs.
func (st *Store) Logs(ctx context.Context, namespace, id string, req LogRequest) ([]envd.LogLine, error) {
	if req.Limit < 0 || req.Limit > MaxLogLines {
		return nil, apistatus.Refuse(errs.ErrInvalid, "limit: must be from 1 to %d", MaxLogLines)
	}
	req.Limit = cmp.Or(req.Limit, MaxLogLines)
	s, err := st.find(ctx, namespace, id)
	if err != nil {
		return nil, err
	}
	if err := checkContainer(s, &req); err != nil {
		return nil, err
	}
	since := req.From
	if req.Backward {
		since = time.Time{}
	}
	if sandbox.PhaseOf(s) == sandbox.Paused { // only a running agent has them
		return nil, IsPaused(id)
	}
	lines, err := st.Agents.Logs(ctx, s, req.Container, since)
	if err != nil {
		return nil, fmt.Errorf("read logs of sandbox %s: %w", id, err)
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

// checkContainer refuses a container that the sandbox does not have. The first one's name is that of the sandbox itself.
func checkContainer(s *agents.Sandbox, req *LogRequest) error {
	all := s.Spec.PodTemplate.Spec.Containers
	i := slices.IndexFunc(all, func(c corev1.Container) bool { return c.Name == req.Container })
	if req.Container != "" && i < 0 {
		return apistatus.Refuse(errs.ErrInvalid, "container: the sandbox has none of the name %q", req.Container)
	}
	if i == 0 {
		req.Container = ""
	}
	return nil
}
