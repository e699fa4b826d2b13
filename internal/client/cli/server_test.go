package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/adminapi"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/guest/envd"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// leeway is what a time that is shown in minutes may pass by before it is shown as another.
const leeway = 30 * time.Second

// Keys of the default namespace, and of another.
const (
	testKey   = "e2b_00112233445566778899aabbccddeeff00112233"
	tenantKey = "e2b_ffeeddccbbaa998877665544332211ffeeddccbb"
)

// agentBinary builds the real agent once for all tests.
var agentBinary = sync.OnceValues(func() (string, error) {
	file := filepath.Join(binDir, "barchan-agent")
	out, err := exec.Command("go", "build", "-o", file, "../../../cmd/barchan-agent").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build the agent: %w: %s", err, out)
	}
	return file, nil
})

// startAgent runs the real agent on loopback, and returns its URL.
func startAgent(t *testing.T) *url.URL {
	t.Helper()
	binary, err := agentBinary()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cfg := envd.Config{
		ListenAddress: "127.0.0.1", Port: -1, PortFile: filepath.Join(dir, "port"),
		DefaultUser: "root", DefaultWorkdir: dir, Open: true,
	}
	if err := envd.WriteConfig(filepath.Join(dir, "config.json"), &cfg); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(binary, "-config", filepath.Join(dir, "config.json")) //nolint:noctx // ended below
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("agent: %s", log.String())
		}
	})
	var addr string
	eventually.True(t, "the agent's port file", func() bool {
		b, err := os.ReadFile(cfg.PortFile)
		addr = strings.TrimSpace(string(b))
		return err == nil && addr != ""
	})
	if !strings.Contains(addr, ":") {
		addr = "127.0.0.1:" + addr
	}
	return &url.URL{Scheme: "http", Host: addr}
}

// server stands for a whole server: REST API, gateway by headers, and the admin
// socket. Behind the gateway is a real agent; sandboxes are names for it.
type server struct {
	t      *testing.T
	dir    string // data directory
	agent  *url.URL
	front  *httptest.Server
	status adminclient.Status

	mu        sync.Mutex
	sandboxes map[string]*client.SandboxDetail
	order     []string
	created   []client.CreateOptions
	// loseCreated is how many responses to creates are lost, and starting how many creates are refused then, as by a server that
	// starts. once has the sandboxes by their idempotency keys.
	loseCreated int
	starting    int
	once        map[string]string
	snapshots   []client.Snapshot
	// templates knows templates besides base; nil: there are none.
	templates func(name string) bool
	bodies    []string        // of pauses, connects, snapshots and forks
	printed   <-chan struct{} // what forks wait for after the first; nil: nothing
	images    []adminclient.Image
	tar       []byte // the last that was imported; +checklocks:mu
	leases    []adminclient.Lease
	repairs   []adminclient.Repair
	logs      []client.LogEntry
	// trafficToken is that of all sandboxes; empty: their traffic is public.
	trafficToken string
	staged       []string // files below /tmp that were sent to the agent; +checklocks:mu
	down         func()
	findings     []adminclient.Finding // +checklocks:mu
	peerKeys     []string              // +checklocks:mu
	travel       travel
	builds       *builds // nil: the server has none
}

