package health_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/health"
)

func newGate(t *testing.T) (*health.Gate, *bytes.Buffer, *prometheus.Registry) {
	t.Helper()
	var log bytes.Buffer
	metrics := prometheus.NewRegistry()
	g, err := health.NewGate(slog.New(slog.NewTextHandler(&log, nil)), metrics)
	if err != nil {
		t.Fatal(err)
	}
	return g, &log, metrics
}

func TestGate(t *testing.T) {
	g, log, metrics := newGate(t)
	if err := g.Err(); err != nil {
		t.Fatalf("a new gate: %v", err)
	}
	g.Set("store", errors.New("secret detail"))
	g.Set("disk", errs.Public(errors.New("statfs /x"), "12 MiB are free"))
	err := g.Err()
	if !errors.Is(err, errs.ErrUnavailable) {
		t.Errorf("Err = %v, want an ErrUnavailable", err)
	}
	text, _ := errs.PublicMessage(err)
	if !strings.Contains(text, "(disk: 12 MiB are free; store)") || strings.Contains(text, "secret") {
		t.Errorf("text for users: %q", text)
	}
	for _, detail := range []string{"secret detail", "statfs /x"} {
		if !strings.Contains(err.Error(), detail) {
			t.Errorf("the log gets %q, without %q", err, detail)
		}
	}
	before := g.Conditions()
	g.Set("disk", errs.Public(nil, "11 MiB are free"))
	after := g.Conditions()
	if len(after) != 2 || after[0].Reason != "11 MiB are free" || !after[0].Since.Equal(before[0].Since) {
		t.Errorf("conditions = %+v after %+v", after, before)
	}
	g.Set("disk", nil)
	g.Set("disk", nil)
	g.Set("store", nil)
	if err := g.Err(); err != nil {
		t.Errorf("after all has passed: %v", err)
	}
	if text := log.String(); strings.Count(text, "new work is refused") != 2 || strings.Count(text, "has passed") != 2 {
		t.Errorf("changes are not logged once each:\n%s", text)
	}
	want := "# HELP barchan_health_condition 1 while the named condition, such as a full disk, makes the server refuse new work; 0 after it has passed.\n# TYPE barchan_health_condition gauge\n" +
		"barchan_health_condition{condition=\"disk\"} 0\nbarchan_health_condition{condition=\"store\"} 0\n"
	if err := testutil.GatherAndCompare(metrics, strings.NewReader(want)); err != nil {
		t.Error(err)
	}
}

func TestNilGateIsOpen(t *testing.T) {
	var g *health.Gate
	g.Set("disk", errors.New("full"))
	if err := g.Err(); err != nil || g.Conditions() != nil {
		t.Errorf("nil gate: %v", err)
	}
}

// In any order of reports, the gate is open when all parts have cleared theirs.
func TestGateFromManySides(t *testing.T) {
	g, _, _ := newGate(t)
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			name := fmt.Sprint(i)
			for range 200 {
				g.Set(name, errors.New("wrong"))
				if err := g.Err(); err == nil || !strings.Contains(err.Error(), name+": wrong") {
					t.Errorf("%s is not in %v", name, err)
				}
				g.Set(name, nil)
			}
		})
	}
	all.Wait()
	if err := g.Err(); err != nil {
		t.Error(err)
	}
}

func BenchmarkErr(b *testing.B) {
	g, err := health.NewGate(slog.New(slog.DiscardHandler), nil)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if g.Err() != nil {
			b.Fatal()
		}
	}
}
