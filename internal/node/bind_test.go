package node

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/node/journal"
	"github.com/barchan-dev/barchan/internal/node/operation"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// member is a sandbox as a pool makes it: its program writes its environment down and stays.
func member(change ...func(*agents.Sandbox)) *agents.Sandbox {
	return object(append([]func(*agents.Sandbox){func(s *agents.Sandbox) {
		pod(s).RestartPolicy = corev1.RestartPolicyAlways
		container(s).Command = []string{"sh", "-c", "env > /program; echo x >> /starts; exec sleep 10000"}
		container(s).Env = []corev1.EnvVar{{Name: "BOTH", Value: "template"}, {Name: "PATH", Value: "$(PATH):/opt"}}
	}}, change...)...)
}

// claimed is a member's object after adoption.
func claimed(s *agents.Sandbox) *agents.Sandbox {
	c := s.DeepCopy()
	c.Spec.Barchan = &agents.BarchanSpec{Access: &agents.AccessPolicy{OpenAgent: true}}
	container(c).Env = append(container(c).Env, corev1.EnvVar{Name: "BOTH", Value: "claim"}, corev1.EnvVar{Name: "OWNER", Value: "$(BOTH) $$(BOTH)"})
	return c
}

const whatClaimedHas = "BOTH=claim\nFROM_IMAGE=yes\nOWNER=claim $(BOTH)\nPATH=/bin:/opt\n"

func token(id sandbox.ID) string { return "token of " + string(id) }

// wantBound checks that a process of the sandbox has what its claim brought.
func wantBound(t *testing.T, n *Node, s *agents.Sandbox, when string) {
	t.Helper()
	out, _ := run(t, n, s, "env")
	var got []string
	for line := range strings.Lines(out) {
		if name, _, _ := strings.Cut(line, "="); slices.Contains([]string{"BOTH", "FROM_IMAGE", "OWNER", "PATH"}, name) {
			got = append(got, line)
		}
	}
	slices.Sort(got)
	if strings.Join(got, "") != whatClaimedHas {
		t.Errorf("%s a process has\n%s", when, out)
	}
}

// isOpen reports whether the agent answers one who has no token.
func isOpen(t *testing.T, n *Node, s *agents.Sandbox) bool {
	t.Helper()
	seen, err := n.Observe(t.Context(), refOf(s))
	must(t, err)
	c, err := envd.NewClient(envd.ClientConfig{HTTP: n.host.Agents.HTTP, BaseURL: "http://" + seen.Address.String() + ":49983"})
	must(t, err)
	_, err = c.Envs(t.Context())
	return err == nil
}

// starts is how often the template's program was started.
func starts(t *testing.T, n *Node, s *agents.Sandbox) int {
	t.Helper()
	out, _, err := tryRun(t.Context(), n, s, "cat /starts")
	if err != nil {
		return 0 // between two containers
	}
	return strings.Count(out, "x")
}

// restartContainer ends the template's program, by which the container is restarted, and waits until the journal has the
// new one: a node that ends before restarts it once more at its next start. The program runs earlier than that.
func restartContainer(t *testing.T, n *Node, s *agents.Sandbox) {
	t.Helper()
	before, old := starts(t, n, s), n.handles.Lookup(s.UID).Row().Process
	provoke(t, n, s, "kill $(ls /proc | while read p; do grep -qs '^sleep' /proc/$p/cmdline && echo $p; done) 2>/dev/null; true")
	eventually.True(t, "the container is restarted", func() bool {
		r := n.handles.Lookup(s.UID).Row()
		return r.Stage == journal.Live && r.Process != old && starts(t, n, s) > before
	})
}

func TestBindOutlivesContainerAndServer(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.cfg.AgentToken = token
	n, stop := m.node()
	for _, c := range []string{"gvisor", "runc"} {
		t.Run(c, func(t *testing.T) {
			s := member(class(c))
			seen := ensure(t, n, s)
			eventually.True(t, "the program runs", func() bool { return starts(t, n, s) == 1 })
			if isOpen(t, n, s) {
				t.Fatal("the agent of a member accepts any client")
			}
			for range 2 {
				must(t, n.Bind(t.Context(), claimed(s)))
			}
			wantBound(t, n, s, "once bound")
			if !isOpen(t, n, s) {
				t.Error("the agent is not open")
			}
			now, err := n.Observe(t.Context(), refOf(s))
			now.Operations, seen.Operations = nil, nil // pointers
			if err != nil || now != seen || starts(t, n, s) != 1 {
				t.Errorf("binding restarted something: %+v, was %+v, %v", now, seen, err)
			}

			restartContainer(t, n, s)
			wantBound(t, n, s, "after a restart of the container")
			if out, _ := run(t, n, s, "grep -c OWNER=claim /program"); out != "1\n" {
				t.Errorf("its program, restarted, does not have it: %q", out)
			}

			stop()
			n, stop = m.node()
			if r := n.handles.Lookup(s.UID).Row(); unbound(r, claimed(s)) {
				t.Errorf("the next server does not know: %+v", r.Plan)
			}
			wantBound(t, n, s, "after a restart of the server")
			restartContainer(t, n, s)
			wantBound(t, n, s, "after a restart of the server, and then of the container")
			if !isOpen(t, n, s) {
				t.Error("the agent is not open any more")
			}
			must(t, n.Bind(t.Context(), s)) // closed again
			if isOpen(t, n, s) {
				t.Error("the agent is not closed again")
			}
			must(t, n.Remove(t.Context(), refOf(s)))
		})
	}
}

