// Package sessions keeps the sessions of people who have signed in to the dashboard, and the tickets that are exchanged once.
// All are in memory, under digests of their secrets: a restart ends them.
package sessions

import (
	"crypto/rand"
	"crypto/sha256"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Bounds of sessions and tickets.
const (
	// Life ends every session.
	Life = 12 * time.Hour
	// LinkLife is how long the ticket of a link can be exchanged.
	LinkLife = time.Minute

	// idle ends a session that no one has used; requests that the page makes by itself do not count.
	idle         = time.Hour
	terminalLife = 30 * time.Second
	maxSessions  = 1024
	maxTickets   = 1024
)

// digest is under what a secret of a client is kept: a copy of the memory or a timing tells no secret.
type digest [sha256.Size]byte

func digestOf(secret string) digest { return sha256.Sum256([]byte(secret)) }

// Session is of one browser.
type Session struct {
	id digest
	// Key is the API key that it was started with.
	Key string
	end time.Time

	used time.Time // guarded by Store.mu
}

// ticket is exchanged once: for a session, or for a terminal.
type ticket struct {
	key     string   // of a link
	session *Session // of a terminal, with sandbox
	sandbox string
	end     time.Time
}

// Store has the sessions and tickets of a process. It is safe for concurrent use.
type Store struct {
	mu       sync.Mutex
	sessions map[digest]*Session // +checklocks:mu
	tickets  map[digest]ticket   // +checklocks:mu
}

// New returns an empty Store.
func New() *Store {
	return &Store{sessions: map[digest]*Session{}, tickets: map[digest]ticket{}}
}

// Start makes a session for the holder of a key, and returns its secret, which is always a new one.
func (s *Store) Start(key string) (secret string, err error) {
	now := time.Now()
	secret = rand.Text()
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, x := range s.sessions {
		if x.over(now) {
			delete(s.sessions, id)
		}
	}
	if len(s.sessions) >= maxSessions {
		return "", errs.Public(errs.ErrExhausted, "too many people are signed in; try again later")
	}
	id := digestOf(secret)
	s.sessions[id] = &Session{id: id, Key: key, end: now.Add(Life), used: now}
	return secret, nil
}

func (x *Session) over(now time.Time) bool {
	return now.After(x.end) || now.After(x.used.Add(idle))
}

// Find returns the session of a secret; nil: there is none, or it has ended. Used has it count as used.
func (s *Store) Find(secret string, used bool) *Session {
	return s.find(digestOf(secret), used)
}

func (s *Store) find(id digest, used bool) *Session {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.sessions[id]
	if x == nil {
		return nil
	}
	if x.over(now) {
		delete(s.sessions, id)
		return nil
	}
	if used {
		x.used = now
	}
	return x
}

// Alive reports whether a session has not ended.
func (s *Store) Alive(x *Session) bool { return s.find(x.id, false) == x }

// End ends a session.
func (s *Store) End(x *Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, x.id)
}

// Link makes a ticket for a session of a key's holder.
func (s *Store) Link(key string) (secret string, err error) {
	return s.issue(ticket{key: key, end: time.Now().Add(LinkLife)})
}

// Terminal makes a ticket for a terminal in a sandbox.
func (s *Store) Terminal(x *Session, sandbox string) (secret string, err error) {
	return s.issue(ticket{session: x, sandbox: sandbox, end: time.Now().Add(terminalLife)})
}

func (s *Store) issue(t ticket) (secret string, err error) {
	now := time.Now()
	secret = rand.Text()
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, old := range s.tickets {
		if now.After(old.end) {
			delete(s.tickets, id)
		}
	}
	if len(s.tickets) >= maxTickets {
		return "", errs.Public(errs.ErrExhausted, "too many tickets are unused; try again in a minute")
	}
	s.tickets[digestOf(secret)] = t
	return secret, nil
}

// TakeLink exchanges a ticket for the key that it was made with.
func (s *Store) TakeLink(secret string) (key string, ok bool) {
	t, ok := s.take(secret, func(t *ticket) bool { return t.session == nil })
	return t.key, ok
}

// TakeTerminal exchanges a ticket that the same session has made for the same sandbox.
func (s *Store) TakeTerminal(secret string, x *Session, sandbox string) bool {
	_, ok := s.take(secret, func(t *ticket) bool { return t.session == x && t.sandbox == sandbox })
	return ok
}

// take uses a ticket up, also where it does not fit.
func (s *Store) take(secret string, fits func(*ticket) bool) (ticket, bool) {
	id := digestOf(secret)
	s.mu.Lock()
	defer s.mu.Unlock()
	t, ok := s.tickets[id]
	delete(s.tickets, id)
	if !ok || time.Now().After(t.end) || !fits(&t) {
		return ticket{}, false
	}
	return t, true
}
