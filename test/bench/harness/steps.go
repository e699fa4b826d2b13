package harness

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
)

// lastUndone is the step that is undone when all others are.
const lastUndone = "undo_address"

// StepTime is what a histogram of the server knows of a step.
type StepTime struct{ Seconds, Count float64 }

var stepLine = regexp.MustCompile(`^barchan_node_step_seconds_(sum|count)\{runtime="([^"]+)",step="([^"]+)"\} (\S+)\s*$`)

// StepTimes returns what the server's metrics have of the steps of a class, by name.
func (s *Server) StepTimes(ctx context.Context, class string) (map[string]StepTime, error) {
	text, err := s.readMetrics(ctx)
	if err != nil {
		return nil, err
	}
	times, err := readSteps(text, class)
	if err == nil && times["total"].Count == 0 {
		err = fmt.Errorf("the server's metrics have no barchan_node_step_seconds of %s", class)
	}
	return times, err
}

func readSteps(metrics, class string) (map[string]StepTime, error) {
	times := map[string]StepTime{}
	for line := range strings.Lines(metrics) {
		m := stepLine.FindStringSubmatch(line)
		if m == nil || m[2] != class {
			continue
		}
		v, err := strconv.ParseFloat(m[4], 64)
		if err != nil {
			return nil, fmt.Errorf("read metric %q: %w", line, err)
		}
		t := times[m[3]]
		if m[1] == "sum" {
			t.Seconds = v
		} else {
			t.Count = v
		}
		times[m[3]] = t
	}
	return times, nil
}

// Metric returns the value of a metric of the server that has no labels.
func (s *Server) Metric(ctx context.Context, name string) (float64, error) {
	text, err := s.readMetrics(ctx)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, fmt.Errorf("the server's metrics have no %s", name)
}

func (s *Server) readMetrics(ctx context.Context) (string, error) {
	res, err := s.get(ctx, s.metrics, "/metrics")
	if err != nil {
		return "", fmt.Errorf("read metrics: %w", err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d", res.StatusCode)
	}
	if err != nil {
		return "", fmt.Errorf("read metrics: %w", err)
	}
	return string(text), nil
}

// AwaitGone returns when all sandboxes of a class that were made are also undone, so that the
// end of one does not burden the beginning of the next.
func (s *Server) AwaitGone(ctx context.Context, class string) error {
	return s.awaitUndone(ctx, class, func(now map[string]StepTime) bool { return now[lastUndone].Count >= now["total"].Count })
}

// Clear kills sandboxes of gVisor's class and returns when nothing of them is left.
func (s *Server) Clear(ctx context.Context, all ...Sandbox) error {
	const class = "gvisor"
	before, err := s.StepTimes(ctx, class)
	if err != nil {
		return err
	}
	for _, x := range all {
		if err := s.Kill(ctx, x); err != nil {
			return err
		}
	}
	return s.awaitUndone(ctx, class, func(now map[string]StepTime) bool {
		return now[lastUndone].Count >= before[lastUndone].Count+float64(len(all))
	})
}

func (s *Server) awaitUndone(ctx context.Context, class string, enough func(now map[string]StepTime) bool) error {
	return Poll(ctx, Tick, "wait for the end of a killed sandbox", func(ctx context.Context) (bool, error) {
		now, err := s.StepTimes(ctx, class)
		return err == nil && enough(now), err
	})
}
