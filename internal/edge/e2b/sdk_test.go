package e2b

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/edge/e2b/request"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/npm"
)

// TestUnmodifiedSDK drives E2B's own SDK from npm: the newest one that we know, and one that
// uses the routes of v1.
func TestUnmodifiedSDK(t *testing.T) {
	for _, version := range []string{"2.51.0", "2.45.0"} {
		t.Run(version, func(t *testing.T) {
			module := filepath.Join(npm.Package(t, "e2b@"+version), "node_modules", "e2b", "dist", "index.mjs")
			f := newFixture(t, func(c *Config) { c.Domain = "sandboxes.example:7743" })
			health := httptest.NewServer(http.HandlerFunc(f.health))
			t.Cleanup(health.Close)
			cmd := exec.CommandContext(t.Context(), "node", "testdata/sdk.mjs", module)
			cmd.Env = append(os.Environ(), "E2B_API_KEY="+f.key, "OTHER_API_KEY="+f.other, "E2B_API_URL="+f.URL, "E2B_SANDBOX_URL="+health.URL)
			if out, err := cmd.CombinedOutput(); err != nil || !strings.HasSuffix(string(out), "ok\n") {
				t.Errorf("the SDK: %v\n%s", err, out)
			}
		})
	}
}

// health answers as the gateway would, by the route table that the manager feeds.
func (f *fixture) health(w http.ResponseWriter, r *http.Request) {
	if e, ok := f.routes.Lookup(sandbox.ID(r.Header.Get(envd.HeaderSandboxID))); ok && e.Reachable() {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	request.WriteError(w, http.StatusBadGateway, "The sandbox was not found")
}
