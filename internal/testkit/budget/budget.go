// Package budget ends a run of tests in time on a slow machine: what has not begun by then is skipped, and said to be.
//
// Only tests of real sandboxes ask it, since they take nearly all the time. It stops nothing that has begun, and leaves out
// nothing that was asked for by -run, as is a test that failed and is tried once more.
package budget

import (
	"flag"
	"os"
	"strconv"
	"testing"
	"time"
)

// Variable is the environment variable with the time, in seconds since 1970, after which no
// such test begins. Without it all begin.
const Variable = "TEST_UNTIL"

// spent reports whether the time is over.
func spent() bool {
	if run := flag.Lookup("test.run"); run != nil && run.Value.String() != "" {
		return false
	}
	until, err := strconv.ParseInt(os.Getenv(Variable), 10, 64)
	return err == nil && time.Now().Unix() > until
}

// Need skips a test for which no time is left. A parallel test calls it after t.Parallel.
func Need(t testing.TB) {
	t.Helper()
	if spent() {
		t.Skip("SKIPPED: no time is left; make test-all runs it")
	}
}
