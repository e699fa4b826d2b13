package apiserver

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/filters/impersonation"
	openapinamer "k8s.io/apiserver/pkg/endpoints/openapi"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
	"k8s.io/apiserver/pkg/util/openapi"
	restclient "k8s.io/client-go/rest"

	barchanopenapi "github.com/barchan-dev/barchan/api/openapi"
)

const (
	maxInFlight         = 1000
	maxMutatingInFlight = 500
	readyTimeout        = 60 * time.Second
	readyInterval       = 2 * time.Millisecond
)

// machinery is a generic API server with our kinds, built and not yet serving.
type machinery struct {
	server *genericapiserver.GenericAPIServer
	stores []*store
	gate   *namespaceGate
	// finalizing is the namespaces' store for the controller that may finalize them.
	finalizing *store
	pods       *podREST // nil where there are none
	streams    map[string]*podStream
	remote     http.Handler // for requests that came over the network
	inside     http.Handler // for those of the in-process transport
}

// build makes the server over b. It starts the watch caches; destroy ends them.
func build(cfg *Config, b *backend, adminToken string) (m *machinery, err error) {
	resources := append(append(ownKinds(), coreKinds()...), eventKind())
	pods := podKind()
	sch, err := newScheme(append(slices.Clone(resources), pods))
	if err != nil {
		return nil, err
	}
	m = &machinery{gate: newNamespaceGate()}
	gc := m.genericConfig(sch, b, newAuthenticator(adminToken, cfg.Keys))
	m.server, err = gc.Complete().New("barchan", genericapiserver.NewEmptyDelegate())
	if err != nil {
		return nil, fmt.Errorf("make the generic server: %w", err)
	}
	defer func() {
		if err != nil {
			m.destroy()
		}
	}()
	for _, r := range resources {
		st, err := newStore(r, sch, b, m.gate, cfg)
		if err != nil {
			return nil, err
		}
		m.stores = append(m.stores, st)
		if r.kind == "APIKey" {
			st.limitKeys()
		}
		if r.gv == corev1.SchemeGroupVersion && r.plural == "namespaces" {
			m.gate.namespaces, m.finalizing = st, st.finalizing()
		}
	}
	if cfg.Pods != nil {
		sandboxes := m.stores[slices.IndexFunc(m.stores, func(s *store) bool { return s.r.kind == "Sandbox" })]
		m.pods = &podREST{tableConvertor{pods}, sandboxes}
		m.streams = podStreams(sandboxes, cfg.Pods)
	}
	if err := m.install(sch); err != nil {
		return nil, err
	}
	m.server.Handler.NonGoRestfulMux.HandleFunc(crdPath, noCRDs)
	m.server.PrepareRun()
	return m, nil
}

// crdPath is where kubectl asks whether a kind that it does not know is a custom one.
const crdPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

// noCRDs answers that there are none. Without it kubectl would report that it could not ask,
// in place of the unknown kind.
func noCRDs(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinitionList","metadata":{},"items":[]}`+"\n")
}

func (m *machinery) genericConfig(sch *scheme, b *backend, authn authenticator.Request) *genericapiserver.RecommendedConfig {
	c := genericapiserver.NewRecommendedConfig(sch.codecs)
	c.EffectiveVersion = newEffectiveVersion()
	c.ExternalAddress = "localhost:443"
	c.LoopbackClientConfig = &restclient.Config{Host: "http://in-process"}
	c.RESTOptionsGetter = b
	c.Authentication.Authenticator = authn
	c.Authorization.Authorizer = newAuthorizer()
	c.EnableProfiling, c.EnableMetrics = false, false
	c.MaxRequestsInFlight, c.MaxMutatingRequestsInFlight = maxInFlight, maxMutatingInFlight
	c.StorageObjectCountTracker = nil
	c.LongRunningFunc = genericfilters.BasicLongRunningRequestCheck(sets.NewString("watch"), sets.NewString("exec", "portforward", "log"))
	defs := openapi.GetOpenAPIDefinitionsWithoutDisabledFeatures(barchanopenapi.GetOpenAPIDefinitions)
	namer := openapinamer.NewDefinitionNamer(sch.Scheme)
	c.OpenAPIConfig = genericapiserver.DefaultOpenAPIConfig(defs, namer)
	c.OpenAPIV3Config = genericapiserver.DefaultOpenAPIV3Config(defs, namer)
	c.OpenAPIConfig.Info.Title, c.OpenAPIV3Config.Info.Title = "Barchan", "Barchan"
	c.BuildHandlerChainFunc = m.buildChains
	return c
}

