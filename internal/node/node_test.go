package node

import (
	"strings"
	"testing"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/sandbox"
)

func TestSandboxRunsAndGoes(t *testing.T) {
	m := newMachine(t)
	n, _ := m.node()
	for _, c := range []string{"gvisor", "runc"} {
		t.Run(c, func(t *testing.T) {
			s := object(class(c))
			seen := ensure(t, n, s)
			if seen.State != sandbox.ContainerRunning || seen.Runtime != c || !seen.Address.IsValid() || !seen.Probed || seen.Node != "test-node" {
				t.Errorf("observed %+v", seen)
			}
			out, code := run(t, n, s, "echo hello; cat /etc/hosts /etc/resolv.conf; hostname; id; exit 3")
			if code != 3 || !strings.Contains(out, "hello") || !strings.Contains(out, seen.Address.String()) || !strings.Contains(out, "nameserver") {
				t.Errorf("exit code %d, output %q", code, out)
			}
			again := ensure(t, n, s)
			if again != seen {
				t.Errorf("ensured again: %+v, before %+v", again, seen)
			}
			goesWithoutATrace(t, n, s)
		})
	}
}

func goesWithoutATrace(t *testing.T, n *Node, s *agents.Sandbox) {
	t.Helper()
	for range 2 {
		must(t, n.Remove(t.Context(), refOf(s)))
	}
	if gone, err := n.Observe(t.Context(), refOf(s)); err != nil || gone.State != sandbox.ContainerAbsent {
		t.Errorf("after removal: %+v, %v", gone, err)
	}
	left, err := n.Audit(t.Context())
	if err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
