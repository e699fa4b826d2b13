package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// newKey makes a key by the command line.
func (s *server) newKey(args ...string) string {
	s.t.Helper()
	var made struct{ Key string }
	s.read(&made, append([]string{"key", "create"}, args...)...)
	if !strings.HasPrefix(made.Key, "e2b_") {
		s.t.Fatalf("key create gave %q", made.Key)
	}
	return made.Key
}

// shortKey makes a key that was good, and has seconds to live.
func (s *server) shortKey(args ...string) string {
	s.t.Helper()
	for life := 2 * time.Second; ; life *= 2 {
		made := time.Now()
		key := s.newKey(append(args, "--expires", life.String())...)
		status, body := s.call(key, http.MethodGet, "/v2/sandboxes", nil)
		if time.Since(made) >= life-time.Second { // its end is kept in whole seconds
			continue // it may have ended meanwhile: the machine stood still
		}
		if status != http.StatusOK {
			s.t.Errorf("a key that has %v to live = %d %s", life, status, body)
		}
		return key
	}
}

// listed are the IDs that a key's owner sees.
func (s *server) listed(key string) (ids []string) {
	s.t.Helper()
	status, body := s.call(key, http.MethodGet, "/v2/sandboxes", nil)
	var list []struct{ SandboxID string }
	if err := json.Unmarshal([]byte(body), &list); err != nil || status != http.StatusOK {
		s.t.Fatalf("GET /v2/sandboxes = %d %s", status, body)
	}
	for _, x := range list {
		ids = append(ids, x.SandboxID)
	}
	return ids
}

// testTenancy verifies the isolation of two teams.
func testTenancy(t *testing.T, s *server) {
	ann, bob := s.newKey("ann", "--namespace", "team-a"), s.newKey("bob", "--namespace", "team-b")
	its := s.create(ann, "base")
	t.Cleanup(func() { s.call(ann, http.MethodDelete, "/sandboxes/"+its, nil) })
	if got := s.listed(ann); !slices.Equal(got, []string{its}) {
		t.Errorf("its owner lists %v, want %s", got, its)
	}
	if got := s.listed(bob); len(got) != 0 {
		t.Errorf("another team lists %v", got)
	}
	if slices.Contains(s.sandboxes(), its) {
		t.Errorf("the command line's key, of the default namespace, lists %s", its)
	}
	for _, r := range []struct {
		method, path string
		body         any
	}{
		{http.MethodGet, "", nil},
		{http.MethodDelete, "", nil},
		{http.MethodPost, "/timeout", map[string]int{"timeout": 1}},
		{http.MethodPost, "/refreshes", map[string]int{"duration": 60}},
		{http.MethodPost, "/pause", nil},
		{http.MethodPost, "/resume", map[string]int{"timeout": 60}},
		{http.MethodPost, "/connect", map[string]int{"timeout": 60}},
		{http.MethodGet, "/metrics", nil},
		{http.MethodGet, "/logs", nil},
	} {
		status, body := s.call(bob, r.method, "/sandboxes/"+its+r.path, r.body)
		if status != http.StatusNotFound || strings.Contains(body, "team-a") {
			t.Errorf("%s %s by another team = %d %s, want 404", r.method, r.path, status, body)
		}
	}
	if status, _ := s.call(ann, http.MethodGet, "/sandboxes/"+its, nil); status != http.StatusOK {
		t.Errorf("after all that its owner gets %d", status)
	}
	out, err := s.kubectl("", "get", "sandboxes", "-n", "team-b")
	if err != nil || strings.Contains(out, "base") {
		t.Errorf("namespace team-b has %s (%v)", out, err)
	}
	if out := s.must("key", "ls", "-A"); !strings.Contains(out, "team-a") || strings.Contains(out, ann) {
		t.Errorf("key ls -A prints no namespace, or a whole key:\n%s", out)
	}
	testKeyScope(t, s, its)
	testKeyEnds(t, s, bob)
}

// testKeyScope has a key use sandboxes and change no template, and finds both in the audit log.
func testKeyScope(t *testing.T, s *server, its string) {
	ci := s.newKey("ci", "--namespace", "team-a", "--scope", "use")
	if got := s.listed(ci); !slices.Contains(got, its) {
		t.Errorf("a key of scope use lists %v", got)
	}
	if status, body := s.call(ci, http.MethodPost, "/v3/templates", map[string]string{"name": "x"}); status != http.StatusForbidden || !strings.Contains(body, "needs manage") {
		t.Errorf("POST /v3/templates with scope use = %d %s", status, body)
	}
	if status, body := s.call(ci, http.MethodPost, "/sandboxes/"+its+"/timeout", map[string]int{"timeout": 300}); status != http.StatusNoContent {
		t.Errorf("POST timeout with scope use = %d %s", status, body)
	}
	if out := s.must("key", "ls", "--namespace", "team-a"); !strings.Contains(out, "use") {
		t.Errorf("key ls has no scope:\n%s", out)
	}
	eventually.NoError(t, "the audit log has the actions", func() error {
		out := s.must("audit", "--since", "10m", "--sandbox", its)
		for _, want := range []string{"key ann", "key ci", "create sandboxes", "update sandboxes", "ok (204)"} {
			if !strings.Contains(out, want) {
				return fmt.Errorf("no %q in\n%s", want, out)
			}
		}
		if strings.Contains(out, ci) {
			t.Errorf("the audit log has a key:\n%s", out)
		}
		return nil
	})
}

// testKeyEnds verifies that revoked and expired keys are rejected like unknown ones.
func testKeyEnds(t *testing.T, s *server, bob string) {
	short := s.shortKey("--namespace", "team-b")
	s.must("key", "rm", "bob", "--namespace", "team-b")
	for what, key := range map[string]string{"revoked": bob, "expired": short} {
		eventually.NoError(t, what+" key", func() error {
			if status, body := s.call(key, http.MethodGet, "/v2/sandboxes", nil); status != http.StatusUnauthorized || !strings.Contains(body, `"code":401`) {
				return fmt.Errorf("%d %s", status, body)
			}
			return nil
		})
	}
	if status, _ := s.call("", http.MethodGet, "/v2/sandboxes", nil); status != http.StatusUnauthorized {
		t.Errorf("no key = %d", status)
	}
}
