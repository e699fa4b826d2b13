package node

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
	"github.com/barchan-dev/barchan/internal/node/ctrd"
	"github.com/barchan-dev/barchan/internal/node/ctrd/supervisor"
	"github.com/barchan-dev/barchan/internal/node/netdev"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/testkit/budget"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const testImage = "barchan.local/test:latest"

// need finds a program, or skips loudly; under CI a missing one is a failure.
func need(t testing.TB, program string) string {
	t.Helper()
	cache := os.Getenv("BARCHAN_CACHE")
	if cache == "" {
		cache = "/var/cache/barchan"
	}
	if path := filepath.Join(cache, "bin", program); exec.CommandContext(t.Context(), path, "--version").Run() == nil {
		return path
	}
	path, err := exec.LookPath(program)
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("%s is missing: %v", program, err)
		}
		t.Skipf("SKIPPED: %s is missing: %v", program, err)
	}
	return path
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root for namespaces, mounts and cgroups")
	}
}

// built is the agent's program, built once for the package's tests.
var built struct {
	once sync.Once
	path string
	err  error
}

func agentProgram(t testing.TB) string {
	t.Helper()
	built.once.Do(func() {
		dir, err := os.MkdirTemp("", "barchan-agent-") //nolint:usetesting // for all tests of the package
		if err != nil {
			built.err = err
			return
		}
		built.path = filepath.Join(dir, "barchan-agent")
		cmd := exec.CommandContext(context.WithoutCancel(t.Context()), "go", "build", "-o", built.path, "github.com/barchan-dev/barchan/cmd/barchan-agent")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			built.err = fmt.Errorf("%w: %s", err, out)
		}
	})
	if built.err != nil {
		t.Fatalf("build the agent: %v", built.err)
	}
	return built.path
}

func TestMain(m *testing.M) {
	code := m.Run()
	if built.path != "" {
		_ = os.RemoveAll(filepath.Dir(built.path))
	}
	os.Exit(code)
}

// imageTar is testTar, made once.
var imageTar struct {
	once sync.Once
	text []byte
}

// testImageTar returns the image of busybox and two users.
func testImageTar(t testing.TB) []byte {
	t.Helper()
	imageTar.once.Do(func() { imageTar.text = testTar(t) })
	return imageTar.text
}

