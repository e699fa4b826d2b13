package cgroups

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// Concurrent moves to our own cgroup change nothing.
func TestQuickMovesChangeNothing(t *testing.T) {
	before, err := os.ReadFile("/proc/self/cgroup")
	must(t, err)
	var calls sync.WaitGroup
	for range 3 {
		calls.Go(func() {
			called := 0
			WithQuickMoves(func() {
				WithQuickMoves(func() { called++ })
			})
			if called != 1 {
				t.Errorf("called %d times", called)
			}
		})
	}
	calls.Wait()
	after, err := os.ReadFile("/proc/self/cgroup")
	if err != nil || string(after) != string(before) {
		t.Errorf("we were in %s, and are in %s, %v", before, after, err)
	}
	if len(moving) > 0 {
		t.Error("the mover is still active")
	}
}

func TestOwnCgroup(t *testing.T) {
	path := ownCgroup()
	if path == "" {
		t.Skip("SKIPPED: no freezer hierarchy of version 1 here")
	}
	pids, err := os.ReadFile(path)
	must(t, err)
	if !slices.Contains(strings.Fields(string(pids)), strconv.Itoa(os.Getpid())) {
		t.Errorf("%s does not have us", path)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
