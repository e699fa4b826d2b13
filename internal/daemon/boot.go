package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"

	"go.opentelemetry.io/otel/trace"
	"k8s.io/apimachinery/pkg/runtime"
	authentication "k8s.io/client-go/kubernetes/typed/authentication/v1"
	authorization "k8s.io/client-go/kubernetes/typed/authorization/v1"
	eventsclient "k8s.io/client-go/kubernetes/typed/events/v1"
	"k8s.io/client-go/tools/events"

	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	"github.com/barchan-dev/barchan/internal/base/docsite"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/apiserver/etcd"
	"github.com/barchan-dev/barchan/internal/control/apiserver/tenancy"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/kubeauth"
	"github.com/barchan-dev/barchan/internal/control/quota"
	"github.com/barchan-dev/barchan/internal/daemon/admission"
	"github.com/barchan-dev/barchan/internal/daemon/auditing"
	"github.com/barchan-dev/barchan/internal/daemon/boot"
	"github.com/barchan-dev/barchan/internal/daemon/defaults"
	"github.com/barchan-dev/barchan/internal/daemon/hostcheck"
	"github.com/barchan-dev/barchan/internal/daemon/kubepods"
	"github.com/barchan-dev/barchan/internal/daemon/nodesocket"
	"github.com/barchan-dev/barchan/internal/edge/e2b"
	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/edge/gateway/connlimit"
)

// makeAPI configures storage and the API server.
func (d *Daemon) makeAPI(context.Context) (err error) {
	host, err := admission.NewHost()
	if err != nil {
		return err
	}
	tenants := admission.Tenants{DefaultRuntime: d.cfg.DefaultRuntime, Quotas: func() *quota.Quotas { return d.quotas }}
	d.api, err = apiserver.New(apiserver.Config{
		DataDir: filepath.Join(d.cfg.DataDir, "apiserver"), Listen: d.cfg.KubeAddr, Log: d.cfg.Log, Limit: func(l net.Listener) net.Listener { return connlimit.New(l, d.cfg.ClientConnections) }, Admission: tenants.After(host.Admit), Bound: tenants.Bound, Pods: d.pods(), Keys: d.tenantOf, Audit: d.audit, Forwarded: http.HandlerFunc(d.serveForwarded), Gate: d.health, Node: d.cfg.NodeSocket != "",
		Etcd: etcd.Config{
			Endpoints: d.cfg.EtcdEndpoints, Prefix: d.cfg.EtcdPrefix, CAFile: d.cfg.EtcdCA, CertFile: d.cfg.EtcdCert, KeyFile: d.cfg.EtcdKey,
			NodeName: d.cfg.NodeName, SecretsKey: d.cfg.SecretsKey, QuotaBackendBytes: d.cfg.EtcdQuota.Value(),
		},
	})
	return err
}

func (d *Daemon) apiServices() services {
	return services{{Name: "apiserver", Run: func(ctx context.Context, ready func()) error {
		if err := d.api.Start(ctx); err != nil {
			return err
		}
		if err := d.useAPI(); err != nil {
			d.api.Stop()
			return err
		}
		ready()
		return d.api.Run(ctx)
	}}}
}

// useAPI connects our own parts to the API server, and writes the kubeconfigs of the administrator and of a node apart.
func (d *Daemon) useAPI() error {
	d.rest, d.objects = d.api.RESTConfig(apiserver.UserController), d.api.Direct(apiserver.UserController)
	copies := map[string]string{d.api.AdminKubeconfig(): d.cfg.Kubeconfig()}
	if d.cfg.NodeSocket != "" {
		copies[d.api.NodeKubeconfig()] = d.cfg.NodeKubeconfig()
	}
	for from, to := range copies {
		kubeconfig, err := os.ReadFile(from)
		if err == nil {
			err = defaults.WriteSecret(to, kubeconfig)
		}
		if err != nil {
			return fmt.Errorf("copy kubeconfig: %w", err)
		}
	}
	return nil
}

