package gateway

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/pprof"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/base/sandbox"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/edge/gateway"
	"github.com/barchan-dev/barchan/internal/edge/route"
	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/proc"
)

// lineup is a backend with proxies before it, each a process of its own.
type lineup struct {
	dir  string
	ways []*way
	stop []func()
}

// way is one way to the backend: direct, or by a proxy.
type way struct {
	name, addr string
	host       string // that requests name
	headers    []string
	pid        int // of the process that listens; 0 for direct
}

// packages has, for each program of others, the package that Debian has it in.
var packages = map[string]string{"nginx": "nginx-light", "haproxy": "haproxy", "wrk": "wrk"}

// install installs what is missing. Debian would start the services; here it may not.
func install(ctx context.Context) error {
	var missing []string
	for program, pkg := range packages {
		if _, err := exec.LookPath(program); err != nil {
			missing = append(missing, pkg)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	args := append([]string{"-qq", "install", "-y", "--no-install-recommends"}, missing...)
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("install %s: %w: %s", strings.Join(missing, ", "), err, out)
	}
	return nil
}

const nginxBackend = `daemon off; master_process off; pid backend.pid; error_log stderr crit;
events { worker_connections 8192; }
http {
  access_log off; keepalive_requests 100000000; keepalive_timeout 600s; sendfile on; tcp_nodelay on;
  client_body_temp_path b1; proxy_temp_path b2; fastcgi_temp_path b3; uwsgi_temp_path b4; scgi_temp_path b5;
  server { listen ADDR; location = /large { root FILES; } location / { return 200 "hello"; } }
}
`

const nginxProxy = `daemon off; worker_processes auto; pid proxy.pid; error_log stderr crit; user root;
events { worker_connections 8192; }
http {
  access_log off; keepalive_requests 100000000; keepalive_timeout 600s; tcp_nodelay on;
  client_body_temp_path p1; proxy_temp_path p2; fastcgi_temp_path p3; uwsgi_temp_path p4; scgi_temp_path p5;
  upstream backend { server BACKEND; keepalive 128; keepalive_requests 100000000; }
  server {
    listen ADDR;
    location / { proxy_pass http://backend; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_max_temp_file_size 0; }
  }
}
`

const haproxyProxy = `global
  maxconn 8000
defaults
  mode http
  option http-keep-alive
  http-reuse always
  timeout connect 5s
  timeout client 600s
  timeout server 600s
frontend all
  bind ADDR
  default_backend backend
backend backend
  server one BACKEND
`

// newLineup starts all processes.
func newLineup(ctx context.Context, dir string) (_ *lineup, err error) {
	if err := install(ctx); err != nil {
		return nil, err
	}
	f := &lineup{}
	defer func() {
		if err != nil {
			f.close()
		}
	}()
	if f.dir, err = os.MkdirTemp(dir, "gateway-bench-"); err != nil {
		return nil, fmt.Errorf("make directory: %w", err)
	}
	large, err := os.Create(filepath.Join(f.dir, "large"))
	if err != nil {
		return nil, fmt.Errorf("make large file: %w", err)
	}
	if err := errors.Join(large.Truncate(largeBody), large.Close(), os.Chmod(f.dir, 0o755)); err != nil { //nolint:gosec // nginx reads it
		return nil, fmt.Errorf("make large file: %w", err)
	}
	backend, err := harness.FreeAddr(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := f.start(ctx, "direct", backend, "nginx", "-p", f.dir, "-c", f.file("backend.conf", nginxBackend, backend, backend)); err != nil {
		return nil, err
	}
	f.ways[0].pid = 0
	for _, p := range []struct{ name, text string }{{"nginx", nginxProxy}, {"haproxy", haproxyProxy}} {
		addr, err := harness.FreeAddr(ctx)
		if err != nil {
			return nil, err
		}
		file := f.file(p.name+".conf", p.text, addr, backend)
		args := []string{"nginx", "-p", f.dir, "-c", file}
		if p.name == "haproxy" {
			args = []string{"haproxy", "-db", "-f", file}
		}
		if _, err := f.start(ctx, p.name, addr, args...); err != nil {
			return nil, err
		}
	}
	if err := f.startRouter(ctx, backend); err != nil {
		return nil, err
	}
	return f, f.startGateway(ctx, backend)
}

// router is the name of agent-sandbox's router, which is written in Go since v0.5.
const router = "agent-sandbox's router"

// startRouter starts agent-sandbox's router, where it has been built: scripts/tool.sh agent-sandbox-router does so. Its clients name the
// address of the sandbox, whose port may be on loopback where a flag allows that. It finds the sandbox by nothing else here.
func (f *lineup) startRouter(ctx context.Context, backend string) error {
	program := filepath.Join(cmp.Or(os.Getenv("BARCHAN_CACHE"), "/var/cache/barchan"), "bin", "agent-sandbox-router")
	if _, err := os.Stat(program); err != nil {
		return nil //nolint:nilerr // it takes minutes to build, and the other proxies are there
	}
	addr, err := harness.FreeAddr(ctx)
	if err != nil {
		return err
	}
	w, err := f.start(ctx, router, addr, program, "-http-bind-address="+addr, "-metrics-bind-address=127.0.0.1:0", "-health-probe-bind-address=127.0.0.1:0",
		"-allow-loopback-pod-ip", "-cache-enabled=false", "-zap-log-level=error")
	if err != nil {
		return err
	}
	host, port, err := net.SplitHostPort(backend)
	w.headers = []string{"X-Sandbox-ID: bench", "X-Sandbox-Pod-IP: " + host, "X-Sandbox-Port: " + port}
	return err
}

func (f *lineup) startGateway(ctx context.Context, backend string) error {
	addr, err := harness.FreeAddr(ctx)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	w, err := f.start(ctx, "barchan", addr, self, Command, addr)
	if err != nil {
		return err
	}
	_, port, err := net.SplitHostPort(backend)
	w.host = port + "-" + string(applyRoute(route.NewTable(), "bench", 1)) + "." + domain
	return err
}

// file writes a configuration and returns its path. What cannot be written shows when it is read.
func (f *lineup) file(name, text, addr, backend string) string {
	text = strings.NewReplacer("ADDR", addr, "BACKEND", backend, "FILES", f.dir).Replace(text)
	path := filepath.Join(f.dir, name)
	_ = os.WriteFile(path, []byte(text), 0o600)
	return path
}

// start starts a process and waits until it listens.
func (f *lineup) start(ctx context.Context, name, addr string, args ...string) (*way, error) {
	var out bytes.Buffer
	ctx, cancel := context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	input, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		cancel()
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	ended := make(chan struct{})
	go func() { // close waits for it
		defer close(ended)
		_ = cmd.Wait()
	}()
	f.stop = append(f.stop, func() {
		_ = input.Close()
		cancel()
		<-ended
	})
	w := &way{name: name, addr: addr, host: addr, pid: cmd.Process.Pid}
	f.ways = append(f.ways, w)
	for {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
		if err == nil {
			return w, c.Close()
		}
		select {
		case <-ended:
			return nil, fmt.Errorf("%s ended at once: %s", name, out.String())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func (f *lineup) close() {
	for _, stop := range f.stop {
		stop()
	}
	if f.dir != "" {
		_ = os.RemoveAll(f.dir)
	}
}

// versions lists the compared programs.
func (f *lineup) versions(ctx context.Context) string {
	nginx, _ := exec.CommandContext(ctx, "nginx", "-v").CombinedOutput()
	haproxy, _ := exec.CommandContext(ctx, "haproxy", "-v").CombinedOutput()
	first, _, _ := strings.Cut(string(haproxy), "\n")
	return strings.TrimSpace(string(nginx)) + ", " + first
}

const (
	// Command is the first argument of this program in a process that [Serve] is for; an address follows.
	Command = "serve-gateway"
	domain  = "bench.test"
)

// Serve is the gateway under test: nothing else is in its process.
func Serve(ctx context.Context, addr string) error {
	tokens, err := sandbox.NewTokens(bytes.Repeat([]byte("x"), 32))
	if err != nil {
		return err
	}
	table := route.NewTable()
	applyRoute(table, "bench", 1)
	table.MarkSynced()
	g, err := gateway.New(gateway.Config{Domains: []string{domain}, Routes: table, Tokens: tokens, Log: telemetry.Discard()})
	if err != nil {
		return err
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	if file := os.Getenv("BARCHAN_BENCH_PROFILE"); file != "" { // to see where its time goes
		out, err := os.Create(file)
		if err != nil {
			return fmt.Errorf("make profile: %w", err)
		}
		defer func() { _ = out.Close() }()
		if err := pprof.StartCPUProfile(out); err != nil {
			return fmt.Errorf("start profile: %w", err)
		}
		defer pprof.StopCPUProfile()
	}
	s := g.Server(nil)
	go func() { // the process ends with it
		_, _ = os.Stdin.Read(make([]byte, 1)) // until the parent closes it
		_ = s.Close()
	}()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// get is the request of a path, as bytes.
func (w *way) get(path string) []byte {
	return []byte("GET " + path + " HTTP/1.1\r\n" + strings.Join(append([]string{"Host: " + w.host}, w.headers...), "\r\n") + "\r\n\r\n")
}

func (w *way) dial(ctx context.Context) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", w.addr)
}

// wrk returns requests a second.
func (w *way) wrk(ctx context.Context, conns int, d time.Duration) (float64, error) {
	args := []string{"-t1", "-c" + strconv.Itoa(conns), "-d" + strconv.Itoa(int(d.Seconds())) + "s", "-H", "Host: " + w.host}
	for _, h := range w.headers {
		args = append(args, "-H", h)
	}
	out, err := exec.CommandContext(ctx, "wrk", append(args, "http://"+w.addr+"/")...).CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("wrk: %w: %s", err, out)
	}
	if strings.Contains(string(out), "Non-2xx") || strings.Contains(string(out), "Socket errors") {
		return 0, fmt.Errorf("wrk met errors: %s", out)
	}
	return strconv.ParseFloat(proc.Field(string(out), "Requests/sec"), 64)
}

// idleMemory is what a proxy grows by for each connection that has made a request and waits.
func (w *way) idleMemory(ctx context.Context, conns int) (float64, error) {
	before, err := w.pss()
	if err != nil {
		return 0, err
	}
	var open []net.Conn
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	buf := make([]byte, 4096)
	for range conns {
		c, err := w.dial(ctx)
		if err != nil {
			return 0, err
		}
		open = append(open, c)
		if _, err := c.Write(w.get("/")); err != nil {
			return 0, err
		}
		if err := readHello(c, buf); err != nil {
			return 0, err
		}
	}
	if err := harness.Rest(ctx, harness.Settle); err != nil { // for what is kept for a while only
		return 0, err
	}
	after, err := w.pss()
	return (after - before) * 1024 / float64(conns), err
}

// pss is the memory of the process and its children, in MiB.
func (w *way) pss() (float64, error) {
	children, err := proc.Where("status", func(text string) bool { return proc.Field(text, "PPid") == strconv.Itoa(w.pid) })
	if err != nil {
		return 0, err
	}
	return proc.PSS(append(children, w.pid))
}

// readHello reads one small answer.
func readHello(c net.Conn, buf []byte) error {
	for n := 0; n < 5 || string(buf[n-5:n]) != "hello"; {
		m, err := c.Read(buf[n:])
		if n += m; err != nil {
			return fmt.Errorf("after %q: %w", buf[:n], err)
		}
	}
	if !bytes.HasPrefix(buf, []byte("HTTP/1.1 200 ")) {
		return fmt.Errorf("answer %.40q", buf)
	}
	return nil
}

// download reads a body of a known size on a fresh connection and returns how long that took.
func (w *way) download(ctx context.Context, path string, size int64) (time.Duration, error) {
	c, err := w.dial(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { _ = c.Close() }()
	began := time.Now()
	if _, err := c.Write(w.get(path)); err != nil {
		return 0, err
	}
	buf := make([]byte, 256<<10)
	total, head := int64(0), int64(-1)
	for head < 0 || total < head+size {
		n, err := c.Read(buf)
		if head < 0 && n > 0 {
			end := bytes.Index(buf[:n], []byte("\r\n\r\n"))
			if end < 0 || !bytes.HasPrefix(buf, []byte("HTTP/1.1 200 ")) {
				return 0, fmt.Errorf("answer %.40q", buf[:n])
			}
			head = int64(end) + 4
		}
		total += int64(n)
		if err != nil {
			return 0, fmt.Errorf("after %d bytes: %w", total, errors.Join(err, io.ErrUnexpectedEOF))
		}
	}
	return time.Since(began), nil
}
