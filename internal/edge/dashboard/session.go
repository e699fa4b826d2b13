package dashboard

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"sync"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Bounds of sessions and tickets.
const (
	// sessionIdle ends a session that no one has used; requests that the page makes by itself do not count.
	sessionIdle = time.Hour
	// sessionLife ends every session.
	sessionLife = 12 * time.Hour
	// linkLife and terminalLife are how long a ticket can be exchanged.
	linkLife     = time.Minute
	terminalLife = 30 * time.Second
	maxSessions  = 1024
	maxTickets   = 1024
)

// digest is under what a secret of a client is kept: a copy of the memory or a timing tells no secret.
type digest [sha256.Size]byte

func digestOf(secret string) digest { return sha256.Sum256([]byte(secret)) }

// newSecret has 256 random bits.
func newSecret() string {
	var random [32]byte
	_, _ = rand.Read(random[:]) // never fails, by its contract
	return base64.RawURLEncoding.EncodeToString(random[:])
}

// session is of one browser.
type session struct {
	id  digest
	key string // the API key; it stays in memory
	end time.Time

	used time.Time // guarded by sessionStore.mu
}

// ticket is exchanged once: for a session, or for a terminal.
type ticket struct {
	key     string   // of a link
	session *session // of a terminal, with sandbox
	sandbox string
	end     time.Time
}

// sessionStore has the sessions and tickets of a process. A restart ends all.
type sessionStore struct {
	mu       sync.Mutex
	sessions map[digest]*session // +checklocks:mu
	tickets  map[digest]ticket   // +checklocks:mu
}

// newSessions returns one without any.
func newSessions() *sessionStore {
	return &sessionStore{sessions: map[digest]*session{}, tickets: map[digest]ticket{}}
}

// Start makes a session for the holder of a key, and returns its secret, which is always a new one.
func (s *sessionStore) Start(key string) (secret string, err error) {
	now := time.Now()
	secret = newSecret()
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
	s.sessions[id] = &session{id: id, key: key, end: now.Add(sessionLife), used: now}
	return secret, nil
}

func (x *session) over(now time.Time) bool {
	return now.After(x.end) || now.After(x.used.Add(sessionIdle))
}

// Find returns the session of a secret; nil: there is none, or it has ended. Used has it count as used.
func (s *sessionStore) Find(secret string, used bool) *session {
	return s.find(digestOf(secret), used)
}

func (s *sessionStore) find(id digest, used bool) *session {
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
func (s *sessionStore) Alive(x *session) bool { return s.find(x.id, false) == x }

// End ends a session.
func (s *sessionStore) End(x *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, x.id)
}

// Link makes a ticket for a session of a key's holder.
func (s *sessionStore) Link(key string) (secret string, err error) {
	return s.issue(ticket{key: key, end: time.Now().Add(linkLife)})
}

// Terminal makes a ticket for a terminal in a sandbox.
func (s *sessionStore) Terminal(x *session, sandbox string) (secret string, err error) {
	return s.issue(ticket{session: x, sandbox: sandbox, end: time.Now().Add(terminalLife)})
}

func (s *sessionStore) issue(t ticket) (secret string, err error) {
	now := time.Now()
	secret = newSecret()
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
func (s *sessionStore) TakeLink(secret string) (key string, ok bool) {
	t, ok := s.take(secret, func(t *ticket) bool { return t.session == nil })
	return t.key, ok
}

// TakeTerminal exchanges a ticket that the same session has made for the same sandbox.
func (s *sessionStore) TakeTerminal(secret string, x *session, sandbox string) bool {
	_, ok := s.take(secret, func(t *ticket) bool { return t.session == x && t.sandbox == sandbox })
	return ok
}

// take uses a ticket up, also where it does not fit.
func (s *sessionStore) take(secret string, fits func(*ticket) bool) (ticket, bool) {
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
