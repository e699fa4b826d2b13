// Package kubepods serves exec, logs and port-forward of the Pods that stand for sandboxes, through the sandboxes' agents.
//
// It decides nothing about access: the API server has authorized the request.
package kubepods

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/pool"
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/control/agentclient"
	"github.com/barchan-dev/barchan/internal/control/apiserver/pods"
	"github.com/barchan-dev/barchan/internal/control/manager"
	"github.com/barchan-dev/barchan/internal/control/manager/sandboxes"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

const (
	podDialTimeout = 5 * time.Second
	podWakeTimeout = time.Minute
)

// Parts are those of a server that is ready.
type Parts struct {
	Manager *manager.Manager
	Objects sandboxes.Objects
	Binder  *agentclient.Client
	Tokens  *sandbox.Tokens
}

// Pods implements pods.Runtime.
type Pods struct {
	// Booted returns an error until Parts may be called.
	Booted func() error
	Parts  func() Parts
}

var _ pods.Runtime = Pods{}

// Ready implements pods.Runtime.
func (p Pods) Ready(ctx context.Context, s *agents.Sandbox) (*agents.Sandbox, error) {
	if err := p.Booted(); err != nil {
		return nil, err
	}
	if pool.MemberOf(s) != "" { // the claimant gets it as it was made
		return nil, errs.Public(errs.ErrConflict, "the sandbox is a member of a warm pool; claim it first")
	}
	if sandbox.PhaseOf(s) == sandbox.Running {
		return s, nil
	}
	ctx, cancel := context.WithTimeout(ctx, podWakeTimeout)
	defer cancel()
	id := sandbox.IDOf(s.UID)
	if err := p.Parts().Manager.Sandboxes.Wake(ctx, id); err != nil {
		return nil, fmt.Errorf("resume sandbox %s: %w", id, err)
	}
	live := &agents.Sandbox{}
	if err := p.Parts().Objects.Get(ctx, client.ObjectKeyFromObject(s), live); err != nil {
		return nil, fmt.Errorf("read sandbox %s: %w", id, err)
	}
	return live, nil
}

// agent returns a client of the agent of a container; empty: the first.
func (p Pods) agent(s *agents.Sandbox, container string) (*envd.Client, error) {
	agent, err := p.Parts().Binder.Agent(s)
	if err != nil || container == "" {
		return agent, err
	}
	return agent.Container(container)
}

// Exec implements pods.Runtime.
func (p Pods) Exec(ctx context.Context, s *agents.Sandbox, c pods.Command) (int, error) {
	agent, err := p.agent(s, c.Container)
	if err != nil {
		return 0, err
	}
	return agent.Exec(ctx, c.Argv, envd.ExecOptions{Stdin: c.Stdin, Stdout: c.Stdout, Stderr: c.Stderr, Terminal: c.Terminal, Resize: c.Resize})
}

// Logs implements pods.Runtime. It does not resume a sandbox.
func (p Pods) Logs(ctx context.Context, s *agents.Sandbox, container string, follow bool, each func(at time.Time, line string) error) error {
	if err := p.Booted(); err != nil {
		return err
	}
	starts := sandbox.PhaseOf(s) == sandbox.Starting && sandbox.Started(s) // its probes have not succeeded, and its log may say why
	if phase := sandbox.PhaseOf(s); phase != sandbox.Running && !starts {
		return errs.Public(errs.ErrConflict, fmt.Sprintf("the sandbox is %s; its log can be read while it runs", phase))
	}
	agent, err := p.agent(s, container)
	if err != nil {
		return err
	}
	return agent.Logs(ctx, envd.SourceEntrypoint, follow, func(l envd.LogLine) error { return each(l.Timestamp, l.Line) })
}

// Dial implements pods.Runtime.
func (p Pods) Dial(ctx context.Context, s *agents.Sandbox, port uint16) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, podDialTimeout)
	defer cancel()
	if port == envd.Port {
		return nil, errs.Public(errs.ErrForbidden, "this port belongs to the sandbox's agent")
	}
	if len(s.Status.PodIPs) == 0 {
		return nil, errs.Public(errs.ErrUnavailable, "the sandbox has no address")
	}
	at := func(port uint16) string { return net.JoinHostPort(s.Status.PodIPs[0], strconv.Itoa(int(port))) }
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", at(port))
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return conn, err
	}
	agent, err := dialer.DialContext(ctx, "tcp", at(envd.Port))
	if err != nil {
		return nil, err
	}
	conn, err = envd.ConnectLocal(ctx, agent, p.Parts().Tokens.Agent(sandbox.IDOf(s.UID)), port)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil, errs.Public(err, fmt.Sprintf("nothing listens on port %d of the sandbox", port))
	}
	return conn, err
}
