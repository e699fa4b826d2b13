package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// newFaulty prepares a server that makes no networks ahead, so that what is left over is seen.
func newFaulty(t *testing.T) *server {
	t.Helper()
	s := newServer(t)
	s.set("BARCHAN_SPARE_NETWORKS", "0")
	return s
}

// startWithOnlooker starts a server and gives it the base image and a sandbox that must live on.
func (s *server) startWithOnlooker() onlooker {
	s.t.Helper()
	s.start()
	s.must("image", "build", "base")
	return s.onlooker()
}

// newServerOnDisk prepares a server whose directory is a disk of its own.
func newServerOnDisk(t *testing.T, size string) *server {
	t.Helper()
	var s *server
	mounted := false
	t.Cleanup(func() { // after the server's own
		if s == nil {
			return
		}
		defer func() {
			_ = os.RemoveAll(s.dir)
			_ = os.Remove(s.dir + ".img")
		}()
		_ = s.log.Close() // it lies on the disk
		if mounted {
			eventually.NoError(t, "umount", func() error { // the last process may still be on its way out
				if out, err := exec.Command("umount", s.dir).CombinedOutput(); err != nil {
					return fmt.Errorf("%w: %s", err, out)
				}
				return nil
			})
		}
	})
	s = newFaulty(t)
	s.set("BARCHAN_RESERVE_DISK", "1Gi") // the default, of which a small disk keeps a part
	image := s.dir + ".img"
	for _, c := range [][]string{
		{"truncate", "-s", size, image},
		{"mkfs.ext4", "-q", "-m", "0", image},
		{"mount", "-o", "loop", image, s.dir},
	} {
		if out, err := exec.CommandContext(t.Context(), c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v %s", c, err, out)
		}
	}
	mounted = true
	return s
}

// onlooker is a sandbox with a process that must outlive every fault.
type onlooker struct {
	s  *server
	id string
}

func (s *server) onlooker() onlooker {
	s.t.Helper()
	b := onlooker{s, s.create(s.localKey(), "base")}
	s.exec(b.id, "echo kept > /tmp/file; setsid sleep 99999 >/dev/null 2>&1 & echo $! > /tmp/pid")
	return b
}

func (b onlooker) mustLive() {
	b.s.t.Helper()
	if out := b.s.exec(b.id, "kill -0 $(cat /tmp/pid) && cat /tmp/file"); out != "kept" {
		b.s.t.Errorf("the onlooker returned %q", out)
	}
}

// tryNew creates a sandbox and removes it. It may be called by any goroutine of a test; 0 is no
// answer.
func (s *server) tryNew() (status int, text string, header http.Header) {
	s.t.Helper()
	key, err := s.readKey()
	if err != nil {
		return 0, err.Error(), nil
	}
	req, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, "http://"+s.http+"/sandboxes", strings.NewReader(`{"templateID":"base","timeout":600,"secure":true}`))
	if err != nil {
		return 0, err.Error(), nil
	}
	req.Header.Set("X-API-Key", key)
	req.Header.Set("Content-Type", "application/json")
	client := http.Client{Timeout: startTime}
	res, err := client.Do(req)
	if err != nil {
		return 0, err.Error(), nil
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body) // one read may bring half of it
	if err != nil {
		return 0, err.Error(), nil
	}
	text = string(b)
	if id := idIn(text); res.StatusCode == http.StatusCreated && id != "" {
		if out, err := s.try("kill", id); err != nil {
			s.t.Errorf("kill %s: %v\n%s", id, err, out)
		}
	}
	return res.StatusCode, text, res.Header
}

// readiness queries a server that may be between two processes; 0 is no answer.
func (s *server) readiness() (status int, text string) {
	ctx, cancel := context.WithTimeout(s.t.Context(), eventually.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.metrics+"/readyz", http.NoBody)
	if err != nil {
		s.t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = res.Body.Close() }()
	b, _ := io.ReadAll(res.Body) // cut off is no answer either
	return res.StatusCode, string(b)
}

