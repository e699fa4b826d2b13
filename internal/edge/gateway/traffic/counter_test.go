package traffic

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// TestHoldExcludes begins requests and holds at the same time: no request begins during a hold.
func TestHoldExcludes(t *testing.T) {
	var c Counter
	var inside, holds atomic.Int64
	var held atomic.Bool
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if !c.Begin() {
					if ended := c.Held(); ended != nil {
						<-ended
					}
					continue
				}
				inside.Add(1)
				if held.Load() {
					t.Error("a request began in a held epoch")
				}
				inside.Add(-1)
				c.End(0)
			}
		})
	}
	for holds.Load() < 1000 {
		release, ok := c.Hold(0)
		if !ok {
			continue
		}
		held.Store(true)
		for range 10 {
			runtime.Gosched() // so that one that should wait would get in
		}
		if inside.Load() != 0 {
			t.Error("held with a request in progress")
		}
		held.Store(false)
		holds.Add(1)
		release()
	}
	close(stop)
	wg.Wait()
	if n := c.count.Load(); n != 0 {
		t.Errorf("%d requests remain", n)
	}
	c.Touch(2)
	if _, ok := c.Hold(1); ok {
		t.Error("held although there was traffic since")
	}
	if _, ok := c.Hold(2); !ok {
		t.Error("not held although there was no traffic since")
	}
}