func newServer(t *testing.T, agent *url.URL) *server {
	t.Helper()
	s := &server{t: t, agent: agent, sandboxes: map[string]*client.SandboxDetail{}, once: map[string]string{}}
	var err error
	if s.dir, err = os.MkdirTemp("", "bcli"); err != nil { //nolint:usetesting // t.TempDir is too long for a socket
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(s.dir) })
	s.front = httptest.NewServer(s)
	t.Cleanup(s.front.Close)
	keyFile := filepath.Join(s.dir, "credentials", "api-key")
	if err := errors.Join(os.MkdirAll(filepath.Dir(keyFile), 0o700), os.WriteFile(keyFile, []byte(testKey+"\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	addr := strings.TrimPrefix(s.front.URL, "http://")
	s.status = adminclient.Status{
		Version: "1.2.3", PID: os.Getpid(), Node: "n1", StartedAt: time.Now().Add(-time.Hour), Ready: true, Phase: "ready", DataDir: s.dir, Quotas: map[string]string{"snapshots": "10000", "stored": "1Ti"},
		Addresses: adminclient.Addresses{
			HTTP: addr, TLS: "127.0.0.1:7743", Kube: "127.0.0.1:7764", Domain: "barchan.localhost:7743",
			CAFile: "/data/ca.pem", Kubeconfig: filepath.Join(s.dir, "kubeconfig"), APIKeyFile: keyFile,
		},
	}
	cfg := config.Config{RunDir: filepath.Join(s.dir, "run")}
	api, err := adminapi.New(adminapi.Config{
		Socket: cfg.AdminSocket(), Server: s, Images: imageList{s}, Build: imageList{s}, Audit: s.audit,
		Addresses: network{s}, Egress: network{s}, Peers: gossip{s}, Checkpoints: &s.travel, Log: telemetry.Discard(),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	s.down = cancel
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := api.Run(ctx); err != nil {
			t.Errorf("admin API: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	eventually.True(t, "the admin socket", func() bool {
		_, err := os.Stat(cfg.AdminSocket())
		return err == nil
	})
	return s
}

// add makes a sandbox without a request.
func (s *server) add(id, state string, metadata map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.order = append(s.order, id)
	s.sandboxes[id] = &client.SandboxDetail{SandboxInfo: client.SandboxInfo{
		SandboxID: id, Name: "sb-" + id[len(id)-4:], TemplateID: "base", State: state, StartedAt: time.Now().Add(-90 * time.Minute),
		EndAt: time.Now().Add(10*time.Minute + leeway), CPUCount: 1, MemoryMB: 512, Metadata: metadata,
	}, Lifecycle: client.Lifecycle{OnTimeout: "kill"}}
}

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if id := r.Header.Get(envd.HeaderSandboxID); id != "" {
		s.gateway(w, r, id)
		return
	}
	if s.builds != nil && s.builds.serve(w, r) {
		return
	}
	namespace, known := map[string]string{testKey: "default", tenantKey: "tenant-a"}[r.Header.Get("X-API-Key")]
	if !known {
		refuse(w, http.StatusUnauthorized, "Invalid API key")
		return
	}
	if r.URL.Path == "/teams" {
		fmt.Fprintf(w, `[{"teamID":"other","isDefault":false},{"teamID":%q,"isDefault":true}]`, namespace)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if strings.HasPrefix(r.URL.Path, "/snapshots") || strings.Contains(r.URL.Path, "/templates") {
		s.snapshotList(w, r)
		return
	}
	parts := strings.Split(strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/v2"), "/sandboxes"), "/")
	if len(parts) == 1 {
		s.collection(w, r)
		return
	}
	d, ok := s.sandboxes[parts[1]]
	if !ok {
		refuse(w, http.StatusNotFound, fmt.Sprintf("Sandbox %q doesn't exist or you don't have access to it", parts[1]))
		return
	}
	s.one(w, r, d, strings.Join(parts[2:], "/"))
}

func (s *server) collection(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPost {
		var n struct {
			client.CreateOptions
			Timeout int64 `json:"timeout"`
		}
		if err := json.NewDecoder(r.Body).Decode(&n); err != nil || (n.TemplateID != "base" && !s.hasSnapshot(n.TemplateID) && !s.hasTemplate(n.TemplateID)) {
			refuse(w, http.StatusNotFound, fmt.Sprintf("template '%s' not found", n.TemplateID))
			return
		}
		n.CreateOptions.Timeout = time.Duration(n.Timeout) * time.Second
		s.createOnce(w, n.CreateOptions, r.Header.Get("Idempotency-Key"))
		return
	}
	q, list := r.URL.Query(), []client.SandboxInfo{}
	filter, _ := url.ParseQuery(q.Get("metadata"))
	for _, id := range s.order {
		d, ok := s.sandboxes[id]
		if !ok || !slices.Contains(strings.Split(q.Get("state"), ","), d.State) {
			continue
		}
		match := true
		for k, v := range filter {
			match = match && d.Metadata[k] == v[0]
		}
		if name := q.Get("name"); match && (name == "" || name == d.Name) {
			list = append(list, d.SandboxInfo)
		}
	}
	_ = json.NewEncoder(w).Encode(list)
}

// createOnce answers with the sandbox of a request, which is that of an earlier one with the same key, or loses the response.
func (s *server) createOnce(w http.ResponseWriter, n client.CreateOptions, key string) {
	if s.loseCreated == 0 && s.starting > 0 {
		s.starting--
		refuse(w, http.StatusServiceUnavailable, "the server is starting")
		return
	}
	id, made := s.once[key]
	if !made || key == "" {
		s.created = append(s.created, n)
		id = fmt.Sprintf("i%019d", len(s.created))
		s.order = append(s.order, id)
		s.sandboxes[id] = &client.SandboxDetail{SandboxInfo: client.SandboxInfo{SandboxID: id, TemplateID: "base", State: "running"}}
		s.once[key] = id
	}
	if s.loseCreated > 0 {
		s.loseCreated--
		panic(http.ErrAbortHandler)
	}
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(client.Sandbox{SandboxID: id, TemplateID: "base"})
}

func (s *server) hasTemplate(name string) bool { return s.templates != nil && s.templates(name) }

func (s *server) one(w http.ResponseWriter, r *http.Request, d *client.SandboxDetail, verb string) {
	if r.Method == http.MethodPost {
		b, _ := io.ReadAll(r.Body)
		s.bodies = append(s.bodies, verb+" "+string(b))
		r.Body = io.NopCloser(bytes.NewReader(b))
	}
	switch r.Method + " " + verb {
	case "POST snapshots":
		s.snapshot(w, r, d)
	case "POST fork":
		s.fork(w, r)
	case "GET ":
		_ = json.NewEncoder(w).Encode(d)
	case "DELETE ":
		delete(s.sandboxes, d.SandboxID)
		w.WriteHeader(http.StatusNoContent)
	case "POST pause":
		if d.State == "paused" {
			refuse(w, http.StatusConflict, "Sandbox is already paused")
			return
		}
		d.State = "paused"
		w.WriteHeader(http.StatusNoContent)
	case "POST connect":
		d.State = "running"
		_ = json.NewEncoder(w).Encode(client.Sandbox{SandboxID: d.SandboxID, TrafficToken: s.trafficToken})
	case "GET metrics":
		fmt.Fprint(w, `[{"cpuUsedPct":12.4,"memUsed":1048576,"diskUsed":2048}]`)
	case "GET logs":
		if d.State == "paused" { // it has no agent
			refuse(w, http.StatusInternalServerError, "internal error")
			return
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"logs": s.logs})
	default:
		refuse(w, http.StatusNotFound, "no route")
	}
}

func (s *server) gateway(w http.ResponseWriter, r *http.Request, id string) {
	s.mu.Lock()
	d, ok := s.sandboxes[id]
	runs := ok && d.State == "running"
	if file := r.URL.Query().Get("path"); strings.HasPrefix(file, "/tmp/.barchan-cp-") {
		s.staged = append(s.staged, file)
	}
	s.mu.Unlock()
	if !runs {
		refuse(w, http.StatusBadGateway, "The sandbox was not found")
		return
	}
	if port := r.Header.Get(envd.HeaderSandboxPort); port != fmt.Sprint(envd.Port) {
		fmt.Fprintf(w, "port %s of %s, path %s", port, id, r.URL.Path)
		return
	}
	_ = http.NewResponseController(w).EnableFullDuplex()
	proxy := httputil.NewSingleHostReverseProxy(s.agent)
	proxy.FlushInterval = -1
	proxy.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	proxy.ServeHTTP(w, r)
}

func refuse(w http.ResponseWriter, code int, message string) {
	w.WriteHeader(code)
	fmt.Fprintf(w, `{"code":%d,"message":%q}`, code, message)
}

// Status, Doctor, Prepare and Stop are the admin API's server.
func (s *server) Status(context.Context) (adminclient.Status, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.status
	st.Sandboxes = map[string]int{}
	for _, d := range s.sandboxes {
		st.Sandboxes[d.State]++
	}
	return st, nil
}

func (s *server) Doctor(context.Context) ([]adminclient.Check, error) {
	return []adminclient.Check{{Name: "server", State: adminclient.CheckOK, Detail: "all well"}}, nil
}

func (s *server) audit(context.Context) ([]adminclient.Finding, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.findings, nil
}

func (s *server) Prepare(context.Context, adminclient.ShutdownRequest, func(adminclient.Event)) error {
	return nil
}

func (s *server) Stop() { s.down() }

// imageList is the admin API's images.
type imageList struct{ *server }

func (l imageList) List(context.Context) ([]adminclient.Image, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.images), nil
}

func (l imageList) add(i adminclient.Image) adminclient.Image {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.images = append(l.images, i)
	return i
}

func (l imageList) Pull(_ context.Context, req adminclient.PullRequest, progress func(adminclient.Event)) (adminclient.Image, error) {
	if req.Username != "" && req.Password != "pass word" {
		return adminclient.Image{}, errs.Public(errs.ErrForbidden, "the registry refused "+req.Username)
	}
	for done := int64(0); done <= 100; done++ {
		progress(adminclient.Event{Step: "pull", Done: done, Total: 100, Bytes: true})
	}
	return l.add(adminclient.Image{Ref: req.Ref, Digest: "sha256:0123456789abcdef", Size: 3 << 20, CreatedAt: time.Now().Add(-3 * time.Minute), LastUsed: time.Now().Add(-2 * time.Minute), Pulled: true}), nil
}

func (l imageList) Import(_ context.Context, tar io.Reader, name string, _ func(adminclient.Event)) ([]adminclient.Image, error) {
	b, err := io.ReadAll(tar)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.tar = b
	l.mu.Unlock()
	return []adminclient.Image{l.add(adminclient.Image{Ref: name, Size: int64(len(b))})}, nil
}

func (l imageList) Export(_ context.Context, req adminclient.ImageExport, w io.Writer) error {
	if req.Source == "none" {
		return errs.Public(errs.ErrNotFound, "no template or image none")
	}
	_, err := io.WriteString(w, req.Namespace+"/"+req.Source+" as "+req.Name)
	return err
}

func (l imageList) Prune(_ context.Context, req adminclient.PruneRequest) (gone []adminclient.Image, _ error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.images = slices.DeleteFunc(l.images, func(i adminclient.Image) bool {
		if i.Pulled || req.All {
			gone = append(gone, i)
		}
		return i.Pulled || req.All
	})
	return gone, nil
}

func (l imageList) Remove(_ context.Context, ref string, _ bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := slices.IndexFunc(l.images, func(i adminclient.Image) bool { return i.Ref == ref })
	if at < 0 {
		return errs.Public(errs.ErrNotFound, "no image "+ref)
	}
	l.images = slices.Delete(l.images, at, at+1)
	return nil
}

func (l imageList) BuildImage(context.Context, adminclient.BuildImageRequest, func(adminclient.Event)) (adminclient.Image, error) {
	return l.add(adminclient.Image{Ref: "base:latest"}), nil
}

// result is what one run of the program gave.
type result struct {
	code           int
	stdout, stderr string
}

// run runs the command line against the server, with stdin as a pipe would give it.
func (s *server) run(stdin string, args ...string) result {
	s.t.Helper()
	return s.runContext(s.t.Context(), strings.NewReader(stdin), args...)
}

func (s *server) runContext(ctx context.Context, stdin io.Reader, args ...string) result {
	s.t.Helper()
	var stdout, stderr bytes.Buffer
	args = append([]string{"--data-dir", s.dir}, args...)
	code := Run(ctx, args, stdin, &stdout, &stderr, app.Deps{Version: "1.2.3"})
	return result{code, stdout.String(), stderr.String()}
}

func (r result) want(t *testing.T, code int, stdout, stderr string) {
	t.Helper()
	if r.code != code || !strings.Contains(r.stdout, stdout) || !strings.Contains(r.stderr, stderr) {
		t.Errorf("exit code %d, stdout %q, stderr %q;\nwant %d, %q, %q", r.code, r.stdout, r.stderr, code, stdout, stderr)
	}
}
