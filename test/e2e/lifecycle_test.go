package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestKilledInTheMiddle kills the server while it makes sandboxes, at moments that a seed
// chooses. The next start finishes or undoes each interrupted operation, and nothing is left
// once all are removed.
func TestKilledInTheMiddle(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newServer(t)
	s.start()
	s.must("image", "build", "base")
	for seed := range uint64(4) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) { testKilled(t, s.in(t), seed) })
	}
}

const createsAtOnce = 6

func testKilled(t *testing.T, s *server, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 7)) //nolint:gosec // chosen to be repeated
	key := s.localKey()
	var running sync.WaitGroup
	var mu sync.Mutex
	answered := map[string]bool{}
	for range createsAtOnce {
		running.Go(func() {
			id, err := s.tryCreate(t.Context(), key)
			if err == nil {
				mu.Lock()
				defer mu.Unlock()
				answered[id] = true
			}
		})
	}
	pause := time.Duration(random.IntN(900)) * time.Millisecond
	select {
	case <-time.After(pause):
	case <-t.Context().Done():
	}
	s.stop(syscall.SIGKILL)
	running.Wait()
	s.start()
	eventually.NoError(t, fmt.Sprintf("after a kill %v into %d creates all is in order", pause, createsAtOnce), func() error {
		out, err := s.kubectl("", "get", "sandboxes", "-A", "-o", `jsonpath={range .items[*]}{.metadata.name} {.status.barchan.phase}{"\n"}{end}`)
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		for line := range strings.Lines(out) { // a new one has no phase yet
			if f := strings.Fields(line); len(f) != 2 || strings.HasSuffix(strings.TrimSuffix(f[1], "Running"), "ing") {
				return fmt.Errorf("phases:\n%s", out)
			}
		}
		return s.onlyLive()
	})
	have := s.listed(key)
	if len(have) > createsAtOnce {
		t.Errorf("%d creates made %d sandboxes: %v", createsAtOnce, len(have), have)
	}
	for id := range answered { // a client that got the ID finds the sandbox
		if out, err := s.try("exec", id, "--", "echo", "there"); err != nil || out != "there\n" {
			t.Errorf("sandbox %s, whose create was answered: %v\n%s", id, err, out)
		}
	}
	addresses := strings.Fields(s.mustKubectl("", "get", "sandboxes", "-A", "-o", "jsonpath={.items[*].status.podIPs[0]}"))
	seen := map[string]bool{}
	for _, a := range addresses {
		if seen[a] {
			t.Errorf("two sandboxes have the address %s: %v", a, addresses)
		}
		seen[a] = true
	}
	for _, id := range have {
		s.must("kill", id)
	}
	eventually.NoError(t, "nothing is left", func() error {
		if out, err := s.kubectl("", "get", "sandboxes", "-A", "-o", "name"); err != nil || strings.TrimSpace(out) != "" {
			return fmt.Errorf("%s %w", out, err)
		}
		return s.onlyLive()
	})
	t.Logf("killed after %v: %d of %d creates were answered, %d sandboxes found", pause, len(answered), createsAtOnce, len(have))
}

// tryCreate is a create that may be cut off.
func (s *server) tryCreate(ctx context.Context, key string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, eventually.Patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.http+"/sandboxes", strings.NewReader(`{"templateID":"base","timeout":600}`))
	if err != nil {
		return "", err
	}
	req.Header.Set("X-API-Key", key)
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	var made struct{ SandboxID string }
	if err := json.NewDecoder(resp.Body).Decode(&made); err != nil || resp.StatusCode != http.StatusCreated {
		return "", fmt.Errorf("%s %w", resp.Status, err)
	}
	return made.SandboxID, nil
}

