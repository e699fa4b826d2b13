package e2e

import (
	"os"
	"strconv"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestFeatures tests what a template may set, and what operators and clients see of it, on one
// server with the operator's own certificate and domain.
func TestFeatures(t *testing.T) {
	t.Parallel()
	s := newServer(t)
	cert, key, roots := certificateFiles(t, s.dir)
	for _, file := range []string{cert, key} {
		if err := os.Chmod(file, 0o644); err != nil { //nolint:gosec // a server's process without root reads it
			t.Fatal(err)
		}
	}
	s.set("BARCHAN_TLS_CERT", cert)
	s.set("BARCHAN_TLS_KEY", key)
	s.set("BARCHAN_DOMAINS", testDomain+",barchan.localhost")
	s.set("BARCHAN_STORE_AFTER", "2s")
	s.set("BARCHAN_SANDBOX_PIDS", strconv.Itoa(pidsLimit))
	s.start()
	s.must("image", "build", "base")
	for name, test := range map[string]func(*testing.T, *server){
		"runtimes": testRuntimes, "service": testService, "restart policy": testRestartPolicy, "refusals": testRefusals, "tenancy": testTenancy,
		"images":          func(t *testing.T, s *server) { testImages(t, s, helloProgram(t)) },
		"gateway":         func(t *testing.T, s *server) { testGateway(t, s, roots) },
		"idle":            testIdle,
		"parallel":        testParallel,
		"Go client":       testGoClient,
		"recipes":         testRecipes,
		"disks":           testDisks,
		"pod objects":     testPodObjects,
		"init containers": testInitContainers,
		"sidecars":        testSidecars,
		"ssh":             testSSH,
		"escapes":         testEscapes,
		"runtime API":     testRuntimeAPI,
		"network policy":  testNetworkPolicy,
		"events":          testEvents,
		"dashboard":       testDashboard,
		"observability":   testObservability,
	} {
		t.Run(name, func(t *testing.T) { test(t, s.in(t)) })
	}
	eventually.NoError(t, "only live resources remain", s.onlyLive)
}
