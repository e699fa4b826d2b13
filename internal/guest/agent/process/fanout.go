package process

import (
	"sync"

	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// queueLength bounds the events that wait for one subscriber. A full queue
// blocks the process, as a terminal would. With subscribers no output is
// dropped, without any all of it is.
const queueLength = 16

// subscriber receives a process's events. Its channel is never closed; the end
// event is the last.
type subscriber struct {
	events chan *processpb.ProcessEvent
	gone   chan struct{}
	once   sync.Once
}

// leave ends the subscription. It may be called more than once.
func (s *subscriber) leave() { s.once.Do(func() { close(s.gone) }) }

// fanout hands a process's events to all subscribers.
type fanout struct {
	mu   sync.Mutex
	subs []*subscriber           // +checklocks:mu
	end  *processpb.ProcessEvent // +checklocks:mu
}

// subscribe adds a subscriber; one that comes after the end gets the end.
func (f *fanout) subscribe() *subscriber {
	s := &subscriber{events: make(chan *processpb.ProcessEvent, queueLength), gone: make(chan struct{})}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.end != nil {
		s.events <- f.end
		return s
	}
	f.subs = append(f.subs, s)
	return s
}

// publish waits until each subscriber has room or has left.
func (f *fanout) publish(ev *processpb.ProcessEvent) {
	for _, s := range f.current() {
		select {
		case s.events <- ev:
		case <-s.gone:
		}
	}
}

// finish publishes the end.
func (f *fanout) finish(end *processpb.ProcessEvent) {
	f.mu.Lock()
	f.end = end
	f.mu.Unlock()
	f.publish(end)
}

// current lists the subscribers and drops those that left.
func (f *fanout) current() []*subscriber {
	f.mu.Lock()
	defer f.mu.Unlock()
	here := make([]*subscriber, 0, len(f.subs))
	for _, s := range f.subs {
		select {
		case <-s.gone:
		default:
			here = append(here, s)
		}
	}
	f.subs = here
	return here
}
