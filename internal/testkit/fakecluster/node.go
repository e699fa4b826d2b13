package fakecluster

import (
	"context"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// nodeWorkers act on sandboxes at once.
const nodeWorkers = 4

// Node has sandboxes of any API server be what they wish to be, except for those that it holds.
type Node struct {
	api   client.Client
	queue workqueue.TypedRateLimitingInterface[types.NamespacedName]

	mu sync.Mutex
	// +checklocks:mu
	hold func(*agents.Sandbox) bool
	// +checklocks:mu
	held map[types.NamespacedName]bool
}

// NewNode returns a node that begins with Run.
func NewNode(api client.Client) *Node {
	limiter := workqueue.NewTypedItemExponentialFailureRateLimiter[types.NamespacedName](time.Millisecond, 100*time.Millisecond)
	return &Node{
		api: api, queue: workqueue.NewTypedRateLimitingQueue(limiter),
		hold: func(*agents.Sandbox) bool { return false }, held: map[types.NamespacedName]bool{},
	}
}

// Holding stops changes of the sandboxes for which hold returns true; nil releases all.
func (n *Node) Holding(hold func(*agents.Sandbox) bool) {
	if hold == nil {
		hold = func(*agents.Sandbox) bool { return false }
	}
	n.mu.Lock()
	n.hold = hold
	again := n.held
	n.held = map[types.NamespacedName]bool{}
	n.mu.Unlock()
	for key := range again {
		n.queue.Add(key)
	}
}

// Observe takes a change of a sandbox; nil is ignored.
func (n *Node) Observe(s *agents.Sandbox) {
	if s != nil {
		n.queue.Add(client.ObjectKeyFromObject(s))
	}
}

func (n *Node) holds(s *agents.Sandbox) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.hold(s) {
		return false
	}
	n.held[client.ObjectKeyFromObject(s)] = true
	return true
}

// Run acts until ctx is done, once.
func (n *Node) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, n.queue.ShutDown)()
	var wg sync.WaitGroup
	for range nodeWorkers {
		wg.Go(func() {
			for n.one(ctx) {
			}
		})
	}
	wg.Wait()
	return nil
}

func (n *Node) one(ctx context.Context) bool {
	key, ended := n.queue.Get()
	if ended {
		return false
	}
	defer n.queue.Done(key)
	s := &agents.Sandbox{}
	err := n.api.Get(ctx, key, s)
	if err == nil && !n.holds(s) {
		err = Reconcile(ctx, n.api, s)
	}
	if err == nil || apierrors.IsNotFound(err) || ctx.Err() != nil {
		n.queue.Forget(key)
		return true
	}
	n.queue.AddRateLimited(key)
	return true
}
