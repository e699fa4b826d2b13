package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// soakFor is how long TestSoak runs.
var soakFor = flag.Duration("soak", 20*time.Second, "how long TestSoak runs")

const (
	soakWorkers = 3
	soakMost    = 3 // sandboxes of one worker
	// soakPatience bounds how long a client retries one request. Both the server and containerd
	// may be away meanwhile, more than once.
	soakPatience = eventually.Patience
)

// held is a sandbox of one worker.
type held struct {
	subject
	secret string
	token  string // of its agent
	claim  bool   // it belongs to a SandboxClaim
	paused bool
}

// soak is a fixture in which much happens at once.
type soak struct {
	*fixture

	mu     sync.Mutex
	live   map[string]*held // +checklocks:mu
	counts map[string]int   // +checklocks:mu
}

// TestSoak has clients do what they like while the server and containerd are killed again and again. No client
// may lose a sandbox, or read a file of another's; in the end the audit must find nothing.
//
// What each worker does and when something is killed follows from the seed; how these fall
// together does not.
func TestSoak(t *testing.T) {
	skipInFast(t)
	w := newFixture(t)
	s := &soak{fixture: w, live: map[string]*held{}, counts: map[string]int{}}
	random := dice(t)
	before := w.bystanders()
	var errs []error
	var mu sync.Mutex
	ctx, end := context.WithTimeout(t.Context(), *soakFor)
	var working sync.WaitGroup
	defer working.Wait() // also where the havoc fails
	defer end()
	run := func(name string, f func(context.Context, *rand.Rand) error) {
		own := rand.New(rand.NewPCG(random.Uint64(), random.Uint64()))
		working.Go(func() {
			if err := f(ctx, own); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("%s: %w", name, err))
				end()
			}
		})
	}
	for i := range soakWorkers {
		run(fmt.Sprintf("worker %d", i), func(ctx context.Context, r *rand.Rand) error { return s.work(ctx, r, i) })
	}
	run("prober", s.probe)
	s.havoc(ctx, random)
	working.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatalf("%v\n%s", err, s.tail())
	}
	s.judge()
	w.same(before)
	s.finish()
	w.resumeBystanders()
}

// errForeign is what must never be, so that a retry does not clear it.
var errForeign = errors.New("this is another's")

// persist retries until it succeeds.
func persist(ctx context.Context, what string, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), soakPatience) // what was begun is ended
	defer cancel()
	for {
		err := try(ctx)
		if err == nil || errors.Is(err, errForeign) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: not within %v: %w", what, soakPatience, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (s *soak) count(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[what]++
}

