package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	barchan "github.com/barchan-dev/barchan/api/barchan/v1alpha1"
	extensions "github.com/barchan-dev/barchan/api/extensions/v1beta1"
	sdk "github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/control/cache"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// cluster is an API server, replicas in network namespaces of their own, and a node that is
// played: its sandboxes are addresses at which a server answers with their secret.
type cluster struct {
	t        testing.TB
	dir      string
	tag      string // begins the names of links and namespaces
	net      string // the first three numbers of all addresses
	api      *apiserver.Server
	key      string
	node     *playedNode
	replicas []*replica
}

// replica is one real process.
type replica struct {
	c    *cluster
	n    int
	env  []string
	addr string // of its HTTP, host:port
	rest *sdk.Client
	cmd  *exec.Cmd // nil while it does not run
	done chan error
}

const (
	clusterPort = "7700"
	gossipPort  = "7701"
	servicePort = 8080
	firstBox    = 100 // of the last numbers of sandboxes' addresses
	boxes       = 100
)

// newCluster starts all but the replicas' processes. An address rests for a time before another
// sandbox gets it.
func newCluster(t testing.TB, replicas int, rest time.Duration) *cluster {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: network namespaces need root")
	}
	dir, err := os.MkdirTemp("/tmp", "bcl-") //nolint:usetesting // removed after the processes in it
	if err != nil {
		t.Fatal(err)
	}
	n := number(t)
	c := &cluster{t: t, dir: dir, tag: fmt.Sprintf("bcl%d", n), net: fmt.Sprintf("10.241.%d", n%250)}
	t.Cleanup(c.remove)
	c.ip("link add %s type bridge", c.tag)
	c.ip("addr add %s.1/24 dev %s", c.net, c.tag)
	c.ip("link set %s up", c.tag)
	c.attach("sb", "50")
	for i := range boxes {
		c.ip("-n %ssb addr add %s.%d/24 dev eth0", c.tag, c.net, firstBox+i)
	}
	c.startAPI(rest)
	for i := range replicas {
		c.replicas = append(c.replicas, c.newReplica(i+1, replicas))
	}
	return c
}

// attach makes a namespace with an address of the cluster's network.
func (c *cluster) attach(name, last string) {
	c.t.Helper()
	ns := c.tag + name
	c.ip("netns add %s", ns)
	c.ip("link add %sh type veth peer name eth0 netns %s", ns, ns)
	c.ip("link set %sh master %s up", ns, c.tag)
	c.ip("-n %s addr add %s.%s/24 dev eth0", ns, c.net, last)
	c.ip("-n %s link set lo up", ns)
	c.ip("-n %s link set eth0 up", ns)
}

func (c *cluster) ip(format string, args ...any) {
	c.t.Helper()
	if err := c.run("ip", fmt.Sprintf(format, args...)); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) run(program, line string) error {
	out, err := exec.Command(program, strings.Fields(line)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w %s", program, line, err, out)
	}
	return nil
}

// remove removes all of the cluster.
func (c *cluster) remove() {
	for _, r := range c.replicas {
		r.kill()
	}
	if c.node != nil {
		c.node.stop()
	}
	if c.api != nil {
		c.api.Stop()
	}
	_ = exec.Command("nft", "delete", "table", "bridge", c.tag).Run() // the test may not have come to it
	for _, name := range []string{"sb", "r1", "r2", "r3", "r4", "r5"} {
		if _, err := os.Stat("/run/netns/" + c.tag + name); err == nil {
			if err := c.run("ip", "netns del "+c.tag+name); err != nil {
				c.t.Error(err)
			}
		}
	}
	_ = c.run("ip", "link del "+c.tag)
	if c.t.Failed() {
		for _, r := range c.replicas {
			c.t.Logf("log of replica %d:\n%s", r.n, r.tail())
		}
	}
	if err := os.RemoveAll(c.dir); err != nil {
		c.t.Error(err)
	}
}

func (c *cluster) startAPI(rest time.Duration) {
	c.t.Helper()
	must := func(err error) {
		c.t.Helper()
		if err != nil {
			c.t.Fatal(err)
		}
	}
	var err error
	c.api, err = apiserver.New(apiserver.Config{DataDir: filepath.Join(c.dir, "api"), Listen: c.net + ".1:6443", Log: telemetry.Discard()})
	must(err)
	must(c.api.Start(c.t.Context()))
	c.node, err = playNode(c, rest)
	must(err)
	c.key = barchan.NewKeySecret()
	ctx, live := c.t.Context(), c.node.objects.Live()
	must(live.Create(ctx, &barchan.APIKey{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "test"}, Spec: barchan.NewAPIKeySpec(c.key, "")}))
	template := &extensions.SandboxTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "base"}}
	template.Spec.PodTemplate.Spec.Containers = []corev1.Container{{Name: "sandbox", Image: "base:1"}}
	must(live.Create(ctx, template))
}

