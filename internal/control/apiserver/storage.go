package apiserver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	etcdk8s "go.etcd.io/etcd/client/v3/kubernetes"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3rpc"
	"go.etcd.io/etcd/server/v3/proxy/grpcproxy/adapter"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/cacher"
	"k8s.io/apiserver/pkg/storage/etcd3"
	etcdfeature "k8s.io/apiserver/pkg/storage/feature"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
)

// backend gives each resource its storage: on the embedded etcd if there is one, or else on
// the endpoints of config.
type backend struct {
	config    storagebackend.Config
	etcd      *embed.Etcd // nil: an existing one, over gRPC
	words     *fatalHook  // of etcd
	watches   *watchHandlers
	compactor etcd3.Compactor
	cached    bool
}

// embeddedCount makes the names that feature detection knows in-process clients by unique.
var embeddedCount atomic.Int64

// namedEndpoint gives the in-process client the endpoint without which it would not be asked
// whether it can request progress; consistent reads from the watch cache need that.
type namedEndpoint struct {
	*clientv3.Client
	name string
}

func (n namedEndpoint) Endpoints() []string { return []string{n.name} }

// newBackend returns the backend and what ends it.
func newBackend(cfg *Config, e *embed.Etcd, words *fatalHook) (*backend, func()) {
	b := &backend{config: *storagebackend.NewDefaultConfig(cfg.EtcdPrefix, nil), etcd: e, words: words, cached: !cfg.WatchCache.Disabled}
	if e == nil {
		b.config.Transport.ServerList = cfg.EtcdEndpoints
		b.config.Transport.TrustedCAFile = cfg.EtcdCAFile
		b.config.Transport.CertFile, b.config.Transport.KeyFile = cfg.EtcdCertFile, cfg.EtcdKeyFile
		return b, func() {}
	}
	b.watches = &watchHandlers{WatchServer: v3rpc.NewWatchServer(e.Server)}
	c := b.client()
	name := fmt.Sprintf("embedded-%d", embeddedCount.Add(1))
	etcdfeature.DefaultFeatureSupportChecker.CheckClient(c.Ctx(), namedEndpoint{c, name}, storage.RequestWatchProgress)
	compactor := etcd3.NewCompactor(c, storagebackend.DefaultCompactInterval, clock.RealClock{}, nil)
	b.compactor = compactor
	return b, func() {
		compactor.Stop()
		_ = c.Close()
		b.watches.close()
	}
}

// client makes a client of the etcd in this process.
func (b *backend) client() *clientv3.Client {
	c := v3client.New(b.etcd.Server)
	c.Watcher = clientv3.NewWatchFromWatchClient(adapter.WatchServerToWatchClient(b.watches), c)
	return c
}

// watchHandlers are etcd's handlers of the watches of this process. Closing a client cancels its
// watches and does not wait for their handlers, which read previous values from the database
// and panic when that is closed under them. A gRPC server would wait for them.
type watchHandlers struct {
	pb.WatchServer

	mu      sync.Mutex
	closed  bool           // +checklocks:mu
	running sync.WaitGroup // Add is called with mu held, before closed is set
}

// Watch implements pb.WatchServer.
func (h *watchHandlers) Watch(stream pb.Watch_WatchServer) error {
	h.mu.Lock()
	if h.closed {
		h.mu.Unlock()
		return context.Canceled
	}
	h.running.Add(1)
	h.mu.Unlock()
	defer h.running.Done()
	return h.WatchServer.Watch(stream)
}

// close refuses new watches and returns when the handlers of the others have ended. Their
// clients must have been closed.
func (h *watchHandlers) close() {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.running.Wait()
}

// GetRESTOptions implements generic.RESTOptionsGetter without a codec; see [backend.forKind].
func (b *backend) GetRESTOptions(gr schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	return b.options(gr, nil, b.cached), nil
}

// forKind returns the options of a resource that is stored by codec. Those with a short life
// are not cached.
func (b *backend) forKind(gr schema.GroupResource, codec runtime.Codec, cached bool) generic.RESTOptions {
	return b.options(gr, codec, cached && b.cached)
}

func (b *backend) options(gr schema.GroupResource, codec runtime.Codec, cached bool) generic.RESTOptions {
	conf := b.config
	conf.Codec = codec
	o := generic.RESTOptions{
		StorageConfig: conf.ForResource(gr), EnableGarbageCollection: true, DeleteCollectionWorkers: 1,
		ResourcePrefix: "/" + gr.Group + "/" + gr.Resource,
	}
	if gr.Group == "" {
		o.ResourcePrefix = "/core/" + gr.Resource
	}
	switch {
	case b.etcd != nil:
		o.Decorator = b.embedded(cached)
	case cached:
		o.Decorator = registry.StorageWithCacher()
	default:
		o.Decorator = generic.UndecoratedStorage
	}
	return o
}

// embedded makes storages that call the etcd of this process.
//
// Each has a client of its own: etcd withholds progress notifications from a whole watch
// stream while any watcher on it starts above the current revision, so on a shared stream a
// cache that has just started would stall consistent reads of all the others.
func (b *backend) embedded(cached bool) generic.StorageDecorator {
	return func(c *storagebackend.ConfigForResource, resourcePrefix string, keyFunc func(runtime.Object) (string, error),
		newFunc, newListFunc func() runtime.Object, attrs storage.AttrFunc, trig storage.IndexerFuncs, idx *cache.Indexers,
	) (storage.Interface, factory.DestroyFunc, error) {
		client := &etcdk8s.Client{Client: b.client()}
		client.Kubernetes = client
		v := storage.APIObjectVersioner{}
		st, err := etcd3.New(client, b.compactor, c.Codec, newFunc, newListFunc, c.Prefix, resourcePrefix, c.GroupResource,
			identity.NewEncryptCheckTransformer(), c.LeaseManagerConfig, etcd3.NewDefaultDecoder(c.Codec, v), v)
		if err != nil {
			return nil, nil, fmt.Errorf("storage of %s: %w", c.GroupResource, err)
		}
		var once sync.Once
		closeStore := func() {
			st.Close()
			_ = client.Close()
		}
		if !cached {
			return st, func() { once.Do(closeStore) }, nil
		}
		ca, err := cacher.NewCacherFromConfig(cacher.Config{
			Storage: st, Versioner: v, GroupResource: c.GroupResource, EventsHistoryWindow: c.EventsHistoryWindow,
			ResourcePrefix: resourcePrefix, KeyFunc: keyFunc, NewFunc: newFunc, NewListFunc: newListFunc,
			GetAttrsFunc: attrs, IndexerFuncs: trig, Indexers: idx, Codec: c.Codec,
		})
		if err != nil {
			closeStore()
			return nil, nil, fmt.Errorf("watch cache of %s: %w", c.GroupResource, err)
		}
		d := cacher.NewCacheDelegator(ca, st)
		return d, func() {
			once.Do(func() {
				d.Stop()
				ca.Stop()
				closeStore()
			})
		}, nil
	}
}

// awaitEnd returns why the embedded etcd has ended, an ErrStorage where it gave up over its
// files; nil if ctx was done before.
func (b *backend) awaitEnd(ctx context.Context) error {
	select {
	case err := <-b.words.said:
		return fmt.Errorf("%w: etcd in %s: %w", ErrStorage, b.etcd.Config().Dir, err)
	case <-b.etcd.Server.StopNotify():
		return errors.New("etcd stopped by itself")
	case <-ctx.Done():
		return nil
	}
}

// closeEtcd ends the embedded etcd and waits for it.
func closeEtcd(e *embed.Etcd) {
	e.Close()
	<-e.Server.StopNotify()
}
