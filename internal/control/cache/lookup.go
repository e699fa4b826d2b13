package cache

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
)

const (
	// lookupTimeout bounds a lookup, with its wait for others.
	lookupTimeout = 10 * time.Second
	// lookupShare is how many times as long as a list the pause after it is: requests for IDs that no sandbox has then cost the API
	// server a small share of its time, whatever their number.
	lookupShare = 10
	// maxLookupPause bounds the pause, since requests for sandboxes that exist wait for it too.
	maxLookupPause = 5 * time.Second
)

// CurrentSandbox returns the sandbox of a namespace that has the ID, for an ID that the cache does not have. Where the watch of
// sandboxes has been cut off lately it reads the API server; otherwise there is none, but for one of the last milliseconds. An
// errs.ErrNotFound means that there is none.
//
// The API server has no index of IDs, so the names of all sandboxes of the namespace are listed. Calls share lists, of which one is in
// flight for each namespace, with a pause after each.
func (c *Cache) CurrentSandbox(ctx context.Context, namespace string, id sandbox.ID) (*agents.Sandbox, error) {
	if !c.sandboxes.broken() {
		return nil, fmt.Errorf("sandbox %s: %w", id, errs.ErrNotFound)
	}
	limited, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	name, err := c.lookups.find(limited, namespace, id)
	if err != nil && limited.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("no response within %s: %w", lookupTimeout, errs.ErrUnavailable)
	}
	if err != nil {
		return nil, fmt.Errorf("look up sandbox %s: %w", id, err)
	}
	s, err := read(ctx, c.live, types.NamespacedName{Namespace: namespace, Name: name}, &agents.Sandbox{})
	if err == nil && sandbox.IDOf(s.UID) != id {
		return nil, fmt.Errorf("sandbox %s: another has its name: %w", id, errs.ErrNotFound)
	}
	return s, err
}

// names returns the names of all sandboxes of a namespace as the API server has them now.
func (c *Cache) names(ctx context.Context, namespace string) (map[sandbox.ID]string, error) {
	var list metav1.PartialObjectMetadataList
	list.SetGroupVersionKind(agents.GroupVersion.WithKind("SandboxList"))
	if err := c.live.List(ctx, &list, client.InNamespace(namespace)); err != nil {
		return nil, fmt.Errorf("list sandboxes of %s: %w", namespace, withKind(err))
	}
	names := make(map[sandbox.ID]string, len(list.Items))
	for i := range list.Items {
		names[sandbox.IDOf(list.Items[i].UID)] = list.Items[i].Name
	}
	return names, nil
}

// lookups share lists of the sandboxes of namespaces.
type lookups struct {
	list func(ctx context.Context, namespace string) (map[sandbox.ID]string, error)

	mu sync.Mutex
	of map[string]*lookup // by namespace; +checklocks:mu
}

// lookup has the last list of a namespace. The caller that has taken the token of turn uses what follows, or, under the mutex of
// lookups, the last caller that leaves.
type lookup struct {
	callers int // guarded by the mutex of lookups
	turn    chan struct{}

	began, next time.Time // when the list began, and when the next one may
	names       map[sandbox.ID]string
	err         error
}

func newLookups(list func(context.Context, string) (map[sandbox.ID]string, error)) *lookups {
	return &lookups{list: list, of: map[string]*lookup{}}
}

// find returns the name of a sandbox by a list that began after the call.
func (l *lookups) find(ctx context.Context, namespace string, id sandbox.ID) (string, error) {
	called := time.Now()
	n := l.join(namespace)
	defer l.leave(n)
	select {
	case <-n.turn:
	case <-ctx.Done():
		return "", withKind(ctx.Err())
	}
	defer func() { n.turn <- struct{}{} }()
	if !n.began.After(called) {
		l.renew(ctx, namespace, n)
	}
	if err := ctx.Err(); err != nil { // what failed by it is no other caller's
		n.began = time.Time{}
		return "", withKind(err)
	}
	if n.err != nil {
		return "", n.err
	}
	if name, ok := n.names[id]; ok {
		return name, nil
	}
	return "", errs.ErrNotFound
}

// renew lists once the pause has ended.
func (l *lookups) renew(ctx context.Context, namespace string, n *lookup) {
	if !lifecycle.Sleep(ctx, time.Until(n.next)) {
		return
	}
	n.began = time.Now()
	n.names, n.err = l.list(ctx, namespace)
	n.next = time.Now().Add(min(lookupShare*time.Since(n.began), maxLookupPause))
}

func (l *lookups) join(namespace string) *lookup {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.of[namespace]
	if n == nil {
		n = &lookup{turn: make(chan struct{}, 1)}
		n.turn <- struct{}{}
		l.of[namespace] = n
	}
	n.callers++
	return n
}

// leave forgets the lists of namespaces without callers, but not the pauses after them.
func (l *lookups) leave(n *lookup) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n.callers--; n.callers > 0 {
		return
	}
	n.began, n.names, n.err = time.Time{}, nil, nil
	now := time.Now()
	maps.DeleteFunc(l.of, func(_ string, n *lookup) bool { return n.callers == 0 && !now.Before(n.next) })
}
