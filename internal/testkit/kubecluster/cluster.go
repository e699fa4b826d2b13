package kubecluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3" //nolint:depguard // the etcd of a cluster that is not ours
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// Addresses within the namespaces of each cluster.
const (
	// NodeIP is the address of the API server and of the first node.
	NodeIP = "172.30.0.1"
	// ServiceIP is that of the Service kubernetes.default. It is an address of the API server's
	// own port, so that it answers without a kube-proxy.
	ServiceIP   = "10.96.0.1"
	dnsIP       = "10.96.0.10" // of the DNS of a cluster with a node
	serviceCIDR = "10.96.0.0/16"
	apiPort     = "443"
)

const apiServer = "kube-apiserver"

// Config selects the size of a cluster.
type Config struct {
	// Nodes is how many nodes run Pods: none, so that Pods stay pending, one or two.
	Nodes int
	// Install, unless nil, creates objects before the controllers start. They know the kinds of CRDs that
	// are established by then; of later ones the garbage collector learns tens of seconds later.
	Install func(*rest.Config)
}

// Cluster is a Kubernetes that ends with the test that started it.
type Cluster struct {
	// REST is how an administrator reaches the API server from the test's process, or from any other
	// on the machine. Its client does not limit its rate.
	REST *rest.Config
	// Kubeconfig is a file with the same for programs that [Cluster.Command] runs.
	Kubeconfig string
	// Client is a client of REST.
	Client kubernetes.Interface

	machine
	etcd     *clientv3.Client
	etcdURL  string
	ca       *authority
	nodes    []*node
	programs []*program
	undo     undo

	restarting atomic.Bool
	restarted  atomic.Bool
}

// Start starts a cluster. It returns when the API server and the controllers work and the node, if any,
// is ready. It skips the test without root or programs, in short runs, and in the parts of the tests
// that leave Kubernetes out.
func Start(t testing.TB, cfg Config) *Cluster {
	t.Helper()
	if cfg.Nodes < 0 || cfg.Nodes > 2 {
		t.Fatalf("a cluster of %d nodes: at most two", cfg.Nodes)
	}
	skip(t, cfg)
	c := &Cluster{}
	t.Cleanup(func() {
		if t.Failed() {
			for _, p := range c.programs {
				t.Logf("end of the output of %s:\n%s", p.name, p.output.String())
			}
		}
		if err := c.undo.run(); err != nil {
			t.Error(err)
		}
	})
	if err := c.start(t, cfg); err != nil {
		t.Fatal(err)
	}
	return c
}

func skip(t testing.TB, cfg Config) {
	t.Helper()
	switch part := os.Getenv("TEST_PART"); {
	case testing.Short():
		t.Skip("SKIPPED: starting a Kubernetes takes time")
	case part != "" && part != "kube":
		t.Skip("SKIPPED: make test-kube runs it")
	case os.Geteuid() != 0:
		t.Skip("SKIPPED: needs root for namespaces")
	}
	names := []string{apiServer, "kube-controller-manager", "kube-scheduler"}
	if cfg.Nodes > 0 {
		names = append(names, nodePrograms...)
	}
	for _, name := range names {
		FindProgram(t, name)
	}
}

func (c *Cluster) start(t testing.TB, cfg Config) (err error) {
	t.Helper()
	if err := removeStale(); err != nil {
		return fmt.Errorf("remove leftovers of killed tests: %w", err)
	}
	if c.dir, err = makeDir(&c.undo); err != nil {
		return err
	}
	// etcd ends after its clients, for which it would wait.
	if c.etcdURL, err = startEtcd(c.dir, &c.undo); err != nil {
		return fmt.Errorf("start etcd: %w", err)
	}
	if err := c.connectEtcd(); err != nil {
		return err
	}
	if err := c.startNamespaces(t); err != nil {
		return err
	}
	if err := c.startServer(t.Context()); err != nil {
		return err
	}
	if cfg.Install != nil {
		cfg.Install(rest.CopyConfig(c.REST))
	}
	if err := c.startClients(); err != nil {
		return err
	}
	if cfg.Nodes > 0 {
		if err := c.startNodes(t, cfg.Nodes); err != nil {
			return err
		}
	}
	// The API server rejects Pods until their namespace has a ServiceAccount.
	eventually.NoError(t, "ServiceAccount default", func() error {
		_, err := c.Client.CoreV1().ServiceAccounts("default").Get(t.Context(), "default", metav1.GetOptions{})
		return errors.Join(err, c.alive())
	})
	if cfg.Nodes > 0 {
		c.awaitNodes(t)
	}
	return nil
}

