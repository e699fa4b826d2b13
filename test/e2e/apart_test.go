package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/base/failpoint"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const (
	// privilegesVariable has all servers of the tests run with these privileges.
	privilegesVariable = "TEST_PRIVILEGES"
	apart              = "apart"

	// The points that TestPrivilegesApart stops at.
	pointPartOwned = "apart/owned"
	pointPartMoved = "apart/moved"
)

// divide has a server run as two processes from its next start on.
func (s *server) divide() {
	s.t.Helper()
	if err := os.Chmod(s.dir, 0o711); err != nil { //nolint:gosec // what is in it has modes of its own
		s.t.Fatal(err)
	}
	s.set("BARCHAN_PRIVILEGES", apart)
}

// part returns a process of a divided server, by its name in the status, once it runs.
func (s *server) part(name string) (pid int) {
	s.t.Helper()
	eventually.NoError(s.t, name+" runs", func() error {
		out, err := s.try("status", "--json")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		var status adminclient.Status
		s.read(&status, "status")
		for _, c := range status.Components {
			if c.Name == name && c.PID > 0 && status.Ready {
				pid = c.PID
				return nil
			}
		}
		return fmt.Errorf("status has %+v", status.Components)
	})
	return pid
}

// killedAt begins a server that dies at a point.
func (s *server) killedAt(armed, point string) {
	s.t.Helper()
	if err := os.WriteFile(armed, []byte(point), 0o600); err != nil {
		s.t.Fatal(err)
	}
	s.begin()
	select {
	case <-s.done: //nolint:errcheck // it was killed
	case <-time.After(startTime):
		s.t.Fatalf("the server never came to %s\n%s", point, s.tail())
	}
	s.cmd = nil
	_ = s.log.Close()
	if !strings.Contains(s.tail(), "failpoint "+strings.TrimSuffix(point, ":3")+": kill") {
		s.t.Fatalf("the server ended elsewhere than at %s\n%s", point, s.tail())
	}
	if err := os.Remove(armed); err != nil {
		s.t.Fatal(err)
	}
}

// TestPrivilegesApart divides the data directory of a server with a running sandbox, dies twice while it does, and goes on as two
// processes. Either is killed then, and the sandbox runs on. In the end all is one process again.
func TestPrivilegesApart(t *testing.T) {
	t.Parallel()
	installSDK(t)
	s := newServer(t)
	s.bin = programWithPoints(t)
	armed := filepath.Join(s.dir, "armed")
	s.set(failpoint.Variable, "@"+armed)
	s.start()
	s.must("image", "build", "base")
	s.apply(imageTemplate("witness", baseImage, "\n        command: [python3, -c, "+strconv.Quote(witness)+"]"))
	id := s.create(s.localKey(), "witness")
	nonce := func() string {
		t.Helper()
		word, _, _ := strings.Cut(s.untilServed(id, "/"), " ")
		return word
	}
	before := nonce()
	same := func(when string) {
		t.Helper()
		if now := nonce(); now != before {
			t.Errorf("%s the sandbox is another: %q, it was %q", when, now, before)
		}
	}

	s.stop(syscall.SIGTERM)
	s.divide()
	s.killedAt(armed, pointPartOwned)
	s.killedAt(armed, pointPartMoved+":3")
	s.start()
	same("as two processes")
	server, node := s.part("server"), s.part("node")
	s.checkUnprivileged(server)
	if node != s.cmd.Process.Pid {
		t.Errorf("the node is process %d, want %d", node, s.cmd.Process.Pid)
	}

	if err := syscall.Kill(server, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "another server's process is started", func() bool { return s.part("server") != server })
	same("after the end of the server's process")
	if out := s.must("doctor"); !strings.Contains(out, "ended 1 times unasked (last: signal: killed)") {
		t.Errorf("doctor does not tell:\n%s", out)
	}
	s.stop(syscall.SIGKILL)
	s.start()
	same("after the end of the node's process, and so of both")

	s.must("pause", id)
	s.must("resume", id)
	same("after a pause")
	runSDK(t, "main.test.mjs", append(s.clientEnv(), "AT_ONCE=8"))
	eventually.NoError(t, "nothing is leaked", func() error {
		out, err := s.try("doctor", "--deep")
		if err != nil {
			t.Log(out)
		}
		return err
	})
	s.stop(syscall.SIGTERM)
	s.set("BARCHAN_PRIVILEGES", "together")
	s.start()
	same("as one process again")
}

// checkUnprivileged checks that a process has no rights of root, and its own share of the machine.
func (s *server) checkUnprivileged(pid int) {
	s.t.Helper()
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	status, err := os.ReadFile(filepath.Join(proc, "status"))
	if err != nil {
		s.t.Fatal(err)
	}
	for _, want := range []string{"\nCapPrm:\t0000000000000000\n", "\nCapEff:\t0000000000000000\n", "\nCapAmb:\t0000000000000000\n", "\nNoNewPrivs:\t1\n"} {
		if !strings.Contains(string(status), want) {
			s.t.Errorf("the server's process lacks %q:\n%s", want, status)
		}
	}
	if strings.Contains(string(status), "\nUid:\t0") || strings.Contains(string(status), "\nGid:\t0") {
		s.t.Errorf("the server's process is root's:\n%s", status)
	}
	groups, err := os.ReadFile(filepath.Join(proc, "cgroup"))
	if want := s.value("BARCHAN_CGROUP_PARENT") + "-server/server\n"; err != nil || !strings.Contains(string(groups), want) {
		s.t.Errorf("the server's process is not in %s:\n%s%v", want, groups, err)
	}
}
