package faults

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	crlog "sigs.k8s.io/controller-runtime/pkg/log"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	sdk "github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
	"github.com/barchan-dev/barchan/internal/testkit/kubefakes"
	"github.com/barchan-dev/barchan/internal/testkit/kubeinstall"
	"github.com/barchan-dev/barchan/internal/testkit/watched"
)

var (
	seed     = flag.Uint64("seed", 0, "repeat the choices of this seed; 0 takes a new one")
	duration = flag.Duration("faults", 30*time.Second, "how long faults happen; from a minute on a node is lost too, whose Pods take a minute to be collected")
)

const (
	namespace = "default"
	// lease is longer than that of the controllers.
	lease = 17 * time.Second
	// outage is what a call may take while faults happen.
	outage = 10 * time.Second
)

// suite is a cluster with Barchan.
type suite struct {
	*testing.T
	cluster     *kubecluster.Cluster
	client      client.Client
	history     *history
	controllers []*kubeinstall.Process
	replicas    []*kubeinstall.Process
	urls        []string // of the replicas
	apis        []*sdk.Client
	http        *http.Client
	dice        *dice
	load        load
	began       time.Time // the faults
}

// TestFaults has 100 SandboxClaims and 100 E2B creates be served while leaders and replicas are killed, watches are cut and objects are
// deleted by hand.
func TestFaults(t *testing.T) { start(t, false).run() }

// TestClocksApart is TestFaults with a controller and a replica whose clocks are a minute ahead of the others' and of Kubernetes'.
func TestClocksApart(t *testing.T) {
	s := start(t, true)
	for i, ahead := range []time.Duration{0, time.Minute} {
		resp, err := s.http.Get(s.urls[i]) //nolint:noctx // it is ready
		must(t, err)
		must(t, resp.Body.Close())
		if at, err := http.ParseTime(resp.Header.Get("Date")); err != nil || time.Until(at.Add(-ahead)).Abs() > 20*time.Second {
			t.Fatalf("the clock of replica %d says %s, %v", i, at, err)
		}
	}
	s.run()
}

func (s *suite) run() {
	s.Helper()
	s.fill()
	s.began = time.Now()
	ctx, cancel := context.WithTimeout(s.Context(), *duration)
	defer cancel()
	var background sync.WaitGroup
	background.Go(func() { s.attackLeaders(ctx) })
	background.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, *duration*3/4) // members of an older revision are replaced as claims come
		defer cancel()
		s.rollOut(ctx)
	})
	background.Go(func() { s.claimAll(ctx) })
	s.attack(ctx)
	s.note("no more faults; requests go on: %s", s.load.summary())
	background.Wait()
	s.note("after the faults: %s", s.load.summary())
	for _, p := range append(s.controllers, s.replicas...) {
		eventually.NoError(s, p.Name+" is ready after the faults", p.Ready)
	}
	s.checkRecovered()
	s.note("everything has recovered")
	s.clear()
	s.note("nothing is left")
}

// note logs an event with its time since the faults began.
func (s *suite) note(format string, args ...any) {
	s.Logf("%7.1fs %s", time.Since(s.began).Seconds(), fmt.Sprintf(format, args...))
}

// start starts two controllers and two replicas; with apart, the clocks of one of each are ahead.
func start(t *testing.T, apart bool) *suite {
	t.Helper()
	crlog.SetLogger(logr.Discard())
	c := kubecluster.Start(t, kubecluster.Config{Install: func(cfg *rest.Config) { kubeinstall.InstallCRDs(t, cfg, kubeinstall.CRDs(t)) }})
	kubefakes.Play(t, c)
	b := kubeinstall.New(t, c, kubeinstall.Build(t))
	of := []*kubeinstall.Barchan{b, b}
	if apart {
		of[1] = b.Ahead()
	}
	s := &suite{T: t, cluster: c, client: watched.Client(t, c.REST), history: newHistory(t), dice: newDice(t), load: newLoad()}
	c.FollowStored(t, agents.GroupVersion.WithResource("sandboxes").GroupResource(), s.history.sawSandbox)
	c.FollowStored(t, extensionsGroup.WithResource("sandboxclaims").GroupResource(), s.history.sawClaim)
	for i := range 2 {
		s.controllers = append(s.controllers, of[i].Controller(fmt.Sprintf("controller-%d", i), "barchan.test/agent:1", "--http-addr", fmt.Sprintf("127.0.0.1:771%d", i)))
	}
	transport := &http.Transport{DialContext: c.Dial}
	t.Cleanup(transport.CloseIdleConnections)
	s.http = &http.Client{Transport: transport}
	for i := range 2 {
		address := fmt.Sprintf("%s:770%d", kubecluster.NodeIP, i)
		s.replicas = append(s.replicas, of[i].Replica(fmt.Sprintf("replica-%d", i), address))
		s.urls = append(s.urls, "http://"+address)
		api, err := sdk.New(sdk.Config{URL: s.urls[i], Key: kubeinstall.APIKey, HTTP: s.http, UserAgent: "faults"})
		must(t, err)
		s.apis = append(s.apis, api)
	}
	return s
}