func testTar(t testing.TB) []byte {
	t.Helper()
	busybox, err := os.ReadFile(need(t, "busybox"))
	if err != nil {
		t.Fatal(err)
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	add := func(h tar.Header, body string) {
		h.Size, h.Format = int64(len(body)), tar.FormatPAX
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, body); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"bin", "etc", "home", "proc", "sys", "dev", "tmp", "root", "var"} {
		add(tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755}, "")
	}
	add(tar.Header{Typeflag: tar.TypeDir, Name: "home/user/", Mode: 0o755, Uid: 1000, Gid: 1000}, "")
	add(tar.Header{Typeflag: tar.TypeReg, Name: "bin/busybox", Mode: 0o755}, string(busybox))
	for _, applet := range []string{"sh", "cat", "echo", "ls", "id", "sleep", "nproc", "wget", "nc", "httpd", "stat", "mkdir", "dd", "env", "hostname", "touch", "true", "false", "kill", "date", "head", "grep", "ip", "mount", "free", "pwd"} {
		add(tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + applet, Linkname: "busybox"}, "")
	}
	add(tar.Header{Typeflag: tar.TypeReg, Name: "etc/passwd", Mode: 0o644}, "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home/user:/bin/sh\n")
	add(tar.Header{Typeflag: tar.TypeReg, Name: "etc/group", Mode: 0o644}, "root:x:0:\nuser:x:1000:\n")
	// A link that a careless host would follow out of the image.
	add(tar.Header{Typeflag: tar.TypeSymlink, Name: "etc/resolv.conf", Linkname: "/barchan-test-must-not-exist"}, "")
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, l)
	if err == nil {
		var cfg *v1.ConfigFile
		if cfg, err = img.ConfigFile(); err == nil {
			cfg = cfg.DeepCopy()
			cfg.OS, cfg.Architecture = "linux", runtime.GOARCH
			cfg.Config = v1.Config{Env: []string{"PATH=/bin", "FROM_IMAGE=yes"}, Cmd: []string{"sh"}}
			img, err = mutate.ConfigFile(img, cfg)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := tarball.Write(name.MustParseReference(testImage), img, &out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// machine is one instance: a containerd of its own, and the configuration of nodes on it.
type machine struct {
	t          testing.TB
	cfg        Config
	supervisor *supervisor.Supervisor
	stopCtrd   func()
	sweepEvery time.Duration // zero means as ever
}

// newMachine starts containerd with the test's image, and takes all away at the end, when
// nothing may be left.
func newMachine(t testing.TB) *machine {
	t.Helper()
	needRoot(t)
	budget.Need(t)
	dir, err := os.MkdirTemp("/tmp", "bn-") //nolint:usetesting // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("BARCHAN_TEST_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	supervisor, err := supervisor.New(supervisor.Config{Binary: need(t, "containerd"), Dir: filepath.Join(dir, "c"), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	client, err := ctrd.NewClient(ctrd.Config{Address: supervisor.Address(), CallTimeout: eventually.Patience})
	if err != nil {
		t.Fatal(err)
	}
	tag := fmt.Sprintf("%05x", rand.Uint32()&0xfffff)
	m := &machine{t: t, supervisor: supervisor, cfg: Config{
		Name: "test-node", DataDir: filepath.Join(dir, "d"), RunDir: filepath.Join(dir, "r"), Containerd: client, Log: log,
		Runtimes: []oci.Config{
			{Class: oci.GVisor, Binary: need(t, "runsc"), Root: filepath.Join(dir, "r", "gvisor")},
			{Class: oci.Runc, Binary: need(t, "runc"), Root: filepath.Join(dir, "r", "runc")},
		},
		AgentBinary: agentProgram(t),
		Network: netdev.Config{
			Bridge: "bnt" + tag, Table: "barchan-t" + tag, NetnsPrefix: "bnt" + tag + "-",
			Subnet: freeSubnet(),
		},
		CgroupParent: "/barchan-t" + tag, CoolDown: time.Second,
		Refuse: func() error { return nil }, CheckSpace: func(string, int64) error { return nil },
		StartTimeout: eventually.Patience, // no test of ours waits for one that does not answer
	}}
	t.Cleanup(func() { m.destroy(dir) })
	m.startContainerd()
	if _, err := client.Import(t.Context(), bytes.NewReader(testImageTar(t)), 0, "", nil); err != nil {
		t.Fatal(err)
	}
	return m
}

// firstSubnet is a random one, and subnetsTaken counts those that machines of this process have.
var (
	firstSubnet  = sync.OnceValue(func() uint32 { return rand.Uint32N(100 << 8) })
	subnetsTaken atomic.Uint32
)

// freeSubnet returns a subnet of 10.90.0.0 to 10.189.255.0 that no other machine of this process has.
func freeSubnet() netip.Prefix {
	n := (firstSubnet() + subnetsTaken.Add(1)) % (100 << 8)
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 90 + byte(n>>8), byte(n), 0}), 24)
}

func (m *machine) startContainerd() {
	ctx, cancel := context.WithCancel(context.WithoutCancel(m.t.Context()))
	ready, ended := make(chan struct{}), make(chan error, 1)
	var once sync.Once
	go func() { ended <- m.supervisor.Run(ctx, func() { once.Do(func() { close(ready) }) }) }()
	select {
	case <-ready:
	case err := <-ended:
		m.t.Fatalf("containerd: %v", err)
	}
	m.stopCtrd = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			m.t.Errorf("containerd: %v", err)
		}
	})
}

// destroy ends the instance and checks that the machine is as it was.
func (m *machine) destroy(dir string) {
	t, ctx := m.t, context.WithoutCancel(m.t.Context())
	n, err := New(m.cfg)
	if err != nil {
		t.Errorf("open the node to destroy it: %v", err)
	} else {
		if err := n.Destroy(ctx); err != nil {
			t.Errorf("destroy: %v", err)
		}
		left, err := n.Audit(ctx)
		if err != nil {
			t.Errorf("audit: %v", err)
		}
		for _, l := range left {
			t.Errorf("left on the machine: %s", l)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
	if m.stopCtrd != nil {
		m.stopCtrd()
	}
	if err := m.supervisor.Stop(ctx); err != nil {
		t.Error(err)
	}
	_ = m.cfg.Containerd.Close()
	unmountBelow(t, dir)
	if err := os.RemoveAll(dir); err != nil {
		t.Error(err)
	}
}

// unmountBelow is for what the runtimes themselves keep mounted in their directories.
func unmountBelow(t testing.TB, dir string) {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(string(b)) {
		if target := strings.Fields(line)[1]; strings.HasPrefix(target, dir+"/") {
			t.Errorf("left mounted: %s", target)
			if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		}
	}
}

// node starts a node on the machine; stop ends it and leaves what it runs.
func (m *machine) node(change ...func(*Config)) (n *Node, stop func()) {
	m.t.Helper()
	cfg := m.cfg
	for _, c := range change {
		c(&cfg)
	}
	n, err := New(cfg)
	if err != nil {
		m.t.Fatal(err)
	}
	n.sweepAfter = 0
	n.sweepEvery = cmp.Or(m.sweepEvery, n.sweepEvery)
	ctx, cancel := context.WithCancel(context.WithoutCancel(m.t.Context()))
	var failure error
	ended := make(chan struct{})
	n.ReadAhead(ctx) // as a server does
	go func() {
		defer close(ended)
		failure = n.Run(ctx)
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		<-ended
		if failure != nil {
			m.t.Errorf("run: %v", failure)
		}
		if err := n.Close(); err != nil {
			m.t.Error(err)
		}
	})
	m.t.Cleanup(stop)
	select {
	case <-n.Adopted():
	case <-ended:
		m.t.FailNow() // stop logs why
	}
	return n, stop
}

// object is a sandbox of the test's image.
func object(change ...func(*agents.Sandbox)) *agents.Sandbox {
	uid := uuid.NewString()
	s := &agents.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s-" + uid[:8], UID: types.UID(uid)},
		Spec: agents.SandboxSpec{SandboxBlueprint: agents.SandboxBlueprint{PodTemplate: agents.PodTemplate{Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "main", Image: testImage}},
		}}}},
	}
	for _, c := range change {
		c(s)
	}
	return s
}

