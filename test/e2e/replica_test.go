package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/program"
)

// startReplica runs a replica of the server on the same machine until the test ends.
func (s *server) startReplica() *server {
	s.t.Helper()
	dir, data := filepath.Join(s.dir, "replica"), s.value("BARCHAN_DATA_DIR")
	if err := os.Mkdir(dir, 0o700); err != nil {
		s.t.Fatal(err)
	}
	r := &server{t: s.t, dir: dir, bin: s.bin, http: program.Address(s.t), process: &process{}}
	r.env = append(os.Environ(),
		"BARCHAN_ROLE=replica", "BARCHAN_NODE_NAME=replica", "BARCHAN_DATA_DIR="+filepath.Join(dir, "d"),
		"BARCHAN_API_KUBECONFIG="+filepath.Join(data, "credentials", "admin.kubeconfig"), "BARCHAN_TOKEN_SECRET="+filepath.Join(data, "credentials", "token-secret"),
		"BARCHAN_HTTP_ADDR="+r.http, "BARCHAN_TLS_ADDR=", "BARCHAN_SSH_ADDR=", "BARCHAN_METRICS_ADDR=", "BARCHAN_RESERVE_DISK=64Mi", "BARCHAN_LOG_LEVEL=debug",
		"BARCHAN_API_URL=http://"+r.http, "BARCHAN_API_KEY="+s.localKey(),
	)
	s.t.Cleanup(func() {
		r.stop(syscall.SIGTERM)
		r.checkNoRace()
		if s.t.Failed() {
			s.t.Logf("end of the replica's log:\n%s", r.tail())
		}
	})
	r.start()
	return r
}

// replicaEnv is the environment of a client of the replica.
func (s *server) replicaEnv(r *server, more ...string) []string {
	env := append(s.clientEnv(), more...)
	for i := range env {
		env[i] = strings.ReplaceAll(env[i], s.http, r.http)
	}
	return env
}

// TestReplica is what the unmodified SDK and the command line do with a replica beside a real server, whose disk has the files of
// volumes, the builds and the events: all of it works, also after the server was killed and is back.
func TestReplica(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: a whole server needs root")
	}
	s := newRacedServer(t)
	s.set("BARCHAN_STORE_AFTER", "100ms")
	s.start()
	s.must("image", "build", "base")
	r := s.startReplica()
	t.Run("volumes", func(t *testing.T) { runSDK(t, "volumes.test.mjs", s.in(t).replicaEnv(r)) })
	t.Run("builds", func(t *testing.T) { runSDK(t, "builds.test.mjs", s.in(t).replicaEnv(r, "BASE_IMAGE="+baseImage)) })
	t.Run("events", func(t *testing.T) { testReplicaEvents(t, s.in(t), r.in(t)) })
	t.Run("without the server", func(t *testing.T) { testReplicaAlone(t, s.in(t), r.in(t)) })
}

// testReplicaEvents checks that the server's log of events, what follows from it, and the decisions of its node are also the replica's.
func testReplicaEvents(t *testing.T, s, r *server) {
	key := s.localKey()
	id := r.create(key, "base")
	if status, text := r.call(key, http.MethodGet, "/sandboxes/"+id+"/network/trace?destination=127.0.0.1", nil); status != http.StatusOK || !strings.Contains(text, `"refused"`) {
		t.Errorf("network trace: %d %s", status, text)
	}
	eventually.NoError(t, "the event is listed", func() error {
		if out, err := r.try("events", id, "--json"); err != nil || !strings.Contains(out, "sandbox.lifecycle.created") {
			return fmt.Errorf("events are %s: %w", out, err)
		}
		return nil
	})
	for path, want := range map[string]string{"/teams/default/metrics": `"concurrentSandboxes":`, "/teams/default/metrics/max?metric=concurrent_sandboxes": `"value":`} {
		if status, text := r.call(key, http.MethodGet, path, nil); status != http.StatusOK || !strings.Contains(text, want) {
			t.Errorf("%s: %d %s", path, status, text)
		}
	}
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("s3cret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.must("webhook", "create", "hook", "http://localhost:1/", "--secret-file", secret)
	r.must("rm", id)
	eventually.NoError(t, "the replica shows how deliveries go", func() error {
		if out := r.must("webhook", "show", "hook"); !strings.Contains(out, "failing") {
			return fmt.Errorf("the webhook is %s", out)
		}
		return nil
	})
	s.must("webhook", "rm", "hook")
	if status, text := r.call("e2b_"+strings.Repeat("0", 40), http.MethodGet, "/events/sandboxes", nil); status != http.StatusUnauthorized {
		t.Errorf("events with an unknown key: %d %s", status, text)
	}
}

// testReplicaAlone kills the server: the replica says so, serves what it can, and all again once the server is back.
func testReplicaAlone(t *testing.T, s, r *server) {
	key := s.localKey()
	var list []struct{ SandboxID string }
	s.read(&list, "ls") // the suite of volumes has left one
	if len(list) != 1 {
		t.Fatalf("sandboxes: %v", list)
	}
	s.stop(syscall.SIGKILL)
	for _, path := range []string{"/events/sandboxes", "/templates/base", "/templates/x/builds/y/status"} {
		if status, text := r.call(key, http.MethodGet, path, nil); status != http.StatusServiceUnavailable || !strings.Contains(text, "the server that this replica belongs to does not answer") {
			t.Errorf("%s without the server: %d %s", path, status, text)
		}
	}
	if status, text := r.call(key, http.MethodGet, "/sandboxes/"+list[0].SandboxID, nil); status != http.StatusOK {
		t.Errorf("the sandbox without the server: %d %s", status, text)
	}
	s.begin()
	eventually.NoError(t, "the replica serves what is the server's", func() error {
		status, text, err := r.tryCall(key, http.MethodGet, "/events/sandboxes/"+list[0].SandboxID, nil)
		if err == nil && (status != http.StatusOK || !strings.Contains(text, "sandbox.lifecycle.created")) {
			err = fmt.Errorf("%d %s", status, text)
		}
		return err
	})
	s.awaitReady()
	runSDK(t, "volumes.test.mjs", s.replicaEnv(r, "PART=after", "SANDBOX="+list[0].SandboxID))
}
