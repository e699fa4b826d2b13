package netdev

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

const (
	// firstPause and longestPause bound the time between tries to make a spare that failed.
	firstPause   = time.Second
	longestPause = time.Minute
	// deleteDelay is how long the kernel has to remove a link with its namespace. It removes many at
	// once, while we would keep everybody waiting for each.
	deleteDelay = 2 * time.Second
	// maxDeleteQueue bounds the links that wait to be removed; further ones are removed in Detach.
	maxDeleteQueue = 1024
)

// netnsPool are the rooms made ahead, and the links that are still to be removed. A spare room has
// no name in the file system, so that it ends with the process that made it, however that ends.
type netnsPool struct {
	size int
	// wake has a token when there may be something to make.
	wake chan struct{}
	// deleteQueue are the names of links to be removed.
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

// pauseRefill has refilling stand back until the function that it returns is called: an attachment that
// somebody waits for is more urgent.
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

// take hands out a spare room, or nil.
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

// wanting reports whether one more should be made now, and in which era: drop begins a new one.
func (s *netnsPool) needed() (era int, yes bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.generation, s.pauses == 0 && len(s.spares) < s.size
}

// put adds a room that was made for an era, if it is still that.
func (s *netnsPool) put(r *preparedNetns, era int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.generation != era {
		return false
	}
	s.spares = append(s.spares, r)
	return true
}

// drop lets go of all spares. The kernel removes them in its own time.
func (s *netnsPool) clear() {
	s.mu.Lock()
	rooms := s.spares
	s.spares = nil
	s.generation++
	s.mu.Unlock()
	for _, r := range rooms {
		r.close()
	}
	s.notify()
}

// enqueueDelete takes a link to be removed in the background, if somebody is there to do it.
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

// Run keeps [Config.Spares] namespaces ready for Attach and removes what Detach left to it, until
// ctx ends. Failures are logged and tried again. Nothing needs Run to run: without it, Attach and
// Detach take longer. Call it once, after Open.
func (n *Network) Run(ctx context.Context) error {
	n.spares.setRunning(true)
	var wg sync.WaitGroup
	wg.Go(func() { n.refill(ctx) })
	wg.Go(func() { n.deleteLinks(ctx) })
	wg.Wait()
	n.spares.setRunning(false)
	for { // what came in after bury ended
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
		n.log.WarnContext(ctx, "no spare network made; trying again", "pause", pause, "error", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, longestPause)
	}
}

// addSpare makes a spare room if one is wanted.
func (n *Network) addSpare() (made bool, err error) {
	era, wanted := n.spares.needed()
	if !wanted {
		return false, nil
	}
	r, err := n.prepareNetns(n.newLinkName(spareMark))
	if err != nil {
		return false, err
	}
	if !n.spares.put(r, era) { // the network was opened anew, or destroyed
		r.close()
		return true, n.removeLink(r.host.Name)
	}
	return true, nil
}

// deleteLinks removes links that Detach has shut already and that are still there after a while, because
// something lives on in their namespaces.
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
		n.log.WarnContext(ctx, "link of a sandbox that is gone not removed; the next start tries again", "link", name, "error", err)
	}
}

// detachLink takes a link from the bridge at once, down and nobody's, and leaves its removal, which
// takes the kernel tens of milliseconds, to Run; without Run it waits for it. No link is success.
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
	// Down first: a link that is up and no port of the bridge would be heard by the host itself.
	err = n.host.LinkSetDown(link)
	if err == nil {
		err = n.host.LinkSetNoMaster(link)
	}
	doomed := n.newLinkName(deleteMark)
	if err == nil {
		err = n.host.LinkSetName(link, doomed)
	}
	switch {
	case missing(err): // with its namespace
		return nil
	case err != nil:
		return n.removeLink(name)
	case n.spares.enqueueDelete(doomed):
		return nil
	}
	return n.removeLink(doomed)
}

// Spares names the host's links of namespaces that are made ahead. More of them than
// [Config.Spares] means that some were left behind, which Open corrects.
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

// sweepLinks removes links that are nobody's.
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
