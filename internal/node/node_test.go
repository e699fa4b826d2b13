package node

import (
	"net/http"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/node/ipam"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func TestSandboxRunsAndGoes(t *testing.T) {
	t.Parallel()
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

// With IPv6, each sandbox has an address beside the other, under either class; without, none.
func TestIPv6InSandboxes(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.cfg.Network.Subnet6 = netip.MustParsePrefix("fd00:ba5c:a4::/64")
	m.cfg.Network.Spares = 2
	n, stop := m.node()
	for _, c := range []string{"gvisor", "runc"} {
		s := object(class(c), func(s *agents.Sandbox) { s.Spec.PodTemplate.Spec.RestartPolicy = corev1.RestartPolicyAlways })
		seen := ensure(t, n, s)
		beside := ipam.Beside(m.cfg.Network.Subnet6, seen.Address).String()
		has := func(when string) {
			t.Helper()
			out, _ := run(t, n, s, "cat /etc/hosts; ip addr; ip -6 route")
			for _, want := range []string{beside + "\t" + s.Name, "inet6 " + beside + "/64", "default via "} {
				if !strings.Contains(out, want) {
					t.Errorf("%s, %s: %q lacks %q", c, when, out, want)
				}
			}
			res, err := (&http.Client{Timeout: eventually.Patience}).Get("http://[" + beside + "]:49983/health") //nolint:noctx // a test's
			if err != nil {
				t.Errorf("%s, %s: %v", c, when, err)
				return
			}
			defer func() { _ = res.Body.Close() }() // open until the sandbox is gone
		}
		has("at first")
		stop()
		n, stop = m.node()
		has("after a restart of the server")
		was := *n.handles.Lookup(s.UID).Row()
		die(t, was)
		eventually.True(t, "it lives again", func() bool {
			r := n.handles.Lookup(s.UID).Row()
			return r.Stage == journal.Live && r.Process != was.Process
		})
		has("after a restart of the sandbox")
		goesWithoutATrace(t, n, s)
	}
}
