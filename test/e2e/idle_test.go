package e2e

import (
	"fmt"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const idleManifest = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata: {name: idler}
spec:
  barchan: {idle: {afterSeconds: 2}, wake: {onTraffic: true}}
  podTemplate:
    spec:
      containers:
      - name: main
        image: barchan.local/base:latest
        command: [python3, -m, http.server, "8080"]
`

// testIdle checks that an idle policy pauses a sandbox without traffic, and the first request wakes
// it.
func testIdle(t *testing.T, s *server) {
	s.mustKubectl(idleManifest, "apply", "-f", "-")
	id := s.idOf("idler")
	s.untilServed(id, "/")
	for range 2 {
		eventually.NoError(t, "it is paused without traffic", func() error {
			phase, err := s.kubectl("", "get", "sandbox", "idler", "-o", "jsonpath={.status.barchan.phase}")
			if err == nil && phase != "Paused" {
				err = fmt.Errorf("phase %q", phase)
			}
			return err
		})
		if status, body, err := s.visit(id, 8080, "/"); err != nil || status != 200 {
			t.Errorf("the request that resumes it: %d %q, %v", status, body, err)
		}
	}
	s.mustKubectl("", "delete", "sandbox", "idler")
}
