package oom

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
)

const limit = 512 << 20

// played is a sandbox whose programs take a MiB each millisecond, up to what they want.
type played struct {
	mu      sync.Mutex
	wants   []int64
	has     []int64
	now     int64 // the limit
	highest int64
	waiting bool
	held    bool // stops all programs
	holds   int
	cache   int64 // above the limit there is no event
	late    time.Duration
	freeing int64 // is still in use for late after the kill
	reached chan struct{}
}

func newPlayed(wants ...int64) *played {
	return &played{wants: wants, has: make([]int64, len(wants)), now: limit, reached: make(chan struct{}, 1)}
}

func (p *played) use() (sum int64) {
	for _, n := range p.has {
		sum += n
	}
	return sum + p.freeing
}

func (p *played) run(ctx context.Context) {
	for ctx.Err() == nil {
		time.Sleep(time.Millisecond)
		p.mu.Lock()
		p.waiting = false
		for i := range p.has {
			if p.held || p.has[i] >= p.wants[i] {
				continue
			}
			if p.use()+1<<20 > p.now {
				p.waiting = true
				select {
				case p.reached <- struct{}{}:
				default:
				}
				continue
			}
			before := p.use() + p.cache
			p.has[i] += 1 << 20
			if before <= limit && p.use()+p.cache > limit {
				select {
				case p.reached <- struct{}{}:
				default:
				}
			}
		}
		p.mu.Unlock()
	}
}

func (p *played) Wait(ctx context.Context) error {
	select {
	case <-p.reached:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (p *played) Use() (cgroups.Use, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	u := cgroups.Use{Over: p.use() - limit, Above: p.use()+p.cache > limit}
	if !p.waiting {
		u.Left = max(1, p.now-p.use())
	}
	return u, nil
}

func (p *played) Raised() int64 { return p.now - limit }

func (p *played) hold(_ context.Context, stopped bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held = stopped; stopped {
		p.holds++
	}
	return nil
}

func (p *played) Raise(bytes int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.use() > limit+bytes {
		return errors.New("busy")
	}
	p.now = limit + bytes
	p.highest = max(p.highest, p.now)
	return nil
}

// kill ends the program with the most memory, after a while in which it must not wait.
func (p *played) kill(ctx context.Context) (envd.OOMKilled, error) {
	time.Sleep(20 * time.Millisecond)
	for ctx.Err() == nil {
		p.mu.Lock()
		most := 0
		for i, n := range p.has {
			if n > p.has[most] {
				most = i
			}
		}
		if killed := p.has[most]; killed == 0 {
			p.mu.Unlock()
			return envd.OOMKilled{}, errors.New("no process has memory")
		} else if !p.waiting {
			p.has[most], p.wants[most] = 0, 0
			if p.late > 0 {
				p.freeing += killed
				time.AfterFunc(p.late, func() { p.mu.Lock(); p.freeing -= killed; p.mu.Unlock() })
			}
			p.mu.Unlock()
			return envd.OOMKilled{PID: most, Bytes: killed}, nil
		}
		p.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
	return envd.OOMKilled{}, context.Cause(ctx)
}

func TestGuard(t *testing.T) {
	for name, c := range map[string]struct {
		wants []int64
		cache int64
		late  time.Duration
		kills int
	}{
		"within the limit":               {wants: []int64{200 << 20, 300 << 20}},
		"within the limit, with a cache": {wants: []int64{200 << 20, 300 << 20}, cache: 100 << 20},
		"one too large":                  {wants: []int64{100 << 20, 900 << 20}, kills: 1},
		"one too large, with a cache":    {wants: []int64{100 << 20, 450 << 20}, cache: 500 << 20, kills: 1},
		"one too large, freed late":      {wants: []int64{900 << 20}, late: 5 * time.Second, kills: 1},
		"eight that together":            {wants: []int64{200 << 20, 200 << 20, 200 << 20, 200 << 20, 200 << 20, 200 << 20, 200 << 20, 200 << 20}, kills: 6},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPlayed(c.wants...)
				p.cache, p.late = c.cache, c.late
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				var running sync.WaitGroup
				defer running.Wait()
				defer cancel()
				running.Go(func() { p.run(ctx) })
				kills := 0
				err := (&Guard{Limit: p, Kill: p.kill, Hold: p.hold, Killed: func(envd.OOMKilled) { kills++ }}).Run(ctx)
				if !errors.Is(err, context.DeadlineExceeded) || kills != c.kills {
					t.Errorf("%d were killed, want %d; %v", kills, c.kills, err)
				}
				p.mu.Lock()
				defer p.mu.Unlock()
				if p.held || (c.kills <= alone) != (p.holds == 0) {
					t.Errorf("stopped %d times, and it is %v that they still are", p.holds, p.held)
				}
				if p.now != limit+headroom || p.use() > limit {
					t.Errorf("afterwards the limit is %d MiB, and %d are in use", p.now>>20, p.use()>>20)
				}
				if p.highest > limit+headroom+maxRaised {
					t.Errorf("the limit was raised to %d MiB", p.highest>>20)
				}
			})
		})
	}
}

// An agent that does not help ends the guard, so that the kernel can act.
func TestGuardGivesUp(t *testing.T) {
	refused := errors.New("refused")
	for name, c := range map[string]struct {
		kill   func(context.Context) (envd.OOMKilled, error)
		within time.Duration
	}{
		"refused": {func(context.Context) (envd.OOMKilled, error) { return envd.OOMKilled{}, refused }, 2 * patience},
		"silent": {func(ctx context.Context) (envd.OOMKilled, error) {
			<-ctx.Done()
			return envd.OOMKilled{}, context.Cause(ctx)
		}, 2 * patience},
		"a lie": {func(context.Context) (envd.OOMKilled, error) { return envd.OOMKilled{PID: 7}, nil }, whole + patience},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPlayed(900 << 20)
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
				var running sync.WaitGroup
				defer running.Wait()
				defer cancel()
				running.Go(func() { p.run(ctx) })
				begin := time.Now()
				err := (&Guard{Limit: p, Kill: c.kill, Hold: p.hold, Killed: func(envd.OOMKilled) {}}).Run(ctx)
				if err == nil || errors.Is(err, context.DeadlineExceeded) && ctx.Err() != nil || time.Since(begin) > c.within {
					t.Errorf("it ended after %s with %v", time.Since(begin), err)
				}
				if p.highest > limit+headroom+maxRaised {
					t.Errorf("the limit was raised to %d MiB", p.highest>>20)
				}
			})
		})
	}
}
