package oci

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// need finds a program, or skips with a log line; in CI a missing one is a failure.
func need(t testing.TB, program string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root for namespaces and cgroups")
	}
	cache := os.Getenv("BARCHAN_CACHE")
	if cache == "" {
		cache = "/var/cache/barchan"
	}
	path := filepath.Join(cache, "bin", program)
	if _, err := os.Stat(path); err == nil {
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

// probe builds the first process of all sandboxes here, once.
var probe = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "barchan-probe-")
	if err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-o", filepath.Join(dir, "agent"), "./testdata/probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", errors.Join(fmt.Errorf("%w: %s", err, out), os.RemoveAll(dir))
	}
	return dir, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if dir, err := probe(); err == nil {
		_ = os.RemoveAll(dir)
	}
	os.Exit(code)
}

// testHost is a gVisor root of the test's own, and a network whose hub is a namespace too, so that
// the host's own is unaffected.
type testHost struct {
	*Runtime
	dir, hub, cgroup string
	boxes            int
}

func newTestHost(t testing.TB) *testHost {
	t.Helper()
	binary := need(t, "runsc")
	need(t, "ip")
	tag := fmt.Sprintf("bco%06x", rand.Uint32()&0xffffff)
	dir, err := os.MkdirTemp("/tmp", tag) //nolint:usetesting // short, for sockets
	must(t, err)
	r, err := New(Config{Class: GVisor, Binary: binary, Root: filepath.Join(dir, "r")})
	must(t, err)
	l := &testHost{Runtime: r, dir: dir, hub: tag, cgroup: "/" + tag}
	t.Cleanup(func() {
		must(t, r.Destroy())
		must(t, cgroups.Remove(l.cgroup))
		must(t, os.RemoveAll(dir))
	})
	l.ip(t, "netns add "+l.hub)
	t.Cleanup(func() { l.ip(t, "netns del "+l.hub) })
	l.ip(t, "-n "+l.hub+" link add hub0 type bridge")
	l.ip(t, "-n "+l.hub+" addr add 10.9.0.1/24 dev hub0")
	l.ip(t, "-n "+l.hub+" link set hub0 up")
	return l
}

func (l *testHost) ip(t testing.TB, args string) {
	t.Helper()
	out, err := exec.CommandContext(context.WithoutCancel(t.Context()), "ip", strings.Fields(args)...).CombinedOutput()
	if err != nil {
		t.Errorf("ip %s: %v: %s", args, err, out)
	}
}

type testSandbox struct {
	*testHost
	id, bundle, rootfs, addr, ns string
	spec                         Sandbox
	console                      *Console
}

// newSandbox creates a sandbox's network, address and directories.
func (l *testHost) newSandbox(t testing.TB, change ...func(*Sandbox)) *testSandbox {
	t.Helper()
	agent, err := probe()
	must(t, err)
	l.boxes++
	id := fmt.Sprintf("box%d", l.boxes)
	ns := l.hub + "-" + id
	b := &testSandbox{
		testHost: l, id: id, bundle: filepath.Join(l.dir, id+"-bundle"), rootfs: filepath.Join(l.dir, id+"-root"), addr: fmt.Sprintf("10.9.0.%d", l.boxes+1),
	}
	for _, dir := range []string{b.bundle, b.rootfs, filepath.Join(b.rootfs, "tmp")} {
		must(t, os.MkdirAll(dir, 0o755))
	}
	l.ip(t, "netns add "+ns)
	t.Cleanup(func() { l.ip(t, "netns del "+ns) })
	l.ip(t, fmt.Sprintf("-n %s link add v%d type veth peer name eth0 netns %s", l.hub, l.boxes, ns))
	l.ip(t, fmt.Sprintf("-n %s link set v%d master hub0 up", l.hub, l.boxes))
	l.ip(t, fmt.Sprintf("-n %s link set lo up", ns))
	b.ns = ns
	b.readdress(t)
	l.ip(t, fmt.Sprintf("-n %s link set eth0 up", ns))
	b.spec = Sandbox{
		Class: GVisor, Hostname: id, Rootfs: b.rootfs, NetnsPath: "/run/netns/" + ns, AgentDir: agent,
		CgroupsPath: filepath.Join(l.cgroup, id), Env: []string{"NAME=" + id}, Mounts: []Mount{{Target: "/memory", SizeLimit: 16 << 20}},
		Limits: Limits{MilliCPU: 2000, Memory: 3 << 30, Pids: 1000},
	}
	for _, c := range change {
		c(&b.spec)
	}
	must(t, WriteBundle(b.bundle, Spec(b.spec)))
	b.console, err = NewConsole()
	must(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), eventually.Patience)
		defer cancel()
		must(t, l.Remove(ctx, b.id, b.spec.CgroupsPath))
		must(t, b.console.Close())
	})
	return b
}

