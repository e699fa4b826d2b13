package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestManyAsleep has two hundred sandboxes sleep on disk over a restart. Nothing of them runs, and each
// resumes as it was.
func TestManyAsleep(t *testing.T) {
	t.Parallel()
	skipInFast(t)
	many := 200
	if testing.Short() {
		many = 20
	}
	s := newSleepy(t, "1ms")
	s.apply(strings.Replace(imageTemplate("bare", baseImage, ""), "image:", "resources: {limits: {memory: 128Mi}}\n        image:", 1))
	key := s.localKey()
	var mu sync.Mutex
	words := map[string]string{}
	var workers sync.WaitGroup
	jobs := make(chan int, many) // a worker that fails leaves the rest
	for i := range many {
		jobs <- i
	}
	close(jobs)
	for range 3 {
		workers.Go(func() {
			for range jobs {
				id, word, err := s.pausedSandbox(key)
				if err != nil {
					t.Errorf("%v\n%s", err, s.tail())
					return
				}
				mu.Lock()
				words[id] = word
				mu.Unlock()
			}
		})
	}
	workers.Wait()
	if t.Failed() {
		return
	}
	allAsleep := func(when string) {
		t.Helper()
		eventually.NoError(t, when+" all are on disk", func() error {
			out, err := s.kubectl("", "get", "sandboxes", "-A", "-o", `jsonpath={range .items[*]}{.status.barchan.memory}{"\n"}{end}`)
			if n := strings.Count(out, string(agents.MemoryOnDisk)); err != nil || n != many {
				return fmt.Errorf("%d of %d: %v", n, many, err) //nolint:errorlint // there may be none
			}
			return nil
		})
		eventually.NoError(t, when+" nothing runs", func() error { // memory is on disk before its container has gone
			if out, _ := exec.CommandContext(t.Context(), "sh", "-c", "find /sys/fs/cgroup -path '*"+s.value("BARCHAN_CGROUP_PARENT")+"/*' -name cgroup.procs | xargs -r cat").Output(); len(out) > 0 {
				return fmt.Errorf("processes run:\n%s", out)
			}
			return nil
		})
		if n := len(s.memories()); n != many {
			t.Errorf("%s %d memories are on disk, want %d", when, n, many)
		}
	}
	allAsleep("before the restart")
	s.stop(syscall.SIGKILL)
	s.start()
	allAsleep("after the restart")
	if n := len(s.listed(key)); n != min(many, 100) { // a page
		t.Errorf("%d are listed", n)
	}
	n := 0
	for id, pid := range words {
		s.must("resume", id)
		if out := s.exec(id, "kill -0 "+pid+" && cat /tmp/pid"); out != pid {
			t.Errorf("%s returned %q, want %s", id, out, pid)
		}
		if n++; n == 10 {
			break
		}
	}
	s.must(append([]string{"kill"}, s.allIDs()...)...)
	s.untilInOrder()
	s.untilNoMemories()
}

// pausedSandbox makes a sandbox with a process, which it returns, and pauses it. It may be called by any goroutine.
func (s *server) pausedSandbox(key string) (id, pid string, err error) {
	id, err = s.makeOf(key, "bare")
	if err != nil {
		return "", "", err
	}
	pid, err = s.stdout("exec", id, "--", "sh", "-c", "setsid sh -c 'trap \"\" HUP; while :; do sleep 9999; done' >/dev/null 2>&1 & echo $! > /tmp/pid; cat /tmp/pid")
	if err != nil {
		return "", "", fmt.Errorf("exec in %s: %w", id, err)
	}
	status, body, err := s.tryCall(key, http.MethodPost, "/sandboxes/"+id+"/pause", nil)
	if err == nil && status != http.StatusNoContent {
		err = fmt.Errorf("pause of %s = %d %s", id, status, body)
	}
	return id, strings.TrimSpace(pid), err
}

// allIDs are the IDs of all sandboxes' objects.
func (s *server) allIDs() []string {
	s.t.Helper()
	return strings.Fields(s.mustKubectl("", "get", "sandboxes", "-A", "-o", `jsonpath={.items[*].status.barchan.id}`))
}