func class(c string) func(*agents.Sandbox) {
	return func(s *agents.Sandbox) { s.Spec.PodTemplate.Spec.RuntimeClassName = &c }
}

func refOf(s *agents.Sandbox) sandbox.Ref {
	return sandbox.Ref{Namespace: s.Namespace, Name: s.Name, UID: s.UID}
}

func ensure(t testing.TB, n *Node, s *agents.Sandbox) sandbox.Observed {
	t.Helper()
	seen, err := n.Ensure(t.Context(), s)
	if err != nil {
		t.Fatalf("ensure %s: %v", s.Name, err)
	}
	return seen
}

// run runs a shell command in a sandbox and returns its output and exit code.
func run(t testing.TB, n *Node, s *agents.Sandbox, command string) (string, int) {
	t.Helper()
	out, code, err := tryRun(t.Context(), n, s, command)
	if err != nil {
		t.Fatalf("run %q: %v", command, err)
	}
	return out, code
}

// provoke runs a shell command that may end the container before its own end is reported. What it was to
// bring about is for the caller to see.
func provoke(t testing.TB, n *Node, s *agents.Sandbox, command string) {
	t.Helper()
	if _, _, err := tryRun(t.Context(), n, s, command); err != nil {
		t.Logf("run %q: %v", command, err)
	}
}

func tryRun(ctx context.Context, n *Node, s *agents.Sandbox, command string) (string, int, error) {
	agent, err := n.Agent(ctx, refOf(s))
	if err != nil {
		return "", 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, eventually.Patience)
	defer cancel()
	req := connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", command}}})
	req.Header().Set("Authorization", "Basic cm9vdDo=") // root
	stream, err := agent.Process().Start(ctx, req)
	if err != nil {
		return "", 0, err
	}
	defer func() { _ = stream.Close() }()
	var out strings.Builder
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		out.Write(event.GetData().GetStdout())
		out.Write(event.GetData().GetStderr())
		if end := event.GetEnd(); end != nil {
			return out.String(), int(end.GetExitCode()), nil
		}
	}
	return out.String(), 0, errors.Join(errors.New("the stream ended early"), stream.Err())
}

// usageOf reads what a running sandbox uses.
func usageOf(t testing.TB, n *Node, s *agents.Sandbox) cgroups.Usage {
	t.Helper()
	used, err := cgroups.ReadUsage(n.host.Cgroup(string(sandbox.IDOf(s.UID))))
	must(t, err)
	return used
}

// diskUsed fails unless a sandbox has written something to its root.
func diskUsed(t testing.TB, n *Node, s *agents.Sandbox) {
	t.Helper()
	if bytes, err := n.DiskUsed(t.Context(), refOf(s)); err != nil || bytes == 0 {
		t.Errorf("disk: %d bytes, %v", bytes, err)
	}
}

// must ends the test on an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// runtimeOf is the runtime that new containers of a class are started by.
func runtimeOf(t testing.TB, n *Node, c oci.Class) *oci.Runtime {
	t.Helper()
	r, err := n.runtimes.Of(c)
	must(t, err)
	return r
}

// interrupted reports whether a removal has interrupted the holder of a sandbox's lock.
func interrupted(n *Node, uid types.UID) bool {
	u := n.handles.Lookup(uid)
	if u == nil {
		return false
	}
	_, is := u.Holder()
	return is
}
