package apiserver

import (
	"context"
	"fmt"
	"reflect"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/control/apiserver/registry"
)

// directTimeout bounds a call without a deadline, as the server bounds requests.
const directTimeout = 30 * time.Second

// Direct reads and writes single objects from inside the process, and has informers list and watch,
// without HTTP and encodings. The user's rights, defaults, validation, resource versions and
// the drain apply as to every request. Only field ownership does not: managedFields stay as the
// caller passes them.
//
// Only Delete takes options. While the server is not running, calls fail with
// errs.ErrUnavailable.
type Direct struct {
	server *Server
	user   user.Info
	may    authorizer.Authorizer
}

// Direct returns direct access as user, one of UserAdmin, UserController and UserNode.
func (s *Server) Direct(user string) *Direct {
	return &Direct{server: s, user: userInfo(user), may: newAuthorizer()}
}

// Get reads an object as storage holds it now.
func (d *Direct) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	return d.do(ctx, "get", key, obj, len(opts), func(ctx context.Context, st *registry.Store) (runtime.Object, error) {
		return st.Get(ctx, key.Name, &metav1.GetOptions{})
	})
}

// Create makes an object and fills obj with what was stored.
func (d *Direct) Create(ctx context.Context, obj client.Object, opts ...client.CreateOption) error {
	return d.do(ctx, "create", client.ObjectKeyFromObject(obj), obj, len(opts), func(ctx context.Context, st *registry.Store) (runtime.Object, error) {
		return st.Create(ctx, obj.DeepCopyObject(), rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
	})
}

// Update writes an object over the version that obj names, and fills obj with what was stored.
func (d *Direct) Update(ctx context.Context, obj client.Object, opts ...client.UpdateOption) error {
	return d.do(ctx, "update", client.ObjectKeyFromObject(obj), obj, len(opts), func(ctx context.Context, st *registry.Store) (runtime.Object, error) {
		if obj.GetResourceVersion() == "" {
			return nil, apierrors.NewBadRequest("metadata.resourceVersion: must be set, as every write is conditional")
		}
		stored, _, err := st.Update(ctx, obj.GetName(), rest.DefaultUpdatedObjectInfo(obj), rest.ValidateAllObjectFunc,
			rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{})
		return stored, err
	})
}

// Delete deletes an object; finalizers and owners apply as usual. Its options are preconditions
// and the propagation.
func (d *Direct) Delete(ctx context.Context, obj client.Object, opts ...client.DeleteOption) error {
	options := (&client.DeleteOptions{}).ApplyOptions(opts).AsDeleteOptions()
	return d.do(ctx, "delete", client.ObjectKeyFromObject(obj), obj, 0, func(ctx context.Context, st *registry.Store) (runtime.Object, error) {
		_, _, err := st.Delete(ctx, obj.GetName(), rest.ValidateAllObjectFunc, options)
		return nil, err
	})
}

func (d *Direct) do(ctx context.Context, verb string, key client.ObjectKey, obj client.Object, options int,
	call func(context.Context, *registry.Store) (runtime.Object, error),
) error {
	if options > 0 {
		return fmt.Errorf("direct %s of %T: options are not supported: %w", verb, obj, errs.ErrInvalid)
	}
	l, st, err := d.enter(verb, obj)
	if err != nil {
		return err
	}
	defer l.requests.Done()
	if (key.Namespace != "") != st.Kind.Namespaced {
		return apierrors.NewBadRequest(fmt.Sprintf("metadata.namespace: %q does not fit %s", key.Namespace, st.Kind.Plural))
	}
	if err := d.allowed(ctx, verb, key, st); err != nil {
		return err
	}
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, directTimeout)
		defer cancel()
	}
	ctx = genericapirequest.WithUser(genericapirequest.WithNamespace(ctx, key.Namespace), d.user)
	got, err := call(ctx, st)
	if err != nil || got == nil {
		return err
	}
	// The result may belong to a cache, so it must not be changed.
	reflect.ValueOf(obj).Elem().Set(reflect.ValueOf(got.DeepCopyObject()).Elem())
	return nil
}

