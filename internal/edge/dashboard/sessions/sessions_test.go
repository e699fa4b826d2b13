package sessions

import (
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func TestSessionsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New()
		secret, err := s.Start("team", "key")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(idle - time.Second)
		if x := s.Find(secret, false); x == nil || x.Key != "key" {
			t.Fatalf("session = %+v before its idle limit", x)
		}
		time.Sleep(2 * time.Second)
		if s.Find(secret, true) != nil {
			t.Error("what the page does by itself has extended the session")
		}

		secret, _ = s.Start("team", "key")
		for range int(Life/(idle/2)) - 1 {
			time.Sleep(idle / 2)
			if s.Find(secret, true) == nil {
				t.Fatal("a session in use ended")
			}
		}
		time.Sleep(idle/2 + time.Second)
		if s.Find(secret, true) != nil {
			t.Error("a session in use has no end")
		}
	})
}

func TestSessionSecretIsNew(t *testing.T) {
	s := New()
	a, _ := s.Start("team", "key")
	b, _ := s.Start("team", "key")
	if a == b || len(a) < 26 {
		t.Errorf("secrets %q and %q", a, b)
	}
	if s.Find("", true) != nil || s.Find(a[:len(a)-1], true) != nil {
		t.Error("another text found a session")
	}
	x := s.Find(a, true)
	s.End(x)
	if s.Find(a, true) != nil || s.Alive(x) || s.Find(b, true) == nil {
		t.Error("End ended too little or too much")
	}
}

// TestSessionsAreBounded has namespaces take all that they can: each has its share, and all together are bounded.
func TestSessionsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New()
		for i := range share {
			namespace := "team-" + strconv.Itoa(i)
			for range maxSessions / share {
				_, err := s.Start(namespace, "key")
				_, linked := s.Link(namespace, "key")
				if err != nil || linked != nil {
					t.Fatalf("of %s: %v, %v", namespace, err, linked)
				}
			}
			if _, err := s.Start(namespace, "key"); errs.Kind(err) != errs.ErrExhausted { //nolint:errorlint // a kind
				t.Errorf("one too many of %s: %v", namespace, err)
			}
			if _, err := s.Link(namespace, "key"); errs.Kind(err) != errs.ErrExhausted { //nolint:errorlint // a kind
				t.Errorf("one link too many of %s: %v", namespace, err)
			}
		}
		if _, err := s.Start("other", "key"); errs.Kind(err) != errs.ErrExhausted { //nolint:errorlint // a kind
			t.Errorf("one too many of all: %v", err)
		}
		time.Sleep(idle + time.Second)
		if _, err := s.Start("team-0", "key"); err != nil {
			t.Errorf("after the others ended: %v", err)
		}
	})
}

func TestTicketsWorkOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New()
		link, _ := s.Link("team", "key")
		if key, ok := s.TakeLink(link); !ok || key != "key" {
			t.Errorf("first use = %q, %v", key, ok)
		}
		if _, ok := s.TakeLink(link); ok {
			t.Error("a link worked twice")
		}
		link, _ = s.Link("team", "key")
		time.Sleep(LinkLife + time.Second)
		if _, ok := s.TakeLink(link); ok {
			t.Error("an old link worked")
		}

		secret, _ := s.Start("team", "key")
		other, _ := s.Start("team", "key")
		x, y := s.Find(secret, true), s.Find(other, true)
		for name, use := range map[string]func(ticket string) bool{
			"another session": func(ticket string) bool { return s.TakeTerminal(ticket, y, "a") },
			"another sandbox": func(ticket string) bool { return s.TakeTerminal(ticket, x, "b") },
			"as a link":       func(ticket string) bool { _, ok := s.TakeLink(ticket); return ok },
		} {
			ticket, _ := s.Terminal(x, "a")
			if use(ticket) {
				t.Errorf("%s: the ticket of a terminal worked", name)
			}
			if s.TakeTerminal(ticket, x, "a") {
				t.Errorf("%s: the ticket is not used up", name)
			}
		}
		ticket, _ := s.Terminal(x, "a")
		if !s.TakeTerminal(ticket, x, "a") || s.TakeTerminal(ticket, x, "a") {
			t.Error("a terminal's ticket did not work once")
		}
		ticket, _ = s.Terminal(x, "a")
		time.Sleep(terminalLife + time.Second)
		if s.TakeTerminal(ticket, x, "a") {
			t.Error("an old ticket worked")
		}
	})
}