func (c *cluster) newReplica(n, of int) *replica {
	c.t.Helper()
	name := fmt.Sprintf("r%d", n)
	c.attach(name, fmt.Sprint(10+n))
	var seeds []string
	for i := 1; i <= of; i++ {
		seeds = append(seeds, fmt.Sprintf("%s.%d:%s", c.net, 10+i, gossipPort))
	}
	host := fmt.Sprintf("%s.%d", c.net, 10+n)
	secret := filepath.Join(c.dir, "token-secret")
	if err := os.WriteFile(secret, []byte(strings.Repeat("s", 32)), 0o600); err != nil {
		c.t.Fatal(err)
	}
	r := &replica{c: c, n: n, addr: host + ":" + clusterPort}
	r.env = append(os.Environ(),
		"BARCHAN_ROLE=replica", "BARCHAN_NODE_NAME="+name, "BARCHAN_DATA_DIR="+filepath.Join(c.dir, name),
		"BARCHAN_HTTP_ADDR="+r.addr, "BARCHAN_TLS_ADDR=", "BARCHAN_SSH_ADDR=", "BARCHAN_METRICS_ADDR=", "BARCHAN_API_KUBECONFIG="+c.api.AdminKubeconfig(), "BARCHAN_TOKEN_SECRET="+secret,
		"BARCHAN_PEER_ADDR="+host+":"+gossipPort, "BARCHAN_PEER_SEEDS="+strings.Join(seeds, ","), "BARCHAN_PEER_DIR="+filepath.Join(c.dir, "peers"),
		"BARCHAN_API_URL=", "BARCHAN_API_KEY=",
	)
	var err error
	r.rest, err = sdk.New(sdk.Config{
		URL: "http://" + r.addr, Key: c.key, UserAgent: "test", HTTP: &http.Client{Timeout: eventually.Patience, Transport: &http.Transport{DisableKeepAlives: true}},
	})
	if err != nil {
		c.t.Fatal(err)
	}
	return r
}

// start runs the replica and returns when it is ready.
func (r *replica) start() {
	r.c.t.Helper()
	log, err := os.OpenFile(r.log(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		r.c.t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	cmd := exec.CommandContext(context.Background(), "ip", "netns", "exec", fmt.Sprintf("%sr%d", r.c.tag, r.n), programs.barchan, "up") // it ends by kill
	cmd.Env, cmd.Stdout, cmd.Stderr = r.env, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		r.c.t.Fatal(err)
	}
	r.cmd, r.done = cmd, make(chan error, 1)
	go func(done chan<- error) { done <- cmd.Wait() }(r.done)
	eventually.NoError(r.c.t, fmt.Sprintf("replica %d is ready", r.n), func() error {
		select {
		case err := <-r.done:
			r.cmd = nil // it is waited for once
			r.c.t.Fatalf("replica %d ended at its start: %v\n%s", r.n, err, r.tail())
		default:
		}
		status, body, err := r.query(r.c.t.Context(), "", "/readyz")
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("%d %s", status, body)
		}
		return err
	})
}

// kill ends the replica as a crash would.
func (r *replica) kill() {
	if r.cmd == nil {
		return
	}
	_ = r.cmd.Process.Kill()
	<-r.done //nolint:errcheck // it was killed
	r.cmd = nil
}

func (r *replica) log() string { return filepath.Join(r.c.dir, fmt.Sprintf("r%d.log", r.n)) }

func (r *replica) tail() string {
	b, _ := os.ReadFile(r.log()) // a missing file reads as empty
	lines := strings.Split(string(b), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "\n")
}

// query makes one request to the replica; with an ID it is for that sandbox's service.
func (r *replica) query(ctx context.Context, id, path string) (int, string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.addr+path, http.NoBody)
	if err != nil {
		return 0, "", err
	}
	if id != "" {
		req.Host = fmt.Sprintf("%d-%s.barchan.localhost", servicePort, id)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	return res.StatusCode, string(b), err
}

// secretOf is what a sandbox answers with, and no other.
func secretOf(id string) string { return "secret of " + id }

// restTime is a twentieth of what a real node waits, so that a route which is a little too old points at
// another's sandbox. A replica that stands still with the machine for so long may lead there, too.
const restTime = 3 * time.Second

// playedNode gives sandboxes addresses at which a real server in a network namespace answers with
// their secret.
type playedNode struct {
	rest    time.Duration
	objects *cache.Cache
	work    chan client.ObjectKey
	server  *http.Server
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu     sync.Mutex
	free   []rested          // those given back last at the end; +checklocks:mu
	owners map[string]string // sandbox IDs by address; +checklocks:mu
	again  int               // how many were given that had an owner before; +checklocks:mu
}

type rested struct {
	addr  string
	since time.Time
}

