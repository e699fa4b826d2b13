package probe

import (
	"context"
	"errors"
	"net/http"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// fakeServer succeeds over HTTP once it is up, and fails while it is down.
type fakeServer struct {
	up, down, back time.Duration // since the start; down zero: never
	began          time.Time
	probes         []time.Duration
}

func (p *fakeServer) RoundTrip(r *http.Request) (*http.Response, error) {
	at := time.Since(p.began)
	p.probes = append(p.probes, at)
	if at < p.up || (p.down > 0 && at >= p.down && at < p.back) {
		return nil, errors.New("refused")
	}
	return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: r}, nil
}

// verdicts has the times of a probe's verdicts, by result.
type verdicts struct{ good, bad []time.Duration }

// verdictsOf runs a probe for a time.
func verdictsOf(t *testing.T, p *fakeServer, s *corev1.Probe, initially bool, lasts time.Duration) (all verdicts) {
	t.Helper()
	s.HTTPGet = &corev1.HTTPGetAction{Port: intstr.FromInt32(80)}
	pr := &prober{Config: Config{Address: netip.MustParseAddr("10.9.0.2"), Running: func() bool { return true }}, http: &http.Client{Transport: p}}
	p.began = time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), lasts)
	defer cancel()
	pr.watch(ctx, s, initially, func(ok bool, _ string) bool {
		if at := time.Since(p.began); ok {
			all.good = append(all.good, at)
		} else {
			all.bad = append(all.bad, at)
		}
		return true
	})
	return all
}

// A program is found ready soon after its start, not only when the next period begins.
func TestProbeBeforeTheFirstSuccess(t *testing.T) {
	for _, up := range []time.Duration{0, 40 * time.Millisecond, 300 * time.Millisecond, time.Second, 7 * time.Second, 25 * time.Second, time.Minute} {
		synctest.Test(t, func(t *testing.T) {
			p := &fakeServer{up: up}
			got := verdictsOf(t, p, &corev1.Probe{FailureThreshold: 100}, false, 5*time.Minute)
			if late := up/2 + firstPause; len(got.good) != 1 || got.good[0] < up || got.good[0] > up+min(late, 10*time.Second) {
				t.Errorf("up after %s, ready after %v", up, got.good)
			}
			if n := len(p.probes); n > 60 {
				t.Errorf("up after %s: probed %d times in 5 minutes, at first %v", up, n, p.probes[:20])
			}
		})
	}
}

// A probe fails after failureThreshold periods, at any frequency, and after the start only then.
func TestProbeFailsByPeriods(t *testing.T) {
	const never = time.Hour
	for name, tt := range map[string]struct {
		program   fakeServer
		probe     corev1.Probe
		initially bool
		want      verdicts
	}{
		"never up":            {fakeServer{up: never}, corev1.Probe{}, false, verdicts{bad: []time.Duration{20 * time.Second}}},
		"once is enough":      {fakeServer{up: never}, corev1.Probe{FailureThreshold: 1}, false, verdicts{bad: []time.Duration{0}}},
		"delayed":             {fakeServer{up: never}, corev1.Probe{InitialDelaySeconds: 5, PeriodSeconds: 2}, false, verdicts{bad: []time.Duration{9 * time.Second}}},
		"liveness":            {fakeServer{up: never}, corev1.Probe{PeriodSeconds: 1}, true, verdicts{bad: []time.Duration{2 * time.Second}}},
		"goes down":           {fakeServer{down: 15 * time.Second, back: 55 * time.Second}, corev1.Probe{}, false, verdicts{good: []time.Duration{0, 60 * time.Second}, bad: []time.Duration{40 * time.Second}}},
		"twice to be good":    {fakeServer{}, corev1.Probe{SuccessThreshold: 2}, false, verdicts{good: []time.Duration{10 * time.Second}}},
		"down for one probes": {fakeServer{down: 10 * time.Second, back: 11 * time.Second}, corev1.Probe{}, false, verdicts{good: []time.Duration{0}}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				got := verdictsOf(t, &tt.program, &tt.probe, tt.initially, 2*time.Minute)
				if !slices.Equal(got.good, tt.want.good) || !slices.Equal(got.bad, tt.want.bad) {
					t.Errorf("good at %v, bad at %v, want %+v", got.good, got.bad, tt.want)
				}
			})
		})
	}
}
