package acme

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"path/filepath"
	"time"

	"golang.org/x/crypto/acme"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
)

const (
	// orderTime bounds one attempt.
	orderTime = 10 * time.Minute
	// firstPause is the pause after the first failure; each further one triples it, up to mostPause.
	// That makes four attempts in the first hour: Let's Encrypt allows five failures of a name per
	// hour.
	firstPause = 2 * time.Minute
	mostPause  = 12 * time.Hour
	// longestSleep bounds a wait, because the clock may be set meanwhile.
	longestSleep = time.Hour
)

// orderAttempt is the result of the attempts for a certificate since the last success.
type orderAttempt struct {
	Failures int       `json:"failures"`
	Failure  string    `json:"failure"`
	After    time.Time `json:"after"` // no attempt before
	Settings string    `json:"settings"`
}

// Run obtains and renews certificates until ctx is done. Callers need not wait for it: the error of an
// attempt is logged, returned by States, and retried later.
func (m *Manager) Run(ctx context.Context) error {
	if m.cfg.DNS == nil {
		m.log.WarnContext(ctx, "no wildcard certificates without settings of DNS: the hosts of sandboxes keep those of the local CA",
			"set", "acmeUpdateServer or acmeHook")
	}
	for {
		w, at := m.next()
		if !sleepUntil(ctx, at) {
			return nil
		}
		if time.Now().Before(at) {
			continue
		}
		m.attempt(ctx, w)
	}
}

// sleepUntil returns at a time, or somewhat earlier; false if ctx is done.
func sleepUntil(ctx context.Context, at time.Time) bool {
	timer := time.NewTimer(min(time.Until(at), longestSleep))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// next returns the certificate that is due first, and when.
func (m *Manager) next() (first certSpec, at time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, w := range m.wants {
		if due := m.dueLocked(w); i == 0 || due.Before(at) {
			first, at = w, due
		}
	}
	return first, at
}

// dueLocked returns when a certificate is to be ordered; the zero time: now.
//
// +checklocks:m.mu
func (m *Manager) dueLocked(w certSpec) time.Time {
	due := time.Time{}
	if c := m.held[w.id]; c != nil && covers(c, w) {
		due = renewAt(c.Leaf.NotBefore, c.Leaf.NotAfter, c.Leaf.SerialNumber.Bytes())
	}
	if after := m.tries[w.id].After; after.After(due) {
		return after
	}
	return due
}

// renewAt returns when a third of a certificate's validity remains, or up to a tenth of that earlier.
// The offset is derived from the serial number, so that machines that started together do not renew
// together, and a restart does not change it.
func renewAt(from, until time.Time, serial []byte) time.Time {
	third := until.Sub(from) / 3
	var last [8]byte
	copy(last[:], serial[max(0, len(serial)-8):])
	early := time.Duration(float64(third/10) * float64(binary.BigEndian.Uint64(last[:])>>11) / (1 << 53))
	return until.Add(-third - early)
}

// attempt orders one certificate, and stores the result before it returns.
func (m *Manager) attempt(ctx context.Context, w certSpec) {
	m.mu.Lock()
	t := m.tries[w.id]
	m.mu.Unlock()
	began := time.Now()
	limited, cancel := context.WithTimeout(ctx, orderTime)
	defer cancel()
	text, err := m.order(limited, w, t.Failures)
	if err == nil {
		err = m.keep(w, text)
	}
	if ctx.Err() != nil {
		return // the server is stopping: not a failure
	}
	if err == nil {
		t = orderAttempt{After: time.Now().Add(m.pause)}
		m.log.InfoContext(ctx, "certificate issued", "names", w.names, telemetry.Duration, time.Since(began))
	} else {
		t.Failures++
		t.Failure, t.Settings = err.Error(), m.settings()
		t.After = time.Now().Add(max(m.pause, pauseAfter(t.Failures, w.id), askedPause(err)))
		m.log.WarnContext(ctx, "no certificate was issued, what there is serves on", "names", w.names, "failures", t.Failures, "again", t.After, telemetry.Error, err)
	}
	m.mu.Lock()
	m.tries[w.id] = t
	note, err := json.Marshal(m.tries)
	m.mu.Unlock()
	if err == nil {
		err = durable.WriteFile(filepath.Join(m.dir, triesFile), note, privateMode)
	}
	if err != nil {
		m.log.WarnContext(ctx, "tries not noted", telemetry.Error, err)
	}
}

// pauseAfter grows with the failures, and differs a little between names.
func pauseAfter(failures int, id string) time.Duration {
	p := firstPause
	for range min(failures, 10) - 1 {
		p = min(3*p, mostPause)
	}
	var sum byte
	for _, c := range []byte(id) {
		sum = sum*31 + c
	}
	return p + p/8*time.Duration(sum)/256
}

// askedPause returns the authority's Retry-After.
func askedPause(err error) time.Duration {
	if problem, ok := errors.AsType[*acme.Error](err); ok {
		if d, limited := acme.RateLimit(problem); limited {
			return d
		}
	}
	return 0
}
