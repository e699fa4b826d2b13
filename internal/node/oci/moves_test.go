package oci

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// Moving ourselves to where we are leaves us there, whoever does it at the same time.
func TestQuickMovesMoveNobody(t *testing.T) {
	before, err := os.ReadFile("/proc/self/cgroup")
	must(t, err)
	var calls sync.WaitGroup
	for range 3 {
		calls.Go(func() {
			called := 0
			withQuickMoves(func() {
				withQuickMoves(func() { called++ })
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
		t.Error("somebody is still at it")
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
