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
	// maxSessions and maxTickets are of all namespaces, of which each has at most a share.
	maxSessions = 1024
	maxTickets  = 1024
	share       = 8
)

// digest is under what a secret of a client is kept: a copy of the memory or a timing tells no secret.
type digest [sha256.Size]byte

func digestOf(secret string) digest { return sha256.Sum256([]byte(secret)) }

// Session is of one browser.
type Session struct {
	id digest
	// Key is the API key that it was started with, of a namespace.
	Key       string
	namespace string
	end       time.Time

	used time.Time // guarded by Store.mu
}

// ticket is exchanged once: for a session, or for a terminal.
type ticket struct {
	namespace string
	key       string   // of a link
	session   *Session // of a terminal, with sandbox
	sandbox   string
	end       time.Time
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

// Start makes a session for the holder of a key of a namespace, and returns its secret, which is always a new one.
func (s *Store) Start(namespace, key string) (secret string, err error) {
	now := time.Now()
	secret = rand.Text()
	s.mu.Lock()
	defer s.mu.Unlock()
	own := 0
	for id, x := range s.sessions {
		switch {
		case x.over(now):
			delete(s.sessions, id)
		case x.namespace == namespace:
			own++
		}
	}
	if len(s.sessions) >= maxSessions || own >= maxSessions/share {
		return "", errs.Public(errs.ErrExhausted, "too many people are signed in; try again later")
	}
	id := digestOf(secret)
	s.sessions[id] = &Session{id: id, Key: key, namespace: namespace, end: now.Add(Life), used: now}
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

// Link makes a ticket for a session of the holder of a key of a namespace.
func (s *Store) Link(namespace, key string) (secret string, err error) {
	return s.issue(ticket{namespace: namespace, key: key, end: time.Now().Add(LinkLife)})
}

// Terminal makes a ticket for a terminal in a sandbox.
func (s *Store) Terminal(x *Session, sandbox string) (secret string, err error) {
	return s.issue(ticket{namespace: x.namespace, session: x, sandbox: sandbox, end: time.Now().Add(terminalLife)})
}

func (s *Store) issue(t ticket) (secret string, err error) {
	now := time.Now()
	secret = rand.Text()
	s.mu.Lock()
	defer s.mu.Unlock()
	own := 0
	for id, old := range s.tickets {
		switch {
		case now.After(old.end):
			delete(s.tickets, id)
		case old.namespace == t.namespace:
			own++
		}
	}
	if len(s.tickets) >= maxTickets || own >= maxTickets/share {
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