// startNamespaces starts the program with PID 1, and sets up mounts and addresses.
func (c *Cluster) startNamespaces(t testing.TB) error {
	t.Helper()
	pod := filepath.Join(c.dir, "pod")
	buildPod(t, pod)
	ns, err := newNamespaces(exec.Command(pod)) //nolint:noctx // ended in order
	if err != nil {
		return fmt.Errorf("make namespaces: %w", err)
	}
	c.ns, c.address = ns, NodeIP
	c.undo.add(ns.end)
	if err := ns.mount(c.dir, binDir()); err != nil {
		return err
	}
	failures := []error{c.ip(t.Context(), "link", "set", "lo", "up")}
	for _, address := range []string{NodeIP, ServiceIP, dnsIP} {
		failures = append(failures, c.ip(t.Context(), "address", "add", address+"/32", "dev", "lo"))
	}
	return errors.Join(failures...)
}

// startServer starts the API server, and what clients reach it by.
func (c *Cluster) startServer(ctx context.Context) (err error) {
	if c.ca, err = newAuthority(); err != nil {
		return fmt.Errorf("make authority: %w", err)
	}
	if c.Kubeconfig, err = c.writeKubeconfig(c.dir, "admin", masters); err != nil {
		return err
	}
	// Clients outside connect to a relay, so that those work too that take no dialer, as streams do.
	host := loopbackAddress()
	relay, err := startRelay(ctx, host, func(ctx context.Context) (net.Conn, error) {
		return c.ns.dial(ctx, "tcp", net.JoinHostPort(NodeIP, apiPort))
	})
	if err != nil {
		return fmt.Errorf("listen on %s: %w", host, err)
	}
	c.undo.add(relay.close)
	names := []string{host, NodeIP, ServiceIP, "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}
	if err := c.ca.writeServer(c.dir, names...); err != nil {
		return fmt.Errorf("write certificates: %w", err)
	}
	admin, err := c.ca.client("admin", masters)
	if err != nil {
		return fmt.Errorf("issue certificate: %w", err)
	}
	if err := admin.write(c.dir, "kubelet-client"); err != nil {
		return err
	}
	c.REST = c.ca.config(relay.listener.Addr().String(), admin)
	if c.Client, err = kubernetes.NewForConfig(c.REST); err != nil {
		return err
	}
	return c.runServer(ctx)
}

// runServer starts the API server and waits until it is ready.
func (c *Cluster) runServer(ctx context.Context) error {
	server, err := c.run(c.machine, apiServer, c.apiserverFlags()...)
	if err != nil {
		return err
	}
	return awaitReady(ctx, c.REST, server)
}

func (c *Cluster) apiserverFlags() []string {
	file := func(name string) string { return filepath.Join(c.dir, name) }
	return append(serverFlags(c.dir, c.etcdURL),
		"--bind-address=0.0.0.0", "--secure-port="+apiPort, "--advertise-address="+NodeIP,
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
		"--service-cluster-ip-range="+serviceCIDR,
		"--kubelet-certificate-authority="+file("ca.crt"), "--kubelet-preferred-address-types=InternalIP",
		"--kubelet-client-certificate="+file("kubelet-client.crt"), "--kubelet-client-key="+file("kubelet-client.key"))
}

// startClients starts the controllers and the scheduler.
func (c *Cluster) startClients() error {
	for _, name := range []string{"kube-controller-manager", "kube-scheduler"} {
		kubeconfig, err := c.writeKubeconfig(c.dir, "system:"+name)
		if err != nil {
			return err
		}
		args := []string{
			"--kubeconfig=" + kubeconfig, "--authentication-kubeconfig=" + kubeconfig, "--authorization-kubeconfig=" + kubeconfig,
			"--bind-address=127.0.0.1", "--leader-elect=false", "--profiling=false", "--kube-api-qps=500", "--kube-api-burst=1000",
		}
		if name == "kube-controller-manager" {
			args = append(args, "--use-service-account-credentials=true", "--enable-hostpath-provisioner=true",
				"--flex-volume-plugin-dir="+volumePlugins, // it makes the directory
				"--root-ca-file="+filepath.Join(c.dir, "ca.crt"), "--service-account-private-key-file="+filepath.Join(c.dir, "server.key"))
		}
		if _, err := c.run(c.machine, name, args...); err != nil {
			return err
		}
	}
	return nil
}

// run starts a program from the cache on a machine.
func (c *Cluster) run(m machine, name string, args ...string) (*program, error) {
	bin := filepath.Join(m.dir, "bin")
	cmd := exec.Command(filepath.Join(bin, name), args...) //nolint:noctx // the namespaces end it
	cmd.Env = []string{"PATH=" + bin + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}
	cmd.Dir = "/"
	p, err := startProgram(cmd, m.ns)
	if err != nil {
		return nil, err
	}
	c.programs = append(c.programs, p)
	return p, nil
}

// alive returns an error if a program has exited.
func (c *Cluster) alive() error {
	for _, p := range c.programs {
		select {
		case <-p.exited:
			return p.failure()
		default:
		}
	}
	return nil
}

// writeKubeconfig writes how a user reaches the API server from within the namespaces.
func (c *Cluster) writeKubeconfig(dir, user string, groups ...string) (path string, err error) {
	pair, err := c.ca.client(user, groups...)
	if err != nil {
		return "", fmt.Errorf("issue certificate: %w", err)
	}
	cfg := clientcmdapi.NewConfig()
	cfg.Clusters["test"] = &clientcmdapi.Cluster{Server: "https://" + net.JoinHostPort(NodeIP, apiPort), CertificateAuthorityData: c.ca.pem}
	cfg.AuthInfos["user"] = &clientcmdapi.AuthInfo{ClientCertificateData: pair.cert, ClientKeyData: pair.key}
	cfg.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "user"}
	cfg.CurrentContext = "test"
	path = filepath.Join(dir, user+".kubeconfig")
	return path, clientcmd.WriteToFile(*cfg, path)
}

