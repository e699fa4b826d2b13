package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubeinstall"
)

const (
	nodes = 10
	// podCIDR has the addresses of Pods; all of them are this machine's, in the cluster's network namespace.
	podCIDR = "10.244.0.0/16"
)

// play gives a cluster nodes whose kubelets kwok plays, and serves what agents serve at the addresses of their Pods.
func play(b *testing.B, c *kubecluster.Cluster) {
	b.Helper()
	if out, err := c.Command(b.Context(), "ip", "route", "add", "local", podCIDR, "dev", "lo").CombinedOutput(); err != nil {
		b.Fatalf("ip route: %v: %s", err, out)
	}
	serveAgents(b, c)
	stages, err := filepath.Abs("testdata/stages.yaml")
	must(b, err)
	serve(b, c, kubecluster.FindProgram(b, "kwok"), "--kubeconfig="+c.Kubeconfig, "--config="+stages, "--manage-all-nodes=true",
		"--cidr="+podCIDR, "--node-lease-duration-seconds=40", "--server-address=")
	for i := range nodes {
		_, err := c.Client.CoreV1().Nodes().Create(b.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%d", i)}}, metav1.CreateOptions{})
		must(b, err)
	}
	eventually.NoError(b, "nodes ready", func() error {
		list, err := c.Client.CoreV1().Nodes().List(b.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, n := range list.Items {
			if len(n.Spec.Taints) > 0 || n.Status.Allocatable.Pods().IsZero() {
				return fmt.Errorf("%s: taints %v, status %+v", n.Name, n.Spec.Taints, n.Status.Conditions)
			}
		}
		return nil
	})
}

// serveAgents answers what controllers and replicas send to the agents of all Pods. It runs no process.
func serveAgents(b *testing.B, c *kubecluster.Cluster) {
	b.Helper()
	l, err := c.Listen(b.Context(), "tcp", "0.0.0.0:"+strconv.Itoa(envd.Port))
	must(b, err)
	tokens, err := sandbox.NewTokens(kubeinstall.TokenSecret())
	must(b, err)
	ids := watchAddresses(b, c)
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+envd.PathInit, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("GET "+envd.PathIdentity, func(w http.ResponseWriter, r *http.Request) {
		local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		addr, err := envd.AddrOf(local)
		id, ok := ids.Load(addr)
		if err != nil || !ok {
			http.Error(w, "no Pod has this address", http.StatusServiceUnavailable)
			return
		}
		token := tokens.Agent(id.(sandbox.ID))
		_ = json.NewEncoder(w).Encode(envd.ProveIdentity(token, envd.TokenSHA256(token), r.URL.Query().Get(envd.QueryNonce), string(id.(sandbox.ID)), addr)) // the client has gone
	})
	server := &http.Server{Handler: mux}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	b.Cleanup(func() {
		must(b, server.Close())
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			b.Error(err)
		}
	})
}

// watchAddresses maps the addresses of Pods to the IDs of their sandboxes.
func watchAddresses(b *testing.B, c *kubecluster.Cluster) *sync.Map {
	b.Helper()
	ids := &sync.Map{}
	note := func(o any) {
		pod, ok := o.(*corev1.Pod)
		if addr, err := netip.ParseAddr(pod.Status.PodIP); ok && err == nil {
			ids.Store(addr, sandbox.ID(pod.Labels[sandbox.LabelID]))
		}
	}
	factory := informers.NewSharedInformerFactoryWithOptions(c.Client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = sandbox.LabelID }))
	_, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: note, UpdateFunc: func(_, now any) { note(now) }})
	must(b, err)
	stop := make(chan struct{})
	factory.Start(stop)
	b.Cleanup(func() { close(stop); factory.Shutdown() })
	return ids
}
