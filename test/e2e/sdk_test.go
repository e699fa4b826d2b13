package e2e

import "testing"

// TestClients drives one server with what is written for E2B, as npm has it. The suites are in
// folder sdk; what is there beside these belongs to the tests of its subject.
func TestClients(t *testing.T) {
	t.Parallel()
	installSDK(t)
	s := newServer(t)
	s.start()
	s.must("image", "build", "base")
	for _, suite := range []string{"base", "behaviour", "methods", "mcp", "cli", "computesdk", "agents", "mastra"} {
		t.Run(suite, func(t *testing.T) { runSDK(t, suite+".test.mjs", append(s.in(t).clientEnv(), "BASE_IMAGE="+baseImage)) })
	}
}
