package lifecycle

import (
	"context"
	"testing"
	"time"
)

func TestEvery(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	calls := 0
	if err := Every(ctx, time.Microsecond, func() {
		if calls++; calls == 3 {
			cancel()
		}
	}); err != nil || calls < 3 { // a tick may win against the end
		t.Errorf("%d calls, %v", calls, err)
	}
	calls = 0
	if err := Every(ctx, time.Hour, func() { calls++ }); err != nil || calls != 1 {
		t.Errorf("after the end: %d calls, %v", calls, err)
	}
}