// buildChains builds what every request passes through on its way to api. Requests of our own
// parts need less: they neither speak for others nor are they counted against the limits.
func (m *machinery) buildChains(api http.Handler, c *genericapiserver.Config) http.Handler {
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
	m.inside = outer(deadline(authenticated(authorized)))

	h := genericfilters.WithMaxInFlightLimit(authorized, c.MaxRequestsInFlight, c.MaxMutatingRequestsInFlight, c.LongRunningFunc)
	h = impersonation.WithImpersonation(h, c.Authorization.Authorizer, c.Serializer)
	h = authenticated(h)
	h = genericfilters.WithTimeoutForNonLongRunningRequests(h, c.LongRunningFunc)
	m.remote = outer(deadline(h))
	return m.remote
}

// install serves every store under its group and version.
func (m *machinery) install(sch *scheme) error {
	groups := map[schema.GroupVersion]map[string]rest.Storage{}
	add := func(gv schema.GroupVersion, path string, s rest.Storage) {
		if groups[gv] == nil {
			groups[gv] = map[string]rest.Storage{}
		}
		groups[gv][path] = s
	}
	var order []schema.GroupVersion
	for _, st := range m.stores {
		if groups[st.r.gv] == nil {
			order = append(order, st.r.gv)
		}
		add(st.r.gv, st.r.plural, st)
		if st.r.status {
			add(st.r.gv, st.r.plural+"/status", newStatusREST(st))
		}
		if st.r.scale != nil {
			add(st.r.gv, st.r.plural+"/scale", &scaleREST{st})
		}
		if st.r.plural == "events" {
			add(eventsv1.SchemeGroupVersion, st.r.plural, st)
			order = append(order, eventsv1.SchemeGroupVersion)
		}
	}
	if m.pods != nil {
		add(corev1.SchemeGroupVersion, m.pods.r.plural, m.pods)
		for name, s := range m.streams {
			add(corev1.SchemeGroupVersion, m.pods.r.plural+"/"+name, s)
		}
	}
	var named []*genericapiserver.APIGroupInfo
	for _, gv := range order {
		info := genericapiserver.NewDefaultAPIGroupInfo(gv.Group, sch.Scheme, sch.parameters, sch.codecs)
		info.VersionedResourcesStorageMap[gv.Version] = groups[gv]
		if gv.Group != corev1.GroupName {
			named = append(named, &info)
			continue
		}
		if err := m.server.InstallLegacyAPIGroup(genericapiserver.DefaultLegacyAPIPrefix, &info); err != nil {
			return fmt.Errorf("install %s: %w", gv, err)
		}
	}
	if err := m.server.InstallAPIGroups(named...); err != nil {
		return fmt.Errorf("install API groups: %w", err)
	}
	return nil
}

// runHooks starts the server's own background work, until ctx is done.
func (m *machinery) runHooks(ctx context.Context) { m.server.RunPostStartHooks(ctx) }

// awaitReady returns when the watch caches are filled and the server says that it is ready.
func (m *machinery) awaitReady(ctx context.Context, t http.RoundTripper) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, errNotReady)
	defer cancel()
	tick := time.NewTicker(readyInterval)
	defer tick.Stop()
	for {
		why := m.notReady(ctx, t)
		if why == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("become ready: %w: %w", context.Cause(ctx), why)
		}
	}
}

func (m *machinery) notReady(ctx context.Context, t http.RoundTripper) error {
	for _, s := range m.stores {
		if err := s.ReadinessCheck(); err != nil {
			return fmt.Errorf("storage of %s: %w", s.r.plural, err)
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
	return fmt.Errorf("%w: %s", errNotReady, text)
}

// destroy ends the watch caches and their clients.
func (m *machinery) destroy() {
	m.server.Destroy()
	for _, s := range m.stores {
		s.Destroy()
	}
}
