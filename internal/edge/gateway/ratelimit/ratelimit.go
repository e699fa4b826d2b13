// Package ratelimit limits requests by sandbox, API key or client address. It bounds the number of its limiters.
package ratelimit

import (
	"context"
	"crypto/sha256"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
)

// MaxLimiters bounds the number of keys, or addresses, with a limiter; the least recently used are
// dropped first.
const MaxLimiters = 4096

// Limiter is the rate of one sandbox's requests. The zero value allows all.
type Limiter struct{ current atomic.Pointer[rate.Limiter] }

// Take counts a request against a rate, with bursts of one second's worth. If the rate is exceeded, it
// returns how long to wait, else 0. perSecond of 0 or less allows all.
func (a *Limiter) Take(perSecond float64) time.Duration {
	if perSecond <= 0 {
		return 0
	}
	l := a.current.Load()
	if l == nil || l.Limit() != rate.Limit(perSecond) {
		fresh := NewLimiter(perSecond)
		if a.current.CompareAndSwap(l, fresh) {
			l = fresh
		} else {
			l = a.current.Load()
		}
	}
	return Wait(l)
}

// NewLimiter allows perSecond requests, with bursts of one second's worth.
func NewLimiter(perSecond float64) *rate.Limiter {
	return rate.NewLimiter(rate.Limit(perSecond), max(1, int(math.Ceil(perSecond))))
}

// Wait counts a request, and returns how long to wait if that exceeds the rate, else 0.
func Wait(l *rate.Limiter) time.Duration {
	r := l.Reserve()
	d := r.Delay()
	if d > 0 {
		r.Cancel() // rejected requests do not count
	}
	return d
}

// Limiters are rate limiters by key. Two generations bound their number: starting a new one drops the
// older. The zero value is ready.
type Limiters[K comparable] struct {
	mu  sync.Mutex
	now map[K]*rate.Limiter // +checklocks:mu
	old map[K]*rate.Limiter // +checklocks:mu
}

// Get returns the key's limiter, or else the result of create, which may be nil.
func (s *Limiters[K]) Get(k K, create func() *rate.Limiter) *rate.Limiter {
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
	if s.now == nil || len(s.now) >= MaxLimiters {
		s.old, s.now = s.now, map[K]*rate.Limiter{}
	}
	s.now[k] = l
	return l
}

// Size returns the number of limiters.
func (s *Limiters[K]) Size() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.now) + len(s.old)
}

// Keys are the rate limiters of API keys, by their hashes. Only existing keys are counted, so
// that invalid ones do not fill the table.
type Keys struct {
	PerSecond float64
	// namespace is Config's KeyNamespace. Nil: each key is counted.
	Namespace func(ctx context.Context, key string) (string, bool)
	Limiters[[sha256.Size]byte]
}

// Take counts a request of a key and returns how long to wait if the rate is exceeded, else 0. An
// unknown key is not counted: the API rejects it.
func (k *Keys) Take(ctx context.Context, key string) time.Duration {
	if k.PerSecond <= 0 || key == "" {
		return 0
	}
	h := sha256.Sum256([]byte(key))
	l := k.Get(h, nil)
	if l == nil {
		if k.Namespace != nil {
			if _, exists := k.Namespace(ctx, key); !exists {
				return 0
			}
		}
		l = k.Get(h, func() *rate.Limiter { return NewLimiter(k.PerSecond) })
	}
	return Wait(l)
}
