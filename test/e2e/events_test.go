package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// testEvents checks what operators see of a sandbox's life, and that a webhook cannot reach the server's own services. Deliveries
// are tested by the crash matrix.
func testEvents(t *testing.T, s *server) {
	id := s.create(s.localKey(), "base")
	s.call(s.localKey(), "POST", "/sandboxes/"+id+"/timeout", map[string]any{"timeout": 1200})
	s.call(s.localKey(), "POST", "/sandboxes/"+id+"/pause", nil)
	s.call(s.localKey(), "POST", "/sandboxes/"+id+"/connect", map[string]any{"timeout": 600})
	s.call(s.localKey(), "DELETE", "/sandboxes/"+id, nil)
	eventually.NoError(t, "the events are listed", func() error {
		var list []struct{ Type string }
		if err := json.Unmarshal([]byte(s.must("events", id, "--json")), &list); err != nil {
			return err
		}
		var types []string
		for _, e := range list {
			types = append(types, strings.TrimPrefix(e.Type, "sandbox.lifecycle."))
		}
		if got := strings.Join(types, " "); got != "created updated paused resumed killed" {
			return fmt.Errorf("events are %s", got)
		}
		return nil
	})
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("s3cret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, address := range []string{"127.0.0.1", "[::1]", "169.254.169.254", "10.0.0.1"} {
		if out, err := s.try("webhook", "create", "x", "http://"+address+"/", "--secret-file", secret); err == nil || !strings.Contains(out, "webhookAllow") {
			t.Errorf("a webhook to %s: %v %s", address, err, out)
		}
	}
	hook := strings.TrimSpace(s.must("webhook", "create", "named", "http://localhost:"+s.http[strings.LastIndex(s.http, ":")+1:]+"/", "--secret-file", secret))
	s.call(s.localKey(), "DELETE", "/sandboxes/"+s.create(s.localKey(), "base"), nil)
	eventually.NoError(t, "a name of the loopback is refused", func() error {
		if out := s.must("webhook", "show", "named"); !strings.Contains(out, hook) || !strings.Contains(out, "webhookAllow") || !strings.Contains(out, "failing") {
			return fmt.Errorf("the webhook is %s", out)
		}
		return nil
	})
	s.must("webhook", "set", "named", "--disable")
	if out := s.must("webhook", "ls"); !strings.Contains(out, "disabled") || strings.Contains(out, "s3cret") {
		t.Errorf("the webhooks are %s", out)
	}
	s.must("webhook", "rm", "named")
}