// TestUpAndDown is what people do with a server in the background.
func TestUpAndDown(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newServer(t)
	empty := filepath.Join(s.dir, "nothing")
	for range 2 {
		if out, err := s.try("down", "--all", "--yes", "--data-dir", empty); err != nil {
			t.Errorf("down --all on nothing: %v\n%s", err, out)
		}
		if out, err := s.try("down", "--data-dir", empty); err != nil || !strings.Contains(out, "not running") {
			t.Errorf("down on nothing: %v\n%s", err, out)
		}
	}
	if _, err := os.Stat(empty); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("down made %s (%v)", empty, err)
	}
	if out, err := s.try("ls"); err == nil || !strings.Contains(out, "barchan up") {
		t.Errorf("ls without a server = %v, want a text how to start one\n%s", err, out)
	}
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		testStopDuringBoot(t, s, sig)
	}
	if out := s.must("up", "--detach"); !strings.Contains(out, "is up") || !strings.Contains(out, s.http) {
		t.Errorf("up -d:\n%s", out)
	}
	if out := s.must("up", "-d"); !strings.Contains(out, "already up") {
		t.Errorf("up -d again:\n%s", out)
	}
	s.must("image", "build", "base")
	id := strings.TrimSpace(s.must("run", "--keep"))
	if out := s.must("down"); !strings.Contains(out, "1 sandbox stays") {
		t.Errorf("down:\n%s", out)
	}
	if out := s.must("down"); !strings.Contains(out, "not running") {
		t.Errorf("down again:\n%s", out)
	}
	s.must("up", "-d")
	if out := s.data("exec", id, "--", "echo", "adopted"); out != "adopted\n" {
		t.Errorf("after down and up: %q", out)
	}
	if out, err := s.try("down", "--all"); err == nil || !strings.Contains(out, "--yes") {
		t.Errorf("down --all without a terminal = %v\n%s", err, out)
	}
	s.must("down")
	// All is removed though no server runs.
	if out := s.must("down", "--all", "--yes"); !strings.Contains(out, "removed sandbox") {
		t.Errorf("down --all of a server that is down:\n%s", out)
	}
	s.checkNothingLeft()
	if _, err := os.Stat(s.value("BARCHAN_DATA_DIR")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("down --all left its directory (%v)", err)
	}
}

// testStopDuringBoot stops a server at its first sign of life; it ends well.
func testStopDuringBoot(t *testing.T, s *server, sig syscall.Signal) {
	t.Helper()
	s.begin()
	eventually.NoError(t, "the server answers", func() error {
		status, text := s.readiness()
		if status == 0 {
			return errors.New(text)
		}
		var body struct{ Phase string }
		if err := json.Unmarshal([]byte(text), &body); err != nil || body.Phase == "" {
			t.Errorf("/readyz during the boot = %d %s %v", status, text, err)
		}
		return nil
	})
	if err := s.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-s.done:
		s.cmd = nil
		_ = s.log.Close()
		if err != nil && exitCode(err) != 130 {
			t.Errorf("%v during the boot ended it with %v\n%s", sig, err, s.tail())
		}
	case <-time.After(stopTime):
		t.Fatalf("%v during the boot did not end it\n%s", sig, s.tail())
	}
}

// TestWithoutRoot verifies that each command that needs root returns what to do.
func TestWithoutRoot(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: becoming nobody needs root")
	}
	dir, err := os.MkdirTemp("/tmp", "be-") //nolint:usetesting // others must be able to look into it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // it holds no secrets
		t.Fatal(err)
	}
	own := filepath.Join(dir, "barchan")
	// Not written by this process: a program that another test starts meanwhile would hold it open, as "text file busy".
	if out, err := exec.CommandContext(t.Context(), "install", "-m", "0755", programs.barchan, own).CombinedOutput(); err != nil {
		t.Fatalf("install: %v\n%s", err, out)
	}
	closed := filepath.Join(dir, "closed")
	if err := os.MkdirAll(filepath.Join(closed, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, give := range map[string]struct {
		args []string
		want []string
	}{
		"up":                      {[]string{"up", "--data-dir", filepath.Join(dir, "d")}, []string{"root", "sudo"}},
		"doctor":                  {[]string{"doctor", "--data-dir", filepath.Join(dir, "d")}, []string{"root", "failed", "sudo"}},
		"up of root's directory":  {[]string{"up", "--data-dir", closed}, []string{"root"}},
		"ls of root's directory":  {[]string{"ls", "--data-dir", closed}, []string{"root"}},
		"doctor of root's server": {[]string{"doctor", "--data-dir", closed}, []string{"root"}},
		"down of root's server":   {[]string{"down", "--data-dir", closed}, []string{"root"}},
		"down --all of it":        {[]string{"down", "--all", "--yes", "--data-dir", closed}, []string{"root"}},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
		defer cancel()
		cmd := exec.CommandContext(ctx, own, give.args...)
		cmd.Dir, cmd.Env = "/", []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/nonexistent"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		out, err := cmd.CombinedOutput()
		if exitCode(err) != 1 {
			t.Errorf("%s: %v, want exit code 1\n%s", name, err, out)
		}
		for _, want := range give.want {
			if !strings.Contains(string(out), want) {
				t.Errorf("%s does not contain %q:\n%s", name, want, out)
			}
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "d")); err == nil {
		t.Error("a refused up made the data directory")
	}
}
