package e2e

import (
	"context"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/tutorial"
)

// testRecipes runs the tutorials and recipes of docs that need the base image alone.
func testRecipes(t *testing.T, s *server) {
	installSDK(t)
	for _, page := range []string{"recipes", "tutorial-program", "tutorial-evaluation", "tutorial-forks"} {
		t.Run(page, func(t *testing.T) { s.in(t).follow(t, page) })
	}
	// What comes before and after needs Kubernetes; test/kube/cluster runs all of it.
	t.Run("tutorial-cluster", func(t *testing.T) {
		s.in(t).follow(t, "tutorial-cluster", "Warm sandboxes", "A claim by kubectl")
		s.mustKubectl("", "delete", "sandboxwarmpool", "warm")
	})
}

// TestBrowserAgent runs the tutorial whose template has a browser, from Debian's packages.
func TestBrowserAgent(t *testing.T) {
	t.Parallel()
	skipInFastBut(t, 0)
	installSDK(t)
	s := newServer(t)
	s.set("BARCHAN_STORE_AFTER", "10ms")
	s.set("BARCHAN_REACHABLE", mirrors(t))
	s.start()
	s.must("image", "build", "base")
	s.in(t).follow(t, "tutorial-browser")
	s.untilNothingWrong()
}

// mirrors are the addresses of this machine's package mirrors, which may be private. The base image has the same mirrors.
func mirrors(t *testing.T) string {
	t.Helper()
	sites, err := exec.CommandContext(t.Context(), "apt-get", "indextargets", "--format", "$(SITE)", "Origin: Debian").Output()
	if err != nil {
		t.Skipf("SKIPPED: this machine has no package mirror of Debian: %v", err)
	}
	var ranges []string
	for site := range strings.FieldsSeq(string(sites)) {
		u, err := url.Parse(site)
		if err != nil {
			t.Fatal(err)
		}
		addrs, err := net.DefaultResolver.LookupNetIP(t.Context(), "ip4", u.Hostname())
		if err != nil {
			t.Skipf("SKIPPED: this machine's package mirror has no address: %v", err)
		}
		for _, a := range addrs {
			ranges = append(ranges, a.Unmap().String()+"/32")
		}
	}
	slices.Sort(ranges)
	return strings.Join(slices.Compact(ranges), ",")
}

// follow does what a page of docs says, as a user of the server.
func (s *server) follow(t *testing.T, page string, sections ...string) {
	t.Helper()
	env := append(s.clientEnv(), "PATH="+filepath.Dir(programs.barchan)+":"+filepath.Dir(kubectl(t))+":"+os.Getenv("PATH"), "BARCHAN_API_URL=http://"+s.http, "BARCHAN_API_KEY="+s.localKey())
	tutorial.Follow(t, "../../docs/"+page+".md", "sdk/node_modules", func(ctx context.Context, name string, args ...string) *exec.Cmd {
		cmd := exec.CommandContext(ctx, name, args...)
		cmd.Env = env
		return cmd
	}, sections...)
}
