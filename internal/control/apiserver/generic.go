package apiserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/filters/impersonation"
	openapinamer "k8s.io/apiserver/pkg/endpoints/openapi"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	"k8s.io/apiserver/pkg/util/openapi"
	restclient "k8s.io/client-go/rest"

	barchanopenapi "github.com/barchan-dev/barchan/api/openapi"
	"github.com/barchan-dev/barchan/internal/base/auditlog"
	"github.com/barchan-dev/barchan/internal/control/apiserver/gc"
	"github.com/barchan-dev/barchan/internal/control/apiserver/kinds"
	"github.com/barchan-dev/barchan/internal/control/apiserver/pods"
	"github.com/barchan-dev/barchan/internal/control/apiserver/registry"
	"github.com/barchan-dev/barchan/internal/control/apiserver/tenancy"
)

const (
	maxInFlight         = 1000
	maxMutatingInFlight = 500
	readyTimeout        = 60 * time.Second
	readyInterval       = 2 * time.Millisecond
)

// engine is a generic API server with our kinds, built and not yet serving.
type engine struct {
	server   *genericapiserver.GenericAPIServer
	registry *registry.Registry
	admitted registry.AdmissionFunc // the configured one; may be nil
	audit    *auditlog.Log          // nil: nothing is recorded
	keys     tenancy.KeyFunc        // nil: there are none
	remote   http.Handler           // for requests from the network
	inside   http.Handler           // for those of the in-process transport
}

// build makes the server over the storage that options gives. It starts the watch caches; destroy
// stops them.
func build(cfg *Config, options func(schema.GroupResource, runtime.Codec, bool) generic.RESTOptions, tokens map[string]string) (e *engine, err error) {
	resources := kinds.All()
	sch, err := kinds.NewScheme(append(slices.Clone(resources), kinds.Pods()))
	if err != nil {
		return nil, err
	}
	e = &engine{admitted: cfg.Admission, audit: cfg.Audit, keys: cfg.Keys}
	gc := e.genericConfig(sch, newAuthenticator(tokens, cfg.Keys))
	e.server, err = gc.Complete().New("barchan", genericapiserver.NewEmptyDelegate())
	if err != nil {
		return nil, fmt.Errorf("make the generic server: %w", err)
	}
	e.registry, err = registry.New(&registry.Config{
		Scheme: sch, Options: options, Admission: e.admit, Bound: cfg.Bound, FromNode: isNode, Gate: cfg.Gate,
	}, resources)
	if err != nil {
		e.server.Destroy()
		return nil, err
	}
	if err := e.install(sch, cfg.Pods); err != nil {
		e.destroy()
		return nil, err
	}
	e.server.Handler.NonGoRestfulMux.HandleFunc(crdPath, noCRDs)
	if cfg.Forwarded != nil {
		e.server.Handler.NonGoRestfulMux.UnlistedHandlePrefix(forwardPath+"/", serveForwarded(cfg.Forwarded))
	}
	e.serveOpenAPI(gc)
	e.server.PrepareRun()
	return e, nil
}

// serveOpenAPI builds the OpenAPI documents when a client first requests one. They are 8 MiB of live heap, and up to 11
// with the responses; many servers are never asked for one.
func (e *engine) serveOpenAPI(c *genericapiserver.RecommendedConfig) {
	documents := sync.OnceValue(func() http.Handler {
		m := mux.NewPathRecorderMux("openapi")
		documents := routes.OpenAPI{Config: c.OpenAPIConfig, V3Config: c.OpenAPIV3Config}
		documents.InstallV2(e.server.Handler.GoRestfulContainer, m)
		documents.InstallV3(e.server.Handler.GoRestfulContainer, m)
		return m
	})
	serve := func(w http.ResponseWriter, r *http.Request) { documents().ServeHTTP(w, r) }
	e.server.Handler.NonGoRestfulMux.HandleFunc("/openapi/v2", serve)
	e.server.Handler.NonGoRestfulMux.HandleFunc("/openapi/v3", serve)
	e.server.Handler.NonGoRestfulMux.HandlePrefix("/openapi/v3/", http.HandlerFunc(serve))
}

