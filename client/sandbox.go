package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// Sandbox is a sandbox that [Client.Create], [Client.Connect], [Client.Open] or [Client.Fork] has returned. It holds nothing open.
type Sandbox struct {
	SandboxID   string `json:"sandboxID"`
	TemplateID  string `json:"templateID"`
	Alias       string `json:"alias,omitempty"`
	EnvdVersion string `json:"envdVersion"`
	// AgentToken is for commands and files. TrafficToken is for ports, where they require one.
	AgentToken   string `json:"envdAccessToken,omitempty"`
	TrafficToken string `json:"trafficAccessToken,omitempty"`
	Domain       string `json:"domain,omitempty"`

	Commands *Commands `json:"-"`
	PTY      *PTY      `json:"-"`
	Files    *Files    `json:"-"`

	client *Client
}

// handle completes a sandbox of the API.
func (c *Client) handle(s *Sandbox, err error) (*Sandbox, error) {
	if err != nil {
		return nil, err
	}
	s.client = c
	return s, s.reach("")
}

// As returns the sandbox with commands and files of one of its users: a name or an ID, with ":GROUP" if wanted.
func (s *Sandbox) As(user string) *Sandbox {
	other := *s
	_ = other.reach(user) // its address was valid for s
	return &other
}

func (s *Sandbox) reach(user string) error {
	agent, err := s.client.agent(s.SandboxID, s.AgentToken, user)
	if err != nil {
		return fmt.Errorf("address of sandbox %s: %w: %w", s.SandboxID, err, ErrInvalid)
	}
	s.Commands, s.PTY, s.Files = &Commands{agent}, &PTY{agent}, &Files{agent, s, user}
	return nil
}

// Kill deletes the sandbox.
func (s *Sandbox) Kill(ctx context.Context) error { return s.client.Kill(ctx, s.SandboxID) }

// Pause pauses the sandbox. [Client.Connect] resumes it.
func (s *Sandbox) Pause(ctx context.Context, o PauseOptions) error {
	return s.client.Pause(ctx, s.SandboxID, o)
}

// SetTimeout sets how long the sandbox lives from now on.
func (s *Sandbox) SetTimeout(ctx context.Context, d time.Duration) error {
	return s.client.SetTimeout(ctx, s.SandboxID, d)
}

// Info reads the sandbox's state.
func (s *Sandbox) Info(ctx context.Context) (SandboxDetail, error) {
	return s.client.Get(ctx, s.SandboxID)
}

// Metrics reads the samples of the sandbox, oldest first: one for every ten seconds of the last hour, and the present.
func (s *Sandbox) Metrics(ctx context.Context) ([]Metric, error) {
	return s.client.Metrics(ctx, s.SandboxID)
}

// CreateSnapshot takes a snapshot of the sandbox, which keeps running.
func (s *Sandbox) CreateSnapshot(ctx context.Context, o SnapshotOptions) (Snapshot, error) {
	return s.client.CreateSnapshot(ctx, s.SandboxID, o)
}

// Fork copies the sandbox into new ones.
func (s *Sandbox) Fork(ctx context.Context, o ForkOptions) ([]Forked, error) {
	return s.client.Fork(ctx, s.SandboxID, o)
}

// IsRunning asks the sandbox itself. It resumes a paused one only if that resumes with traffic.
func (s *Sandbox) IsRunning(ctx context.Context) (bool, error) {
	err := guestError(ctx, "health", s.Commands.agent.Health(ctx))
	if e, ok := errors.AsType[*Error](err); ok && e.Status == http.StatusBadGateway {
		return false, nil
	}
	return err == nil, err
}

// Host returns the host name of a port, for URLs. [Sandbox.Address] works without a domain too.
func (s *Sandbox) Host(port int) string {
	if s.Domain != "" {
		return strconv.Itoa(port) + "-" + s.SandboxID + "." + s.Domain
	}
	return s.client.host(s.SandboxID, port)
}

// Address returns the base URL of a port and the headers that a request to it needs.
func (s *Sandbox) Address(port int) (string, http.Header) {
	base, h := s.client.SandboxAddress(s.SandboxID, port)
	if s.TrafficToken != "" {
		h.Set(envd.HeaderTrafficToken, s.TrafficToken)
	}
	return base, h
}

// Client returns the client of the sandbox.
func (s *Sandbox) Client() *Client { return s.client }

// fileURL returns a URL that gives its bearer one file.
func (s *Sandbox) fileURL(path string, op envd.Operation, user string, life time.Duration) string {
	q := url.Values{envd.QueryPath: {path}}
	if user != "" {
		q.Set(envd.QueryUsername, user)
	}
	var expiry *time.Time
	if life > 0 {
		expiry = new(time.Now().Add(life))
		q.Set(envd.QueryExpiration, strconv.FormatInt(expiry.Unix(), 10))
	}
	q.Set(envd.QuerySignature, envd.Sign(path, op, user, s.AgentToken, expiry))
	base, _ := s.client.SandboxAddress(s.SandboxID, envd.Port)
	return base + envd.PathFiles + "?" + q.Encode()
}
