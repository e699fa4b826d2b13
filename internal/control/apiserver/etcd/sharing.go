package etcd

import (
	"context"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// sharing has what a watch cache lists and watches share parts.
func sharing(st storage.Interface, share func(runtime.Object)) storage.Interface {
	if share == nil {
		return st
	}
	return sharedStorage{st, share}
}

type sharedStorage struct {
	storage.Interface
	share func(runtime.Object)
}

// GetList implements storage.Interface.
func (s sharedStorage) GetList(ctx context.Context, key string, opts storage.ListOptions, list runtime.Object) error {
	if err := s.Interface.GetList(ctx, key, opts, list); err != nil {
		return err
	}
	return meta.EachListItem(list, func(o runtime.Object) error {
		s.share(o)
		return nil
	})
}

// Watch implements storage.Interface.
func (s sharedStorage) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	from, err := s.Interface.Watch(ctx, key, opts)
	if err != nil {
		return nil, err
	}
	w := &sharedWatch{from: from, events: make(chan watch.Event), stopped: make(chan struct{})}
	go w.run(s.share) // ends with from, which Stop ends
	return w, nil
}

// sharedWatch passes events on.
type sharedWatch struct {
	from    watch.Interface
	events  chan watch.Event
	stopped chan struct{}
	once    sync.Once
}

func (w *sharedWatch) run(share func(runtime.Object)) {
	defer close(w.events)
	for e := range w.from.ResultChan() {
		if e.Type == watch.Added || e.Type == watch.Modified {
			share(e.Object)
		}
		select {
		case w.events <- e:
		case <-w.stopped: // the reader has stopped
		}
	}
}

// Stop implements watch.Interface.
func (w *sharedWatch) Stop() {
	w.once.Do(func() { close(w.stopped) })
	w.from.Stop()
}

// ResultChan implements watch.Interface.
func (w *sharedWatch) ResultChan() <-chan watch.Event { return w.events }