func (d *Daemon) makeCache(ctx context.Context) (err error) {
	cfg := cache.Config{REST: d.rest, Log: d.cfg.Log, Trim: true}
	switch d.cfg.Role {
	case config.RoleController:
		cfg.Kinds = cache.ControllerKinds()
	case config.RoleReplica:
		cfg.Kinds = cache.ReplicaKinds()
		if d.hasServer() {
			cfg.Kinds = append(cfg.Kinds, &barchan.Volume{})
		}
	case config.RoleNode:
		cfg.Kinds = cache.NodeKinds()
	default: // claims are written directly, which keeps managed fields as the caller has them
		cfg.Kinds, cfg.Trim, cfg.Source = cache.ServerKinds(), false, d.api.Direct(apiserver.UserController).ListerWatcher
	}
	if d.cache, err = cache.New(ctx, cfg); err != nil {
		return err
	}
	if d.objects == nil {
		d.objects = d.cache.Live()
	}
	return nil
}

// cacheServices are ready when every kind has been listed.
func (d *Daemon) cacheServices() services {
	return services{boot.Awaited("cache", d.cache.Run, d.cache.WaitSynced)}
}

// makeGateway opens the listeners.
func (d *Daemon) makeGateway(ctx context.Context) error {
	keyNamespace := func(ctx context.Context, key string) (string, bool) {
		tenant, err := d.manager.Keys.Authenticate(ctx, key)
		return tenant.Namespace, err == nil
	}
	api, err := d.httpAPI(ctx)
	if err != nil {
		return err
	}
	cfg := gateway.Config{
		Domains: d.cfg.Domains, Routes: d.routes, Tokens: d.tokens, API: api, Waker: d.manager.Sandboxes,
		Names: func(_ context.Context, namespace, name string) (sandbox.ID, bool) {
			return d.routes.LookupName(namespace, name)
		},
		ClientIdle: d.cfg.ClientIdle, StreamIdle: d.cfg.StreamIdle, SandboxRate: float64(d.cfg.SandboxRate), KeyRate: float64(d.cfg.KeyRate),
		SandboxRequests: d.cfg.SandboxRequests, MemoryLow: hostcheck.MemoryLow(d.cfg.IdleMemory.Value()),
		KeyNamespace: keyNamespace, Kept: d.binder.Take, NoFastPath: !d.cfg.GatewayFastPath,
		Log: d.cfg.Log, AccessLog: d.accessLog(), Audit: auditing.Gateway(d.audit, d.routes), Registerer: d.metrics,
	}
	if d.verifier != nil {
		cfg.Verifier = d.verifier
	}
	cfg.Tracing = d.tracing()
	if d.gateway, err = gateway.New(cfg); err != nil {
		return err
	}
	if d.ssh != nil {
		if err := d.openSSH(keyNamespace); err != nil {
			return err
		}
	}
	d.open(d.gateway)
	return nil
}

func (d *Daemon) gatewayServices() (list services) {
	if d.cfg.Role == config.RoleServer && d.cfg.PeerAddr == "" { // all traffic passes here
		list = append(list, boot.Background("idle", func(ctx context.Context) error { return d.gateway.WatchIdle(ctx, d.manager.Sandboxes) }))
	}
	return append(list, boot.Background("dashboard", d.dashboard.Run), boot.Background("gateway", func(ctx context.Context) error {
		<-ctx.Done()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
		defer cancel()
		return d.gateway.Drain(grace)
	}))
}

// tracing returns the provider of tracers; nil without a collector.
func (d *Daemon) tracing() trace.TracerProvider {
	if d.cfg.OTLPEndpoint == "" {
		return nil
	}
	return d.tracer
}

// httpAPI is what the listeners answer to requests that are not for a sandbox.
func (d *Daemon) httpAPI(ctx context.Context) (http.Handler, error) {
	cfg := e2b.Config{Manager: d.manager, Log: d.cfg.Log, Audit: d.audit, Metrics: d.metrics, Domains: d.cfg.Domains}
	if d.cfg.TLSAddr != "" || d.ofCluster() { // the SDKs use TLS for a domain; a cluster ends it before us
		cfg.Domain = d.cfg.Domain()
	}
	if d.ssh != nil {
		cfg.SSH = d.sshAccess()
	}
	if d.hasServer() {
		server, err := apiserver.NewForwarder(d.rest)
		if err != nil {
			return nil, err
		}
		cfg.Server = server
	}
	if d.cfg.KubeTokens {
		tokens, err := d.kubeTokens()
		if err != nil {
			return nil, err
		}
		cfg.Tokens = tokens
	}
	rest, err := e2b.New(cfg)
	if err != nil {
		return nil, err
	}
	mux := d.probes()
	mux.Handle("/", telemetry.TraceHandler(d.tracer, "api", rest))
	if err := d.makeDashboard(ctx, rest); err != nil {
		return nil, err
	}
	mux.Handle("/ui", d.dashboard)
	mux.Handle("/ui/", d.dashboard)
	docs := docsite.Handler()
	mux.Handle(docsite.Path, docs)
	mux.Handle(docsite.Path+"/", docs)
	if d.apart != nil {
		mux.Handle(nodesocket.ContentPath, d.apart.Content(d.log))
	}
	d.forwarded = mux
	return mux, nil
}

