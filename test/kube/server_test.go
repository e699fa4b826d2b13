package kube

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed" //nolint:depguard // the etcd of a cluster that is not ours
	"go.uber.org/zap"
	"k8s.io/client-go/rest"
)

const (
	// startTime bounds the start of a server; it is no measure of speed.
	startTime = 3 * time.Minute
	// stopTime is how long a server may take to end before it is killed.
	stopTime = 2 * time.Minute
	// apiPort is the port at an address that no other run has.
	apiPort = "6443"
)

// kube is the server that all tests share; each has namespaces of its own.
var kube cluster

func TestMain(m *testing.M) {
	code := m.Run()
	if err := kube.stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// cluster is a kube-apiserver over an etcd of its own. Both listen on the loopback device or a
// socket only, so nothing of the machine is changed and runs do not meet.
type cluster struct {
	once   sync.Once
	config *rest.Config
	err    error // of the start
	// undo ends what was started, the last first.
	undo []func() error
}

// startKube returns how an administrator reaches the server, which has our CRDs.
func startKube(t *testing.T) *rest.Config {
	t.Helper()
	if testing.Short() {
		t.Skip("SKIPPED: starting a kube-apiserver takes time")
	}
	if os.Getenv("TEST_PART") == "fast" {
		t.Skip("SKIPPED: make test-all runs it")
	}
	program := findProgram(t, "kube-apiserver")
	kube.once.Do(func() {
		if kube.err = kube.start(program); kube.err != nil {
			return
		}
		kube.err = errors.New("CRDs were not installed") // if install fails this test
		install(t, kube.config)
		kube.err = nil
	})
	if kube.err != nil {
		t.Fatal(kube.err)
	}
	return rest.CopyConfig(kube.config)
}

func (k *cluster) start(program string) error {
	dir, err := os.MkdirTemp("", "kube") // short, for sockets lie below
	if err != nil {
		return err
	}
	k.undo = append(k.undo, func() error { return os.RemoveAll(dir) })
	host := loopbackAddress()
	pki, err := newPKI(dir, host)
	if err != nil {
		return fmt.Errorf("make certificates: %w", err)
	}
	etcd, err := k.startEtcd(dir)
	if err != nil {
		return fmt.Errorf("start etcd: %w", err)
	}
	cmd := exec.Command(program, flags(dir, host, etcd)...) //nolint:noctx // ended by stop, in order
	var output tail
	cmd.Stdout, cmd.Stderr = &output, &output
	exited, err := startWithParent(cmd)
	if err != nil {
		return fmt.Errorf("start kube-apiserver: %w", err)
	}
	k.undo = append(k.undo, func() error { return end(cmd.Process, exited) })
	k.config = pki.config(host)
	if err := awaitReady(context.Background(), k.config, exited); err != nil {
		return fmt.Errorf("kube-apiserver: %w\n%s", err, output.String())
	}
	return nil
}

// stop ends the server in order, so that etcd loses no client that still writes.
func (k *cluster) stop() error {
	var failures []error
	for _, undo := range slices.Backward(k.undo) {
		failures = append(failures, undo())
	}
	return errors.Join(failures...)
}

func flags(dir, host, etcd string) []string {
	file := func(name string) string { return filepath.Join(dir, name) }
	return []string{
		"--etcd-servers=" + etcd,
		"--bind-address=" + host, "--secure-port=" + apiPort, "--advertise-address=" + host,
		"--endpoint-reconciler-type=none", // it accepts no loopback address, and no client finds the server by endpoints
		"--cert-dir=" + dir, "--tls-cert-file=" + file("server.crt"), "--tls-private-key-file=" + file("server.key"),
		"--client-ca-file=" + file("ca.crt"), "--authorization-mode=RBAC",
		"--service-cluster-ip-range=192.0.2.0/24",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + file("server.key"), "--service-account-signing-key-file=" + file("server.key"),
		"--profiling=false",
	}
}

// startWithParent starts a program that the kernel kills if the tests are killed. The kernel watches
// the thread that started it, so that thread stays until the program ends.
func startWithParent(cmd *exec.Cmd) (exited chan error, err error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	exited = make(chan error, 1)
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			exited <- cmd.Wait()
		}
	}()
	return exited, <-started
}

