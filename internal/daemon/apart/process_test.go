package apart

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/daemon/adminops"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// parentVariable has the test's program be the parent, with this data directory.
const parentVariable = "BARCHAN_TEST_APART_PARENT"

// TestMain is the server's process too, and its parent.
func TestMain(m *testing.M) {
	switch dir := os.Getenv(parentVariable); {
	case IsServer():
		os.Exit(serverMain())
	case dir != "":
		_ = os.Unsetenv(parentVariable)
		os.Exit(parentMain(dir))
	}
	os.Exit(m.Run())
}

// serverMain is ready at once. It fails at its start where the file "fail" is in its directory.
func serverMain() int {
	data := os.Getenv("BARCHAN_DATA_DIR")
	if _, err := os.Stat(filepath.Join(data, "fail")); err == nil {
		return 3
	}
	status, err := os.ReadFile("/proc/self/status")
	if err == nil {
		err = os.WriteFile(filepath.Join(data, "status"), append(status, strings.Join(os.Environ(), "\n")...), 0o600)
	}
	run := filepath.Join(data, "run")
	_ = os.Mkdir(run, 0o700)
	socket := filepath.Join(run, "admin.sock")
	_ = os.Remove(socket)
	ln, err2 := net.Listen("unix", socket) //nolint:noctx // a process of its own
	if err := errors.Join(err, err2); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 5
	}
	_ = http.Serve(ln, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { //nolint:gosec // as above
		_ = json.NewEncoder(w).Encode(adminclient.Status{Ready: true})
	}))
	return 6
}

// parentMain runs the server's process until it is killed.
func parentMain(dir string) int {
	fmt.Fprintln(os.Stderr, newProcess(testConfig(dir), other).run(context.Background()))
	return 1
}

func testConfig(dir string) Config {
	cfg := config.Default()
	cfg.DataDir, cfg.RunDir = dir, filepath.Join(dir, "run")
	return Config{Config: cfg, Log: telemetry.Discard(), Output: os.Stderr}
}

// pidOf waits for a process of the server that is ready, and not the last.
func pidOf(t *testing.T, p *process, last int) (pid int) {
	t.Helper()
	eventually.True(t, "a process is ready", func() bool {
		c := p.Component()
		pid = c.PID
		return strings.HasPrefix(c.State, stateRunning) && pid != last
	})
	return pid
}

// TestProcess has no rights of root, is started again when it ends, and stops with ctx.
func TestProcess(t *testing.T) {
	t.Parallel()
	data := oldData(t)
	if err := Divide(data, other); err != nil {
		t.Fatal(err)
	}
	cfg := testConfig(data)
	cfg.TLSAddr = "127.0.0.1:443"
	p := newProcess(cfg, other)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- p.run(ctx) }()
	first := pidOf(t, p, 0)
	b, err := os.ReadFile(filepath.Join(data, "server", "status"))
	if err != nil {
		t.Fatal(err)
	}
	id := strings.Repeat("\t"+strconv.Itoa(unnamed), 4) + "\n"
	for _, want := range []string{"\nUid:" + id, "\nGid:" + id, "\nGroups:\t \n", "\nNoNewPrivs:\t1\n", "\nCapEff:\t0000000000000400\n", "\nBARCHAN_PRIVILEGES=together", "\nBARCHAN_NODE_SOCKET=" + data + "/node.sock"} {
		if !strings.Contains(string(b), want) {
			t.Errorf("the process lacks %q:\n%s", want, b)
		}
	}
	if err := syscall.Kill(first, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	second := pidOf(t, p, first)
	if state := p.Component().State; state != "running, ended 1 times unasked (last: signal: killed)" {
		t.Errorf("state %q", state)
	}
	cancel()
	select {
	case <-ended: //nolint:errcheck // by SIGTERM, which this one does not handle
	case <-time.After(time.Minute):
		t.Fatal("it does not stop")
	}
	if _, err := lifecycle.ProcessOf(second); err == nil {
		t.Error("the process is still there")
	}
}

// TestProcessThatDoesNotStart ends at once, instead of being tried forever.
func TestProcessThatDoesNotStart(t *testing.T) {
	t.Parallel()
	data := oldData(t)
	if err := errors.Join(Divide(data, other), os.WriteFile(filepath.Join(data, "server", "fail"), nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	if err := newProcess(testConfig(data), other).run(t.Context()); err == nil || !strings.Contains(err.Error(), "ended at its start") || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("it ended with %v", err)
	}
}

// TestParentIsKilled has the process end with its parent.
func TestParentIsKilled(t *testing.T) {
	t.Parallel()
	data := oldData(t)
	if err := Divide(data, other); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	parent, err := os.StartProcess(self, []string{self}, &os.ProcAttr{Env: append(os.Environ(), parentVariable+"="+data), Files: []*os.File{nil, nil, os.Stderr}})
	if err != nil {
		t.Fatal(err)
	}
	own := serverConfig(testConfig(data).Config)
	admin := adminclient.New(own.AdminSocket(), data)
	eventually.NoError(t, "the process answers", func() error {
		_, err := admin.Status(t.Context())
		return err
	})
	if err := parent.Kill(); err != nil {
		t.Fatal(err)
	}
	_, _ = parent.Wait()
	eventually.True(t, "the process ends too", func() bool {
		_, err := admin.Status(t.Context())
		return errors.Is(err, adminclient.ErrNotRunning)
	})
}

// TestNodeFails has the node be started again after its first boot, and the error of that end all.
func TestNodeFails(t *testing.T) {
	t.Parallel()
	fault, last := errors.New("fault"), errors.New("last")
	cfg := testConfig(t.TempDir())
	cfg.TokenSecret = filepath.Join(cfg.DataDir, "credentials", "token-secret")
	credentials := filepath.Join(ServerDir(cfg.DataDir), "credentials")
	if err := errors.Join(os.MkdirAll(credentials, 0o700), os.WriteFile(filepath.Join(credentials, "token-secret"), nil, 0o600),
		os.WriteFile(filepath.Join(credentials, "node.kubeconfig"), hostile(t), 0o600)); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		booted bool
		errs   []error
		want   error
		runs   int
	}{
		"at its first boot": {false, []error{fault}, fault, 1},
		"later":             {true, []error{fault, fault, nil}, nil, 3},
		"for good":          {true, []error{fault, last}, last, 2},
	} {
		runs := 0
		cfg.Final = func(err error) bool { return errors.Is(err, last) }
		cfg.Node = func(context.Context, config.Config, adminops.ServerProcess) (bool, error) {
			runs++
			return c.booted, c.errs[runs-1]
		}
		if err := runNode(t.Context(), cfg, other, nil); !errors.Is(err, c.want) || runs != c.runs {
			t.Errorf("%s: %d runs, %v; want %d, %v", name, runs, err, c.runs, c.want)
		}
	}
}
