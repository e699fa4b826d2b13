package warmpool

import (
	"time"

	"k8s.io/apimachinery/pkg/util/intstr"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

// usage is what is known of a pool's claims.
type usage struct {
	claimed int       // living sandboxes
	current int       // those of the current revision
	last    time.Time // when the last claim came; zero for never
}

// use counts the sandboxes that were claimed through a pool; known is the last claim so far.
func use(claimed []agents.Sandbox, revision string, known time.Time) usage {
	u := usage{last: known}
	for i := range claimed {
		s := &claimed[i]
		at := s.CreationTimestamp.Time
		if t, err := time.Parse(time.RFC3339Nano, s.Annotations[pool.AnnotationClaimedAt]); err == nil {
			at = t
		}
		if at.After(u.last) {
			u.last = at
		}
		if sandbox.DeadForGood(s) {
			continue
		}
		u.claimed++
		if pool.RevisionOf(s) == revision {
			u.current++
		}
	}
	return u
}

// desired is how many members a pool wants now, and when that may change by time alone.
func desired(p *extensions.SandboxWarmPool, u usage, now time.Time) (n int, until time.Time) {
	b := p.Spec.Barchan
	if b == nil || b.Autoscale == nil {
		return int(*p.Spec.Replicas), time.Time{}
	}
	a := b.Autoscale
	low, most := int(a.MinReplicas), int(a.MaxReplicas)
	idle := u.last.Add(time.Duration(a.IdleSeconds) * time.Second)
	if u.last.IsZero() || !now.Before(idle) {
		return low, time.Time{}
	}
	share := int(a.SparePercent)
	n = (u.claimed*share + 99 - share) / (100 - share) // rounded up
	if n = min(max(n, low, 1), most); n > low {
		until = idle
	}
	return n, until
}

// bounds are the surge and unavailability that a rollout may use, in members. One of them is 1
// or more, unless nothing is desired.
func bounds(p *extensions.SandboxWarmPool, desired int) (surge, unavailable int) {
	unavailable = desired
	if b := p.Spec.Barchan; b != nil {
		surge = share(b.MaxSurge, desired, true, 0)
		unavailable = share(b.MaxUnavailable, desired, false, desired)
	}
	if surge == 0 && unavailable == 0 { // small shares of few members
		unavailable = 1
	}
	return surge, min(unavailable, desired)
}

func share(v *intstr.IntOrString, of int, up bool, unset int) int {
	if v == nil {
		return unset
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(v, of, up)
	if err != nil { // no API server stores such a value
		return unset
	}
	return n
}
