package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/budget"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/program"
)

const (
	startTime = 2 * time.Minute
	stopTime  = 2 * time.Minute
	// imageTime is for the base image, which is built once for all tests. Beside tests and compilers, on a machine without
	// its packages, that takes more than startTime; killed, it begins anew.
	imageTime = 15 * time.Minute
)

// What make test leaves to make test-all is skipped where this variable has this value.
const (
	partVariable = "TEST_PART"
	partFast     = "fast"
)

// skipInFast skips a test that make test leaves to make test-all.
func skipInFast(t *testing.T) {
	t.Helper()
	if os.Getenv(partVariable) == partFast {
		t.Skip("SKIPPED: make test-all runs it")
	}
}

// skipInFastBut is skipInFast on all days but every second one, from day 0 or 1 since 1970 on: make test runs long tests in turn.
func skipInFastBut(t *testing.T, day int64) {
	t.Helper()
	if time.Now().Unix()/(24*60*60)%2 != day {
		skipInFast(t)
	}
}

// programs are those that users have; they are brought up to date before the tests.
var programs struct{ barchan string }

func TestMain(m *testing.M) {
	os.Exit(func() int {
		if os.Getuid() != 0 {
			return m.Run() // every test then skips, loudly
		}
		if out, err := exec.CommandContext(context.Background(), "../../scripts/build.sh").CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
			return 1
		}
		var err error
		if programs.barchan, err = filepath.Abs("../../bin/barchan"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}())
}

var (
	buildPoints = sync.OnceValues(func() ([]byte, error) { return buildVariant("failpoints") })
	buildRaced  = sync.OnceValues(func() ([]byte, error) { return buildVariant("race") })
)

func buildVariant(name string) ([]byte, error) {
	return exec.CommandContext(context.Background(), "../../scripts/build.sh", name).CombinedOutput()
}

// programWithPoints builds the server with failpoints, once.
func programWithPoints(t *testing.T) string {
	t.Helper()
	return variant(t, "failpoints", buildPoints)
}

func variant(t *testing.T, name string, build func() ([]byte, error)) string {
	t.Helper()
	if out, err := build(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return programs.barchan + "-" + name
}

// newRacedServer is newServer of a program with the race detector, in make test-all. Its log has
// the requests that failed.
func newRacedServer(t *testing.T) *server {
	t.Helper()
	s := newServer(t)
	s.set("BARCHAN_LOG_LEVEL", "debug")
	if os.Getenv(partVariable) != partFast {
		s.bin = variant(t, "race", buildRaced)
	}
	return s
}

var instances atomic.Int32

// number is unique among all tests in all processes while this one runs: names, subnets
// and cgroups are made of it.
func number(t testing.TB) int {
	t.Helper()
	for range 240 {
		n := 1 + (int(instances.Add(1))+os.Getpid()%20*10)%240
		mine, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", fmt.Sprintf("@barchan-e2e-%d", n))
		if err == nil {
			t.Cleanup(func() { _ = mine.Close() })
			return n
		}
	}
	t.Fatal("240 servers and clusters of tests are there already")
	return 0
}

// server is one barchan with all of its own.
type server struct {
	t            *testing.T
	dir          string
	env          []string
	bin          string // the server's program
	http         string
	tls          string
	ssh, metrics string
	*process
}

// process is the server's, if it runs.
type process struct {
	cmd  *exec.Cmd
	done chan error
	log  *os.File
	uid  uint32 // that it runs as
}

// in is the server for a subtest, which is skipped if no time is left.
func (s *server) in(t *testing.T) *server {
	t.Helper()
	budget.Need(t)
	c := *s
	c.t = t
	return &c
}

// newServer prepares a server and removes every trace of it at the test's end.
func newServer(t *testing.T) *server {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: a whole server needs root")
	}
	budget.Need(t)
	dir, err := os.MkdirTemp("/tmp", "be-") //nolint:usetesting // short, for sockets lie below, and removed last
	if err != nil {
		t.Fatal(err)
	}
	n := number(t)
	tag := fmt.Sprintf("be%d", n)
	s := &server{t: t, dir: dir, bin: programs.barchan, http: program.Address(t), tls: program.Address(t), ssh: program.Address(t), metrics: program.Address(t), process: &process{}}
	s.env = append(os.Environ(),
		"BARCHAN_DATA_DIR="+filepath.Join(dir, "d"), "BARCHAN_HTTP_ADDR="+s.http, "BARCHAN_TLS_ADDR="+s.tls, "BARCHAN_KUBE_ADDR="+program.Address(t), "BARCHAN_SSH_ADDR="+s.ssh, "BARCHAN_METRICS_ADDR="+s.metrics,
		"BARCHAN_BRIDGE_NAME="+tag, fmt.Sprintf("BARCHAN_SUBNET=10.%d.%d.0/24", 100+n%100, n%250),
		"BARCHAN_NETNS_PREFIX="+tag+"-", "BARCHAN_NFT_TABLE="+tag, "BARCHAN_CGROUP_PARENT=/"+tag, "BARCHAN_CONTAINERD_NAMESPACE="+tag,
		"BARCHAN_API_URL=", "BARCHAN_API_KEY=",
		"BARCHAN_POOL_SIZE=0",       // tests of pools make their own
		"BARCHAN_RESERVE_DISK=64Mi", // others fill this disk too; see newServerOnDisk
	)
	if os.Getenv(privilegesVariable) == apart {
		s.divide()
	}
	t.Cleanup(s.remove)
	return s
}

