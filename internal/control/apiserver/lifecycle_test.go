package apiserver_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/localca"
	"github.com/barchan-dev/barchan/internal/control/apiserver"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

func configMap(name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
}

func TestNewRefusesBadConfig(t *testing.T) {
	good := func() apiserver.Config { return apiserver.Config{DataDir: "/x", Listen: "127.0.0.1:0"} }
	for name, tc := range map[string]struct {
		change func(*apiserver.Config)
		want   string
	}{
		"no directory":       {func(c *apiserver.Config) { c.DataDir = "" }, "data directory"},
		"relative directory": {func(c *apiserver.Config) { c.DataDir = "x" }, "data directory"},
		"listen":             {func(c *apiserver.Config) { c.Listen = "7764" }, "host:port"},
		"small quota":        {func(c *apiserver.Config) { c.Etcd.QuotaBackendBytes = 1 }, "quota"},
		"endpoint":           {func(c *apiserver.Config) { c.Etcd.Endpoints = []string{"localhost:2379"} }, "etcd endpoint"},
		"half a key pair":    {func(c *apiserver.Config) { c.Etcd.CertFile = "/x.crt" }, "certificate and key"},
		"prefix with an end": {func(c *apiserver.Config) { c.Etcd.Prefix = "/barchan/" }, "prefix"},
		"short lease":        {func(c *apiserver.Config) { c.Etcd.Lease = time.Second }, "lease"},
		"prefix":             {func(c *apiserver.Config) { c.Etcd.Prefix = "barchan" }, "prefix"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := good()
			tc.change(&cfg)
			_, err := apiserver.New(cfg)
			if !errors.Is(err, errs.ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("New = %v, want an invalid %s", err, tc.want)
			}
		})
	}
	if _, err := apiserver.New(good()); err != nil {
		t.Errorf("New of a good configuration = %v", err)
	}
}

func TestRestartKeepsData(t *testing.T) {
	dir := t.TempDir()
	at := func(c *apiserver.Config) { c.DataDir = dir }
	first := start(t, at)
	if err := clientAs(t, first, apiserver.UserAdmin).Create(t.Context(), configMap("kept")); err != nil {
		t.Fatal(err)
	}
	kubeconfig, err := os.ReadFile(filepath.Join(dir, "pki", "admin.token"))
	if err != nil {
		t.Fatal(err)
	}
	first.Stop()
	first.Stop()
	if err := first.Start(t.Context()); !errors.Is(err, errs.ErrConflict) {
		t.Errorf("Start of a stopped server = %v, want a conflict", err)
	}

	second := start(t, at)
	var cm corev1.ConfigMap
	if err := clientAs(t, second, apiserver.UserAdmin).Get(t.Context(), client.ObjectKeyFromObject(configMap("kept")), &cm); err != nil {
		t.Errorf("after a restart: %v", err)
	}
	again, err := os.ReadFile(filepath.Join(dir, "pki", "admin.token"))
	if err != nil || string(again) != string(kubeconfig) {
		t.Errorf("the token changed with a restart (%v)", err)
	}
}

func TestKillKeepsWrites(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), eventually.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), writerDir+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var acknowledged []string
	lines := bufio.NewScanner(out)
	for len(acknowledged) < 50 && lines.Scan() {
		acknowledged = append(acknowledged, lines.Text())
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() {
		acknowledged = append(acknowledged, lines.Text())
	}
	_ = cmd.Wait()
	if len(acknowledged) < 50 {
		t.Fatalf("the writer ended after %d writes", len(acknowledged))
	}

	s := start(t, func(c *apiserver.Config) { c.DataDir, c.Listen = dir, "" })
	var list corev1.ConfigMapList
	if err := clientAs(t, s, apiserver.UserAdmin).List(t.Context(), &list, client.InNamespace("default")); err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	for _, cm := range list.Items {
		have[cm.Name] = true
	}
	for _, name := range acknowledged {
		if !have[name] {
			t.Errorf("%s was acknowledged and is gone", name)
		}
	}
}

