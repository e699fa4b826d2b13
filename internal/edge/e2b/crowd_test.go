package e2b_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	kube "sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/control/controllers/claim"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/fakecluster"
	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// crowdServer is the variable with the data directory of a server that a test of the crowd starts, kills and starts again. Its listener
// is file 3, which the test keeps, so that clients that come meanwhile wait.
const crowdServer = "TEST_CROWD_SERVER"

// serveCrowd is that server: the control plane, the controller of claims, and a stand-in for the node.
func serveCrowd(dir string) {
	ctx := context.Background()
	plane, _, err := startControlPlane(ctx, apiserver.Config{DataDir: dir, Listen: "127.0.0.1:0", Log: telemetry.Discard()})
	if err != nil {
		panic(err)
	}
	node := fakecluster.NewNode(plane.objects.Live())
	var boxes census
	_, err = cache.On(ctx, plane.objects, func(older, newer *agents.Sandbox) {
		boxes.observe(older, newer)
		node.Observe(newer)
	})
	if err != nil {
		panic(err)
	}
	claims, err := claim.New(claim.Config{
		Log: telemetry.Discard(), Client: plane.objects.Live(), Watched: plane.objects.Informers(), Cache: plane.objects, Picker: plane.picker, Quota: plane.quotas, Assumed: plane.assumed,
	})
	if err != nil {
		panic(err)
	}
	go func() { panic(node.Run(ctx)) }()
	go func() { panic(claims.Start(ctx)) }()
	mux := http.NewServeMux()
	mux.Handle("/", plane.web)
	mux.HandleFunc("GET /waiting/{namespace}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, plane.quotas.Waiting(r.PathValue("namespace")))
	})
	mux.HandleFunc("GET /most/{namespace}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, boxes.mostOf(r.PathValue("namespace")))
	})
	l, err := net.FileListener(os.NewFile(3, "listener"))
	if err != nil {
		panic(err)
	}
	panic(http.Serve(l, mux)) //nolint:gosec // its clients are the test's
}

// census counts the sandboxes that have not ended.
type census struct {
	mu   sync.Mutex
	live map[string]int // by namespace; +checklocks:mu
	most map[string]int // the largest number since the server's start; +checklocks:mu
}

// observe takes a change, as cache.On has them.
func (c *census) observe(older, newer *agents.Sandbox) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.live == nil {
		c.live, c.most = map[string]int{}, map[string]int{}
	}
	if older != nil && !sandbox.DeadForGood(older) {
		c.live[older.Namespace]--
	}
	if newer != nil && !sandbox.DeadForGood(newer) {
		c.live[newer.Namespace]++
		c.most[newer.Namespace] = max(c.most[newer.Namespace], c.live[newer.Namespace])
	}
}

func (c *census) mostOf(namespace string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.most[namespace]
}

// The two namespaces of the crowd. The first asks for four times as much; both have the same room.
const (
	slots    = 50
	patience = 10 * time.Minute
	// wave is how many requests come at once, in no order.
	wave = 100
	// overtakers is how many later requests may be answered before one: those that are made at the same time, some times over.
	overtakers = 4 * slots
	// claimsOfWave and twinsOfWave are how many SandboxClaims come with a wave, and how many of its requests are sent twice.
	claimsOfWave, twinsOfWave = 12, 10
	// impatientOfWave is how many more requests wait for a second only.
	impatientOfWave = 84
)