// admit limits what a tenant writes, beside the configured admission.
func (e *engine) admit(ctx context.Context, obj, old runtime.Object) field.ErrorList {
	list := tenancy.EndsInTime(ctx, e.registry, obj)
	if e.admitted != nil {
		list = append(list, e.admitted(ctx, obj, old)...)
	}
	return list
}

// crdPath is where kubectl looks up an unknown kind.
const crdPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

// noCRDs returns an empty list. Without it kubectl would report the failed lookup instead of the
// unknown kind.
func noCRDs(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinitionList","metadata":{},"items":[]}`+"\n")
}

func (e *engine) genericConfig(sch *kinds.Scheme, authn authenticator.Request) *genericapiserver.RecommendedConfig {
	c := genericapiserver.NewRecommendedConfig(sch.Codecs)
	c.EffectiveVersion = newEffectiveVersion()
	c.ExternalAddress = "localhost:443"
	c.LoopbackClientConfig = &restclient.Config{Host: "http://in-process"}
	c.Authentication.Authenticator = authn
	c.Authorization.Authorizer = newAuthorizer()
	c.EnableProfiling, c.EnableMetrics = false, false
	c.MaxRequestsInFlight, c.MaxMutatingRequestsInFlight = maxInFlight, maxMutatingInFlight
	c.StorageObjectCountTracker = nil
	streams := genericfilters.BasicLongRunningRequestCheck(sets.NewString("watch"), sets.NewString("exec", "portforward", "log"))
	c.LongRunningFunc = func(r *http.Request, info *request.RequestInfo) bool { return isForwarded(r) || streams(r, info) }
	defs := openapi.GetOpenAPIDefinitionsWithoutDisabledFeatures(barchanopenapi.GetOpenAPIDefinitions)
	namer := openapinamer.NewDefinitionNamer(sch.Scheme)
	c.OpenAPIConfig = genericapiserver.DefaultOpenAPIConfig(defs, namer)
	c.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(defs, namer)
	c.SkipOpenAPIInstallation = true // serveOpenAPI installs them
	c.OpenAPIConfig.Info.Title, c.OpenAPIV3Config.Info.Title = "Barchan", "Barchan"
	c.BuildHandlerChainFunc = e.buildChains
	return c
}

// buildChains builds the handler chains before api. Requests of our own parts need fewer handlers:
// they neither impersonate nor count against the limits.
func (e *engine) buildChains(api http.Handler, c *genericapiserver.Config) http.Handler {
	authenticated := func(h http.Handler) http.Handler {
		failed := genericapifilters.Unauthorized(c.Serializer)
		return genericapifilters.WithAuthentication(h, c.Authentication.Authenticator, failed, nil, nil)
	}
	outer := func(h http.Handler) http.Handler {
		h = genericapifilters.WithWarningRecorder(h)
		h = genericapifilters.WithCacheControl(h)
		h = genericapifilters.WithRequestInfo(h, c.RequestInfoResolver)
		h = genericapifilters.WithRequestReceivedTimestamp(h)
		h = genericfilters.WithPanicRecovery(h, c.RequestInfoResolver)
		return genericapifilters.WithAuditInit(h)
	}
	deadline := func(h http.Handler) http.Handler {
		return genericapifilters.WithRequestDeadline(h, nil, nil, c.LongRunningFunc, c.Serializer, c.RequestTimeout)
	}

	authorized := genericapifilters.WithAuthorization(api, c.Authorization.Authorizer, c.Serializer)
	e.inside = outer(deadline(authenticated(authorized)))

	h := genericfilters.WithMaxInFlightLimit(authorized, c.MaxRequestsInFlight, c.MaxMutatingRequestsInFlight, c.LongRunningFunc)
	h = tenancy.WithShares(h, c.LongRunningFunc)
	h = impersonation.WithImpersonation(h, c.Authorization.Authorizer, c.Serializer)
	if e.audit != nil {
		h = genericapifilters.WithAudit(h, auditSink{e.audit}, auditPolicy{}, c.LongRunningFunc)
	}
	h = tenancy.WithStreamsEnded(authenticated(h), e.keys, c.LongRunningFunc)
	h = genericfilters.WithTimeoutForNonLongRunningRequests(h, c.LongRunningFunc)
	e.remote = outer(deadline(h))
	return e.remote
}

