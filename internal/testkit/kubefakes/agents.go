package kubefakes

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubeinstall"
)

// HeaderFor has the ID of the sandbox that a client's request is for. The agent of another fails the test. An agent answers
// requests for no path of its own with the ID of its sandbox.
const HeaderFor = "X-Test-For"

// agents are those of all Pods.
type agents struct {
	tb     testing.TB
	tokens *sandbox.Tokens

	mu    sync.Mutex
	at    map[netip.Addr]*agent // +checklocks:mu
	conns map[net.Conn]*agent   // that accepted it; nil until the Pod of the address is known; +checklocks:mu
}

// agent is that of one Pod.
type agent struct {
	id  sandbox.ID
	pod types.UID

	// Guarded by agents.mu.
	bound bool // it knows its token
	ended bool // its Pod is gone
}

type connKey struct{}

// serveAgents serves agents at the addresses of all Pods until the test ends.
func serveAgents(t testing.TB, c *kubecluster.Cluster) {
	t.Helper()
	l, err := c.Listen(t.Context(), "tcp", "0.0.0.0:"+strconv.Itoa(envd.Port))
	must(t, err)
	tokens, err := sandbox.NewTokens(kubeinstall.TokenSecret())
	must(t, err)
	all := &agents{tb: t, tokens: tokens, at: map[netip.Addr]*agent{}, conns: map[net.Conn]*agent{}}
	all.follow(c)
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+envd.PathInit, all.init)
	mux.HandleFunc("GET "+envd.PathIdentity, all.identity)
	mux.HandleFunc("/", all.whoami)
	server := &http.Server{
		Handler: mux,
		ConnContext: func(ctx context.Context, conn net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, conn)
		},
		ConnState: all.observe,
	}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	t.Cleanup(func() {
		must(t, server.Close())
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
}

// follow has the Pods' agents begin and end.
func (a *agents) follow(c *kubecluster.Cluster) {
	factory := informers.NewSharedInformerFactoryWithOptions(c.Client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = sandbox.LabelID }))
	_, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { a.begin(o) }, UpdateFunc: func(_, o any) { a.begin(o) }, DeleteFunc: a.end,
	})
	must(a.tb, err)
	stop := make(chan struct{})
	factory.Start(stop)
	a.tb.Cleanup(func() { close(stop); factory.Shutdown() })
}

func (a *agents) begin(o any) {
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return
	}
	addr, err := netip.ParseAddr(pod.Status.PodIP)
	if err != nil || pod.Status.Phase != corev1.PodRunning {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	was := a.at[addr]
	if was != nil && was.pod == pod.UID {
		return
	}
	a.endLocked(was)
	a.at[addr] = &agent{id: sandbox.ID(pod.Labels[sandbox.LabelID]), pod: pod.UID}
}

func (a *agents) end(o any) {
	if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = gone.Obj
	}
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if addr, err := netip.ParseAddr(pod.Status.PodIP); err == nil && a.at[addr] != nil && a.at[addr].pod == pod.UID {
		a.endLocked(a.at[addr])
		delete(a.at, addr)
	}
}

// endLocked ends an agent, if there is one, and its connections.
//
// +checklocks:a.mu
func (a *agents) endLocked(g *agent) {
	if g == nil {
		return
	}
	g.ended = true
	for conn, of := range a.conns {
		if of == g {
			_ = conn.Close() // once more, perhaps
		}
	}
}

// observe keeps the open connections.
func (a *agents) observe(conn net.Conn, state http.ConnState) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch state {
	case http.StateNew:
		a.conns[conn] = nil
	case http.StateClosed:
		delete(a.conns, conn)
	case http.StateActive, http.StateIdle, http.StateHijacked:
	}
}

// of returns the agent that has accepted a request's connection, its address, and whether it knows its token. It answers 503 and
// returns nil where there is none.
func (a *agents) of(w http.ResponseWriter, r *http.Request) (g *agent, addr netip.Addr, bound bool) {
	conn, _ := r.Context().Value(connKey{}).(net.Conn)
	addr, err := envd.AddrOf(conn.LocalAddr())
	a.mu.Lock()
	defer a.mu.Unlock()
	if g = a.conns[conn]; g == nil && err == nil {
		g = a.at[addr]
		a.conns[conn] = g
	}
	if g == nil || g.ended {
		http.Error(w, "no Pod has this address", http.StatusServiceUnavailable)
		return nil, addr, false
	}
	return g, addr, g.bound
}

func (a *agents) init(w http.ResponseWriter, r *http.Request) {
	g, _, _ := a.of(w, r)
	if g == nil {
		return
	}
	req := envd.InitRequest{}
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	token := a.tokens.Agent(g.id)
	for _, got := range []string{req.AccessToken, r.Header.Get(envd.HeaderAccessToken)} {
		if got != "" && got != token {
			a.tb.Errorf("the agent of sandbox %s received another's token", g.id)
			http.Error(w, "wrong token", http.StatusUnauthorized)
			return
		}
	}
	if req.AccessToken != "" {
		a.mu.Lock()
		g.bound = true
		a.mu.Unlock()
	}
	w.WriteHeader(http.StatusNoContent)
}

func (a *agents) identity(w http.ResponseWriter, r *http.Request) {
	g, addr, bound := a.of(w, r)
	if g == nil {
		return
	}
	token, hash := "", envd.TokenSHA256(a.tokens.Agent(g.id))
	if bound {
		token = a.tokens.Agent(g.id)
	}
	_ = json.NewEncoder(w).Encode(envd.ProveIdentity(token, hash, r.URL.Query().Get(envd.QueryNonce), string(g.id), addr)) // the client has gone
}

func (a *agents) whoami(w http.ResponseWriter, r *http.Request) {
	g, _, _ := a.of(w, r)
	if g == nil {
		return
	}
	if meant := r.Header.Get(HeaderFor); meant != "" && meant != string(g.id) {
		a.tb.Errorf("a request for sandbox %s reached sandbox %s", meant, g.id)
	}
	_, _ = w.Write([]byte(g.id)) // the client has gone
}
