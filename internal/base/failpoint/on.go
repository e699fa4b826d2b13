//go:build failpoints

package failpoint

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Enabled reports whether the program was built with failpoints.
const Enabled = true

// ErrArmed is the error of Err at a point that is armed with the action error.
var ErrArmed = errors.New("failure on purpose")

// lookAgain is the polling interval of a waiting point.
const lookAgain = 5 * time.Millisecond

// spec is the armed point.
type spec struct {
	name, action string
	at           int
}

var (
	mu sync.Mutex
	// counted is the spec that reached counts for.
	counted spec // +checklocks:mu
	reached int  // +checklocks:mu
)

// Reach marks a point. It may not return.
func Reach(name string) { _ = Err(name) }

// ReachIn is Reach for a name of two parts.
func ReachIn(group, name string) { Reach(group + "/" + name) }

// Err marks a point whose caller can fail. It may not return, or only later, or return an error.
func Err(name string) error {
	s := armed()
	if s.name != name || !s.isTurn() {
		return nil
	}
	fmt.Fprintf(os.Stderr, "failpoint %s: %s\n", name, s.action)
	switch s.action {
	case "error":
		return fmt.Errorf("failpoint %s: %w", name, ErrArmed)
	case "wait":
		for armed() == s {
			time.Sleep(lookAgain)
		}
	default:
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	return nil
}

// isTurn counts, and reports whether the Nth time is reached.
func (s spec) isTurn() bool {
	mu.Lock()
	defer mu.Unlock()
	if s != counted {
		counted, reached = s, 0
	}
	reached++
	return reached == s.at
}

// armed reads the armed point. A syntax error ends the process: a test that arms nothing proves
// nothing.
func armed() spec {
	text := os.Getenv(Variable)
	if file, ok := strings.CutPrefix(text, "@"); ok {
		b, err := os.ReadFile(file)
		if err != nil {
			return spec{}
		}
		text = strings.TrimSpace(string(b))
	}
	if text == "" {
		return spec{}
	}
	s, err := parse(text)
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", Variable, err)
		os.Exit(2) //nolint:forbidigo // only tests build this
	}
	return s
}

func parse(text string) (spec, error) {
	s := spec{at: 1}
	var number string
	var ok bool
	text, s.action, _ = strings.Cut(text, "=")
	if s.name, number, ok = strings.Cut(text, ":"); ok {
		n, err := strconv.Atoi(number)
		if err != nil || n < 1 {
			return s, fmt.Errorf("%q: want NAME[:N][=ACTION], N from 1", text)
		}
		s.at = n
	}
	switch s.action {
	case "":
		s.action = "kill"
	case "kill", "error", "wait":
	default:
		return s, fmt.Errorf("action %q: want kill, error or wait", s.action)
	}
	for _, known := range names {
		if s.name == known {
			return s, nil
		}
	}
	return s, fmt.Errorf("no point %q", s.name)
}
