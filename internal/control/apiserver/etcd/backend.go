package etcd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
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
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"

	"github.com/barchan-dev/barchan/internal/base/health"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
)

// ErrStorage means that the embedded etcd cannot continue because of its files. Acknowledged
// writes are on disk; only a new process can open them again.
var ErrStorage = errors.New("the object store cannot continue")

// Backend gives each resource its storage.
type Backend struct {
	cfg  *Config
	gate *health.Gate
	log  *slog.Logger
	undo []func()

	storage storagebackend.Config

	// of the embedded etcd
	etcd      *embed.Etcd // nil: an existing one, over gRPC
	fatal     *fatalHook
	watches   *watchHandlers
	compactor etcd3.Compactor
	secrets   *keyring // encrypts Secrets
	rotating  atomic.Bool

	// of an existing etcd
	outside *clientv3.Client
	owner   *ownership
}

// Open starts the embedded etcd in dir, or takes the prefix of an existing one. cfg is complete; dir
// also holds the ID by which servers recognize each other. The gate may be nil.
func Open(ctx context.Context, cfg *Config, dir string, gate *health.Gate, log *slog.Logger) (*Backend, error) {
	b := &Backend{cfg: cfg, gate: gate, log: log, storage: *storagebackend.NewDefaultConfig(cfg.Prefix, nil)}
	open := b.openEmbedded
	if len(cfg.Endpoints) > 0 {
		open = b.openExisting
	}
	if err := open(ctx, dir); err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

// embeddedCount makes the names unique by which feature detection distinguishes in-process clients.
var embeddedCount atomic.Int64

// namedEndpoint gives the in-process client an endpoint. Without one, it is not checked for progress
// requests, which consistent reads from the watch cache need.
type namedEndpoint struct {
	*clientv3.Client
	name string
}

func (n namedEndpoint) Endpoints() []string { return []string{n.name} }

func (b *Backend) openEmbedded(ctx context.Context, dir string) (err error) {
	if b.secrets, err = openKeyring(cmp.Or(b.cfg.SecretsKey, filepath.Join(dir, encryptionKeyFile))); err != nil {
		return err
	}
	b.fatal = newFatalHook(ctx)
	b.etcd, err = startEtcd(ctx, filepath.Join(dir, "etcd"), b.cfg.QuotaBackendBytes, b.log, b.fatal)
	if err != nil {
		return err
	}
	b.watches = &watchHandlers{WatchServer: v3rpc.NewWatchServer(b.etcd.Server)}
	c := b.client()
	name := fmt.Sprintf("embedded-%d", embeddedCount.Add(1))
	etcdfeature.DefaultFeatureSupportChecker.CheckClient(c.Ctx(), namedEndpoint{c, name}, storage.RequestWatchProgress) //nolint:contextcheck // the client has its own
	compactor := etcd3.NewCompactor(c, storagebackend.DefaultCompactInterval, clock.RealClock{}, nil)
	b.compactor = compactor
	b.undo = append(b.undo, func() {
		compactor.Stop()
		_ = c.Close()
		b.watches.close()
		b.etcd.Close()
		<-b.etcd.Server.StopNotify()
	})
	if err := b.checkEncryption(ctx, c); err != nil {
		return err
	}
	_, err = b.finishRotation(ctx, c) // of a server that crashed
	return err
}

// openExisting connects to an existing etcd and takes the prefix. Its operator encrypts it: a key in this
// server's directory would keep another server from taking over. It fails at once if etcd does not
// answer, where the storage layer would retry without an error.
func (b *Backend) openExisting(ctx context.Context, dir string) (err error) {
	b.storage.Transport.ServerList = b.cfg.Endpoints
	b.storage.Transport.TrustedCAFile = b.cfg.CAFile
	b.storage.Transport.CertFile, b.storage.Transport.KeyFile = b.cfg.CertFile, b.cfg.KeyFile
	lasting := context.WithoutCancel(ctx)
	ctx, cancel := context.WithTimeoutCause(ctx, probeTimeout, errNotReady)
	defer cancel()
	if b.outside, err = dialEtcd(lasting, b.cfg, b.log); err != nil {
		return err
	}
	b.undo = append(b.undo, func() { _ = b.outside.Close() })
	if b.owner, err = takeOwnership(ctx, b.outside, b.cfg, dir, b.log); err != nil {
		return err
	}
	b.undo = append(b.undo, func() { b.owner.release(lasting) })
	return nil
}

// Close releases the prefix, or stops the embedded etcd and waits for it. The storages must have
// been destroyed. It may block for as long as Err returns an error.
func (b *Backend) Close() {
	for _, f := range slices.Backward(b.undo) {
		f()
	}
}

// Err returns an ErrStorage with its cause if the embedded etcd has stopped because of its files.
func (b *Backend) Err() error {
	if b.fatal == nil || !b.fatal.stuck.Load() {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrStorage, b.fatal.cause())
}

// Await returns an error when the storage can no longer be used, an ErrStorage if because of
// the files of the embedded etcd; nil once ctx is done.
func (b *Backend) Await(ctx context.Context) error {
	if b.etcd == nil {
		return b.owner.await(ctx)
	}
	select {
	case <-b.fatal.running.Done():
		return fmt.Errorf("%w: etcd in %s: %w", ErrStorage, b.etcd.Config().Dir, b.fatal.cause())
	case <-b.etcd.Server.StopNotify():
		return errors.New("etcd stopped unexpectedly")
	case <-ctx.Done():
		return nil
	}
}

// Maintain reports the state of the storage to the gate until ctx is done, and keeps the embedded
// etcd below its quota. An existing etcd is maintained by its operator.
func (b *Backend) Maintain(ctx context.Context) error {
	interval, check := outsideInterval, func() error { return alarmOf(ctx, b.outside) }
	if b.etcd != nil {
		m := &maintenance{etcd: b.etcd, quota: b.cfg.QuotaBackendBytes, log: b.log}
		interval, check = maintenanceInterval, func() error { return m.run(ctx) }
	}
	return lifecycle.Every(ctx, interval, func() { b.gate.Set(conditionStore, check()) })
}

// client returns a client of the embedded etcd.
func (b *Backend) client() *clientv3.Client {
	c := v3client.New(b.etcd.Server)
	c.Watcher = clientv3.NewWatchFromWatchClient(adapter.WatchServerToWatchClient(b.watches), c)
	return c
}

// watchHandlers serves the watches of this process. Closing a client cancels its watches without
// waiting for their handlers. These read previous values from the database, and panic if it
// is closed meanwhile. A gRPC server would wait for them.
type watchHandlers struct {
	pb.WatchServer

	mu      sync.Mutex
	closed  bool           // +checklocks:mu
	running sync.WaitGroup // Add is called under mu, before closed is set
}

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

// Options returns the storage options of a resource that codec encodes.
func (b *Backend) Options(gr schema.GroupResource, codec runtime.Codec, cached bool) generic.RESTOptions {
	conf := b.storage
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

// embedded makes storages that call the embedded etcd.
//
// Each has its own client: etcd withholds progress notifications from a whole watch stream
// while any watcher on it starts above the current revision. On a shared stream, a cache that
// has just started would stall consistent reads of all others.
func (b *Backend) embedded(cached bool) generic.StorageDecorator {
	return func(c *storagebackend.ConfigForResource, resourcePrefix string, keyFunc func(runtime.Object) (string, error),
		newFunc, newListFunc func() runtime.Object, attrs storage.AttrFunc, trig storage.IndexerFuncs, idx *cache.Indexers,
	) (storage.Interface, factory.DestroyFunc, error) {
		client := &etcdk8s.Client{Client: b.client()}
		client.Kubernetes = client
		v := storage.APIObjectVersioner{}
		st, err := etcd3.New(client, b.compactor, c.Codec, newFunc, newListFunc, c.Prefix, resourcePrefix, c.GroupResource,
			b.transformer(c.GroupResource), c.LeaseManagerConfig, etcd3.NewDefaultDecoder(c.Codec, v), v)
		if err != nil {
			return nil, nil, fmt.Errorf("storage of %s: %w", c.GroupResource, err)
		}
		var once sync.Once
		closeStore := func() {
			st.Close()
			_ = client.Close()
		}
		held := b.held(c.GroupResource, st)
		if !cached {
			return held, func() { once.Do(closeStore) }, nil
		}
		ca, err := cacher.NewCacherFromConfig(cacher.Config{
			Storage: sharing(held, b.cfg.Share), Versioner: v, GroupResource: c.GroupResource, EventsHistoryWindow: c.EventsHistoryWindow,
			ResourcePrefix: resourcePrefix, KeyFunc: keyFunc, NewFunc: newFunc, NewListFunc: newListFunc,
			GetAttrsFunc: attrs, IndexerFuncs: trig, Indexers: idx, Codec: c.Codec,
		})
		if err != nil {
			closeStore()
			return nil, nil, fmt.Errorf("watch cache of %s: %w", c.GroupResource, err)
		}
		d := cacher.NewCacheDelegator(ca, held)
		return d, func() {
			once.Do(func() {
				d.Stop()
				ca.Stop()
				closeStore()
			})
		}, nil
	}
}