func playNode(c *cluster, rest time.Duration) (*playedNode, error) {
	n := &playedNode{rest: rest, work: make(chan client.ObjectKey, 4096), owners: map[string]string{}}
	for i := range boxes {
		n.free = append(n.free, rested{addr: fmt.Sprintf("%s.%d", c.net, firstBox+i)})
	}
	ln, err := listenIn(c.tag+"sb", fmt.Sprintf(":%d", servicePort))
	if err != nil {
		return nil, err
	}
	n.server = &http.Server{Handler: http.HandlerFunc(n.answer), ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	n.running.Go(func() { _ = n.server.Serve(ln) })
	ctx, cancel := context.WithCancel(context.Background())
	n.cancel = cancel
	if n.objects, err = cache.New(ctx, cache.Config{REST: c.api.RESTConfig(apiserver.UserController)}); err != nil {
		return nil, err
	}
	n.running.Go(func() { _ = n.objects.Run(ctx) })
	if _, err = cache.On(ctx, n.objects, func(_, s *agents.Sandbox) {
		if s != nil {
			n.work <- client.ObjectKeyFromObject(s)
		}
	}); err != nil {
		return nil, err
	}
	n.running.Go(func() {
		for {
			select {
			case key := <-n.work:
				if err := n.reconcile(ctx, key); err != nil && ctx.Err() == nil {
					n.work <- key
				}
			case <-ctx.Done():
				return
			}
		}
	})
	return n, n.objects.WaitSynced(ctx)
}

func (n *playedNode) stop() {
	n.cancel()
	_ = n.server.Close()
	n.running.Wait()
}

func (n *playedNode) answer(w http.ResponseWriter, r *http.Request) {
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	host, _, _ := net.SplitHostPort(local.String())
	n.mu.Lock()
	owner := n.owners[host]
	n.mu.Unlock()
	fmt.Fprint(w, secretOf(owner))
}

func (n *playedNode) reconcile(ctx context.Context, key client.ObjectKey) error {
	s := &agents.Sandbox{}
	if err := n.objects.Live().Get(ctx, key, s); err != nil {
		return client.IgnoreNotFound(err)
	}
	id := string(sandbox.IDOf(s.UID))
	switch {
	case s.DeletionTimestamp != nil:
		if len(s.Status.PodIPs) > 0 {
			n.release(s.Status.PodIPs[0], id)
		}
		s.Finalizers = nil
		return client.IgnoreNotFound(n.objects.Live().Update(ctx, s))
	case len(s.Status.PodIPs) > 0:
		return nil
	}
	addr, err := n.take(id)
	if err != nil {
		return err
	}
	now := metav1.Now()
	s.Status.PodIPs, s.Status.NodeName = []string{addr}, "played"
	s.Status.Barchan = &agents.BarchanStatus{ID: id, Phase: string(sandbox.Running), StartedAt: &now}
	s.Status.Conditions = []metav1.Condition{{Type: agents.ConditionReady, Status: metav1.ConditionTrue, Reason: agents.ReasonDependenciesReady, LastTransitionTime: now}}
	if err := n.objects.Live().Status().Update(ctx, s); err != nil {
		n.release(addr, id)
		return client.IgnoreNotFound(err)
	}
	return nil
}

// take gives the address that was given back last of those that have rested.
func (n *playedNode) take(id string) (string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, x := range slices.Backward(n.free) {
		if time.Since(x.since) >= n.rest {
			n.free = slices.Delete(n.free, i, i+1)
			n.owners[x.addr] = id
			if !x.since.IsZero() {
				n.again++
			}
			return x.addr, nil
		}
	}
	return "", errors.New("no address has rested")
}

func (n *playedNode) usedAgain() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.again
}

// freeIn is how long a free address has still to rest; less than 0 if it has.
func (n *playedNode) freeIn(addr string) (time.Duration, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, x := range n.free {
		if x.addr == addr {
			return n.rest - time.Since(x.since), nil
		}
	}
	return 0, fmt.Errorf("%s is not free", addr)
}

// addressOf is where a sandbox is.
func (n *playedNode) addressOf(id string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	for addr, owner := range n.owners {
		if owner == id {
			return addr
		}
	}
	return ""
}

func (n *playedNode) release(addr, id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.owners[addr] == id {
		delete(n.owners, addr)
		n.free = append(n.free, rested{addr, time.Now()})
	}
}

// listenIn listens in a named network namespace. The thread that goes there ends there.
func listenIn(ns, addr string) (net.Listener, error) {
	type result struct {
		ln  net.Listener
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // never unlocked
		f, err := os.Open("/run/netns/" + ns)
		if err != nil {
			done <- result{nil, err}
			return
		}
		defer func() { _ = f.Close() }()
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- result{nil, fmt.Errorf("enter %s: %w", ns, err)}
			return
		}
		var lc net.ListenConfig
		ln, err := lc.Listen(context.Background(), "tcp", addr)
		done <- result{ln, err}
	}()
	r := <-done
	return r.ln, r.err
}