// ListerWatcher returns how an informer of this process lists and watches the kind of an object, in all namespaces. The objects are those of
// the server's watch cache: the receiver may change an object itself, but nothing that it points to.
func (d *Direct) ListerWatcher(obj client.Object) cache.ListerWatcher {
	return registry.WholeLists(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			l, source, err := d.source(ctx, "list", obj)
			if err != nil {
				return nil, err
			}
			defer l.requests.Done()
			return source.ListWithContext(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			l, source, err := d.source(ctx, "watch", obj)
			if err != nil {
				return nil, err
			}
			from, err := source.WatchWithContext(ctx, o)
			if err != nil {
				l.requests.Done()
				return nil, err
			}
			w := &drainedWatch{from, sync.OnceFunc(l.requests.Done)}
			context.AfterFunc(l.serving, w.Stop) //nolint:contextcheck // the end of the server ends it
			return w, nil
		},
	})
}

// drainedWatch is a watch for which a server that stops waits.
type drainedWatch struct {
	watch.Interface
	done func()
}

// Stop implements watch.Interface.
func (w *drainedWatch) Stop() {
	w.Interface.Stop()
	w.done()
}

// source begins a request, which the caller ends.
func (d *Direct) source(ctx context.Context, verb string, obj client.Object) (*local, cache.ListerWatcherWithContext, error) {
	l, st, err := d.enter(verb, obj)
	if err != nil {
		return nil, nil, err
	}
	if err := d.allowed(ctx, verb, client.ObjectKey{}, st); err != nil {
		l.requests.Done()
		return nil, nil, err
	}
	return l, cache.ToListerWatcherWithContext(st.Source()), nil
}

// enter begins a request, which the caller ends.
func (d *Direct) enter(verb string, obj client.Object) (*local, *registry.Store, error) {
	l := d.server.local.Load()
	if l == nil || l.requests.Add(1) != nil {
		return nil, nil, fmt.Errorf("%w: the API server is not running", errs.ErrUnavailable)
	}
	if st := l.stores[reflect.TypeOf(obj)]; st != nil {
		return l, st, nil
	}
	l.requests.Done()
	return nil, nil, fmt.Errorf("direct %s: %T is no kind of this server: %w", verb, obj, errs.ErrInvalid)
}

func (d *Direct) allowed(ctx context.Context, verb string, key client.ObjectKey, st *registry.Store) error {
	decision, why, err := d.may.Authorize(ctx, authorizer.AttributesRecord{
		User: d.user, Verb: verb, Namespace: key.Namespace, Name: key.Name, ResourceRequest: true,
		APIGroup: st.Kind.GV.Group, APIVersion: st.Kind.GV.Version, Resource: st.Kind.Plural,
	})
	if err != nil || decision != authorizer.DecisionAllow {
		if err == nil {
			err = fmt.Errorf("user %s may not %s this: %s", d.user.GetName(), verb, why)
		}
		return apierrors.NewForbidden(st.Kind.GroupResource(), key.Name, err)
	}
	return nil
}

// Contents is [registry.Registry.Contents]. While the server is not running, it fails with errs.ErrUnavailable.
func (s *Server) Contents(ctx context.Context, namespace string) (int64, error) {
	l := s.local.Load()
	if l == nil {
		return 0, fmt.Errorf("%w: the API server is not running", errs.ErrUnavailable)
	}
	return l.registry.Contents(ctx, namespace)
}

// local is the server for in-process requests.
type local struct {
	*drainer
	stores   map[reflect.Type]*registry.Store // by the type of their objects
	registry *registry.Registry
}

func (e *engine) byType() map[reflect.Type]*registry.Store {
	all := map[reflect.Type]*registry.Store{}
	for _, st := range e.registry.Stores {
		all[reflect.TypeOf(st.Kind.Object)] = st
	}
	return all
}