// TestDiskFullWhileStoring pauses a sandbox with more memory than the disk has room for, which therefore
// stays in RAM: where space is kept free, nothing is written at all; where none is, the disk runs full in the
// middle. It can be resumed from there, also while new work is refused, and is stored once there is space.
func TestDiskFullWhileStoring(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	for name, tt := range map[string]struct {
		reserve string
		text    string
	}{
		"reserve":    {"100Mi", "100 MiB are kept for what runs"},
		"no reserve": {"0", "no space left"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServerOnDisk(t, "6G")
			s.set("BARCHAN_STORE_AFTER", "1ms")
			s.set("BARCHAN_RESERVE_DISK", tt.reserve)
			s.start()
			s.must("image", "build", "base")
			s.apply(runtimeTemplate("roomy", "gvisor", "1536Mi"))
			c := canary{name: "memory", files: map[string]string{canaryProgram(t): "/home/user/canary"}, start: "/home/user/canary memory"}
			id, before := s.hatch(c)
			giveBack := take(t, s.dir, 600<<20)
			s.must("pause", id)
			eventually.NoError(t, "it reports why it stays in RAM", func() error {
				out := s.suspended(id)
				if !strings.Contains(out, "could not be written to disk") || !strings.Contains(out, tt.text) {
					return errors.New(out)
				}
				return nil
			})
			s.untilNoMemories() // it is tried again and again, with a pause between
			if tt.reserve != "0" {
				giveBack = both(giveBack, take(t, s.dir, 51<<20))
				s.untilRefused("disk", "")
			}
			s.must("resume", id)
			before = s.checkCanary(c, id, witnessPort, before, "after a sleep without room")
			giveBack()
			s.untilWell()
			s.must("pause", id)
			s.onDisk(id)
			s.must("resume", id)
			s.checkCanary(c, id, witnessPort, before, "after a sleep with room")
			s.must("kill", id)
			s.untilInOrder()
		})
	}
}

// both does one after the other.
func both(first, second func()) func() { return func() { first(); second() } }

// suspended is the message of a sandbox's condition Suspended.
func (s *server) suspended(id string) string {
	s.t.Helper()
	return s.mustKubectl("", "get", "sandboxes", "-A", "-o",
		`jsonpath={range .items[?(@.status.barchan.id=="`+id+`")]}{.status.conditions[?(@.type=="Suspended")].message}{end}`)
}

// TestDamagedMemory damages memory on disk in each of its files: the sandbox does not start from it, reports
// it with a remedy, and stays as it is. It resumes when its memory is whole again, or from its files.
func TestDamagedMemory(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newSleepy(t, "1ms")
	damage := map[string]func(path string, b []byte) error{
		"changed":   func(path string, b []byte) error { b[len(b)/2] ^= 1; return os.WriteFile(path, b, 0o600) },
		"truncated": func(path string, b []byte) error { return os.WriteFile(path, b[:len(b)/2], 0o600) },
		"gone":      func(path string, _ []byte) error { return os.Remove(path) },
	}
	for _, file := range []string{"checkpoint.img", "pages.img", "pages_meta.img", "image.json"} {
		for how, do := range damage {
			if file == "image.json" && how == "changed" {
				continue // it depends on what
			}
			t.Run(file+" "+how, func(t *testing.T) {
				s := s.in(t)
				id, nonce := s.echo()
				s.exec(id, "echo kept > /home/user/kept; sync")
				s.must("pause", id)
				s.onDisk(id)
				path := filepath.Join(s.value("BARCHAN_DATA_DIR"), "node", "memory", id, file)
				whole, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				if err := do(path, append([]byte(nil), whole...)); err != nil {
					t.Fatal(err)
				}
				for range 2 {
					if out, err := s.try("resume", id); err == nil || !strings.Contains(out, "damaged") || !strings.Contains(out, "files only") {
						t.Fatalf("resume = %v, want a text that the memory is damaged, and files only may help\n%s", err, out)
					}
					if out := s.must("show", id); !strings.Contains(out, "paused") {
						t.Fatalf("afterwards it is\n%s", out)
					}
				}
				if how == "truncated" {
					s.resumesFrom(id, nonce, path, whole)
				} else {
					s.resumesFromFiles(id, nonce)
				}
				s.must("kill", id)
			})
		}
	}
	s.untilInOrder()
}

// resumesFromFiles gives the memory of a sandbox up, whose files are then still there.
func (s *server) resumesFromFiles(id, nonce string) {
	s.t.Helper()
	s.must("resume", id, "--files-only")
	if now := s.nonce(id); now == nonce {
		s.t.Errorf("it still returned %s", now)
	}
	if out := s.exec(id, "cat /home/user/kept"); out != "kept" {
		s.t.Errorf("its file has %q", out)
	}
	s.must("pause", id)
	s.onDisk(id)
	s.must("resume", id)
}

// resumesFrom repairs the memory of a sandbox, which then resumes.
func (s *server) resumesFrom(id, nonce, path string, whole []byte) {
	s.t.Helper()
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		s.t.Fatal(err)
	}
	s.must("resume", id)
	if now := s.nonce(id); now != nonce {
		s.t.Errorf("it returned %s, want %s", now, nonce)
	}
}
