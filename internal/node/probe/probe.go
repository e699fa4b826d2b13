// Package probe runs the probes of a sandbox as Kubernetes does: startup, readiness and liveness, by HTTP,
// TCP or a command in the sandbox. It reports verdicts and acts on none of them; it keeps no state after Run
// returns, and holds no lock.
package probe

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	corev1 "k8s.io/api/core/v1"

	"github.com/barchan-dev/barchan/internal/base/lifecycle"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
)

// execUser is the Authorization of probes that run a command as root.
const execUser = "Basic cm9vdDo="

// Config configures the probes of a sandbox and receives their results.
type Config struct {
	Startup, Readiness, Liveness *corev1.Probe
	// Started skips the startup probe: it succeeded before a restart of the server.
	Started bool
	// Address is the sandbox's; Agent is a client of its agent, which runs commands.
	Address netip.Addr
	Agent   func() (*envd.Client, error)
	// Running reports whether to probe now; a paused sandbox is not probed.
	Running func() bool
	// Ready receives the first verdict about readiness and each change. Failed receives why the container must be
	// replaced, at most once for each probe.
	Ready  func(ok bool, why string)
	Failed func(why string)
}

type prober struct {
	Config
	http *http.Client
}

// Run runs the probes until ctx ends: the startup probe until it succeeds once,
// then readiness and liveness in parallel. A sandbox that was ready before a restart of the server has
// started, and stays ready until its probe fails.
func Run(ctx context.Context, cfg Config) {
	p := &prober{Config: cfg, http: &http.Client{
		// As on Kubernetes, a probe verifies no certificate and follows no redirect.
		Transport: &http.Transport{
			DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
			MaxResponseHeaderBytes: envd.MaxResponseHeader,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	if s := p.Startup; s != nil && !p.Started {
		if !p.startup(ctx, s) {
			p.Failed("its startup probe failed")
			return
		}
	}
	if p.Readiness == nil {
		p.Ready(true, "")
	}
	var probing sync.WaitGroup
	defer probing.Wait()
	if s := p.Readiness; s != nil {
		probing.Go(func() {
			p.watch(ctx, s, false, func(ok bool, why string) bool {
				p.Ready(ok, why)
				return true
			})
		})
	}
	if s := p.Liveness; s != nil {
		probing.Go(func() {
			p.watch(ctx, s, true, func(ok bool, why string) bool {
				if !ok {
					p.Failed("its liveness probe failed: " + why)
				}
				return ok
			})
		})
	}
}

// startup reports whether the probe succeeded before it failed too often. It is true when ctx
// ends, since the result is then unknown.
func (p *prober) startup(ctx context.Context, s *corev1.Probe) bool {
	good := true
	p.watch(ctx, s, false, func(ok bool, _ string) bool {
		good = ok
		return false
	})
	return good || ctx.Err() != nil
}

// watch probes at the probe's period and reports the first verdict and each change, until report
// returns false or ctx ends.
func (p *prober) watch(ctx context.Context, s *corev1.Probe, initially bool, report func(ok bool, why string) bool) {
	if !lifecycle.Sleep(ctx, time.Duration(s.InitialDelaySeconds)*time.Second) {
		return
	}
	v := newVerdict(s, initially)
	for {
		next := v.period()
		if p.Running() {
			err := p.probe(ctx, s)
			if ctx.Err() != nil {
				return
			}
			if v.add(err, time.Now()) && !report(v.good, textOf(err)) {
				return
			}
			next = v.pause(time.Now())
		}
		if !lifecycle.Sleep(ctx, next) {
			return
		}
	}
}

func textOf(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func (p *prober) probe(ctx context.Context, s *corev1.Probe) error {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(orElse(s.TimeoutSeconds, 1))*time.Second)
	defer cancel()
	switch {
	case s.HTTPGet != nil:
		return p.get(ctx, s.HTTPGet)
	case s.TCPSocket != nil:
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", p.host(s.TCPSocket.Port.IntValue()))
		if err != nil {
			return fmt.Errorf("tcpSocket: %w", err)
		}
		return conn.Close()
	default:
		return p.exec(ctx, s.Exec.Command)
	}
}

func (p *prober) host(port int) string {
	return net.JoinHostPort(p.Address.String(), strconv.Itoa(port))
}

func (p *prober) get(ctx context.Context, g *corev1.HTTPGetAction) error {
	scheme := strings.ToLower(string(g.Scheme))
	if scheme == "" {
		scheme = "http"
	}
	url := fmt.Sprintf("%s://%s/%s", scheme, p.host(g.Port.IntValue()), strings.TrimPrefix(g.Path, "/"))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return fmt.Errorf("httpGet: %w", err)
	}
	for _, h := range g.HTTPHeaders {
		if strings.EqualFold(h.Name, "Host") {
			req.Host = h.Value
		}
		req.Header.Add(h.Name, h.Value)
	}
	res, err := p.http.Do(req)
	if err != nil {
		return fmt.Errorf("httpGet: %w", err)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode < 200 || res.StatusCode >= 400 {
		return fmt.Errorf("httpGet: status %d", res.StatusCode)
	}
	return nil
}

func (p *prober) exec(ctx context.Context, argv []string) error {
	agent, err := p.Agent()
	if err != nil {
		return err
	}
	noInput := false
	req := connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: argv[0], Args: argv[1:]}, Stdin: &noInput,
	})
	req.Header().Set("Authorization", execUser)
	stream, err := agent.Process().Start(ctx, req)
	if err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	defer func() { _ = stream.Close() }()
	for stream.Receive() {
		if end := stream.Msg().GetEvent().GetEnd(); end != nil {
			if code := end.GetExitCode(); code != 0 {
				return fmt.Errorf("exec: exit code %d", code)
			}
			return nil
		}
	}
	return fmt.Errorf("exec: %w", stream.Err())
}

func orElse(value, otherwise int32) int32 {
	if value > 0 {
		return value
	}
	return otherwise
}
