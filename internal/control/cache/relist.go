package cache

import (
	"context"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/watchlist"
)

// relisting is the ListerWatcher of an informer. It calls relisted after each complete list: after a
// broken watch, no event reports an object that was deleted before the informer received it.
type relisting struct {
	toolscache.ListerWatcher
	relisted func()
	watches  *continuity // nil: of no interest
	listed   atomic.Bool // since the last watch began
}

// IsWatchListSemanticsUnSupported reports whether the informer has to list before it watches.
func (r *relisting) IsWatchListSemanticsUnSupported() bool {
	return watchlist.DoesClientNotSupportWatchListSemantics(r.ListerWatcher)
}

func (r *relisting) ListWithContext(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
	list, err := toolscache.ToListerWithContext(r.ListerWatcher).ListWithContext(ctx, opts)
	if err == nil {
		r.listed.Store(true)
		r.relisted()
	}
	return list, err //nolint:wrapcheck // the informer compares it
}

func (r *relisting) WatchWithContext(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	w, err := toolscache.ToWatcherWithContext(r.ListerWatcher).WatchWithContext(ctx, opts)
	if err != nil {
		return nil, err //nolint:wrapcheck // the informer compares it
	}
	lists := opts.SendInitialEvents != nil && *opts.SendInitialEvents
	if lists {
		l := &listingWatch{Interface: w, events: make(chan watch.Event), stopped: make(chan struct{})}
		go l.pass(r.relisted) // ends with the watch, or by Stop
		w = l
	}
	return r.watches.follow(w, r.listed.Swap(false) || lists), nil
}

// listingWatch is a watch that begins with all existing objects.
type listingWatch struct {
	watch.Interface
	events  chan watch.Event
	stopped chan struct{}
	once    sync.Once
}

func (l *listingWatch) ResultChan() <-chan watch.Event { return l.events }

func (l *listingWatch) Stop() {
	l.once.Do(func() { close(l.stopped) })
	l.Interface.Stop()
}

// pass forwards events, and calls listed at the bookmark after the existing objects.
func (l *listingWatch) pass(listed func()) {
	defer close(l.events)
	for e := range l.Interface.ResultChan() {
		if e.Type == watch.Bookmark {
			if o, err := meta.Accessor(e.Object); err == nil && o.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true" {
				listed()
			}
		}
		select {
		case l.events <- e:
		case <-l.stopped:
			return
		}
	}
}
