package e2e

import (
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/hostileagent"
)

// TestHostileAgent has a whole server ask an agent that answers with attacks. Four clients at once must not make it take more than
// hostileMemory: with what an answer of two megabytes once became it took a gigabyte.
func TestHostileAgent(t *testing.T) {
	const hostileMemory = 160 << 20
	slow := []string{"silence", "head without a body", "a byte a second"} // TestSilentAgent in agentclient
	s := newServer(t)
	agent := filepath.Join(s.dir, "barchan-agent") // down --all needs it too
	build := exec.CommandContext(t.Context(), "go", "build", "-o", agent, "./testdata/hostileagent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	s.set("BARCHAN_AGENT_BINARY", agent)
	s.start()
	s.must("image", "build", "base")
	key := s.localKey()
	id := s.create(key, "base")
	before := s.peakMemory()
	for attack := range hostileagent.Attacks() {
		if slices.Contains(slow, attack) {
			continue
		}
		if status, text, err := s.visit(id, 8080, "/?"+url.QueryEscape(attack)); status != http.StatusOK || err != nil {
			t.Fatalf("set the attack: %d %s, %v", status, text, err)
		}
		var asking sync.WaitGroup
		for range 4 {
			for _, path := range []string{"/sandboxes/" + id + "/metrics", "/v2/sandboxes/" + id + "/logs", "/sandboxes/metrics?sandbox_ids=" + id} {
				asking.Go(func() {
					if status, text, err := s.tryCall(key, http.MethodGet, path, nil); err != nil || status == http.StatusInternalServerError || len(text) > 4<<10 {
						t.Errorf("%s of %q: %d with %d bytes, %v", path, attack, status, len(text), err)
					}
				})
			}
		}
		asking.Wait()
	}
	if took := s.peakMemory() - before; took > hostileMemory {
		t.Errorf("the server took %d MiB", took>>20)
	}
	if status, text := s.call(key, http.MethodDelete, "/sandboxes/"+id, nil); status != http.StatusNoContent {
		t.Errorf("kill: %d %s", status, text)
	}
}

// peakMemory is the most that the server had in memory, in bytes.
func (s *server) peakMemory() int {
	s.t.Helper()
	status, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(s.cmd.Process.Pid), "status"))
	if err != nil {
		s.t.Fatal(err)
	}
	kib, err := strconv.Atoi(string(regexp.MustCompile(`VmHWM:\s*(\d+) kB`).FindSubmatch(status)[1]))
	if err != nil {
		s.t.Fatal(err)
	}
	return kib << 10
}