func idIn(text string) string {
	_, rest, found := strings.Cut(text, `"sandboxID":"`)
	if !found || len(rest) < 20 {
		return ""
	}
	return rest[:20]
}

// untilRefused waits until new work is refused for a reason, and checks every report of it.
func (s *server) untilRefused(name, why string) {
	s.t.Helper()
	reason := name + ": " + why
	eventually.NoError(s.t, "it is noticed", func() error {
		if _, text := s.readiness(); !strings.Contains(text, strconv.Quote(name)) {
			return errors.New(text)
		}
		return nil
	})
	eventually.NoError(s.t, "new work is refused", func() error {
		status, text, header := s.tryNew()
		if status != http.StatusServiceUnavailable || !strings.Contains(text, reason) || header.Get("Retry-After") == "" {
			return fmt.Errorf("%d %s (Retry-After %q), want 503 with %q", status, text, header.Get("Retry-After"), reason)
		}
		return nil
	})
	if status, text := s.readiness(); status != http.StatusOK || !strings.Contains(text, `"degraded"`) {
		s.t.Errorf("readyz = %d %s, want it ready and degraded", status, text)
	}
	if out := s.must("status"); !strings.Contains(out, reason) {
		s.t.Errorf("status does not contain %q:\n%s", reason, out)
	}
	if out, err := s.try("doctor"); err == nil || !strings.Contains(out, "server: "+name) {
		s.t.Errorf("doctor does not contain %q: %v\n%s", reason, err, out)
	}
	if _, text := query(s.t, http.DefaultClient, "http://"+s.metrics+"/metrics", nil); !strings.Contains(text, "barchan_health_condition{condition=") {
		s.t.Error("no metric shows it")
	}
	if out, err := s.try("image", "pull", "registry.invalid/x:1"); err == nil || !strings.Contains(out, reason) {
		s.t.Errorf("a pull meanwhile: %v\n%s", err, out)
	}
}

// staysFull reports whether the store of objects is full although the server has tidied up in it: what was
// thrown away there is room that comes back. It has to log what it does for debugging.
func (s *server) staysFull() (full bool) {
	s.t.Helper()
	tidied := func() int {
		log, err := os.ReadFile(filepath.Join(s.dir, "log"))
		if err != nil {
			s.t.Fatal(err)
		}
		return bytes.Count(log, []byte("etcd compacted"))
	}
	enough := tidied() + 2 // each result is logged when the next begins
	eventually.True(s.t, "the server tidies up, or has room", func() bool {
		_, text := s.readiness()
		full = strings.Contains(text, strconv.Quote("object store"))
		return !full || tidied() >= enough
	})
	return full
}

// untilWell waits until new work is taken again.
func (s *server) untilWell() {
	s.t.Helper()
	eventually.NoError(s.t, "new work is taken again", func() error {
		status, text, _ := s.tryNew()
		if status != http.StatusCreated {
			return fmt.Errorf("%d %s", status, text)
		}
		return nil
	})
}

// untilInOrder waits until the machine matches the objects.
func (s *server) untilInOrder() {
	s.t.Helper()
	eventually.NoError(s.t, "all is in order", s.onlyLive)
}

