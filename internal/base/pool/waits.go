package pool

import (
	"strings"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// Waits are the times that a claim waited before its sandbox was written, to the millisecond.
type Waits struct {
	// Quota is the wait in the queue of the namespace's quota.
	Quota time.Duration
	// Member is the wait for a member of a warm pool that was being created.
	Member time.Duration
}

const (
	waitQuota  = "quota"
	waitMember = "member"
)

// Add returns the sums of two waits.
func (w Waits) Add(more Waits) Waits { return Waits{w.Quota + more.Quota, w.Member + more.Member} }

// Mark notes the waits in a sandbox, as in "quota=1.2s,member=180ms". A wait of less than a millisecond is none.
func (w Waits) Mark(s *agents.Sandbox) {
	var parts []string
	for _, part := range []struct {
		name string
		time time.Duration
	}{{waitQuota, w.Quota}, {waitMember, w.Member}} {
		if part.time >= time.Millisecond {
			parts = append(parts, part.name+"="+part.time.Truncate(time.Millisecond).String())
		}
	}
	if len(parts) == 0 {
		return
	}
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations[AnnotationClaimWaits] = strings.Join(parts, ",")
}

// WaitsOf returns what the claim of a sandbox waited for. Parts that cannot be read are left out: tenants can change annotations.
func WaitsOf(s *agents.Sandbox) (w Waits) {
	for part := range strings.SplitSeq(s.Annotations[AnnotationClaimWaits], ",") {
		name, text, _ := strings.Cut(part, "=")
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 {
			continue
		}
		switch name {
		case waitQuota:
			w.Quota = d
		case waitMember:
			w.Member = d
		}
	}
	return w
}