// end ends the server as a service manager does.
func end(p *os.Process, exited chan error) error {
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop kube-apiserver: %w", err)
	}
	select {
	case <-exited: //nolint:errcheck // it was signalled to end
		return nil
	case <-time.After(stopTime):
		_ = p.Kill()
		<-exited //nolint:errcheck // it was killed
		return fmt.Errorf("kube-apiserver did not end within %v of SIGTERM", stopTime)
	}
}

// awaitReady polls /readyz with backoff until the server is ready or gone.
func awaitReady(ctx context.Context, cfg *rest.Config, exited chan error) error {
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
		case end := <-exited:
			exited <- end // for stop
			return fmt.Errorf("ended at its start: %w", errors.Join(end, err))
		case <-ctx.Done():
			return fmt.Errorf("not ready within %v: %w", startTime, err)
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

// startEtcd runs an etcd in the process, on a socket in dir, and returns the socket's URL.
func (k *cluster) startEtcd(dir string) (string, error) {
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
	k.undo = append(k.undo, func() error {
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

// loopbackAddress is one of the sixteen million that the loopback device answers, so that the
// port is free and runs do not meet.
func loopbackAddress() string {
	return net.IPv4(127, byte(1+mathrand.IntN(254)), byte(mathrand.IntN(256)), byte(1+mathrand.IntN(254))).String()
}

func findProgram(t *testing.T, name string) string {
	t.Helper()
	cache := os.Getenv("BARCHAN_CACHE")
	if cache == "" {
		cache = "/var/cache/barchan"
	}
	p := filepath.Join(cache, "bin", name)
	if _, err := os.Stat(p); err == nil {
		return p
	}
	if os.Getenv("CI") == "true" {
		t.Fatalf("%s is missing: scripts/tool.sh kube-apiserver builds it", p)
	}
	t.Skipf("SKIPPED: %s is missing: scripts/tool.sh kube-apiserver builds it", p)
	return ""
}

// pki is an authority of the test's own with what it issued: files for the server, and the
// certificate of an administrator.
type pki struct{ ca, cert, key []byte }

func newPKI(dir, host string) (p pki, err error) {
	caKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return p, err
	}
	ca := certificate("test authority")
	ca.IsCA, ca.BasicConstraintsValid, ca.KeyUsage = true, true, x509.KeyUsageCertSign
	if p.ca, err = sign(ca, ca, caKey, caKey); err != nil {
		return p, err
	}
	admin := certificate("admin")
	admin.Subject.Organization = []string{"system:masters"}
	admin.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if p.cert, p.key, err = issue(admin, ca, caKey); err != nil {
		return p, err
	}
	server := certificate("kube-apiserver")
	server.ExtKeyUsage, server.IPAddresses = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, []net.IP{net.ParseIP(host)}
	cert, key, err := issue(server, ca, caKey)
	if err != nil {
		return p, err
	}
	for name, content := range map[string][]byte{"ca.crt": p.ca, "server.crt": cert, "server.key": key} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return p, err
		}
	}
	return p, nil
}

// config is how the administrator reaches a server. The client does not hold itself back.
func (p pki) config(host string) *rest.Config {
	return &rest.Config{
		Host: "https://" + net.JoinHostPort(host, apiPort), QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: p.ca, CertData: p.cert, KeyData: p.key},
	}
}

func certificate(name string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(mathrand.Int64()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature,
	}
}

func issue(c, ca *x509.Certificate, caKey *ecdsa.PrivateKey) (cert, key []byte, err error) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	if cert, err = sign(c, ca, k, caKey); err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		return nil, nil, err
	}
	return cert, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

func sign(c, ca *x509.Certificate, key, caKey *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.CreateCertificate(rand.Reader, c, ca, key.Public(), caKey)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}
