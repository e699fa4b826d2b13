package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// newSleepy starts a server that writes the memory of sandboxes to disk after some time.
func newSleepy(t *testing.T, storeAfter string) *server {
	t.Helper()
	s := newServer(t)
	s.set("BARCHAN_STORE_AFTER", storeAfter)
	s.set("BARCHAN_SPARE_NETWORKS", "0")
	s.set("BARCHAN_LOG_LEVEL", "debug") // has the requests that failed
	s.start()
	s.must("image", "build", "base")
	s.apply(echoTemplate)
	return s
}

// echoTemplate is a template of sandboxes that answer with the path of the request, and a
// word that they made up at their start.
const echoTemplate = `
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: echo}
spec:
  podTemplate:
    spec:
      containers:
      - name: main
        image: ` + baseImage + `
        command:
        - python3
        - -c
        - |
          import http.server, os
          nonce = os.urandom(8).hex()
          class Handler(http.server.BaseHTTPRequestHandler):
              protocol_version = "HTTP/1.1"
              def do_GET(self):
                  body = f"{nonce} {self.path}".encode()
                  self.send_response(200)
                  self.send_header("Content-Length", str(len(body)))
                  self.end_headers()
                  self.wfile.write(body)
              def log_message(self, *args):
                  pass
          http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
        resources: {limits: {memory: 256Mi}}
`

// echo makes such a sandbox, and returns its word.
func (s *server) echo() (id, nonce string) {
	s.t.Helper()
	id = s.create(s.localKey(), "echo")
	return id, s.nonce(id)
}

// nonce returns the random word of a sandbox, once it responds.
func (s *server) nonce(id string) string {
	s.t.Helper()
	nonce, _, _ := strings.Cut(s.untilServed(id, "/"), " ")
	return nonce
}

// TestSleepBySDK pauses and resumes through the unmodified SDK: by calls, by timeouts and by traffic.
// It does so with memory that is on disk as soon as may be, and with memory that stays in RAM.
func TestSleepBySDK(t *testing.T) {
	t.Parallel()
	for _, storeAfter := range []string{"1ms", "0s"} {
		t.Run(storeAfter, func(t *testing.T) { runSDK(t, "sleep.test.mjs", newSleepy(t, storeAfter).clientEnv()) })
	}
}

// TestManySleeps suspends one sandbox fifty times: every other time it is resumed at once, wherever its
// memory then is.
func TestManySleeps(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newSleepy(t, "1ms")
	id, nonce := s.echo()
	s.exec(id, "setsid sh -c 'i=0; while :; do i=$((i+1)); echo $i > /tmp/new; mv /tmp/new /tmp/count; sleep 0.01; done' >/dev/null 2>&1 & until test -e /tmp/count; do sleep 0.01; done")
	last, files := 0, 0
	for i := range 50 {
		s.must("pause", id)
		if i%2 == 0 {
			s.onDisk(id)
		}
		s.must("resume", id)
		if now := s.nonce(id); now != nonce {
			t.Fatalf("after sleep %d it returned %s, want %s", i+1, now, nonce)
		}
		var n int
		if _, err := fmt.Sscan(s.exec(id, "cat /tmp/count"), &n); err != nil || n < last {
			t.Fatalf("after sleep %d it counted to %d, before it to %d: %v", i+1, n, last, err)
		}
		last = n
		if i == 9 {
			files = s.openFiles()
		}
	}
	if now := s.openFiles(); now > files+20 {
		t.Errorf("the server has %d files open after 50 suspends, %d after 10", now, files)
	}
	s.must("kill", id)
	s.untilInOrder()
	s.untilNoMemories()
}

// openFiles counts the files that the server has open.
func (s *server) openFiles() int {
	s.t.Helper()
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", s.cmd.Process.Pid))
	if err != nil {
		s.t.Fatal(err)
	}
	return len(files)
}

// memories are the images of memory on disk.
func (s *server) memories() []string {
	s.t.Helper()
	found, err := filepath.Glob(filepath.Join(s.value("BARCHAN_DATA_DIR"), "node", "memory", "*"))
	if err != nil {
		s.t.Fatal(err)
	}
	return found
}

// untilNoMemories waits until no memory is left on disk.
func (s *server) untilNoMemories() {
	s.t.Helper()
	eventually.NoError(s.t, "no memory is left on disk", func() error {
		if left := s.memories(); len(left) > 0 {
			return fmt.Errorf("%v", left)
		}
		return nil
	})
}

