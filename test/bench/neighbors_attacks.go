package main

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
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/guest/envd"
)

// attack is what a tenant does that its neighbors shall not notice.
type attack struct {
	name string
	// inside is a Python program that root runs in the attackers' sandboxes.
	inside string
	// breaks means that the sandbox may not answer once it runs.
	breaks bool
	// outside runs in a process of its own until ctx is done.
	outside func(ctx context.Context, t *tenant, sandboxID string)
}

// attackPrelude has what the programs share. The name server is the host's side of the bridge: no packet goes further.
const attackPrelude = `
import errno, os, socket, sys, threading, time
def server():
    for line in open("/etc/resolv.conf"):
        if line.startswith("nameserver"):
            return line.split()[1]
def forever(f, processes=1):
    for _ in range(processes - 1):
        if os.fork() == 0:
            break
    while True:
        try:
            f()
        except (OSError, MemoryError):
            time.sleep(0.001)
`

func attacks() []attack {
	return []attack{
		{name: "fork bomb", inside: "forever(os.fork)\n", breaks: true},
		{name: "memory", inside: `
def hog():
    if os.fork() == 0:
        taken = []
        while True:
            taken.append(os.urandom(1 << 20) * 16)
    os.wait()
forever(hog)
`, breaks: true},
		{name: "full disk", inside: `
block = os.urandom(1 << 20)
def fill():
    with open("/fill", "wb", buffering=0) as f:
        try:
            while True:
                f.write(block)
        finally:
            os.unlink("/fill")
forever(fill)
`},
		{name: "inodes", inside: `
def make():
    os.makedirs("/many", exist_ok=True)
    i = 0
    try:
        while True:
            os.close(os.open("/many/%d" % i, os.O_CREAT | os.O_WRONLY))
            i += 1
    finally:
        for j in range(i):
            os.unlink("/many/%d" % j)
forever(make)
`},
		{name: "descriptors", inside: `
def take():
    taken = []
    try:
        while True:
            taken.append(os.open("/etc/passwd", os.O_RDONLY))
    finally:
        for fd in taken:
            os.close(fd)
forever(take, 16)
`},
		{name: "connections", inside: `
address, taken = server(), []
def connect():
    s = socket.socket()
    s.setblocking(False)
    s.connect_ex((address, 53))
    taken.append(s)
    if len(taken) > 5000:
        taken.pop(0).close()
forever(connect, 4)
`},
		{name: "packets", inside: `
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect((server(), 53))
forever(lambda: s.send(b"x"), 4)
`},
		{name: "logs", inside: `
out, text = os.open("/proc/1/fd/1", os.O_WRONLY), b"noise " * 1000 + b"\n"
forever(lambda: os.write(out, text), 2)
`},
		{name: "deep tree, snapshots", inside: `
def deepen():
    os.makedirs("/deep", exist_ok=True)
    os.chdir("/deep")
    for _ in range(4000):
        os.mkdir("d" * 255)
        os.chdir("d" * 255)
    time.sleep(3600)
forever(deepen)
`, outside: func(ctx context.Context, t *tenant, id string) {
			for ctx.Err() == nil {
				if _, err := t.rest.CreateSnapshot(ctx, id, client.SnapshotOptions{}); err != nil {
					pause(ctx)
				}
			}
		}},
		{name: "connections to the gateway", outside: func(ctx context.Context, t *tenant, _ string) { together(8, func() { t.hold(ctx) }) }},
		{name: "requests to its sandbox", outside: func(ctx context.Context, t *tenant, id string) { together(64, func() { t.flood(ctx, id) }) }},
		{name: "signed URLs of 18 kB", outside: func(ctx context.Context, t *tenant, _ string) { together(8, func() { t.sign(ctx) }) }},
		{name: "creates and kills", outside: func(ctx context.Context, t *tenant, _ string) { together(4, func() { t.churn(ctx) }) }},
	}
}

func pause(ctx context.Context) { _ = rest(ctx, 10*time.Millisecond) }

func together(n int, f func()) {
	var all sync.WaitGroup
	for range n {
		all.Go(f)
	}
	all.Wait()
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
		x, err := t.rest.Create(ctx, client.CreateOptions{TemplateID: "bench-gvisor", Timeout: time.Minute})
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

// attackCommand is the first argument of this program in a process of its own.
const attackCommand = "attack"

// runAttack attacks from outside until ctx is done.
func runAttack(ctx context.Context, name, addr, sandboxID string) error {
	t, err := newTenant(addr, os.Getenv(client.EnvAPIKey))
	if err != nil {
		return err
	}
	for _, a := range attacks() {
		if a.name == name {
			a.outside(ctx, t, sandboxID)
			return nil
		}
	}
	return fmt.Errorf("no attack %q", name)
}

// outsider is a process that attacks from outside. Nil is none.
type outsider struct{ cmd *exec.Cmd }

// startOutsider starts one. It has the lowest priority, because a real one has a machine of its own.
func startOutsider(ctx context.Context, name, addr, key, sandboxID string) (*outsider, error) {
	path, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "nice", "-n", "19", path, attackCommand, name, addr, sandboxID)
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
