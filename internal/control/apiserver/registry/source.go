package registry

import (
	"context"
	"io"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/client-go/tools/cache"
)

// Source lists and watches the objects of all namespaces, for a reflector of this process. The objects are those of the watch cache, neither
// encoded nor decoded: the receiver may change an object itself, but nothing that it points to.
func (s *Store) Source() cache.ListerWatcher {
	return WholeLists(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			if o.ResourceVersion == "0" {
				o.ResourceVersion = "" // as new as storage, which costs little here
			}
			o.Limit = 0 // pages would be read from storage, and decoded
			list, err := s.List(everywhere(ctx), internalOptions(&o))
			if err != nil {
				return nil, err
			}
			return list, meta.EachListItem(list, func(x runtime.Object) error {
				untyped(x)
				return nil
			})
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.Watch = true
			ctx = everywhere(ctx)
			w, err := s.Watch(ctx, internalOptions(&o))
			if err != nil {
				return nil, err
			}
			return watch.NewStreamWatcher(&cachedEvents{Interface: w, ctx: ctx, store: s}, nil), nil
		},
	})
}

// WholeLists has a reflector list before it watches: a watch that begins with all objects copies each of them.
func WholeLists(lw *cache.ListWatch) cache.ListerWatcher {
	return cache.ToListWatcherWithWatchListSemantics(lw, listsWhole{})
}

type listsWhole struct{}

func (listsWhole) IsWatchListSemanticsUnSupported() bool { return true }

func everywhere(ctx context.Context) context.Context {
	return genericapirequest.WithNamespace(ctx, metav1.NamespaceAll)
}

func internalOptions(o *metav1.ListOptions) *metainternalversion.ListOptions {
	in := &metainternalversion.ListOptions{}
	_ = metainternalversion.Convert_v1_ListOptions_To_internalversion_ListOptions(o, in, nil) // fails for selectors alone, which no reflector sets
	return in
}

// untyped leaves out the kind, as clients do that decode objects of one.
func untyped(o runtime.Object) { o.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{}) }

// cachedEvents are the events of a watch with the objects of the watch cache, in place of copies. It is the decoder of a watch.StreamWatcher,
// whose reader may stop at any time.
type cachedEvents struct {
	watch.Interface
	ctx   context.Context //nolint:containedctx // of the watch
	store *Store

	mu     sync.Mutex // held while the watch cache is read
	closed bool       // +checklocks:mu
}

// Decode implements watch.Decoder.
func (e *cachedEvents) Decode() (watch.EventType, runtime.Object, error) {
	event, open := <-e.ResultChan()
	if !open {
		return "", nil, io.EOF
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return "", nil, io.EOF
	}
	o := event.Object
	if event.Type != watch.Error && event.Type != watch.Bookmark {
		o = e.store.cached(e.ctx, o)
		untyped(o)
	}
	return event.Type, o, nil
}

// Close implements watch.Decoder. The watch cache is not read after it.
func (e *cachedEvents) Close() {
	e.Stop()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
}

// cached returns an object as the watch cache has it, or, if that has none of this version, the object.
func (s *Store) cached(ctx context.Context, o runtime.Object) runtime.Object {
	if a, err := meta.Accessor(o); err == nil {
		key, err := s.KeyFunc(genericapirequest.WithNamespace(ctx, a.GetNamespace()), a.GetName())
		found := s.New()
		if err == nil {
			err = s.Storage.Get(ctx, key, storage.GetOptions{ResourceVersion: "0", IgnoreNotFound: true}, found)
		}
		if f, ok := found.(metav1.Object); ok && err == nil && f.GetUID() == a.GetUID() && f.GetResourceVersion() == a.GetResourceVersion() {
			return found
		}
	}
	if c, ok := o.(runtime.CacheableObject); ok { // shared by several watches, for what they send
		return c.GetObject()
	}
	return o
}