// dice are safe for concurrent use. They repeat the choices of a seed, not their times.
type dice struct {
	mu  sync.Mutex
	rng *rand.Rand // +checklocks:mu
}

func newDice(t *testing.T) *dice {
	n := *seed
	if n == 0 {
		n = uint64(time.Now().UnixNano()) % 1e6
	}
	t.Logf("to repeat it: go test ./test/kube/faults -faults=%v -seed=%d", *duration, n)
	return &dice{rng: rand.New(rand.NewPCG(n, n))}
}

func (d *dice) below(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rng.IntN(n)
}

func (d *dice) perm(n int) []int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rng.Perm(n)
}

// pause returns a duration between half of one and one and a half.
func (d *dice) pause(around time.Duration) time.Duration {
	return around/2 + time.Duration(d.below(int(around)))
}

// attackLeaders ends or halts the leader every few seconds until ctx ends.
func (s *suite) attackLeaders(ctx context.Context) {
	ways := []func(context.Context, *kubeinstall.Process) error{
		func(_ context.Context, p *kubeinstall.Process) error { return p.Signal(syscall.SIGKILL) }, // started again, it has the Lease at once
		func(_ context.Context, p *kubeinstall.Process) error { return p.Signal(syscall.SIGTERM) }, // the other follows at once
		s.halt,
	}
	for {
		for _, way := range s.dice.perm(len(ways)) {
			if !lifecycle.Sleep(ctx, s.dice.pause(4*time.Second)) {
				return
			}
			if p := s.leader(ctx); p != nil {
				s.note("leader %s: attack %d", p.Name, way)
				if err := ways[way](ctx, p); err != nil {
					s.Error(err)
				}
			}
		}
	}
}

// halt lets a leader continue after another leads, so that it acts on what it knew before.
func (s *suite) halt(ctx context.Context, p *kubeinstall.Process) error {
	err := p.Signal(syscall.SIGSTOP)
	lifecycle.Sleep(ctx, lease)
	return errors.Join(err, p.Signal(syscall.SIGCONT))
}

// leader returns the process that holds the Lease; nil if there is none, or the API server is away.
func (s *suite) leader(ctx context.Context) *kubeinstall.Process {
	l, err := s.cluster.Client.CoordinationV1().Leases("barchan-system").Get(ctx, "barchan-controller", metav1.GetOptions{})
	if err != nil || l.Spec.HolderIdentity == nil {
		return nil
	}
	for _, p := range s.controllers {
		if p.Name == *l.Spec.HolderIdentity {
			return p
		}
	}
	return nil
}

// attack has all other faults happen, in turns, until ctx ends.
func (s *suite) attack(ctx context.Context) {
	faults := []struct {
		name string
		do   func() error
	}{
		{"replica killed", func() error { return s.replicas[s.dice.below(len(s.replicas))].Signal(syscall.SIGKILL) }},
		{"Pods deleted", s.deletePods},
		{"Services deleted", s.deleteServices},
		{"policies deleted", s.deletePolicies},
		{"volumes deleted", s.deleteVolume},
		{"API server killed, history compacted", s.restartServer},
	}
	if *duration >= time.Minute {
		if err := s.loseNode(); err != nil { //nolint:contextcheck // calls go on after the faults
			s.Error(err)
		}
	}
	for {
		for _, i := range s.dice.perm(len(faults)) {
			if !lifecycle.Sleep(ctx, s.dice.pause(3*time.Second)) {
				return
			}
			s.note("fault: %s", faults[i].name)
			if err := faults[i].do(); err != nil {
				s.Errorf("%s: %v", faults[i].name, err)
			}
		}
	}
}

// within calls check until it returns nil, for as long as a wait may take, and returns its last error. Unlike package eventually
// it may be called by any goroutine.
func within(check func() error) error {
	for end := time.Now().Add(eventually.Patience); ; time.Sleep(20 * time.Millisecond) {
		err := check()
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("not within %v: %w", eventually.Patience, err)
		}
	}
}

