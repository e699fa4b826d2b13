package lifecycle_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
)

var errBoom = errors.New("boom")

// TestStackReportsAnEarlyReturn: a service that returns before it is stopped has failed.
func TestStackReportsAnEarlyReturn(t *testing.T) {
	for name, give := range map[string]error{"nil": nil, "a cancel of its own": context.Canceled} {
		t.Run(name, func(t *testing.T) {
			var s lifecycle.Stack
			err := s.Push(t.Context(), "early", func(_ context.Context, ready func()) error {
				ready()
				return give
			})
			<-s.Failed()
			if err = errors.Join(err, s.Stop()); err == nil {
				t.Error("no error")
			}
		})
	}
}

// member returns a service that records its start and its end in events.
func member(events *[]string, name string, end error) func(context.Context, func()) error {
	return func(ctx context.Context, ready func()) error {
		*events = append(*events, "+"+name)
		ready()
		<-ctx.Done()
		time.Sleep(time.Second) // an end that takes time must still be waited for
		*events = append(*events, "-"+name)
		return end
	}
}

func TestStackStopsInReverse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s lifecycle.Stack
		var events []string
		for _, name := range []string{"store", "api", "gateway"} {
			if err := s.Push(t.Context(), name, member(&events, name, nil)); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Stop(); err != nil {
			t.Errorf("Stop = %v", err)
		}
		want := []string{"+store", "+api", "+gateway", "-gateway", "-api", "-store"}
		if !slices.Equal(events, want) {
			t.Errorf("events = %v, want %v", events, want)
		}
		if err := s.Stop(); err != nil {
			t.Errorf("a second Stop = %v", err)
		}
	})
}

func TestStackOutlivesTheContextOfItsStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s lifecycle.Stack
		var events []string
		ctx, cancel := context.WithCancel(t.Context())
		if err := s.Push(ctx, "store", member(&events, "store", nil)); err != nil {
			t.Fatal(err)
		}
		cancel()
		synctest.Wait()
		if !slices.Equal(events, []string{"+store"}) {
			t.Errorf("events = %v: the service ended out of order", events)
		}
		if err := s.Stop(); err != nil {
			t.Errorf("Stop = %v", err)
		}
	})
}

func TestStackReportsAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s lifecycle.Stack
		var events []string
		if err := s.Push(t.Context(), "store", member(&events, "store", nil)); err != nil {
			t.Fatal(err)
		}
		err := s.Push(t.Context(), "faulty", func(_ context.Context, ready func()) error {
			ready()
			time.Sleep(time.Minute)
			return errBoom
		})
		if err != nil {
			t.Fatal(err)
		}
		<-s.Failed()
		if err := s.Stop(); !errors.Is(err, errBoom) || !strings.Contains(err.Error(), "service faulty: boom") {
			t.Errorf("Stop = %v, want the faulty service named", err)
		}
		if !slices.Equal(events, []string{"+store", "-store"}) {
			t.Errorf("events = %v", events)
		}
	})
}

func TestStackPushFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s lifecycle.Stack
		err := s.Push(t.Context(), "dead", func(context.Context, func()) error { return errBoom })
		if !errors.Is(err, errBoom) {
			t.Errorf("Push of one that fails = %v, want boom", err)
		}

		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		ended := false
		err = s.Push(ctx, "slow", func(ctx context.Context, _ func()) error {
			defer func() { ended = true }()
			<-ctx.Done()
			return ctx.Err()
		})
		if !errors.Is(err, context.DeadlineExceeded) || !ended {
			t.Errorf("Push of one never ready = %v, ended %v", err, ended)
		}
		if err := s.Stop(); err != nil {
			t.Errorf("Stop = %v: a failed Push left something", err)
		}
	})
}