// install serves every store under its group and version.
func (e *engine) install(sch *kinds.Scheme, runs pods.Runtime) error {
	groups := map[schema.GroupVersion]map[string]rest.Storage{}
	var order []schema.GroupVersion
	add := func(gv schema.GroupVersion, path string, s rest.Storage) {
		if groups[gv] == nil {
			groups[gv] = map[string]rest.Storage{}
			order = append(order, gv)
		}
		groups[gv][path] = s
	}
	for _, st := range e.registry.Stores {
		add(st.Kind.GV, st.Kind.Plural, st)
		for name, sub := range st.Subresources() {
			add(st.Kind.GV, st.Kind.Plural+"/"+name, sub)
		}
	}
	add(eventsv1.SchemeGroupVersion, "events", e.registry.Store("Event"))
	if runs != nil {
		for path, s := range pods.Storage(e.registry.Store("Sandbox"), runs) {
			add(corev1.SchemeGroupVersion, path, s)
		}
	}
	var named []*genericapiserver.APIGroupInfo
	for _, gv := range order {
		info := genericapiserver.NewDefaultAPIGroupInfo(gv.Group, sch.Scheme, sch.Parameters, sch.Codecs)
		info.VersionedResourcesStorageMap[gv.Version] = groups[gv]
		if gv.Group != corev1.GroupName {
			named = append(named, &info)
			continue
		}
		if err := e.server.InstallLegacyAPIGroup(genericapiserver.DefaultLegacyAPIPrefix, &info); err != nil {
			return fmt.Errorf("install %s: %w", gv, err)
		}
	}
	if err := e.server.InstallAPIGroups(named...); err != nil {
		return fmt.Errorf("install API groups: %w", err)
	}
	return nil
}

// controllers returns the controllers that deletion needs, by name.
func (e *engine) controllers(log *slog.Logger) map[string]func(context.Context) error {
	var collected, contents []gc.Kind
	kind := func(s *registry.Store, o registry.Objects) gc.Kind {
		return gc.Kind{GroupKind: s.Kind.GV.WithKind(s.Kind.Kind).GroupKind(), Namespaced: s.Kind.Namespaced, Store: o, Source: o.Source()}
	}
	for _, s := range e.registry.Stores {
		k := kind(s, s.Objects())
		if s.Kind.TTLSeconds == 0 { // events own nothing and expire
			collected = append(collected, k)
		}
		if k.Namespaced {
			contents = append(contents, k)
		}
	}
	s := e.registry.Store("Namespace")
	namespaces := &gc.Namespaces{
		Kind: kind(s, s.FinalizedObjects()), Finalizer: kinds.NamespaceFinalizer, Contents: contents,
		Close: e.registry.CloseNamespace, Reopen: e.registry.ReopenNamespace, Log: log,
	}
	return map[string]func(context.Context) error{"garbage collector": gc.New(collected, log).Run, "namespace controller": namespaces.Run}
}

// awaitReady returns when the watch caches are filled and the server reports that it is ready.
func (e *engine) awaitReady(ctx context.Context, t http.RoundTripper) error {
	var cause error
	err := wait.PollUntilContextTimeout(ctx, readyInterval, readyTimeout, true, func(ctx context.Context) (bool, error) {
		cause = e.notReady(ctx, t)
		return cause == nil, nil
	})
	if err != nil {
		return fmt.Errorf("become ready: %w: %w", err, cause)
	}
	return nil
}

func (e *engine) notReady(ctx context.Context, t http.RoundTripper) error {
	for _, s := range e.registry.Stores {
		if err := s.ReadinessCheck(); err != nil {
			return fmt.Errorf("storage of %s: %w", s.Kind.Plural, err)
		}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://in-process/readyz?verbose", http.NoBody)
	if err != nil {
		return err
	}
	resp, err := t.RoundTrip(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode == http.StatusOK {
		return nil
	}
	text, _ := io.ReadAll(resp.Body)
	return errors.New(string(text))
}

// destroy stops the watch caches and their clients.
func (e *engine) destroy() {
	e.server.Destroy()
	e.registry.Destroy()
}
