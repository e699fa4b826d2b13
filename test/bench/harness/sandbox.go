package harness

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// DefaultTemplate is the template of gVisor's class.
const DefaultTemplate = "bench-gvisor"

func templateOf(class string) string { return "bench-" + class }

// Template is as the server's default one, but for what is set.
type Template struct {
	Name, Namespace, Class, Memory string
	Sandbox                        string // spec.barchan.sandbox in JSON
}

// ApplyTemplate makes a template.
func (s *Server) ApplyTemplate(ctx context.Context, t Template) error { return s.Apply(ctx, t.json()) }

func (t Template) json() string {
	return fmt.Sprintf(`{"apiVersion":"extensions.agents.x-k8s.io/v1beta1","kind":"SandboxTemplate",
"metadata":{"name":%q,"namespace":%q},
"spec":{"barchan":{"sandbox":%s},"podTemplate":{"spec":{"runtimeClassName":%q,"containers":[{"name":"sandbox","image":"barchan.local/base:latest",
"resources":{"limits":{"cpu":"2","memory":%q}}}]}}}}`, t.Name, cmp.Or(t.Namespace, "default"), cmp.Or(t.Sandbox, "{}"), cmp.Or(t.Class, "gvisor"), cmp.Or(t.Memory, "512Mi"))
}

// Sandbox is a running sandbox and the client of its agent, through the gateway.
type Sandbox struct {
	ID    string
	Agent *envd.Client
}

// Open returns a sandbox that the REST API has made.
func (s *Server) Open(made *client.Sandbox) (Sandbox, error) {
	base, h := s.REST.SandboxAddress(made.SandboxID, envd.Port)
	agent, err := envd.NewClient(envd.ClientConfig{HTTP: s.http, BaseURL: base, Header: h, Token: func() string { return made.AgentToken }})
	return Sandbox{ID: made.SandboxID, Agent: agent}, err
}

// Create makes a sandbox of a class by the REST API.
func (s *Server) Create(ctx context.Context, class string) (Sandbox, error) {
	return s.Claim(ctx, client.CreateOptions{TemplateID: templateOf(class), Timeout: time.Hour})
}

// Claim requests a sandbox by the REST API.
func (s *Server) Claim(ctx context.Context, o client.CreateOptions) (Sandbox, error) {
	made, err := s.REST.Create(ctx, o)
	if err != nil {
		return Sandbox{}, fmt.Errorf("create sandbox: %w", err)
	}
	return s.Open(made)
}

// Kill kills a sandbox and returns when that is answered.
func (s *Server) Kill(ctx context.Context, x Sandbox) error {
	if err := s.REST.Kill(ctx, x.ID); err != nil {
		return fmt.Errorf("kill sandbox %s: %w", x.ID, err)
	}
	return nil
}

// Fill makes n sandboxes of a class.
func (s *Server) Fill(ctx context.Context, class string, n int) ([]Sandbox, error) {
	var mu sync.Mutex
	var made []Sandbox
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(AtOnce)
	for range n {
		group.Go(func() error {
			x, err := s.Create(ctx, class)
			if err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			made = append(made, x)
			return nil
		})
	}
	return made, group.Wait()
}

// Each calls f with each sandbox, with AtOnce of them at once.
func Each(ctx context.Context, all []Sandbox, f func(context.Context, Sandbox) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(AtOnce)
	for _, x := range all {
		group.Go(func() error { return f(ctx, x) })
	}
	return group.Wait()
}

// KillAll returns when none is left, also of a server that was started again and has no counts of their steps.
func (s *Server) KillAll(ctx context.Context, all []Sandbox) error {
	if err := Each(ctx, all, s.Kill); err != nil {
		return err
	}
	return s.AwaitFew(ctx, 0)
}

// AwaitFew returns when no more sandboxes than n are left.
func (s *Server) AwaitFew(ctx context.Context, n int) error {
	return Poll(ctx, 10*Tick, fmt.Sprintf("wait until %d sandboxes are left", n), func(ctx context.Context) (bool, error) {
		phases, err := s.Phases(ctx)
		all := 0
		for _, count := range phases {
			all += count
		}
		return err == nil && all <= n, err
	})
}

// Phases returns how many sandboxes are in each phase.
func (s *Server) Phases(ctx context.Context) (map[string]int, error) {
	status, err := s.admin.Status(ctx)
	if err != nil {
		return nil, fmt.Errorf("read status: %w", err)
	}
	return status.Sandboxes, nil
}

// Output is what a command wrote, and when.
type Output struct {
	Text  string    // of standard output
	First time.Time // when the first of it came
}

// Run runs a command to its end, as an SDK does: one RPC whose stream has output and end.
func (x Sandbox) Run(ctx context.Context, argv ...string) (Output, error) {
	var out Output
	stream, err := x.Agent.Process().Start(ctx, connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: argv[0], Args: argv[1:]},
	}))
	if err != nil {
		return out, fmt.Errorf("start %s: %w", argv[0], err)
	}
	defer func() { _ = stream.Close() }()
	var end *processpb.ProcessEvent_EndEvent
	var stdout strings.Builder
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		if data := event.GetData(); data != nil {
			if out.First.IsZero() {
				out.First = time.Now()
			}
			stdout.Write(data.GetStdout())
		}
		if e := event.GetEnd(); e != nil {
			end = e
		}
	}
	out.Text = stdout.String()
	switch err := stream.Err(); {
	case err != nil:
		return out, fmt.Errorf("run %s: %w", argv[0], err)
	case end == nil:
		return out, errors.New("the stream ended before the process")
	case end.GetExitCode() != 0:
		return out, fmt.Errorf("%s ended with %d: %s", argv[0], end.GetExitCode(), end.GetError())
	}
	return out, nil
}
