package kubeinstall

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
	"github.com/barchan-dev/barchan/internal/testkit/kubecluster"
)

// Process is a role that runs until the test ends. It is started again when it exits, as a container of a Deployment is.
type Process struct {
	// Name is the process's: a controller's in the Lease.
	Name string
	// Address is where it serves HTTP in the cluster's network namespace.
	Address string
	metrics string // address
	// Started is when it was first started.
	Started time.Time
	// ReadyAt is when it was seen ready.
	ReadyAt time.Time

	b       *Barchan
	dir     string
	logFile string
	args    []string
	env     []string
	log     *os.File
	stop    func()

	mu      sync.Mutex
	running *kubecluster.Process // +checklocks:mu
	killed  bool                 // running was sent SIGKILL or SIGTERM; +checklocks:mu
}

// Controller runs a controller with a name, and waits until it is ready. agentImage is that of the sandboxes.
func (b *Barchan) Controller(name, agentImage string, flags ...string) *Process {
	b.Helper()
	return b.start("controller", name, "127.0.0.1:7700", append([]string{"--agent-image", agentImage}, flags...))
}

// Replica runs a replica with a name that serves the E2B API at an address of the cluster's network namespace, and waits until it
// is ready.
func (b *Barchan) Replica(name, address string) *Process {
	b.Helper()
	return b.start("replica", name, address, []string{"--http-addr", address})
}

func (b *Barchan) start(role, name, address string, flags []string) *Process {
	b.Helper()
	p := &Process{
		Name: name, Address: address, Started: time.Now(),
		b: b, env: b.env["barchan-"+role], dir: b.TempDir(), logFile: filepath.Join(b.TempDir(), "log"),
	}
	serves := address
	if i := slices.Index(flags, "--http-addr"); i >= 0 {
		serves = flags[i+1]
	}
	host, port, _ := net.SplitHostPort(serves)
	p.metrics = net.JoinHostPort(host, "1"+port)
	p.args = append([]string{
		"up", "--role", role, "--data-dir", p.dir, "--node-name", name, "--api-kubeconfig", b.account(role), "--token-secret", b.secret, "--tls-addr", "", "--ssh-addr", "", "--metrics-addr", p.metrics,
	}, flags...)
	var err error
	p.log, err = os.OpenFile(p.logFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	must(b, err)
	must(b, p.run())
	ctx, stop := context.WithCancel(context.WithoutCancel(b.Context()))
	var supervised sync.WaitGroup
	supervised.Go(func() { p.supervise(ctx) })
	p.stop = func() {
		stop()
		supervised.Wait()
	}
	b.Cleanup(func() {
		p.stop()
		p.report()
	})
	eventually.NoError(b, name+" is ready", p.Ready)
	p.ReadyAt = time.Now()
	return p
}

// Stop has the process exit for good, as the end of the test does.
func (p *Process) Stop() { p.stop() }

// PID is that of the process that runs now.
func (p *Process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.running.PID()
}

// Get returns what the process answers to GET of a path. Any code but 200 is an error.
func (p *Process) Get(ctx context.Context, path string) ([]byte, error) {
	address := p.Address
	if path == "/metrics" {
		address = p.metrics
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := (&http.Transport{DialContext: p.b.Dial, DisableKeepAlives: true}).RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s of %s: %s: %s", path, p.Name, resp.Status, text)
	}
	return text, err
}

// run starts the process.
func (p *Process) run() error {
	cmd := p.b.Command(context.WithoutCancel(p.b.Context()), filepath.Join(p.b.bin, p.b.program), p.args...)
	cmd.Env = append(cmd.Env, p.env...)
	cmd.Stdout, cmd.Stderr = p.log, p.log
	running, err := kubecluster.Serve(cmd)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running, p.killed = running, false
	return nil
}

// supervise starts the process again when it exits, until ctx ends.
func (p *Process) supervise(ctx context.Context) {
	for {
		p.mu.Lock()
		running := p.running
		p.mu.Unlock()
		select {
		case <-ctx.Done():
			p.exited(running.Stop())
			return
		case <-running.Exited():
			p.exited(running.Stop())
		}
		if err := p.run(); err != nil { //nolint:contextcheck // the process outlives ctx
			p.b.Errorf("start %s again: %v", p.Name, err)
			return
		}
	}
}

// exited reports an exit with an error that no signal explains.
func (p *Process) exited(err error) {
	p.mu.Lock()
	killed := p.killed
	p.mu.Unlock()
	if text := p.output(); err != nil && !killed && !strings.Contains(lastLines(text, 5), "Lease was lost") {
		p.b.Errorf("%s: %v", p.Name, err)
	}
}

// Signal sends a signal to the process. SIGKILL and SIGTERM end it; it is started again.
func (p *Process) Signal(s syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.killed = p.killed || s == syscall.SIGKILL || s == syscall.SIGTERM
	return p.running.Signal(s)
}

// Ready returns an error unless the process is ready.
func (p *Process) Ready() error {
	out, err := p.b.Command(p.b.Context(), filepath.Join(p.b.bin, "barchan"), "status", "--data-dir", p.dir).CombinedOutput()
	if err == nil && !bytes.Contains(out, []byte("ready")) {
		err = errors.New("it is not ready")
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", p.Name, err, out)
	}
	return nil
}

func (p *Process) output() string {
	text, err := os.ReadFile(p.logFile)
	if err != nil {
		p.b.Error(err)
	}
	return string(text)
}

// report prints the output of a failed test's process, and fails the test if the process lacked a right.
func (p *Process) report() {
	text := p.output()
	must(p.b, p.log.Close())
	if strings.Contains(text, "is forbidden") && !p.b.Restarted() { // a server that starts does not know all rights yet
		p.b.Errorf("%s lacks a right", p.Name)
	}
	if p.b.Failed() {
		p.b.Logf("%s:\n%s", p.Name, lastLines(text, 300))
	}
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