// work is one client's life.
func (s *soak) work(ctx context.Context, r *rand.Rand, worker int) error {
	var mine []*held
	for n := 0; ctx.Err() == nil; n++ {
		var err error
		dice, at := r.IntN(100), r.IntN(soakMost)
		var h *held
		if at < len(mine) {
			h = mine[at]
		}
		switch {
		case h == nil:
			if h, err = s.make(ctx, dice, fmt.Sprintf("soak-%d-%d", worker, n)); err == nil {
				mine = append(mine, h)
			}
		case dice < 30:
			err = s.command(ctx, h)
		case dice < 60:
			err = s.sleepOrWake(ctx, h)
		case dice < 85:
			err = s.look(ctx, h)
		default:
			err = s.end(ctx, h)
			mine = slices.DeleteFunc(mine, func(x *held) bool { return x == h })
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// make gets a sandbox in one of the ways there are, and leaves a secret in it.
func (s *soak) make(ctx context.Context, dice int, name string) (*held, error) {
	h := &held{subject: subject{name: name}, secret: "secret of " + name}
	way, do := "warm create", create("warm")
	switch {
	case dice < 30:
		way, do = "cold create", create("cold")
	case dice < 55:
		way, do, h.claim = "claim object", claimOf("warm-pool"), true
	}
	if err := persist(ctx, way, func(ctx context.Context) error { return do(ctx, s.fixture, &h.subject) }); err != nil {
		return nil, err
	}
	if err := persist(ctx, "token of "+h.id, func(ctx context.Context) error {
		var detail struct{ EnvdAccessToken string }
		_, err := s.send(ctx, http.MethodGet, "/sandboxes/"+h.id, "", nil, &detail)
		h.token = detail.EnvdAccessToken
		return err
	}); err != nil {
		return nil, err
	}
	if err := persist(ctx, "write the secret of "+h.id, func(ctx context.Context) error {
		_, err := s.file(ctx, http.MethodPost, h, h.secret)
		return err
	}); err != nil {
		return nil, err
	}
	s.count(way)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live[h.id] = h
	return h, nil
}

// file reads or writes the file with a sandbox's secret, through the gateway.
func (s *soak) file(ctx context.Context, method string, h *held, content string) (string, error) {
	url := "http://" + s.http + "/files?username=user&path=/home/user/secret"
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(content))
	if err != nil {
		return "", err
	}
	req.Host = fmt.Sprintf("%d-%s.barchan.localhost", envd.Port, h.id)
	req.Header.Set("Content-Type", "application/octet-stream")
	req.Header.Set("X-Access-Token", h.token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s of %s: %d %s", method, url, h.id, resp.StatusCode, b)
	}
	return string(b), err
}

// look verifies that a sandbox has its secret. A worker's own running one must respond.
func (s *soak) look(ctx context.Context, h *held) error {
	if h.paused {
		return nil
	}
	s.count("read")
	return persist(ctx, "read the secret of "+h.id, func(ctx context.Context) error {
		got, err := s.file(ctx, http.MethodGet, h, "")
		if err == nil && got != h.secret {
			return fmt.Errorf("%w: sandbox %s of %q has the secret %q", errForeign, h.id, h.name, got)
		}
		return err
	})
}

// command runs a command in a sandbox.
func (s *soak) command(ctx context.Context, h *held) error {
	if h.paused {
		return nil
	}
	s.count("command")
	return persist(ctx, "command in "+h.id, func(context.Context) error {
		out, err := s.stdout("exec", h.id, "--", "cat", "/home/user/secret") //nolint:contextcheck // it has a time of its own
		if err == nil && out != h.secret {
			return fmt.Errorf("%w: a command in sandbox %s of %q returned %q", errForeign, h.id, h.name, out)
		}
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
}

func (s *soak) sleepOrWake(ctx context.Context, h *held) error {
	what, do := "pause", pauseSubject
	if h.paused {
		what, do = "resume", resumeSubject
	}
	s.count(what)
	err := persist(ctx, what+" "+h.id, func(ctx context.Context) error { return do(ctx, s.fixture, &h.subject) })
	s.mu.Lock()
	h.paused = !h.paused
	s.mu.Unlock()
	return err
}

func (s *soak) end(ctx context.Context, h *held) error {
	s.count("kill")
	s.mu.Lock()
	delete(s.live, h.id)
	s.mu.Unlock()
	return persist(ctx, "kill "+h.id, func(ctx context.Context) error {
		if h.claim {
			return deleteClaim(ctx, s.fixture, &h.subject)
		}
		return killOf(ctx, s.fixture, &h.subject)
	})
}

// probe reads any sandbox's secret, at any time: what it gets, if it gets something, must be that one's.
func (s *soak) probe(ctx context.Context, r *rand.Rand) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		h := s.any(r)
		if h == nil {
			continue
		}
		short, cancel := context.WithTimeout(ctx, time.Second)
		got, err := s.file(short, http.MethodGet, h, "")
		cancel()
		if err == nil {
			s.count("probe")
			if got != h.secret {
				return fmt.Errorf("sandbox %s of %q has the secret %q", h.id, h.name, got)
			}
		}
	}
}

func (s *soak) any(r *rand.Rand) *held {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := r.IntN(soakWorkers * soakMost)
	for _, h := range s.live {
		if n--; n < 0 {
			return h
		}
	}
	return nil
}

// havoc kills the server, or containerd, until time is over. It is the test's own goroutine.
func (s *soak) havoc(ctx context.Context, r *rand.Rand) {
	s.t.Helper()
	for {
		pause := time.Duration(500+r.IntN(3000)) * time.Millisecond
		both, server := r.IntN(5) == 0, r.IntN(3) > 0
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		if both || !server {
			s.killContainerd()
			s.count("death of containerd")
		}
		if both || server {
			s.stop(syscall.SIGKILL)
			s.start() //nolint:contextcheck // it outlives the havoc
			s.count("death of the server")
		}
	}
}

// killContainerd kills the containerd of this server, if it runs.
func (s *soak) killContainerd() {
	s.t.Helper()
	found, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		s.t.Fatal(err)
	}
	for _, file := range found {
		b, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(b), "containerd\x00--config\x00"+s.dir+"/") {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended already
		}
	}
}

// judge checks that each client has exactly the sandboxes that it expects.
func (s *soak) judge() {
	s.t.Helper()
	s.mu.Lock()
	s.t.Logf("done: %v", s.counts)
	all := slices.Collect(maps.Values(s.live))
	s.mu.Unlock()
	s.calm()
	ids := s.subjects()
	for _, h := range all {
		if !slices.Contains(ids, h.id) {
			s.t.Errorf("the sandbox %s of %q is lost", h.id, h.name)
			continue
		}
		if h.paused {
			s.need(s.sleepOrWake(s.t.Context(), h))
		}
		s.need(s.look(s.t.Context(), h))
	}
	eventually.NoError(s.t, "there is no extra sandbox", func() error { // that of a claim goes a little after it
		for _, x := range s.boxes() {
			id := idOf(&x)
			ours := isMember(&x) || id == s.running || id == s.paused || id == s.claimed
			if !ours && !slices.ContainsFunc(all, func(h *held) bool { return h.id == id }) {
				return fmt.Errorf("sandbox %s has no owner: %+v", id, x.ObjectMeta)
			}
		}
		return nil
	})
}

// finish removes all sandboxes but bystanders and members.
func (s *soak) finish() {
	s.t.Helper()
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.live))
	s.mu.Unlock()
	for _, h := range all {
		s.need(s.end(s.t.Context(), h))
		s.gone(h.id)
	}
	s.calm()
	s.clean()
}