// start runs the server in the foreground of a child and waits until it is ready.
func (s *server) start() {
	s.t.Helper()
	s.begin()
	s.awaitReady()
}

// begin runs the server in the foreground of a child.
func (s *server) begin() {
	s.t.Helper()
	log, err := os.OpenFile(filepath.Join(s.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := exec.CommandContext(context.Background(), s.bin, "up") // it outlives the test's context: see remove
	cmd.Env, cmd.Stdout, cmd.Stderr = s.env, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if s.uid != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: s.uid, Gid: s.uid}
	}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.cmd, s.log, s.done = cmd, log, make(chan error, 1)
	go func(done chan<- error) { done <- cmd.Wait() }(s.done)
}

// awaitReady waits until the server that was begun is ready.
func (s *server) awaitReady() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.http+"/readyz", nil)
		if err != nil {
			s.t.Fatal(err)
		}
		if resp, err := http.DefaultClient.Do(req); err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return
			}
		}
		select {
		case err := <-s.done:
			s.t.Fatalf("the server ended at its start: %v\n%s", err, s.tail())
		case <-ctx.Done():
			s.t.Fatalf("the server is not ready\n%s", s.tail())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// stop ends the server as a service manager would, or by SIGKILL; sandboxes keep running.
func (s *server) stop(sig syscall.Signal) {
	s.t.Helper()
	if s.cmd == nil {
		return
	}
	if err := s.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		s.t.Fatal(err)
	}
	select {
	case err := <-s.done:
		if sig == syscall.SIGTERM && err != nil {
			s.t.Errorf("the server ended with %v\n%s", err, s.tail())
		}
	case <-time.After(stopTime):
		_ = s.cmd.Process.Kill()
		s.t.Errorf("the server did not stop within %v\n%s", stopTime, s.tail())
	}
	s.cmd = nil
	_ = s.log.Close()
}

// remove takes everything away, whether the server runs or not, and checks that nothing stayed.
func (s *server) remove() {
	if s.cmd == nil {
		s.start() // only a server has the list of all that it made
	}
	if out, err := s.try("down", "--all", "--yes"); err != nil {
		s.t.Errorf("down --all: %v\n%s\n%s", err, out, s.tail())
	}
	select {
	case err := <-s.done:
		if err != nil {
			s.t.Errorf("the server ended with %v", err)
		}
	case <-time.After(stopTime):
		_ = s.cmd.Process.Kill()
		s.t.Errorf("down --all left the server running\n%s", s.tail())
	}
	s.checkNothingLeft()
	s.checkNoRace()
	if s.t.Failed() {
		s.t.Logf("end of the server's log:\n%s", s.tail())
	}
	_ = os.RemoveAll(s.dir)
}

