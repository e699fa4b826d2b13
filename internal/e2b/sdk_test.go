package e2b

import (
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/envd"
	"github.com/barchan-dev/barchan/internal/sandbox"
)

// TestUnmodifiedSDK drives E2B's own SDK from npm: the newest one that we know, and one that
// uses the routes of v1.
func TestUnmodifiedSDK(t *testing.T) {
	for _, version := range []string{"2.51.0", "2.45.0"} {
		t.Run(version, func(t *testing.T) {
			module := sdk(t, version)
			f := newFixture(t)
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
	writeError(w, http.StatusBadGateway, "The sandbox was not found")
}

// sdk returns the path of the SDK's module, from the cache of builds or from npm.
func sdk(t *testing.T, version string) string {
	t.Helper()
	for _, tool := range []string{"node", "npm"} {
		if _, err := exec.LookPath(tool); err != nil {
			if os.Getenv("CI") == "true" {
				t.Fatalf("%s is missing, and CI must run this test", tool)
			}
			t.Skipf("SKIPPED: %s is missing, so the real SDK is NOT tested", tool)
		}
	}
	cache := os.Getenv("BARCHAN_CACHE")
	if cache == "" {
		cache = "/var/cache/barchan"
	}
	home := filepath.Join(cache, "npm", "e2b-"+version)
	module := filepath.Join("node_modules", "e2b", "dist", "index.mjs")
	if _, err := os.Stat(filepath.Join(home, module)); err == nil {
		return filepath.Join(home, module)
	}
	// Installed aside and moved in one step, so that a test beside this one never sees a half.
	if err := os.MkdirAll(filepath.Dir(home), 0o755); err != nil {
		t.Fatal(err)
	}
	aside, err := os.MkdirTemp(filepath.Dir(home), ".install-") //nolint:usetesting // must lie on the cache's file system
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(aside) })
	cmd := exec.CommandContext(t.Context(), "npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", aside, "e2b@"+version)
	if out, err := cmd.CombinedOutput(); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("npm install e2b@%s: %v\n%s", version, err, out)
		}
		t.Skipf("SKIPPED: npm install e2b@%s: %v, so the real SDK is NOT tested\n%s", version, err, out)
	}
	if err := os.Rename(aside, home); err != nil {
		return filepath.Join(aside, module)
	}
	return filepath.Join(home, module)
}
