package netdev

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

const (
	// firstPause and longestPause bound the pause after a failure to create a spare.
	firstPause   = time.Second
	longestPause = time.Minute
	// deleteDelay is the time for the kernel to remove a link with its namespace. It removes many
	// at once, while explicit removals block each caller.
	deleteDelay = 2 * time.Second
	// maxDeleteQueue bounds the links waiting for removal; Detach removes further ones itself.
	maxDeleteQueue = 1024
)

// netnsPool has the spare namespaces and the links to delete. A spare has no name in the file
// system, so that the kernel removes it with the process.
type netnsPool struct {
	size int
	// wake has a token when a spare may be needed.
	wake chan struct{}
	// deleteQueue has the names of links to delete.
	deleteQueue chan string
	// deleteDelay is deleteDelay; tests change it before Run.
	deleteDelay time.Duration

	mu         sync.Mutex
	running    bool             // +checklocks:mu
	pauses     int              // +checklocks:mu
	generation int              // +checklocks:mu
	spares     []*preparedNetns // +checklocks:mu
}

func newNetnsPool(want int) *netnsPool {
	return &netnsPool{size: want, wake: make(chan struct{}, 1), deleteQueue: make(chan string, maxDeleteQueue), deleteDelay: deleteDelay}
}

// pauseRefill stops refilling until release is called: an attachment is more urgent.
func (s *netnsPool) pauseRefill() (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pauses++
	return func() {
		s.mu.Lock()
		s.pauses--
		s.mu.Unlock()
		s.notify()
	}
}

func (s *netnsPool) notify() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *netnsPool) take() *preparedNetns {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.spares) == 0 {
		return nil
	}
	r := s.spares[0]
	s.spares = s.spares[1:]
	return r
}

// needed reports whether to create one more spare, and for which generation: clear begins a new
// one.
func (s *netnsPool) needed() (generation int, yes bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.generation, s.pauses == 0 && len(s.spares) < s.size
}

// put adds a spare if its generation is still current.
func (s *netnsPool) put(r *preparedNetns, generation int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.generation != generation {
		return false
	}
	s.spares = append(s.spares, r)
	return true
}

// clear closes all spares; the kernel removes them later.
func (s *netnsPool) clear() {
	s.mu.Lock()
	spares := s.spares
	s.spares = nil
	s.generation++
	s.mu.Unlock()
	for _, r := range spares {
		r.close()
	}
	s.notify()
}

// enqueueDelete queues a link for background removal, if Run runs.
func (s *netnsPool) enqueueDelete(link string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.running {
		return false
	}
	select {
	case s.deleteQueue <- link:
		return true
	default:
		return false
	}
}

func (s *netnsPool) isRunning() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running
}

func (s *netnsPool) setRunning(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running = on
}

// Run keeps [Config.Spares] namespaces ready for Attach and removes what Detach queued, until ctx
// ends. It logs and retries failures. Without Run, Attach and Detach work but take longer. Call it
// once, after Open.
func (n *Network) Run(ctx context.Context) error {
	n.spares.setRunning(true)
	var wg sync.WaitGroup
	wg.Go(func() { n.refill(ctx) })
	wg.Go(func() { n.deleteLinks(ctx) })
	wg.Wait()
	n.spares.setRunning(false)
	for { // queued after deleteLinks ended
		select {
		case name := <-n.spares.deleteQueue:
			n.deleteLink(context.WithoutCancel(ctx), name)
		default:
			n.spares.clear()
			return nil
		}
	}
}

func (n *Network) refill(ctx context.Context) {
	pause := firstPause
	for {
		made, err := n.addSpare()
		if err == nil {
			pause = firstPause
			if made && ctx.Err() == nil {
				continue
			}
			select {
			case <-ctx.Done():
				return
			case <-n.spares.wake:
			}
			continue
		}
		n.log.WarnContext(ctx, "cannot create spare network; retrying", "pause", pause, "error", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, longestPause)
	}
}

func (n *Network) addSpare() (made bool, err error) {
	generation, needed := n.spares.needed()
	if !needed {
		return false, nil
	}
	r, err := n.prepareNetns(n.newLinkName(spareMark))
	if err != nil {
		return false, err
	}
	if !n.spares.put(r, generation) { // the network was reopened or destroyed
		r.close()
		return true, n.removeLink(r.host.Name)
	}
	return true, nil
}

// deleteLinks removes links that Detach has closed and that still exist after a delay, because
// processes remain in their namespaces.
func (n *Network) deleteLinks(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case name := <-n.spares.deleteQueue:
			select {
			case <-ctx.Done():
			case <-time.After(n.spares.deleteDelay):
			}
			for range len(n.spares.deleteQueue) {
				n.deleteLink(ctx, <-n.spares.deleteQueue)
			}
			n.deleteLink(ctx, name)
		}
	}
}

func (n *Network) deleteLink(ctx context.Context, name string) {
	if err := n.removeLink(name); err != nil {
		n.log.WarnContext(ctx, "cannot remove link of deleted sandbox", "link", name, "error", err)
	}
}

// detachLink removes a link from the bridge at once, down and renamed. Run deletes it, which takes
// the kernel tens of milliseconds; without Run detachLink waits for that. No link is success.
func (n *Network) detachLink(name string) error {
	if !n.spares.isRunning() {
		return n.removeLink(name)
	}
	link, err := n.host.LinkByName(name)
	if missing(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("find link %s: %w", name, err)
	}
	// Down first: the host itself would receive from a link that is up and not a bridge port.
	err = n.host.LinkSetDown(link)
	if err == nil {
		err = n.host.LinkSetNoMaster(link)
	}
	marked := n.newLinkName(deleteMark)
	if err == nil {
		err = n.host.LinkSetName(link, marked)
	}
	switch {
	case missing(err): // removed with its namespace
		return nil
	case err != nil:
		return n.removeLink(name)
	case n.spares.enqueueDelete(marked):
		return nil
	}
	return n.removeLink(marked)
}

// Spares names the host's links of spare namespaces. More than [Config.Spares] means leftovers,
// which Open removes.
func (n *Network) Spares(_ context.Context) ([]string, error) {
	return n.linksThat(n.isSpare)
}

func (n *Network) linksThat(match func(name string) bool) (names []string, err error) {
	links, err := consistentList(n.host.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	for _, l := range links {
		if name := l.Attrs().Name; match(name) {
			names = append(names, name)
		}
	}
	return names, nil
}

func (n *Network) sweepLinks() error {
	names, err := n.linksThat(func(name string) bool { return n.isSpare(name) || n.isMarkedForDelete(name) })
	if err != nil {
		return err
	}
	var failures []error
	for _, name := range names {
		failures = append(failures, n.removeLink(name))
	}
	return errors.Join(failures...)
}
