package quota_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/quota"
)

// queued has requests of some sizes wait, one after the other, and returns their numbers in the order of the grants.
func queued(t *testing.T, q *quota.Quotas, patience time.Duration, cpus ...int64) (granted func() []int, refused func() []error) {
	t.Helper()
	var mu sync.Mutex
	var order []int
	var errors []error
	for i, cpu := range cpus {
		go func() {
			_, err := q.Await(t.Context(), quota.Request{Namespace: team, Size: quota.Size{MilliCPU: cpu, Memory: 1}}, patience)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errors = append(errors, err)
				return
			}
			order = append(order, i)
		}()
		synctest.Wait() // so that they come in this order
	}
	return func() []int { synctest.Wait(); return order }, func() []error { synctest.Wait(); return errors }
}

func TestQueueIsFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, _ := newQuotas(t, quota.Limits{}, map[string]string{quota.AnnotationCPU: "2"})
		a, b := box("a", of("1", "1")), box("b", of("1", "1"))
		q.Observe(nil, a)
		q.Observe(nil, b)
		granted, refused := queued(t, q, time.Minute, 2000, 500, 500)
		if got := granted(); got != nil {
			t.Fatalf("granted without room: %v", got)
		}
		if n := q.Waiting(team); n != 3 {
			t.Errorf("%d wait, want 3", n)
		}
		q.Observe(a, nil)
		if got := granted(); got != nil {
			t.Errorf("a small request overtook one that needs more: %v", got)
		}
		if _, err := q.Hold(t.Context(), quota.Request{Namespace: team, Size: quota.Size{MilliCPU: 1}}); !errors.Is(err, errs.ErrExhausted) || !strings.Contains(errs.Text(err), "3 requests wait") {
			t.Errorf("a request that does not wait overtook the queue: %v", err)
		}
		resume, err := q.Hold(t.Context(), quota.Request{Namespace: team, Size: quota.Size{MilliCPU: 1}, Paused: true})
		if err != nil {
			t.Errorf("a resume waits for the queue: %v", err)
		}
		resume.Release()
		q.Observe(b, nil)
		if got := granted(); !slices.Equal(got, []int{0}) {
			t.Errorf("granted %v, want the first alone", got)
		}
		time.Sleep(time.Minute)
		errs := refused()
		if len(errs) != 2 || !strings.Contains(errs[0].Error(), "waited 1m0s in the queue, and was number") {
			t.Errorf("refused with %v", errs)
		}
		if n := q.Waiting(team); n != 0 {
			t.Errorf("%d wait still", n)
		}
	})
}

func TestQueueMovesOn(t *testing.T) {
	for name, change := range map[string]func(q *quota.Quotas, reader *namespaces, held *quota.Reservation, cancel func()){
		"released": func(_ *quota.Quotas, _ *namespaces, held *quota.Reservation, _ func()) { held.Release() },
		"limit raised": func(_ *quota.Quotas, reader *namespaces, _ *quota.Reservation, _ func()) {
			reader.mu.Lock()
			reader.annotations = nil
			reader.mu.Unlock()
			time.Sleep(10 * time.Second)
		},
		"first one has given up": func(_ *quota.Quotas, _ *namespaces, held *quota.Reservation, cancel func()) { cancel(); held.Release() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q, reader := newQuotas(t, quota.Limits{}, map[string]string{quota.AnnotationSandboxes: "1"})
				held, err := q.Hold(t.Context(), quota.Request{Namespace: team})
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				first, second := errs.ErrTimeout, errs.ErrTimeout
				await := func(ctx context.Context, result *error) {
					r, err := q.Await(ctx, quota.Request{Namespace: team}, time.Hour)
					*result = err
					r.Release()
				}
				go await(ctx, &first)
				synctest.Wait()
				go await(t.Context(), &second)
				synctest.Wait()
				change(q, reader, held, cancel)
				synctest.Wait()
				if second != nil {
					t.Errorf("the second request: %v", second)
				}
				if (first != nil) != (ctx.Err() != nil) {
					t.Errorf("the first request: %v", first)
				}
			})
		})
	}
}

func TestQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, _ := newQuotas(t, quota.Limits{}, map[string]string{quota.AnnotationSandboxes: "0"})
		ctx, cancel := context.WithCancel(t.Context())
		for range 10_000 {
			go func() { _, _ = q.Await(ctx, quota.Request{Namespace: team}, time.Hour) }()
		}
		synctest.Wait()
		_, err := q.Await(t.Context(), quota.Request{Namespace: team}, time.Hour)
		if !errors.Is(err, errs.ErrExhausted) {
			t.Errorf("one more than may wait: %v", err)
		}
		cancel()
		synctest.Wait()
		if n := q.Waiting(team); n != 0 {
			t.Errorf("%d wait after their callers have left", n)
		}
	})
}
