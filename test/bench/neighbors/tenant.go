package neighbors

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/test/bench/harness"
)

const (
	coldTemplate    = "bench-cold"
	tenantNamespace = "attacker"
)

// attacker makes a namespace with a key and a template, and the template that has no pool.
func attacker(ctx context.Context, b *harness.Bench) (*tenant, error) {
	key, err := b.Server.Command(ctx, "key", "create", "attacker", "--namespace", tenantNamespace)
	if err != nil {
		return nil, err
	}
	for _, t := range []harness.Template{{Name: coldTemplate}, {Name: harness.DefaultTemplate, Namespace: tenantNamespace}} {
		if err := b.Server.ApplyTemplate(ctx, t); err != nil {
			return nil, err
		}
	}
	return newTenant(b.Server.Addr, strings.TrimSpace(key))
}

// tenant is who attacks.
type tenant struct {
	key, addr string
	rest      *client.Client
}

func newTenant(addr, key string) (*tenant, error) {
	c, err := client.New(client.Config{URL: "http://" + addr, Key: key, UserAgent: "bench"})
	return &tenant{key: key, addr: addr, rest: c}, err
}

// begin starts an attack. The function ends it, and is never nil.
func (t *tenant) begin(ctx context.Context, a attack) (end func() error, err error) {
	var sandboxes []*client.Sandbox
	var outside *outsider
	end = func() error {
		err := outside.end()
		for _, x := range sandboxes {
			if gone := t.rest.Kill(context.WithoutCancel(ctx), x.SandboxID); !a.breaks || !errors.Is(gone, client.ErrNotFound) { // the attack may have ended it
				err = errors.Join(err, gone)
			}
		}
		return err
	}
	for range attackers {
		x, err := t.rest.Create(ctx, client.CreateOptions{TemplateID: harness.DefaultTemplate, Timeout: time.Hour})
		if err != nil {
			return end, err
		}
		sandboxes = append(sandboxes, x)
		if err := x.Files.WriteString(ctx, "/tmp/attack.py", attackPrelude+a.inside); err != nil {
			return end, err
		}
		if _, err := x.Commands.Run(ctx, "sudo -n sh -c 'nohup python3 /tmp/attack.py >/tmp/attack.out 2>&1 & sleep 1; if ! pgrep -f attack.py >/dev/null; then cat /tmp/attack.out; exit 1; fi'",
			client.CommandOptions{}); err != nil && a.inside != "" && !a.breaks {
			return end, fmt.Errorf("start in the sandbox: %w", err)
		}
	}
	if a.outside != nil {
		outside, err = startOutsider(ctx, a.name, t.addr, t.key, sandboxes[0].SandboxID)
	}
	return end, err
}

// hold opens connections and sends half a request over each.
func (t *tenant) hold(ctx context.Context) {
	var taken []net.Conn
	for ctx.Err() == nil {
		conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", t.addr)
		if err == nil {
			_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n")
			taken = append(taken, conn)
		}
		if len(taken) > 4000 {
			_ = taken[0].Close()
			taken = taken[1:]
		}
		if err != nil {
			pause(ctx)
		}
	}
	for _, conn := range taken {
		_ = conn.Close()
	}
}

// flood makes requests to the attacker's own sandbox.
func (t *tenant) flood(ctx context.Context, id string) {
	for ctx.Err() == nil {
		t.get(ctx, "/health", func(h http.Header) {
			h.Set(envd.HeaderSandboxID, id)
			h.Set(envd.HeaderSandboxPort, strconv.Itoa(envd.Port))
		})
	}
}

// sign asks for a file by a signature that fits no sandbox.
func (t *tenant) sign(ctx context.Context) {
	for ctx.Err() == nil {
		t.get(ctx, "/files?signature=v1_x&path=/x"+strings.Repeat("&a", 9000), func(http.Header) {})
	}
}

func (t *tenant) churn(ctx context.Context) {
	for ctx.Err() == nil {
		x, err := t.rest.Create(ctx, client.CreateOptions{TemplateID: harness.DefaultTemplate, Timeout: time.Minute})
		if err != nil {
			pause(ctx)
			continue
		}
		_ = t.rest.Kill(context.WithoutCancel(ctx), x.SandboxID)
	}
}

func (t *tenant) get(ctx context.Context, path string, set func(http.Header)) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+t.addr+path, nil)
	if err != nil {
		return
	}
	set(req.Header)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		pause(ctx)
		return
	}
	_, _ = io.Copy(io.Discard, res.Body)
	_ = res.Body.Close()
}

// Command is the first argument of this program in a process that attacks from outside; [Attack] has the others.
const Command = "attack"

// Attack attacks from outside until ctx is done.
func Attack(ctx context.Context, name, addr, sandboxID string) error {
	t, err := newTenant(addr, os.Getenv(client.EnvAPIKey))
	if err != nil {
		return err
	}
	a, err := chosen(name)
	if err != nil {
		return err
	}
	a[0].outside(ctx, t, sandboxID)
	return nil
}

// outsider is a process that attacks from outside. Nil is none.
type outsider struct{ cmd *exec.Cmd }

// startOutsider starts one. It has the lowest priority, 39 below that of this process, because a real one has a machine of its own.
func startOutsider(ctx context.Context, name, addr, key, sandboxID string) (*outsider, error) {
	path, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "nice", "-n", "39", path, Command, name, addr, sandboxID)
	cmd.Env, cmd.Stderr = append(os.Environ(), client.EnvAPIKey+"="+key), os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start attack: %w", err)
	}
	return &outsider{cmd}, nil
}

func (o *outsider) end() error {
	if o == nil {
		return nil
	}
	err := o.cmd.Process.Signal(syscall.SIGTERM)
	if end := new(exec.ExitError); err == nil {
		if err = o.cmd.Wait(); errors.As(err, &end) {
			err = nil // by the signal
		}
	}
	return err
}
