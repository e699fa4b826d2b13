package dashboard

import (
	"sync"

	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// maxSubscribers bounds the pages of all namespaces, maxOfNamespace those of one.
const (
	maxSubscribers = 256
	maxOfNamespace = 64
)

// hub passes changes of sandboxes on to the pages that are open.
type hub struct {
	mu    sync.Mutex
	pages map[*subscriber]struct{} // +checklocks:mu
}

func newHub() *hub { return &hub{pages: map[*subscriber]struct{}{}} }

// subscriber has the sandboxes that one page has not been sent yet. It holds the cache's own objects, each once.
type subscriber struct {
	namespace string
	wake      chan struct{}

	mu      sync.Mutex
	changed map[types.UID]*agents.Sandbox // +checklocks:mu
	gone    []types.UID                   // +checklocks:mu
}

func (h *hub) observe(older, newer *agents.Sandbox) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for p := range h.pages {
		p.add(older, newer)
	}
}

// subscribe begins to collect changes in a namespace.
func (h *hub) subscribe(namespace string) (*subscriber, error) {
	p := &subscriber{namespace: namespace, wake: make(chan struct{}, 1), changed: map[types.UID]*agents.Sandbox{}}
	h.mu.Lock()
	defer h.mu.Unlock()
	own := 0
	for open := range h.pages {
		if open.namespace == namespace {
			own++
		}
	}
	if len(h.pages) >= maxSubscribers || own >= maxOfNamespace {
		return nil, errs.Public(errs.ErrExhausted, "too many pages are open; close some")
	}
	h.pages[p] = struct{}{}
	return p, nil
}

func (h *hub) unsubscribe(p *subscriber) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.pages, p)
}

func (p *subscriber) add(older, newer *agents.Sandbox) {
	s := newer
	if s == nil {
		s = older
	}
	if s.Namespace != p.namespace {
		return
	}
	p.mu.Lock()
	if newer == nil {
		delete(p.changed, s.UID)
		p.gone = append(p.gone, s.UID)
	} else {
		p.changed[s.UID] = newer
	}
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// take returns what has changed since the last call.
func (p *subscriber) take() (changed map[types.UID]*agents.Sandbox, gone []types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	changed, gone = p.changed, p.gone
	p.changed, p.gone = map[types.UID]*agents.Sandbox{}, nil
	return changed, gone
}