// Command prepares a program that runs in the cluster's network namespace, where it reaches the API server
// and Pods, with the machine's own files and KUBECONFIG set. It is killed if the test's process is.
// [Serve] starts one that runs for longer.
func (c *Cluster) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := c.ns.command(ctx, name, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig)
	return cmd
}

// Kubectl runs kubectl as an administrator and returns what it prints. If it fails, the test does.
func (c *Cluster) Kubectl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := c.Command(t.Context(), FindProgram(t, "kubectl"), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s\n%s", strings.Join(args, " "), err, out, c.State(t))
	}
	return string(out)
}

// State returns what a reader of a failure wants to see.
func (c *Cluster) State(t testing.TB) string {
	t.Helper()
	out, err := c.Command(t.Context(), FindProgram(t, "kubectl"), "get", "pods,sandboxes,sandboxclaims,events", "-A", "-o", "wide").CombinedOutput()
	if err != nil {
		return string(out) + err.Error() // without our kinds, perhaps
	}
	return string(out)
}

// Apply applies manifests in YAML as an administrator.
func (c *Cluster) Apply(t testing.TB, manifests string) {
	t.Helper()
	cmd := c.Command(t.Context(), FindProgram(t, "kubectl"), "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(manifests)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("kubectl apply: %v\n%s", err, out)
	}
}

// Dial connects from within the cluster's network namespace, to a Pod for example. The address is numeric.
func (c *Cluster) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return c.ns.dial(ctx, network, address)
}

// Namespace creates a namespace that has a ServiceAccount, so that Pods can be created in it. It stays until
// the cluster ends.
func (c *Cluster) Namespace(t testing.TB, name string) {
	t.Helper()
	ns := namespace(name)
	if _, err := c.Client.CoreV1().Namespaces().Create(t.Context(), ns, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	eventually.NoError(t, "ServiceAccount default in "+name, func() error {
		_, err := c.Client.CoreV1().ServiceAccounts(name).Get(t.Context(), "default", metav1.GetOptions{})
		return errors.Join(err, c.alive())
	})
}

// Listen listens on the machine of the control plane, as the program of a Pod does. The address is numeric.
func (c *Cluster) Listen(ctx context.Context, network, address string) (net.Listener, error) {
	return c.ns.listen(ctx, network, address)
}

// ListenOnNodes listens on the machine of each node. The address is numeric.
func (c *Cluster) ListenOnNodes(ctx context.Context, network, address string) (all []net.Listener, err error) {
	for _, n := range c.nodes {
		l, err := n.ns.listen(ctx, network, address)
		if err != nil {
			return nil, err // those before it end with the network
		}
		all = append(all, l)
	}
	return all, nil
}

// Freeze stops a program of the control plane or of the first node with SIGSTOP, such as kube-apiserver: its connections stay and
// are not answered. resume lets it go on; the end of the test does too.
func (c *Cluster) Freeze(t testing.TB, name string) (resume func()) {
	t.Helper()
	for _, p := range c.programs {
		if p.name != name {
			continue
		}
		if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatalf("freeze %s: %v", name, err)
		}
		resume = sync.OnceFunc(func() { _ = p.cmd.Process.Signal(syscall.SIGCONT) })
		t.Cleanup(resume)
		return resume
	}
	t.Fatalf("%s does not run", name)
	return nil
}