func TestStartErrors(t *testing.T) {
	t.Run("port in use", func(t *testing.T) {
		ln, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // a listener that only occupies a port
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = ln.Close() }()
		s := newServer(t, func(c *apiserver.Config) { c.Listen = ln.Addr().String() })
		if err := s.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "address already in use") {
			t.Errorf("Start = %v, want the port in use", err)
		}
	})
	t.Run("directory in use", func(t *testing.T) {
		dir := t.TempDir()
		at := func(c *apiserver.Config) { c.DataDir = dir }
		start(t, at)
		err := newServer(t, at).Start(t.Context())
		if !errors.Is(err, errs.ErrConflict) || !strings.Contains(err.Error(), "another server") {
			t.Errorf("Start = %v, want another server named", err)
		}
	})
	t.Run("broken files", func(t *testing.T) { testBrokenFiles(t) })
	t.Run("no etcd there", func(t *testing.T) {
		s := newServer(t, func(c *apiserver.Config) {
			c.Etcd.Endpoints = []string{"unix://" + filepath.Join(t.TempDir(), "none.sock")}
		})
		if err := s.Start(t.Context()); !errors.Is(err, errs.ErrUnavailable) {
			t.Errorf("Start = %v, want unavailable", err)
		}
	})
	t.Run("bad token file", func(t *testing.T) {
		dir := t.TempDir()
		if err := os.Mkdir(filepath.Join(dir, "pki"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "pki", "admin.token"), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		s := newServer(t, func(c *apiserver.Config) { c.DataDir = dir })
		if err := s.Start(t.Context()); !errors.Is(err, errs.ErrInvalid) {
			t.Errorf("Start = %v, want an invalid token", err)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := newServer(t).Start(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("Start = %v, want cancelled", err)
		}
	})
}

func testBrokenFiles(t *testing.T) {
	for name, pattern := range map[string]string{"database": "etcd/member/snap/db", "log": "etcd/member/wal/*.wal"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			at := func(c *apiserver.Config) { c.DataDir = dir }
			start(t, at).Stop()
			files, err := filepath.Glob(filepath.Join(dir, pattern))
			if err != nil || len(files) == 0 {
				t.Fatalf("no %s in %s (%v)", pattern, dir, err)
			}
			for _, f := range files {
				if err := os.WriteFile(f, []byte(strings.Repeat("garbage ", 4096)), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := newServer(t, at).Start(t.Context()); err == nil || !strings.Contains(err.Error(), dir) {
				t.Errorf("Start = %v, want an error that names the directory", err)
			}
		})
	}
}

func TestSideBySide(t *testing.T) {
	a, b := start(t), start(t)
	if err := clientAs(t, a, apiserver.UserAdmin).Create(t.Context(), configMap("in-a")); err != nil {
		t.Fatal(err)
	}
	err := clientAs(t, b, apiserver.UserAdmin).Get(t.Context(), client.ObjectKeyFromObject(configMap("in-a")), &corev1.ConfigMap{})
	if client.IgnoreNotFound(err) != nil || err == nil {
		t.Errorf("the other server's object: %v, want not found", err)
	}
	a.Stop()
	if err := clientAs(t, b, apiserver.UserAdmin).Create(t.Context(), configMap("in-b")); err != nil {
		t.Errorf("after the other server stopped: %v", err)
	}
}

// startOtherEtcd runs an etcd of its own, as a user would have it, and returns its endpoint.
func startOtherEtcd(t *testing.T) string {
	t.Helper()
	cfg := embed.NewConfig()
	cfg.Dir, cfg.ZapLoggerBuilder = t.TempDir(), embed.NewZapLoggerBuilder(zap.NewNop())
	listen := url.URL{Scheme: "unix", Path: filepath.Join(t.TempDir(), "c.sock")}
	peer := url.URL{Scheme: "unix", Path: filepath.Join(t.TempDir(), "p.sock")}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{listen}, []url.URL{listen}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.Name + "=" + peer.String()
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	select {
	case <-e.Server.ReadyNotify():
	case <-time.After(eventually.Patience):
		t.Fatal("etcd is not ready")
	}
	return listen.String()
}

func TestExternalEtcd(t *testing.T) {
	endpoint := startOtherEtcd(t)
	with := func(c *apiserver.Config) { c.Etcd.Endpoints = []string{endpoint} }
	s := start(t, with)
	if err := clientAs(t, s, apiserver.UserAdmin).Create(t.Context(), configMap("outside")); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	again := start(t, with) // in another directory: the data are in etcd
	if err := clientAs(t, again, apiserver.UserAdmin).Get(t.Context(), client.ObjectKeyFromObject(configMap("outside")), &corev1.ConfigMap{}); err != nil {
		t.Errorf("after a restart: %v", err)
	}
}

func TestNothingIsLeft(t *testing.T) {
	known := []goleak.Option{
		goleak.IgnoreCurrent(),
		goleak.IgnoreAnyFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"),   // one for the process
		goleak.IgnoreAnyFunction("k8s.io/apimachinery/pkg/util/wait.Forever"), // the same, of the first health check
		// A timer of three seconds that each consistent read leaves to run out.
		goleak.IgnoreAnyFunction("k8s.io/apiserver/pkg/storage/cacher.(*watchCache).waitUntilFreshLocked.func2"),
	}
	defer eventually.NoError(t, "nothing is left", func() error { return goleak.Find(known...) })
	for range 2 {
		s := newServer(t)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		if err := s.Start(ctx); err != nil {
			t.Fatal(err)
		}
		go func() { ended <- s.Run(ctx) }()
		w, err := clientAs(t, s, apiserver.UserAdmin).Watch(ctx, &corev1.ConfigMapList{})
		if err != nil {
			t.Fatal(err)
		}
		if code := get(t, s, "/healthz", ""); code != http.StatusOK {
			t.Errorf("/healthz = %d", code)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v", err)
		}
		for range w.ResultChan() { // until the stopped server has closed it
		}
		err = clientAs(t, s, apiserver.UserAdmin).List(t.Context(), &corev1.ConfigMapList{})
		if !errors.Is(err, errs.ErrUnavailable) {
			t.Errorf("a request after the end: %v, want unavailable", err)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}

func request(t testing.TB, target string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, target, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// get sends a request over TLS, with a token or anonymously, and returns the status.
func get(t testing.TB, s *apiserver.Server, path, token string) int {
	t.Helper()
	kc, err := clientcmd.BuildConfigFromFlags("", s.AdminKubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(kc.CAData)
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, ForceAttemptHTTP2: true}
	defer tr.CloseIdleConnections()
	req := request(t, kc.Host+path)
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := (&http.Client{Transport: tr, Timeout: eventually.Patience}).Do(req)
	if err != nil {
		t.Fatalf("GET %s: %v", path, err)
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}

func TestFilesArePrivate(t *testing.T) {
	dir := t.TempDir()
	s := start(t, func(c *apiserver.Config) { c.DataDir = filepath.Join(dir, "data") })
	err := filepath.WalkDir(filepath.Join(dir, "data"), func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		public := d.Name() == localca.CertFile
		if err == nil && !public && info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if s.Addr() == nil {
		t.Error("Addr = nil for a listening server")
	}
}

// TestHeadsOfStrangers requires that the listener is the limited one, and that no client can have it keep large heads of requests.
func TestHeadsOfStrangers(t *testing.T) {
	limited := false
	s := start(t, func(c *apiserver.Config) {
		c.Limit = func(l net.Listener) net.Listener { limited = true; return l }
	})
	if !limited {
		t.Error("the listener is not limited")
	}
	conn, err := (&tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}}).DialContext(t.Context(), "tcp", s.Addr().String()) //nolint:gosec // a test
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(eventually.Patience))
	_, _ = io.WriteString(conn, "GET /api HTTP/1.1\r\nHost: x\r\nX-A: "+strings.Repeat("a", 100<<10)+"\r\n\r\n")
	status := make([]byte, len("HTTP/1.1 431"))
	if _, err := io.ReadFull(conn, status); string(status) != "HTTP/1.1 431" {
		t.Errorf("a head of 100 KiB: %q, %v", status, err)
	}
}
