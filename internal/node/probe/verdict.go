package probe

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// firstPause is the pause after the first failure of a probe that has not succeeded yet. Each
// further pause is half as long again.
const firstPause = 50 * time.Millisecond

// verdict evaluates the results of a probe. Kubernetes probes once a period. Here a probe that has
// never succeeded runs more often, so that a sandbox is ready soon after its program is. Only one failure
// a period counts, so that failureThreshold keeps its meaning.
type verdict struct {
	probe *corev1.Probe
	// good is the verdict, and reported whether it has been returned as new.
	good, reported bool
	// begun is set once it has succeeded, or is assumed to have.
	begun               bool
	successes, failures int32
	counts              time.Time // from when on a failure counts, before the first success
	next                time.Duration
}

func newVerdict(s *corev1.Probe, initially bool) *verdict {
	return &verdict{probe: s, good: initially, begun: initially, next: firstPause}
}

func (v *verdict) period() time.Duration {
	return time.Duration(orElse(v.probe.PeriodSeconds, 10)) * time.Second
}

// add takes a result, and reports whether the verdict changes, or is the first.
func (v *verdict) add(failure error, now time.Time) (changed bool) {
	if failure == nil {
		v.begun, v.successes, v.failures = true, v.successes+1, 0
		changed = v.successes >= orElse(v.probe.SuccessThreshold, 1) && (!v.good || !v.reported)
	} else {
		v.successes = 0
		if v.begun || !now.Before(v.counts) {
			v.failures, v.counts = v.failures+1, now.Add(v.period())
		}
		changed = v.failures >= orElse(v.probe.FailureThreshold, 3) && (v.good || !v.reported)
	}
	if changed {
		v.good, v.reported = failure == nil, true
	}
	return changed
}

func (v *verdict) pause(now time.Time) time.Duration {
	if v.begun {
		return v.period()
	}
	pause := min(v.next, v.counts.Sub(now))
	v.next = min(v.next+v.next/2, v.period())
	return pause
}
