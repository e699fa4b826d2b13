package acme

import (
	"testing"
	"time"
)

func TestRenewAt(t *testing.T) {
	from := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	until := from.Add(90 * 24 * time.Hour)
	third := 30 * 24 * time.Hour
	seen := map[time.Time]bool{}
	for _, serial := range [][]byte{{1}, {0xff, 2, 3, 4, 5, 6, 7, 8}, {9, 0xff, 2, 3, 4, 5, 6, 7, 8}, {0, 0, 0, 0, 0, 0, 0, 0}, nil} {
		at := renewAt(from, until, serial)
		if at.After(until.Add(-third)) || at.Before(until.Add(-third-third/10)) {
			t.Errorf("serial %x: %s", serial, at)
		}
		if at != renewAt(from, until, serial) {
			t.Errorf("serial %x: another time", serial)
		}
		seen[at] = true
	}
	if len(seen) < 3 {
		t.Errorf("all at once: %v", seen)
	}
}

// TestPauses: few enough for what authorities allow, and always bounded.
func TestPauses(t *testing.T) {
	var sum time.Duration
	inHour := 1
	for n := 1; n < 50; n++ {
		p := pauseAfter(n, "box.test")
		if p < firstPause || p > mostPause+mostPause/8 {
			t.Errorf("after %d failures: %s", n, p)
		}
		if sum += p; sum < time.Hour {
			inHour++
		}
	}
	if inHour > 5 {
		t.Errorf("%d tries in the first hour", inHour)
	}
}
