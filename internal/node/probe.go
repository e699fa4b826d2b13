package node

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
	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/guest/envd/processpb"
	"github.com/barchan-dev/barchan/internal/node/journal"
)

// execUser is the Authorization of probes that run a command: root's, whatever user the
// template's program has.
const execUser = "Basic cm9vdDo="

// prober asks one sandbox.
type prober struct {
	n    *Node
	u    *sandboxHandle
	row  *journal.Row
	addr netip.Addr
	http *http.Client
}

func (n *Node) newProber(u *sandboxHandle, r *journal.Row) *prober {
	return &prober{n: n, u: u, row: r, addr: r.Address, http: &http.Client{
		// As on Kubernetes, a certificate proves nothing to a probe, and a redirect is an answer.
		Transport:     &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}, //nolint:gosec // see above
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// probe runs the template's probes until ctx ends: the startup probe until it succeeds once,
// then readiness and liveness side by side. What was ready when a server before this one went
// has started, and stays ready until its probe fails.
func (n *Node) probe(ctx context.Context, u *sandboxHandle, r *journal.Row) {
	p := n.newProber(u, r)
	if s := r.Plan.Startup; s != nil && !r.Ready {
		if !p.startup(ctx, s) {
			n.unwell(ctx, u, r, "its startup probe failed")
			return
		}
	}
	if r.Plan.Readiness == nil {
		p.ready(ctx, true, "")
	}
	var probing sync.WaitGroup
	defer probing.Wait()
	if s := r.Plan.Readiness; s != nil {
		probing.Go(func() {
			p.watch(ctx, s, false, func(ok bool, why string) bool {
				p.ready(ctx, ok, why)
				return true
			})
		})
	}
	if s := r.Plan.Liveness; s != nil {
		probing.Go(func() {
			p.watch(ctx, s, true, func(ok bool, why string) bool {
				if !ok {
					n.unwell(ctx, u, r, "its liveness probe failed: "+why)
				}
				return ok
			})
		})
	}
}

// ready makes seen, and notes, whether the sandbox is ready.
func (p *prober) ready(ctx context.Context, ok bool, why string) {
	changed := p.u.see(func(o *sandbox.Observed) {
		if o.State != sandbox.ContainerExited {
			o.Probed = ok
		}
		if o.State == sandbox.ContainerRunning {
			o.Message = why
		}
	})
	if changed {
		p.n.dirty.mark(p.u.ref)
	}
	if p.row.Plan.Probed() {
		p.note(ctx, ok)
	}
}

// note keeps in the journal what the probes say. Failing costs no more than a moment of being
// not ready after the next start of the server.
func (p *prober) note(ctx context.Context, ok bool) {
	_, done, err := p.u.take(ctx)
	if err != nil {
		return
	}
	defer done()
	now := p.u.current()
	if p.u.isRemoved() || now == nil || now.Process != p.row.Process || now.Stage != journal.Live || now.Ready == ok {
		return
	}
	changed := *now
	changed.Ready = ok
	if err := p.n.note(p.u, &changed, journal.Live); err != nil {
		p.n.log.WarnContext(ctx, "readiness not noted", telemetry.Sandbox, p.u.ref.Name, telemetry.Error, err)
	}
}

// startup reports whether the probe succeeded before it failed too often. It is true when ctx
// ends, for then nobody knows.
func (p *prober) startup(ctx context.Context, s *corev1.Probe) bool {
	good := true
	p.watch(ctx, s, false, func(ok bool, _ string) bool {
		good = ok
		return false
	})
	return good || ctx.Err() != nil
}

// watch asks as the probe says and tells each change from the last verdict, and the first, until tell
// returns false or ctx ends. A sandbox that sleeps is not asked.
func (p *prober) watch(ctx context.Context, s *corev1.Probe, initially bool, tell func(ok bool, why string) bool) {
	if !lifecycle.Sleep(ctx, time.Duration(s.InitialDelaySeconds)*time.Second) {
		return
	}
	v := newVerdict(s, initially)
	for {
		next := v.period()
		if p.u.observed().State == sandbox.ContainerRunning {
			err := p.ask(ctx, s)
			if ctx.Err() != nil {
				return
			}
			if v.add(err, time.Now()) && !tell(v.good, textOf(err)) {
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

// ask asks once.
func (p *prober) ask(ctx context.Context, s *corev1.Probe) error {
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

func (p *prober) host(port int) string { return net.JoinHostPort(p.addr.String(), strconv.Itoa(port)) }

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
		return fmt.Errorf("httpGet: answered %s", res.Status)
	}
	return nil
}

func (p *prober) exec(ctx context.Context, argv []string) error {
	agent, err := p.n.agentOf(p.u.id, p.addr)
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
				return fmt.Errorf("exec: ended with code %d", code)
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
