package sandboxes

import "testing"

func TestTally(t *testing.T) {
	for _, tt := range []struct {
		tally tally
		want  string
	}{
		{tally{}, "0 done, 0 running or waiting, 0 not successful"},
		{tally{whole: true}, "0 done, 0 running or waiting, 0 not successful"},
		{tally{read: 9, running: 2, succeeded: 3, failed: 1, unfinished: 1}, "5 done, 2 running or waiting, 2 not successful"},
		{tally{read: 200, running: 50, succeeded: 99, failed: 1, whole: true}, "[############............] 50% of 200: 100 done, 50 running or waiting, 1 not successful"},
		{tally{read: 3, succeeded: 3, whole: true}, "[########################] 100% of 3: 3 done, 0 running or waiting, 0 not successful"},
	} {
		if got := tt.tally.String(); got != tt.want {
			t.Errorf("%+v: %q, want %q", tt.tally, got, tt.want)
		}
	}
}
