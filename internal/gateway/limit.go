package gateway

import (
	"context"
	"crypto/sha256"
	"math"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// maxKeys bounds the keys whose rates are remembered; those not seen for long go first.
const maxKeys = 4096

// allowance is the rate of one sandbox's requests. The zero value allows all.
type allowance struct{ current atomic.Pointer[rate.Limiter] }

// take counts a request against a rate, with bursts of a second's worth. It returns how long to
// wait where the rate is exceeded, else 0. perSecond of 0 or less allows all.
func (a *allowance) take(perSecond float64) time.Duration {
	if perSecond <= 0 {
		return 0
	}
	l := a.current.Load()
	if l == nil || l.Limit() != rate.Limit(perSecond) {
		fresh := newLimiter(perSecond)
		if a.current.CompareAndSwap(l, fresh) {
			l = fresh
		} else {
			l = a.current.Load()
		}
	}
	return wait(l)
}

func newLimiter(perSecond float64) *rate.Limiter {
	return rate.NewLimiter(rate.Limit(perSecond), max(1, int(math.Ceil(perSecond))))
}

func wait(l *rate.Limiter) time.Duration {
	r := l.Reserve()
	d := r.Delay()
	if d > 0 {
		r.Cancel() // refused requests do not count
	}
	return d
}

// keyLimits are the rates of API keys, by their hashes. Only keys that exist are counted, so that
// nobody fills them with others. Two generations bound them all the same, and a new one forgets
// what the last but one knew.
type keyLimits struct {
	perSecond float64
	// exists reports whether there is such a key. Nil: each is counted.
	exists func(ctx context.Context, key string) bool

	mu  sync.Mutex
	now map[[sha256.Size]byte]*rate.Limiter // +checklocks:mu
	old map[[sha256.Size]byte]*rate.Limiter // +checklocks:mu
}

// take counts a request of a key and returns how long to wait, if the rate is exceeded. A key that
// does not exist is not counted: the API refuses it.
func (k *keyLimits) take(ctx context.Context, key string) time.Duration {
	if k.perSecond <= 0 || key == "" {
		return 0
	}
	h := sha256.Sum256([]byte(key))
	l := k.known(h)
	if l == nil {
		if k.exists != nil && !k.exists(ctx, key) {
			return 0
		}
		l = k.learn(h)
	}
	return wait(l)
}

// known returns the limiter of a key that was counted before, or nil.
func (k *keyLimits) known(h [sha256.Size]byte) *rate.Limiter {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l := k.now[h]; l != nil {
		return l
	}
	l := k.old[h]
	if l != nil {
		k.addLocked(h, l)
	}
	return l
}

// learn returns the limiter of a key that exists.
func (k *keyLimits) learn(h [sha256.Size]byte) *rate.Limiter {
	k.mu.Lock()
	defer k.mu.Unlock()
	l := k.now[h]
	if l == nil { // else another request was first
		l = newLimiter(k.perSecond)
		k.addLocked(h, l)
	}
	return l
}

// +checklocks:k.mu
func (k *keyLimits) addLocked(h [sha256.Size]byte, l *rate.Limiter) {
	if k.now == nil || len(k.now) >= maxKeys {
		k.old, k.now = k.now, map[[sha256.Size]byte]*rate.Limiter{}
	}
	k.now[h] = l
}

// apiKeyOf is the key that a request to the API shows, or empty.
func apiKeyOf(r *http.Request) string {
	if key := r.Header.Get("X-Api-Key"); key != "" {
		return key
	}
	_, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	return strings.TrimSpace(key)
}

// seconds is a time for Retry-After: whole, and at least 1.
func seconds(d time.Duration) int { return max(1, int(math.Ceil(d.Seconds()))) }

// tooMany refuses a request beyond a rate.
func tooMany(what string, after time.Duration) *refusal {
	return &refusal{status: http.StatusTooManyRequests, message: "Too many requests " + what + "; try again later", retryAfter: seconds(after)}
}