// call is within, for a call of the API server that may be away.
func (s *suite) call(what string, do func(ctx context.Context) error) error {
	err := within(func() error {
		ctx, cancel := context.WithTimeout(s.Context(), outage)
		defer cancel()
		return do(ctx)
	})
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// remove deletes an object without a grace period; whether it exists does not matter.
func (s *suite) remove(o client.Object) error {
	return s.call("delete "+o.GetName(), func(ctx context.Context) error {
		return client.IgnoreNotFound(s.client.Delete(ctx, o, client.GracePeriodSeconds(0)))
	})
}

// list fills a list of our objects in the namespace.
func (s *suite) list(list client.ObjectList, having ...string) error {
	return s.call("list", func(ctx context.Context) error {
		return s.client.List(ctx, list, client.InNamespace(namespace), client.HasLabels(having))
	})
}

func (s *suite) deletePods() error {
	var pods corev1.PodList
	if err := s.list(&pods, sandbox.LabelID); err != nil || len(pods.Items) == 0 {
		return err
	}
	var failures []error
	for range 5 {
		failures = append(failures, s.remove(&pods.Items[s.dice.below(len(pods.Items))]))
	}
	return errors.Join(failures...)
}

func (s *suite) deleteServices() error {
	var services corev1.ServiceList
	failures := []error{s.list(&services, sandbox.LabelID)}
	for i := range services.Items {
		failures = append(failures, s.remove(&services.Items[i]))
	}
	return errors.Join(failures...)
}

func (s *suite) deletePolicies() error {
	ours := metav1.ListOptions{LabelSelector: sandbox.LabelPolicy}
	return errors.Join(
		s.call("delete NetworkPolicies", func(ctx context.Context) error {
			return s.cluster.Client.NetworkingV1().NetworkPolicies(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, ours)
		}),
		s.call("delete PodDisruptionBudgets", func(ctx context.Context) error {
			return s.cluster.Client.PolicyV1().PodDisruptionBudgets(namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, ours)
		}))
}

// deleteVolume deletes a PersistentVolumeClaim, and the Pod that keeps it from going.
func (s *suite) deleteVolume() error {
	name := plainName(s.dice.below(plainSandboxes))
	meta := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: namespace, Name: name} }
	return errors.Join(s.remove(&corev1.PersistentVolumeClaim{ObjectMeta: meta("data-" + name)}), s.remove(&corev1.Pod{ObjectMeta: meta(name)}))
}

// restartServer verifies that clients cannot continue a watch across the restart.
func (s *suite) restartServer() error {
	before := &corev1.ConfigMapList{}
	err := errors.Join(
		s.list(before),
		s.call("write", func(ctx context.Context) error { // so that before is before something
			return s.client.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: "written-"}})
		}))
	if err != nil {
		return err
	}
	s.cluster.RestartServer(s.T)
	return s.call("watch", func(ctx context.Context) error {
		w, err := s.cluster.Client.CoreV1().ConfigMaps(namespace).Watch(ctx, metav1.ListOptions{ResourceVersion: before.ResourceVersion})
		if err == nil {
			defer w.Stop()
			e := <-w.ResultChan()
			err = apierrors.FromObject(e.Object)
		}
		if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
			return fmt.Errorf("a watch from before the restart: %w, want 410 Gone", err)
		}
		return nil
	})
}

// loseNode has a node be not ready, and then deletes it.
func (s *suite) loseNode() error {
	name := fmt.Sprintf("node-%d", s.dice.below(kubefakes.Nodes))
	nodes := s.cluster.Client.CoreV1().Nodes()
	s.note("fault: %s is lost", name)
	return errors.Join(
		s.call("annotate", func(ctx context.Context) error {
			_, err := nodes.Patch(ctx, name, types.MergePatchType, []byte(`{"metadata":{"annotations":{"`+kubefakes.AnnotationNotReady+`":""}}}`), metav1.PatchOptions{})
			return err
		}),
		s.call("not ready", func(ctx context.Context) error {
			_, err := nodes.Patch(ctx, name, types.StrategicMergePatchType, []byte(`{"status":{"conditions":[{"type":"Ready","status":"False","reason":"KubeletNotReady"}]}}`), metav1.PatchOptions{}, "status")
			return err
		}),
		s.awaitNotReady(name),
		s.call("delete", func(ctx context.Context) error { return nodes.Delete(ctx, name, metav1.DeleteOptions{}) }))
}

// awaitNotReady waits until the Pods of a node are not ready.
func (s *suite) awaitNotReady(node string) error {
	return s.call("Pods of "+node, func(ctx context.Context) error {
		pods, err := s.cluster.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
		if err != nil {
			return err
		}
		for i := range pods.Items {
			for _, c := range pods.Items[i].Status.Conditions {
				if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
					return fmt.Errorf("%s is ready", pods.Items[i].Name)
				}
			}
		}
		return nil
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