// hasServer reports whether this is a replica of a server of ours. On a cluster there is none.
func (d *Daemon) hasServer() bool { return d.cfg.Role == config.RoleReplica && d.verifier == nil }

// ofCluster reports whether this is a replica on a Kubernetes cluster.
func (d *Daemon) ofCluster() bool { return d.cfg.Role == config.RoleReplica && d.verifier != nil }

// serveForwarded answers what a replica forwards, once the boot is complete.
func (d *Daemon) serveForwarded(w http.ResponseWriter, r *http.Request) {
	if d.progress.Err() != nil {
		d.progress.Handler().ServeHTTP(w, r)
		return
	}
	d.forwarded.ServeHTTP(w, r)
}

// kubeTokens authenticates by tokens of the cluster.
func (d *Daemon) kubeTokens() (*kubeauth.Authorizer, error) {
	if d.verifier == nil {
		return nil, fmt.Errorf("kubeTokens: the API server is not that of a Kubernetes cluster, and has no tokens: %w", errs.ErrInvalid)
	}
	tokens, err := authentication.NewForConfig(d.rest)
	if err != nil {
		return nil, fmt.Errorf("client of token reviews: %w", err)
	}
	accesses, err := authorization.NewForConfig(d.rest)
	if err != nil {
		return nil, fmt.Errorf("client of access reviews: %w", err)
	}
	return kubeauth.New(tokens.TokenReviews(), accesses.SubjectAccessReviews(), d.cache), nil
}

// probes are what every role answers to any client.
func (d *Daemon) probes() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", boot.Healthz)
	mux.HandleFunc("GET /readyz", d.progress.Brief)
	return mux
}

// details are for the operator alone.
func (d *Daemon) details() *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", boot.Healthz)
	mux.Handle("GET /readyz", d.progress)
	mux.Handle("GET /metrics", telemetry.MetricsHandler(d.metrics))
	return mux
}

// events returns a recorder of Events on objects, and its end.
func (d *Daemon) events(ctx context.Context, scheme *runtime.Scheme) (events.EventRecorder, func(), error) {
	sink, err := eventsclient.NewForConfig(d.rest)
	if err != nil {
		return nil, nil, fmt.Errorf("make the events client: %w", err)
	}
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: sink})
	if err := broadcaster.StartRecordingToSinkWithContext(context.WithoutCancel(ctx)); err != nil {
		return nil, nil, fmt.Errorf("record events: %w", err)
	}
	return broadcaster.NewRecorder(scheme, "barchan"), broadcaster.Shutdown, nil
}

// accessLog is where the gateway writes a record per request; nil leaves it to its debug log.
func (d *Daemon) accessLog() *slog.Logger {
	if d.cfg.AccessLog {
		return d.cfg.Log
	}
	return nil
}

// tenantOf resolves an API key, as the REST API does; it is a tenancy.KeyFunc.
func (d *Daemon) tenantOf(ctx context.Context, secret string) (tenancy.Tenant, error) {
	if err := d.progress.Err(); err != nil {
		return tenancy.Tenant{}, err
	}
	id, err := d.manager.Keys.Authenticate(ctx, secret)
	return tenancy.Tenant{Namespace: id.Namespace, Key: id.Key, Scope: id.Scope}, err
}

// pods serve kubectl's streams.
func (d *Daemon) pods() kubepods.Pods {
	return kubepods.Pods{Booted: d.progress.Err, Parts: func() kubepods.Parts {
		return kubepods.Parts{Manager: d.manager, Objects: d.objects, Binder: d.binder, Tokens: d.tokens}
	}}
}

func (d *Daemon) makeDefaults(ctx context.Context) error {
	return defaults.Make(ctx, &d.cfg.Config, d.api.RESTConfig(apiserver.UserAdmin))
}
