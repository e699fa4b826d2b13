package pool

import (
	"testing"
	"time"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

func TestWaits(t *testing.T) {
	for _, tt := range []struct {
		name string
		in   Waits
		text string
		out  Waits
	}{
		{"none", Waits{}, "", Waits{}},
		{"too short", Waits{Quota: 900 * time.Microsecond}, "", Waits{}},
		{"member", Waits{Member: 180*time.Millisecond + 300}, "member=180ms", Waits{Member: 180 * time.Millisecond}},
		{"both", Waits{Quota: 1200 * time.Millisecond, Member: time.Second}, "quota=1.2s,member=1s", Waits{Quota: 1200 * time.Millisecond, Member: time.Second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := &agents.Sandbox{}
			tt.in.Mark(s)
			if got := s.Annotations[AnnotationClaimWaits]; got != tt.text {
				t.Errorf("annotation = %q, want %q", got, tt.text)
			}
			if got := WaitsOf(s); got != tt.out {
				t.Errorf("read again = %+v, want %+v", got, tt.out)
			}
		})
	}
	s := &agents.Sandbox{}
	s.Annotations = map[string]string{AnnotationClaimWaits: "quota,member=soon,other=3s,=,quota=-4s,member=7ms"}
	if got := WaitsOf(s); got != (Waits{Member: 7 * time.Millisecond}) {
		t.Errorf("of a changed annotation = %+v", got)
	}
}
