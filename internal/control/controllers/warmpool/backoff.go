package warmpool

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
)

const (
	firstRetry   = time.Second
	longestRetry = 5 * time.Minute
)

// failureBackoff delays replacements while a pool's members of one revision fail. Its zero value has no failures. After
// a restart there is one more try.
type failureBackoff struct {
	revision string
	failures int       // rounds of failures since the last success
	retryAt  time.Time // when what failed may be replaced
	cause    string    // of the last failure
	refused  string    // why new members are invalid to the API server
	began    time.Time // when the revision was first seen
	ready    map[types.UID]struct{}
	failed   map[types.UID]struct{}
}

// observe updates the backoff from the members as they are now.
func (t *failureBackoff) observe(revision string, members []member, now time.Time) {
	if t.revision != revision {
		*t = failureBackoff{revision: revision, began: now}
	}
	isReady, hasFailed := map[types.UID]struct{}{}, map[types.UID]struct{}{}
	success, fresh := false, false
	for _, m := range members {
		switch {
		case m.revision != revision:
		case m.state == ready:
			isReady[m.uid] = struct{}{}
			success = success || !has(t.ready, m.uid)
		case m.state == failed:
			hasFailed[m.uid] = struct{}{}
			if !has(t.failed, m.uid) {
				fresh, t.cause = true, m.note
			}
		}
	}
	t.ready, t.failed = isReady, hasFailed
	if success {
		t.failures, t.retryAt, t.refused = 0, time.Time{}, ""
	}
	if fresh {
		t.fail(now)
	}
}

// fail starts a delay, unless one is in progress.
func (t *failureBackoff) fail(now time.Time) {
	if now.Before(t.retryAt) {
		return
	}
	t.failures++
	t.retryAt = now.Add(min(firstRetry<<min(t.failures-1, 20), longestRetry))
}

// refuse records that the API server rejected a member, as invalid or for another reason.
func (t *failureBackoff) refuse(text string, invalid bool, now time.Time) {
	t.cause, t.refused = text, ""
	if invalid {
		t.refused = text
	}
	t.fail(now)
}

func (t *failureBackoff) hold(now time.Time) bool { return t.failures > 0 && now.Before(t.retryAt) }

func (t *failureBackoff) probe() bool { return t.failures > 0 }
