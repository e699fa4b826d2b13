package picker

import (
	"container/heap"
	"container/list"

	"k8s.io/apimachinery/pkg/types"
)

// key names one pool and one revision of a template. Members of a template that the pool had before are not of its present one, also
// where both have the same content.
type key struct {
	pool     types.UID
	template types.NamespacedName
	revision string
}

// group holds the members of a key, and the claims that wait for one.
type group struct {
	tiers    []*tier    // by the rank of this process for their members
	ready    int        // in the queues
	making   int        // may become ready
	outdated *list.List // of *member: another writer changed them since the newest event
	waiting  *list.List // of *waiter, by number; empty while a member is ready
}

// tier holds the ready members for which this process has one rank; see [rivals].
type tier struct {
	nodes   map[string]*nodeQueue
	fullest queueHeap
}

func newGroup() *group { return &group{outdated: list.New(), waiting: list.New()} }

// empty reports whether a group can be dropped.
func (g *group) empty() bool {
	return g.ready+g.making+g.outdated.Len()+g.waiting.Len() == 0
}

// add puts a member into its node's queue, by sequence number.
func (g *group) add(m *member, rank int) {
	for len(g.tiers) <= rank {
		g.tiers = append(g.tiers, &tier{nodes: map[string]*nodeQueue{}})
	}
	t, node := g.tiers[rank], m.seen.Status.NodeName
	s := t.nodes[node]
	if s == nil {
		s = &nodeQueue{tier: t, node: node, members: list.New()}
		t.nodes[node] = s
	}
	m.queue, m.at = s, s.insert(m)
	if s.members.Len() == 1 {
		heap.Push(&t.fullest, s)
	} else {
		heap.Fix(&t.fullest, s.index)
	}
	g.ready++
}

// remove takes a member out of its queue.
func (g *group) remove(m *member) {
	s := m.queue
	s.members.Remove(m.at)
	m.queue, m.at = nil, nil
	if s.members.Len() == 0 {
		heap.Remove(&s.tier.fullest, s.index)
		delete(s.tier.nodes, s.node)
	} else {
		heap.Fix(&s.tier.fullest, s.index)
	}
	g.ready--
}

// best returns the next member; nil if none is ready. Of those that another process prefers it is the newest: that process takes
// the oldest.
func (g *group) best() *member {
	for rank, t := range g.tiers {
		switch {
		case len(t.fullest) == 0:
		case rank == 0:
			return t.fullest[0].first()
		default:
			return t.fullest[0].last()
		}
	}
	return nil
}

// rerank distributes the ready members over the tiers again.
func (g *group) rerank(rank func(*member) int) {
	var all []*member
	for _, t := range g.tiers {
		for _, s := range t.nodes {
			for e := s.members.Front(); e != nil; e = e.Next() {
				all = append(all, of[*member](e))
			}
		}
	}
	g.tiers, g.ready = nil, 0
	for _, m := range all {
		g.add(m, rank(m))
	}
}

// join lets a claim wait behind all that have lower numbers.
func (g *group) join(t *waiter, k key) {
	t.key, t.result = k, make(chan *member, 1)
	for e := g.waiting.Back(); e != nil; e = e.Prev() {
		if of[*waiter](e).number < t.number {
			t.at = g.waiting.InsertAfter(t, e)
			return
		}
	}
	t.at = g.waiting.PushFront(t)
}

// leave ends the wait of a claim with its member; nil if there will be none.
func (g *group) leave(t *waiter, m *member) {
	g.waiting.Remove(t.at)
	t.at = nil
	t.result <- m
}

// of is the value of a list's element.
func of[T any](e *list.Element) T {
	v, _ := e.Value.(T)
	return v
}

// nodeQueue is the queue of one node's ready members.
type nodeQueue struct {
	tier    *tier
	node    string
	members *list.List // of *member, by turn
	index   int        // in the heap
}

func (s *nodeQueue) first() *member { return of[*member](s.members.Front()) }

func (s *nodeQueue) last() *member { return of[*member](s.members.Back()) }

// insert keeps the order: a new member is last, one that was put back first.
func (s *nodeQueue) insert(m *member) *list.Element {
	if last := s.members.Back(); last == nil || of[*member](last).seq < m.seq {
		return s.members.PushBack(m)
	}
	for e := s.members.Front(); e != nil; e = e.Next() {
		if m.seq < of[*member](e).seq {
			return s.members.InsertBefore(m, e)
		}
	}
	return s.members.PushBack(m)
}

// queueHeap is a heap with the longest queue on top; of equally long ones, that whose first member has
// been ready for longest.
type queueHeap []*nodeQueue

func (h queueHeap) Len() int { return len(h) }

func (h queueHeap) Less(i, j int) bool {
	if a, b := h[i].members.Len(), h[j].members.Len(); a != b {
		return a > b
	}
	if h[i].members.Len() == 0 {
		return h[i].node < h[j].node
	}
	return h[i].first().seq < h[j].first().seq
}

func (h queueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push is part of heap.Interface.
func (h *queueHeap) Push(x any) {
	if s, ok := x.(*nodeQueue); ok {
		s.index = len(*h)
		*h = append(*h, s)
	}
}

// Pop is part of heap.Interface.
func (h *queueHeap) Pop() any {
	last := len(*h) - 1
	s := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return s
}
