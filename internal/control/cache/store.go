package cache

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"

	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// store has the objects of one kind.
type store struct {
	toolscache.Indexer
	addIndexers func(toolscache.Indexers) error

	mu sync.Mutex // held while an index is made
}

// newStore returns the store of an informer.
func newStore(informer toolscache.SharedIndexInformer) *store {
	return &store{Indexer: informer.GetIndexer(), addIndexers: informer.AddIndexers}
}

// find returns the objects with a value of an index. The empty namespace is all of them.
func (s *store) find(name, value string) ([]any, error) {
	if value == "" && name == toolscache.NamespaceIndex {
		return s.List(), nil
	}
	if err := s.makeIndex(name); err != nil {
		return nil, err
	}
	return s.ByIndex(name, value)
}

func (s *store) makeIndex(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.GetIndexers()[name] != nil {
		return nil
	}
	all := indexes()
	values := all[slices.IndexFunc(all, func(ix index) bool { return ix.name == name })].values
	err := s.addIndexers(toolscache.Indexers{name: func(o any) ([]string, error) { return values(o.(client.Object)), nil }}) //nolint:forcetypeassert // all kinds are
	if err != nil {                                                                                                          // it has stopped
		return fmt.Errorf("%w: %w", ErrStopped, err)
	}
	return nil
}

// shared returns the objects of a kind with a value of an index, as the cache holds them.
func shared[T client.Object](ctx context.Context, c *Cache, index, value string) ([]T, error) {
	s := c.stores[reflect.TypeFor[T]()]
	if s == nil {
		return nil, notHeld[T]()
	}
	if err := c.ready(ctx); err != nil {
		return nil, fmt.Errorf("list %s: %w", reflect.TypeFor[T]().Elem().Name(), err)
	}
	found, err := s.find(index, value)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", reflect.TypeFor[T]().Elem().Name(), err)
	}
	all := make([]T, len(found))
	for i, o := range found {
		all[i], _ = reflect.TypeAssert[T](reflect.ValueOf(o))
	}
	return all, nil
}

func notHeld[T client.Object]() error {
	return fmt.Errorf("the cache does not hold %s: %w", reflect.TypeFor[T]().Elem().Name(), errs.ErrInvalid)
}

// in returns those of a namespace, or all if that is empty.
func in[T client.Object](namespace string, all []T) []T {
	return slices.DeleteFunc(all, func(o T) bool { return namespace != "" && o.GetNamespace() != namespace })
}

// copied is a pointer to an API type.
type copied[T any] interface {
	*T
	DeepCopy() *T
}

// clones returns the caller's own objects.
func clones[T any, P copied[T]](shared []P, err error) ([]P, error) {
	for i, o := range shared {
		shared[i] = o.DeepCopy()
	}
	return shared, err
}

// copies returns the caller's own objects, as values.
func copies[T any, P copied[T]](shared []P, err error) ([]T, error) {
	all := make([]T, len(shared))
	for i, o := range shared {
		all[i] = *o.DeepCopy()
	}
	return all, err
}