// run starts the sandbox and waits until it answers.
func (b *testSandbox) run(t testing.TB) *testSandbox {
	t.Helper()
	if _, err := b.Run(t.Context(), b.id, b.bundle, b.console); err != nil {
		t.Fatal(err)
	}
	b.dial(t).close()
	return b
}

// copyOf creates a sandbox with copies of another's current files.
func (b *testSandbox) copyOf(t testing.TB, change ...func(*Sandbox)) *testSandbox {
	t.Helper()
	next := b.newSandbox(t, change...)
	if out, err := exec.CommandContext(t.Context(), "cp", "-a", b.rootfs+"/.", next.rootfs).CombinedOutput(); err != nil {
		t.Fatalf("copy files: %v: %s", err, out)
	}
	return next
}

// readdress gives the network namespace its address again, which the next start takes.
func (b *testSandbox) readdress(t testing.TB) {
	t.Helper()
	b.ip(t, fmt.Sprintf("-n %s addr replace %s/24 dev eth0", b.ns, b.addr))
}

func (b *testSandbox) restore(t testing.TB, image string, o RestoreOptions) *testSandbox {
	t.Helper()
	if _, err := b.Restore(t.Context(), b.id, b.bundle, image, b.console, o); err != nil {
		t.Fatal(err)
	}
	return b
}

// processes returns the processes of the sandbox on the host: its sentry and gofer at least.
func (b *testSandbox) processes(t testing.TB) []int {
	t.Helper()
	pids, err := cgroups.Processes(b.spec.CgroupsPath)
	must(t, err)
	if len(pids) < 2 {
		t.Fatalf("processes %v, want a sentry and a gofer at least", pids)
	}
	return pids
}

// within calls f on a thread in the hub's network namespace.
func (l *testHost) within(f func() error) error {
	ended := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread exits with the goroutine
		ns, err := os.Open("/run/netns/" + l.hub)
		if err == nil {
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
			_ = ns.Close()
		}
		if err == nil {
			err = f()
		}
		ended <- err
	}()
	return <-ended
}

type probeConn struct {
	conn  net.Conn
	lines *bufio.Scanner
}

// dial connects, as soon as the probe listens.
func (b *testSandbox) dial(t testing.TB) *probeConn {
	t.Helper()
	var c probeConn
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	err := retry(ctx, func() (bool, error) {
		err := b.within(func() (err error) {
			limited, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			c.conn, err = (&net.Dialer{}).DialContext(limited, "tcp", net.JoinHostPort(b.addr, "7000"))
			return err
		})
		return err == nil, err
	})
	if err != nil {
		t.Fatalf("%s does not answer: %v; console %q", b.id, err, b.console.Text())
	}
	c.lines = bufio.NewScanner(c.conn)
	return &c
}

func (c *probeConn) close() { _ = c.conn.Close() }

// request sends a question and returns the answer, or how the connection ended.
func (c *probeConn) request(question string) (string, error) {
	if err := c.conn.SetDeadline(time.Now().Add(eventually.Patience)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintln(c.conn, question); err != nil {
		return "", err
	}
	if !c.lines.Scan() {
		if err := c.lines.Err(); err != nil {
			return "", err
		}
		return "", io.EOF
	}
	return c.lines.Text(), nil
}

func (b *testSandbox) query(t testing.TB, question string) string {
	t.Helper()
	c := b.dial(t)
	defer c.close()
	answer, err := c.request(question)
	if err != nil {
		t.Fatalf("query %s %q: %v; console %q", b.id, question, err, b.console.Text())
	}
	return answer
}

func (b *testSandbox) expect(t testing.TB, question, want string) {
	t.Helper()
	if got := b.query(t, question); got != want {
		t.Errorf("%s: %s: got %q, want %q", b.id, question, got, want)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// retry repeats try every few milliseconds until done or the end of ctx.
func retry(ctx context.Context, try func() (done bool, err error)) error {
	for {
		done, err := try()
		if done {
			return err
		}
		select {
		case <-time.After(2 * time.Millisecond):
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		}
	}
}