// TestSleepUnderLoad has clients call a sandbox all the time while it suspends and resumes. No client gets
// another's response, and each gets one.
func TestSleepUnderLoad(t *testing.T) {
	t.Parallel()
	s := newSleepy(t, "1ms")
	id, nonce := s.echo()
	var mu sync.Mutex
	answers := map[string]int{}
	stop := again(8, func(c, i int) {
		path := fmt.Sprintf("/%d/%d", c, i)
		status, body, err := s.visit(id, 8080, path)
		kind := fmt.Sprint(status)
		switch {
		case err != nil: // a closed connection is allowed too
			kind = "cut off"
		case status == http.StatusOK && body != nonce+" "+path:
			t.Errorf("%s was answered %q", path, body)
		case status == http.StatusOK:
		case status != http.StatusBadGateway || !strings.Contains(body, id):
			t.Errorf("%s was answered %d %q", path, status, body)
		}
		mu.Lock()
		answers[kind]++
		mu.Unlock()
	})
	defer stop()
	served := func() int {
		mu.Lock()
		defer mu.Unlock()
		return answers["200"]
	}
	for i := range 10 {
		before := served()
		eventually.NoError(t, "a client is served", func() error {
			if served() < before+10 {
				return errors.New("no response")
			}
			return nil
		})
		s.must("pause", id)
		if i%2 == 0 {
			s.onDisk(id)
		}
		s.must("resume", id)
	}
	stop()
	t.Logf("answers: %v", answers)
	if now := s.nonce(id); now != nonce {
		t.Errorf("it returned %s, want %s", now, nonce)
	}
}

// TestSleepRaces has two clients make conflicting requests. For all responses, the sandbox is then
// as one of them requested, without leftovers of the other's.
func TestSleepRaces(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newSleepy(t, "1ms")
	key := s.localKey()
	query := func(id, what string) (int, string, error) {
		switch what {
		case "kill":
			return s.tryCall(key, http.MethodDelete, "/sandboxes/"+id, nil)
		case "pause":
			return s.tryCall(key, http.MethodPost, "/sandboxes/"+id+"/pause", nil)
		default:
			return s.tryCall(key, http.MethodPost, "/sandboxes/"+id+"/connect", map[string]int{"timeout": 600})
		}
	}
	allowed := map[int]bool{200: true, 201: true, 204: true, 404: true, 409: true}
	for _, race := range []struct {
		first, second string
		paused        bool
	}{
		{"resume", "kill", true}, {"pause", "kill", false}, {"kill", "pause", false}, {"resume", "resume", true}, {"pause", "pause", false}, {"resume", "pause", true},
	} {
		t.Run(race.first+" and "+race.second, func(t *testing.T) {
			s := s.in(t)
			for range 6 {
				id, nonce := s.echo()
				if race.paused {
					s.must("pause", id)
				}
				var both sync.WaitGroup
				for _, what := range []string{race.first, race.second} {
					both.Go(func() {
						if status, body, err := query(id, what); !allowed[status] {
							t.Errorf("%s: %d %s %v", what, status, body, err)
						}
					})
				}
				both.Wait()
				if race.second == "kill" || race.first == "kill" {
					eventually.NoError(t, "it is gone", func() error {
						if status, body := s.call(key, http.MethodGet, "/sandboxes/"+id, nil); status != http.StatusNotFound {
							return fmt.Errorf("%d %s", status, body)
						}
						return nil
					})
					continue
				}
				eventually.NoError(t, "it resumes", func() error {
					status, body, err := query(id, "resume")
					if err == nil && status/100 != 2 {
						err = fmt.Errorf("%d %s", status, body)
					}
					return err
				})
				if now := s.nonce(id); now != nonce {
					t.Errorf("it returned %s, want %s", now, nonce)
				}
				s.must("kill", id)
			}
			s.untilInOrder()
			s.untilNoMemories()
		})
	}
}

// TestTimeoutWhileDown has the time of sandboxes run out while no server runs.
func TestTimeoutWhileDown(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newSleepy(t, "1ms")
	key := s.localKey()
	made := func(more map[string]any) (id string) {
		more["templateID"], more["timeout"] = "echo", 600
		status, body := s.call(key, http.MethodPost, "/sandboxes", more)
		if status != http.StatusCreated {
			t.Fatalf("create = %d %s", status, body)
		}
		return idIn(body)
	}
	ends, pauses := made(map[string]any{}), made(map[string]any{"autoPause": true})
	paused, _ := s.echo()
	nonce := s.nonce(pauses)
	s.must("pause", paused)
	s.onDisk(paused)
	for _, id := range []string{ends, pauses} {
		if status, body := s.call(key, http.MethodPost, "/sandboxes/"+id+"/timeout", map[string]int{"timeout": 2}); status != http.StatusNoContent {
			t.Fatalf("timeout = %d %s", status, body)
		}
	}
	over := time.Now().Add(2 * time.Second)
	s.stop(syscall.SIGKILL)
	time.Sleep(time.Until(over)) // it is the time itself that must pass
	s.start()
	eventually.NoError(t, "one has ended", func() error {
		if status, body := s.call(key, http.MethodGet, "/sandboxes/"+ends, nil); status != http.StatusNotFound {
			return fmt.Errorf("%d %s", status, body)
		}
		return nil
	})
	for _, id := range []string{pauses, paused} {
		eventually.NoError(t, id+" is paused", func() error {
			if status, body := s.call(key, http.MethodGet, "/sandboxes/"+id, nil); status != http.StatusOK || !strings.Contains(body, `"paused"`) {
				return fmt.Errorf("%d %s", status, body)
			}
			return nil
		})
	}
	s.onDisk(pauses)
	s.must("resume", pauses)
	if now := s.nonce(pauses); now != nonce {
		t.Errorf("it returned %s, want %s", now, nonce)
	}
}
