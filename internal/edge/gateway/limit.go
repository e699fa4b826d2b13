package gateway

import (
	"context"
	"crypto/sha256"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// maxLimiters bounds the number of keys, or addresses, with a limiter; the least recently used are
// dropped first.
const maxLimiters = 4096

// rateLimiter is the rate of one sandbox's requests. The zero value allows all.
type rateLimiter struct{ current atomic.Pointer[rate.Limiter] }

// take counts a request against a rate, with bursts of one second's worth. If the rate is exceeded, it
// returns how long to wait, else 0. perSecond of 0 or less allows all.
func (a *rateLimiter) take(perSecond float64) time.Duration {
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
		r.Cancel() // rejected requests do not count
	}
	return d
}

// limiters are rate limiters by key. Two generations bound their number: starting a new one drops the
// older. The zero value is ready.
type limiters[K comparable] struct {
	mu  sync.Mutex
	now map[K]*rate.Limiter // +checklocks:mu
	old map[K]*rate.Limiter // +checklocks:mu
}

// get returns the key's limiter, or else the result of create, which may be nil.
func (s *limiters[K]) get(k K, create func() *rate.Limiter) *rate.Limiter {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.now[k]
	if l != nil {
		return l
	}
	if l = s.old[k]; l == nil && create != nil {
		l = create()
	}
	if l == nil {
		return nil
	}
	if s.now == nil || len(s.now) >= maxLimiters {
		s.old, s.now = s.now, map[K]*rate.Limiter{}
	}
	s.now[k] = l
	return l
}

// keyLimits are the rate limiters of API keys, by their hashes. Only existing keys are counted, so
// that invalid ones do not fill the table.
type keyLimits struct {
	perSecond float64
	// namespace is Config's KeyNamespace. Nil: each key is counted.
	namespace func(ctx context.Context, key string) (string, bool)
	limiters[[sha256.Size]byte]
}

// take counts a request of a key and returns how long to wait if the rate is exceeded, else 0. An
// unknown key is not counted: the API rejects it.
func (k *keyLimits) take(ctx context.Context, key string) time.Duration {
	if k.perSecond <= 0 || key == "" {
		return 0
	}
	h := sha256.Sum256([]byte(key))
	l := k.get(h, nil)
	if l == nil {
		if k.namespace != nil {
			if _, exists := k.namespace(ctx, key); !exists {
				return 0
			}
		}
		l = k.get(h, func() *rate.Limiter { return newLimiter(k.perSecond) })
	}
	return wait(l)
}