// TestCrowd asks for 5,000 sandboxes where 100 fit, by the REST API and by SandboxClaims, in two namespaces, and kills the server in
// the middle. Every request gets a sandbox of its own, in the order of the requests, or a refusal that says what is to blame.
func TestCrowd(t *testing.T) {
	unit := 5
	if os.Getenv("TEST_PART") == "fast" || testing.Short() || raceDetector() {
		unit = 1
	}
	waves := map[string]int{"many": 4 * unit, "few": unit}
	c := startCrowd(t)
	teams := map[string]*crowdTeam{}
	for name, n := range waves {
		teams[name] = c.team(name, n)
	}
	var all sync.WaitGroup
	for _, x := range teams {
		x.fill()
		x.refusedAtOnce()
	}
	for _, x := range teams { // the order of the waves is that of the queue
		x.enqueue()
	}
	for _, x := range teams {
		all.Go(x.expire)
	}
	all.Wait()
	for _, x := range teams {
		x.release()
	}
	total := 0
	for _, x := range teams {
		total += x.requests()
	}
	eventually.True(t, "a third of the requests is served", func() bool { return c.served.Load() > int64(total/3) })
	for _, x := range teams {
		x.checkFull()
	}
	c.server.Stop(t)
	for _, x := range teams {
		x.checkOrder("before the server ended")
		x.forgetOrder()
	}
	c.start()
	c.clients.Wait()
	for _, x := range teams {
		x.checkEnd()
	}
	if c.faults.Load() == 0 {
		t.Error("no request met the end of the server")
	}
	// The few did not wait for the many.
	if many := teams["few"].othersAtEnd.Load(); many > int64(teams["many"].requests()*3/4) {
		t.Errorf("%d requests of the other namespace were served before the last of the few", many)
	}
}

// raceDetector reports whether this program has it; scripts/test.sh --all runs TestCrowd without it too.
func raceDetector() bool {
	info, _ := debug.ReadBuildInfo()
	return slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// crowd is the server, and what its clients have seen.
type crowd struct {
	t        *testing.T
	dir      string
	listener *os.File
	url      string
	server   program.Server
	kube     atomic.Pointer[kube.WithWatch]
	teams    []*crowdTeam
	// clients are those that wait for a sandbox.
	clients sync.WaitGroup
	// served counts requests with a sandbox, faults errors that are not a request's.
	served, faults atomic.Int64
}

func startCrowd(t *testing.T) *crowd {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	c := &crowd{t: t, dir: t.TempDir(), url: "http://" + l.Addr().String()}
	if c.listener, err = l.(*net.TCPListener).File(); err != nil { //nolint:forcetypeassert // it is one
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.listener.Close() })
	t.Cleanup(func() {
		c.server.Stop(t)
		c.clients.Wait() // also after a Fatal: they may still report errors
	})
	c.start()
	return c
}

// start starts the server, and returns when it answers.
func (c *crowd) start() {
	c.t.Helper()
	cmd := exec.CommandContext(context.WithoutCancel(c.t.Context()), os.Args[0])
	cmd.Env, cmd.ExtraFiles = append(os.Environ(), crowdServer+"="+c.dir), []*os.File{c.listener}
	c.server.Start(c.t, cmd, func() error {
		_, err := c.get("waiting", "none")
		return err
	})
	api, err := apiserver.New(apiserver.Config{DataDir: c.dir, Log: telemetry.Discard()})
	if err != nil {
		c.t.Fatal(err)
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", api.AdminKubeconfig())
	if err != nil {
		c.t.Fatal(err)
	}
	cfg.QPS = -1
	scheme, err := cache.NewScheme()
	if err != nil {
		c.t.Fatal(err)
	}
	objects, err := kube.NewWithWatch(cfg, kube.Options{Scheme: scheme})
	if err != nil {
		c.t.Fatal(err)
	}
	c.kube.Store(&objects)
}

func (c *crowd) objects() kube.WithWatch { return *c.kube.Load() }

// ask returns a number of the server's about a namespace: how many requests are "waiting" in its queue, or how many sandboxes it had at
// "most".
func (c *crowd) ask(what, namespace string) (n int) {
	c.t.Helper()
	eventually.NoError(c.t, "the server answers", func() (err error) {
		n, err = c.get(what, namespace)
		return err
	})
	return n
}

func (c *crowd) get(what, namespace string) (n int, err error) {
	ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url+"/"+what+"/"+namespace, nil)
	if err != nil {
		return 0, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = res.Body.Close() }()
	_, err = fmt.Fscan(res.Body, &n)
	return n, err
}