// initCounter counts the configurations sent to agents.
type initCounter struct {
	http.RoundTripper
	sent atomic.Int32
}

func (c *initCounter) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Path == envd.PathInit {
		c.sent.Add(1)
	}
	return c.RoundTripper.RoundTrip(r)
}

func TestBindSendsOnlyMissingConfiguration(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.cfg.AgentToken = token
	n, _ := m.node()
	counter := &initCounter{RoundTripper: n.host.Agents.HTTP.Transport}
	n.host.Agents.HTTP = &http.Client{Transport: counter}
	variables := map[string]string{"BOTH": "claim", "OWNER": "claim $(BOTH)"}
	for _, tt := range []struct {
		name string
		sent *envd.InitRequest
		open bool
		want int32
	}{
		{"the claim sent all", &envd.InitRequest{EnvVars: variables}, false, 0},
		{"the claim sent nothing", nil, false, 1},
		{"an open agent must be closed", &envd.InitRequest{EnvVars: variables, Open: true}, false, 1},
		{"an open agent stays open", &envd.InitRequest{EnvVars: variables, Open: true}, true, 0},
		{"a closed agent must be opened", &envd.InitRequest{EnvVars: variables}, true, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := member()
			ensure(t, n, s)
			if tt.sent != nil {
				agent, err := n.Agent(t.Context(), refOf(s))
				must(t, err)
				must(t, agent.Init(t.Context(), *tt.sent))
			}
			bound := claimed(s)
			bound.Spec.Barchan.Access.OpenAgent = tt.open
			counter.sent.Store(0)
			must(t, n.Bind(t.Context(), bound))
			if got := counter.sent.Load(); got != tt.want {
				t.Errorf("the node sent %d configurations, want %d", got, tt.want)
			}
			if isOpen(t, n, s) != tt.open {
				t.Errorf("the agent is open: %t", !tt.open)
			}
			wantBound(t, n, s, "once bound")
			eventually.True(t, "the program runs", func() bool { return starts(t, n, s) == 1 })
			restartContainer(t, n, s)
			wantBound(t, n, s, "after a restart of the container")
			must(t, n.Remove(t.Context(), refOf(s)))
		})
	}
}

func TestDeathWhileBinding(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	m.cfg.AgentToken = token
	for _, at := range []string{"bind_config", "bind_agent"} {
		t.Run("after "+at, func(t *testing.T) {
			n, stop := m.node(func(c *Config) {
				c.AfterStep = func(step string) error {
					if step == at {
						return operation.ErrCrash
					}
					return nil
				}
			})
			s := member()
			ensure(t, n, s)
			eventually.True(t, "the program runs", func() bool { return starts(t, n, s) == 1 })
			if err := n.Bind(t.Context(), claimed(s)); !errors.Is(err, operation.ErrCrash) {
				t.Fatalf("bind: %v", err)
			}
			stop()
			n, stop = m.node()
			defer stop()
			must(t, n.Bind(t.Context(), claimed(s)))
			wantBound(t, n, s, "bound by the next server")
			if !isOpen(t, n, s) {
				t.Error("the agent is not open")
			}
			restartContainer(t, n, s)
			wantBound(t, n, s, "after a restart of the container")
			must(t, n.Remove(t.Context(), refOf(s)))
		})
	}
}

func TestBindWaitsForItsTime(t *testing.T) {
	t.Parallel()
	m := newMachine(t)
	n, _ := m.node()
	s := member()
	if err := n.Bind(t.Context(), claimed(s)); err != nil || n.handles.Lookup(s.UID) != nil {
		t.Errorf("a sandbox that is not there: %v", err)
	}
	ensure(t, n, s)
	bad := claimed(s)
	container(bad).Env = append(container(bad).Env, corev1.EnvVar{Name: "S", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{Key: "k"}}})
	if err := n.Bind(t.Context(), bad); !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), "spec.podTemplate.spec.containers[0].env") {
		t.Errorf("what no sandbox may have: %v", err)
	}
	_, err := n.Suspend(t.Context(), refOf(s), agents.SuspendMemory)
	must(t, err)
	must(t, n.Bind(t.Context(), claimed(s)))
	if r := n.handles.Lookup(s.UID).Row(); r.Stage != journal.Paused || len(r.Plan.Env) != 2 {
		t.Errorf("a suspended sandbox was bound: %+v", r)
	}
	_, err = n.Resume(t.Context(), refOf(s), false)
	must(t, err)
	must(t, n.Bind(t.Context(), claimed(s)))
	wantBound(t, n, s, "once awake")

	// A row of a server that did not note the image's environment.
	old := member()
	ensure(t, n, old)
	u := n.handles.Lookup(old.UID)
	row := *u.Row()
	row.ImageEnv = nil
	must(t, n.handles.Note(u, &row, journal.Live))
	must(t, n.Bind(t.Context(), claimed(old)))
	if out, _ := run(t, n, old, "echo $FROM_IMAGE $BOTH"); out != "yes claim\n" {
		t.Errorf("a row of before: %q", out)
	}
}