// checkNoRace fails if the race detector reported anything, also of a server that was killed.
func (s *server) checkNoRace() {
	log, err := os.ReadFile(filepath.Join(s.dir, "log"))
	if err != nil {
		s.t.Error(err)
	}
	if _, report, found := strings.Cut(string(log), "WARNING: DATA RACE"); found {
		s.t.Errorf("data race in the server:%s", report[:min(len(report), 8<<10)])
	}
}

func (s *server) checkNothingLeft() {
	tag := s.value("BARCHAN_BRIDGE_NAME")
	for what, command := range map[string]string{
		"links":      "ip -o link | grep -w " + tag,
		"namespaces": "ls /var/run/netns | grep ^" + tag + "-",
		"rules":      "nft list tables | grep -w " + tag,
		"mounts":     "grep " + s.dir + "/ /proc/self/mounts",
		"processes":  "pgrep -af [b]e-" + strings.TrimPrefix(s.dir, "/tmp/be-") + "/",
		"cgroups":    "find /sys/fs/cgroup -type d -name " + tag + " -o -type d -name " + tag + "-server",
	} {
		eventually.NoError(s.t, "no "+what+" are left behind", func() error { // a process may be on its way out
			out, _ := exec.CommandContext(context.Background(), "sh", "-c", command).Output() // grep's 1 is what we hope for
			if text := strings.TrimSpace(string(out)); text != "" && !strings.Contains(text, "not found") {
				return errors.New(text)
			}
			return nil
		})
	}
}

func (s *server) value(key string) string {
	for _, kv := range s.env {
		if v, ok := strings.CutPrefix(kv, key+"="); ok {
			return v
		}
	}
	return ""
}

// gatewayError matches the access log's record of a local reply of the gateway.
var gatewayError = regexp.MustCompile(`msg=request .* status=(429|50[234]) `)

// errorsLogged returns the lines of errors in the server's log.
func (s *server) errorsLogged() string {
	log, err := os.ReadFile(filepath.Join(s.dir, "log"))
	if err != nil {
		return err.Error()
	}
	var lines []string
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, "level=ERROR") {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

// tail returns the end of the log, and before it the requests to sandboxes that failed.
func (s *server) tail() string {
	b, _ := os.ReadFile(filepath.Join(s.dir, "log"))
	lines := strings.Split(string(b), "\n")
	end := max(0, len(lines)-30)
	failed := slices.DeleteFunc(lines[:end:end], func(line string) bool {
		return !strings.Contains(line, `msg="exchange failed"`) && !gatewayError.MatchString(line)
	})
	return strings.Join(slices.Concat(failed, lines[end:]), "\n")
}

// try runs a command of ours and returns what it printed.
func (s *server) try(args ...string) (string, error) {
	return s.tryIn("", args...)
}

func (s *server) tryIn(stdin string, args ...string) (string, error) {
	limit := startTime
	if args[0] == "image" {
		limit = imageTime
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, programs.barchan, args...)
	var out bytes.Buffer
	cmd.Env, cmd.Stdout, cmd.Stderr, cmd.Stdin = s.env, &out, &out, strings.NewReader(stdin)
	err := cmd.Run()
	return out.String(), err
}

// must is try that has to succeed.
func (s *server) must(args ...string) string {
	s.t.Helper()
	out, err := s.try(args...)
	if err != nil {
		s.t.Fatalf("barchan %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// clientEnv is the environment that `barchan env` gives a client.
func (s *server) clientEnv(flags ...string) []string {
	s.t.Helper()
	vars := map[string]string{}
	if err := json.Unmarshal([]byte(s.must(append([]string{"env", "--shell", "json"}, flags...)...)), &vars); err != nil {
		s.t.Fatalf("barchan env: %v", err)
	}
	env := os.Environ()
	for k, v := range vars {
		env = append(env, k+"="+v)
	}
	return env
}