// take fills the disk but for some bytes, and returns what gives the room back.
func take(t *testing.T, dir string, leave int64) (giveBack func()) {
	t.Helper()
	path := filepath.Join(dir, fmt.Sprintf("filler-%d", time.Now().UnixNano()))
	f, err := os.Create(path)
	if errors.Is(err, syscall.ENOSPC) { // not even for the name
		return func() {}
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	var size int64
	for step := int64(256 << 20); step >= 4096; {
		var disk syscall.Statfs_t
		if err := syscall.Statfs(dir, &disk); err != nil {
			t.Fatal(err)
		}
		free := int64(disk.Bavail) * disk.Bsize
		if free-leave < step {
			step /= 2
			continue
		}
		if err := syscall.Fallocate(int(f.Fd()), 0, size, step); errors.Is(err, syscall.ENOSPC) {
			step /= 2
			continue
		} else if err != nil {
			t.Fatal(err)
		}
		size += step
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	}
}

// TestFullDisk fills the disk of a server: first nearly, which it must notice, then wholly, which
// its storage does not survive. Running sandboxes continue, and the server recovers when there is space.
func TestFullDisk(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newServerOnDisk(t, "4G")
	b := s.startWithOnlooker()
	pid := s.cmd.Process.Pid
	t.Run("nearly", func(t *testing.T) {
		s := s.in(t)
		stop := again(2, func(_, _ int) {
			if status, text, _ := s.tryNew(); status != http.StatusCreated && status != http.StatusServiceUnavailable {
				t.Errorf("create while the disk fills = %d %s\n%s", status, text, s.errorsLogged())
			}
		})
		defer stop()
		giveBack := take(t, s.dir, 100<<20)
		s.untilRefused("disk", "")
		stop()
		if list := s.sandboxes(); len(list) != 1 || list[0] != b.id {
			t.Errorf("sandboxes = %v", list)
		}
		onlooker{s, b.id}.mustLive()
		giveBack()
		s.untilWell()
		s.untilInOrder()
	})
	t.Run("wholly", func(t *testing.T) {
		s := s.in(t)
		var back []func()
		eventually.NoError(t, "etcd ends", func() error {
			back = append(back, take(t, s.dir, 0)) // the reserve too, when it is given up
			change := strings.Repeat(strconv.FormatInt(time.Now().UnixNano(), 36), 10_000)
			_, _ = s.kubectl("", "annotate", "--overwrite", "sandboxes", "-A", "--all", "--request-timeout=5s", "x="+change)
			status, text := s.readiness()
			if status != http.StatusServiceUnavailable || !strings.Contains(text, `"phase":"disk"`) {
				return fmt.Errorf("readyz = %d %s", status, text)
			}
			return nil
		})
		if status, text, _ := s.tryNew(); status != http.StatusServiceUnavailable || !strings.Contains(text, "MiB are needed to start") {
			t.Errorf("create meanwhile = %d %s", status, text)
		}
		if s.cmd.Process.Pid != pid || syscall.Kill(pid, 0) != nil {
			t.Error("it is another process")
		}
		for _, f := range back {
			f()
		}
		eventually.NoError(t, "the server is back", func() error {
			if status, text := s.readiness(); status != http.StatusOK {
				return fmt.Errorf("%d %s", status, text)
			}
			return nil
		})
		onlooker{s, b.id}.mustLive()
		s.untilWell()
		s.untilInOrder()
	})
}

// TestReadOnlyDirectory makes the data directory read-only for files opened from now on.
func TestReadOnlyDirectory(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newFaulty(t)
	b := s.startWithOnlooker()
	dir := s.value("BARCHAN_DATA_DIR")
	for _, flags := range []string{"bind", "remount,ro,bind"} {
		if out, err := exec.CommandContext(t.Context(), "mount", "-o", flags, dir, dir).CombinedOutput(); err != nil {
			t.Fatalf("mount -o %s: %v %s", flags, err, out)
		}
	}
	mounted := true
	unmount := func() {
		if !mounted {
			return
		}
		mounted = false
		eventually.NoError(t, "umount "+dir, func() error { // a file there may be open
			if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
	}
	defer unmount()
	s.untilRefused("data directory", "it is mounted read-only")
	b.mustLive()
	unmount()
	s.untilWell()
	b.mustLive()
	s.untilInOrder()
}

// TestShortOfMemory keeps more memory free than the machine has. A sandbox paused in RAM resumes, for it has its
// memory already; a stored one waits.
func TestShortOfMemory(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newFaulty(t)
	s.set("BARCHAN_STORE_AFTER", "0s") // in RAM, however long the machine stands still before the resume
	b := s.startWithOnlooker()
	s.stop(syscall.SIGTERM)
	s.set("BARCHAN_RESERVE_MEMORY", "1Ti")
	s.start()
	s.untilRefused("memory", "")
	b.mustLive()
	s.must("pause", b.id)
	s.must("resume", b.id)
	b.mustLive()
	s.stop(syscall.SIGTERM)
	s.set("BARCHAN_STORE_AFTER", "1ms")
	s.start()
	s.untilRefused("memory", "")
	s.must("pause", b.id)
	s.onDisk(b.id)
	if out, err := s.try("resume", b.id); err == nil || !strings.Contains(out, "memory: ") {
		t.Errorf("resume = %v\n%s", err, out)
	}
	s.stop(syscall.SIGTERM)
	s.set("BARCHAN_RESERVE_MEMORY", "0")
	s.start()
	s.must("resume", b.id)
	b.mustLive()
	s.untilWell()
}

// TestFullStore fills etcd to its quota, by objects that have nothing to do with sandboxes.
func TestFullStore(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newFaulty(t)
	s.set("BARCHAN_ETCD_QUOTA", "16Mi")
	s.set("BARCHAN_LOG_LEVEL", "debug") // see staysFull
	b := s.startWithOnlooker()
	ends := s.create(s.localKey(), "base")
	file := filepath.Join(t.TempDir(), "big")
	if err := os.WriteFile(file, bytes.Repeat([]byte("x"), 700<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	full, taken := false, 0
	for i := 0; i < 1000 && taken < 80 && !full; i++ { // a refusal may come before the server notices why
		out, err := s.kubectl("", "create", "configmap", fmt.Sprintf("big-%d", i), "--from-file="+file)
		if err == nil {
			taken++
			continue
		}
		if !strings.Contains(out, "object store") {
			t.Fatalf("kubectl create: %v %s", err, out)
		}
		full = s.staysFull()
	}
	if !full {
		t.Fatalf("%d MiB went into a store of 16", taken*700>>10)
	}
	s.untilRefused("object store", "")
	b.mustLive()
	eventually.NoError(t, "what runs can be ended", func() error {
		if out, err := s.try("kill", ends); err != nil && !strings.Contains(out, "doesn't exist") {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	s.mustKubectl("", "delete", "configmap", "--all")
	s.untilWell()
	b.mustLive()
	s.untilInOrder()
}

// TestContainerdKilled kills containerd again and again while sandboxes are made.
func TestContainerdKilled(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newFaulty(t)
	b := s.startWithOnlooker()
	var mu sync.Mutex
	answers := map[int]int{}
	stop := again(3, func(_, _ int) {
		status, text, _ := s.tryNew()
		mu.Lock()
		answers[status]++
		mu.Unlock()
		if status != http.StatusCreated && status != http.StatusServiceUnavailable {
			t.Errorf("create while containerd is killed = %d %s", status, text)
		}
	})
	defer stop()
	for range 4 {
		pid, err := s.containerd()
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		b.mustLive() // without containerd, or with the next one
		mu.Lock()
		before := answers[http.StatusCreated]
		mu.Unlock()
		eventually.NoError(t, "containerd is back", func() error {
			now, err := s.containerd()
			if err != nil || now == pid || syscall.Kill(now, 0) != nil {
				return fmt.Errorf("process %d (%w)", now, err)
			}
			return nil
		})
		eventually.NoError(t, "a create succeeds before the next kill", func() error {
			mu.Lock()
			defer mu.Unlock()
			if answers[http.StatusCreated] == before {
				return fmt.Errorf("answers: %v", answers)
			}
			return nil
		})
	}
	stop()
	t.Logf("answers to creates: %v", answers)
	s.untilWell()
	b.mustLive()
	s.untilInOrder()
}

// containerd is the process ID of the server's. Its file may just be written.
func (s *server) containerd() (pid int, err error) {
	b, err := os.ReadFile(filepath.Join(s.value("BARCHAN_DATA_DIR"), "containerd", "containerd.pid"))
	if err != nil {
		return 0, err
	}
	var file struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal(b, &file); err != nil || file.PID == 0 {
		return 0, fmt.Errorf("pid file of containerd: %q: %w", b, err)
	}
	return file.PID, nil
}
