package kubecluster

import (
	"context"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"go.etcd.io/etcd/server/v3/embed" //nolint:depguard // the etcd of a cluster that is not ours
	"go.uber.org/zap"
	"k8s.io/client-go/rest"
)

// Server is a kube-apiserver over an etcd of its own. Both listen on the loopback device or a socket
// only. It has no controllers: nothing collects garbage, and namespaces stay.
type Server struct {
	// REST is how an administrator reaches the server.
	REST *rest.Config

	undo undo
}

// undo ends what was started, the last first.
type undo []func() error

func (u *undo) add(f func() error) { *u = append(*u, f) }

func (u *undo) run() error {
	var failures []error
	for _, f := range slices.Backward(*u) {
		failures = append(failures, f())
	}
	*u = nil
	return errors.Join(failures...)
}

// StartServer starts a server from the program kube-apiserver.
func StartServer(ctx context.Context, path string) (*Server, error) {
	s := &Server{}
	if err := s.start(ctx, path); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

func (s *Server) start(ctx context.Context, path string) error {
	dir, err := os.MkdirTemp("", "kube") // short, for sockets lie below
	if err != nil {
		return err
	}
	s.undo.add(func() error { return os.RemoveAll(dir) })
	host := loopbackAddress()
	ca, err := newAuthority()
	if err != nil {
		return fmt.Errorf("make authority: %w", err)
	}
	if err := ca.writeServer(dir, host); err != nil {
		return fmt.Errorf("write certificates: %w", err)
	}
	admin, err := ca.client("admin", masters)
	if err != nil {
		return fmt.Errorf("issue certificate: %w", err)
	}
	etcd, err := startEtcd(dir, &s.undo)
	if err != nil {
		return fmt.Errorf("start etcd: %w", err)
	}
	const port = "6443"
	args := append(serverFlags(dir, etcd),
		"--bind-address="+host, "--secure-port="+port, "--advertise-address="+host,
		"--endpoint-reconciler-type=none", // it accepts no loopback address, and no client finds the server by endpoints
		"--authorization-mode=RBAC", "--service-cluster-ip-range=192.0.2.0/24")
	p, err := startProgram(exec.Command(path, args...), nil) //nolint:noctx // ended by Stop, in order
	if err != nil {
		return err
	}
	s.undo.add(p.stop)
	s.REST = ca.config(net.JoinHostPort(host, port), admin)
	return awaitReady(ctx, s.REST, p)
}

// Stop ends the server in order, so that etcd loses no client that still writes.
func (s *Server) Stop() error { return s.undo.run() }

// serverFlags are those of any kube-apiserver with certificates in dir.
func serverFlags(dir, etcd string) []string {
	file := func(name string) string { return filepath.Join(dir, name) }
	return []string{
		"--etcd-servers=" + etcd,
		"--cert-dir=" + dir, "--tls-cert-file=" + file("server.crt"), "--tls-private-key-file=" + file("server.key"),
		"--client-ca-file=" + file("ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + file("server.key"), "--service-account-signing-key-file=" + file("server.key"),
		"--profiling=false",
	}
}

// startEtcd runs an etcd in the process, on a socket in dir, and returns the socket's URL.
func startEtcd(dir string, u *undo) (string, error) {
	client := url.URL{Scheme: "unix", Path: filepath.Join(dir, "c")}
	peer := url.URL{Scheme: "unix", Path: filepath.Join(dir, "p")}
	cfg := embed.NewConfig()
	cfg.Name, cfg.Dir = "test", filepath.Join(dir, "etcd")
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.Name + "=" + peer.String()
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return "", err
	}
	u.add(func() error {
		e.Close()
		return nil
	})
	select {
	case <-e.Server.ReadyNotify():
		return client.String(), nil
	case err := <-e.Err():
		return "", err
	case <-time.After(startTime):
		return "", fmt.Errorf("not ready within %v", startTime)
	}
}

// awaitReady polls /readyz with backoff until the server is ready or gone.
func awaitReady(ctx context.Context, cfg *rest.Config, p *program) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	c, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return err
	}
	defer c.CloseIdleConnections()
	for pause := 50 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := checkReady(ctx, c, cfg.Host)
		if err == nil {
			return nil
		}
		select {
		case <-p.exited:
			return p.failure()
		case <-ctx.Done():
			return fmt.Errorf("%s: not ready within %v: %w\n%s", p.name, startTime, err, p.output.String())
		case <-time.After(pause):
		}
	}
}

func checkReady(ctx context.Context, c *http.Client, host string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, host+"/readyz", http.NoBody)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET /readyz: %s", resp.Status)
	}
	return nil
}

// loopbackAddress is one of the sixteen million that the loopback device answers, so that the
// port is free and runs do not meet.
func loopbackAddress() string {
	return net.IPv4(127, byte(1+mathrand.IntN(254)), byte(mathrand.IntN(256)), byte(1+mathrand.IntN(254))).String()
}
