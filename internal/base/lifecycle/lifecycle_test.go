package lifecycle_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
)

var errBoom = errors.New("boom")

func untilAsked(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

func TestRunStopsTheRestWhenOneFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stopped := false
		err := lifecycle.Run(t.Context(),
			lifecycle.Service{Name: "steady", Run: func(ctx context.Context) error {
				defer func() { stopped = true }()
				return untilAsked(ctx)
			}},
			lifecycle.Service{Name: "faulty", Run: func(context.Context) error {
				time.Sleep(time.Hour)
				return errBoom
			}},
		)
		if !errors.Is(err, errBoom) || !strings.Contains(err.Error(), "service faulty: boom") {
			t.Errorf("Run = %v, want the faulty service named", err)
		}
		if strings.Contains(err.Error(), "steady") {
			t.Errorf("Run = %v blames a service that stopped on request", err)
		}
		if !stopped {
			t.Error("Run returned before the steady service ended")
		}
	})
}

func TestRunJoinsAllFailures(t *testing.T) {
	errLate := errors.New("flush failed")
	err := lifecycle.Run(t.Context(),
		lifecycle.Service{Name: "a", Run: func(ctx context.Context) error { <-ctx.Done(); return errLate }},
		lifecycle.Service{Name: "b", Run: func(context.Context) error { return errBoom }},
	)
	if !errors.Is(err, errBoom) || !errors.Is(err, errLate) {
		t.Errorf("Run = %v, want both failures", err)
	}
}

func TestRunBlamesEarlyReturn(t *testing.T) {
	for name, give := range map[string]error{"nil": nil, "a cancel of its own": context.Canceled} {
		t.Run(name, func(t *testing.T) {
			err := lifecycle.Run(t.Context(), lifecycle.Service{
				Name: "quitter", Run: func(context.Context) error { return give },
			})
			if err == nil {
				t.Error("Run = nil, want an error")
			}
		})
	}
}

func TestRunEndsQuietlyWhenAsked(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := lifecycle.Run(ctx, lifecycle.Service{Name: "steady", Run: untilAsked}); err != nil {
		t.Errorf("Run = %v", err)
	}
	deadline, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	if err := lifecycle.Run(deadline, lifecycle.Service{Name: "steady", Run: untilAsked}); err != nil {
		t.Errorf("Run at a deadline = %v", err)
	}
}
