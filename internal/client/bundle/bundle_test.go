package bundle_test

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/adminapi"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/client/bundle"
	"github.com/barchan-dev/barchan/internal/client/kubeobjects"
	"github.com/barchan-dev/barchan/internal/config"
	"github.com/barchan-dev/barchan/internal/testkit/embedded"
)

// plant begins every secret of these tests.
const plant = "PLANTED"

// planted has a secret in each field of the kinds that takes one.
const planted = `
apiVersion: agents.x-k8s.io/v1beta1
kind: Sandbox
metadata:
  name: victim
  namespace: default
  labels: {team: PLANTED-label}
  annotations: {note: PLANTED-annotation, example.com/sha256: "PLANTED-0123456789abcdef"}
spec:
  barchan: {metadata: {user: PLANTED-metadata}, warmUp: {command: [sh, -c, PLANTED-warm-up]}, access: {maskRequestHost: PLANTED.example.com}}
  podTemplate:
    metadata: {labels: {l: PLANTED-pod-label}, annotations: {a: PLANTED-pod-annotation}}
    spec:
      imagePullSecrets: [{name: pull}]
      containers:
      - name: main
        image: barchan.local/base:latest
        command: [PLANTED-command]
        args: [--token, PLANTED-argument]
        env: [{name: API_TOKEN, value: PLANTED-env}]
        resources: {limits: {cpu: 500m, memory: 256Mi}}
---
apiVersion: v1
kind: Secret
metadata: {name: pull, namespace: default}
type: kubernetes.io/dockerconfigjson
stringData: {.dockerconfigjson: '{"auths":{"registry.example.com":{"username":"u","password":"PLANTED-registry"}}}'}
---
apiVersion: v1
kind: Secret
metadata: {name: webhook, namespace: default}
stringData: {secret: PLANTED-webhook-secret}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxTemplate
metadata: {name: victim, namespace: default, annotations: {a: PLANTED-template}}
spec:
  podTemplate: {spec: {containers: [{name: main, image: "barchan.local/base:latest", env: [{name: X, value: PLANTED-template-env}]}]}}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxWarmPool
metadata: {name: victim, namespace: default, labels: {l: PLANTED-pool}}
spec: {replicas: 2, sandboxTemplateRef: {name: victim}}
---
apiVersion: extensions.agents.x-k8s.io/v1beta1
kind: SandboxClaim
metadata: {name: victim, namespace: default}
spec: {warmPoolRef: {name: victim}, env: [{name: X, value: PLANTED-claim-env}], additionalPodMetadata: {labels: {l: PLANTED-claim-label}}}
---
apiVersion: barchan.dev/v1alpha1
kind: APIKey
metadata: {name: victim, namespace: default}
spec: {description: PLANTED-description, sha256: "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"}
---
apiVersion: barchan.dev/v1alpha1
kind: Volume
metadata: {name: victim, namespace: default}
spec: {storageClassName: nfs, nfs: {server: 192.0.2.1, path: /PLANTED-export}}
---
apiVersion: v1
kind: Event
metadata: {name: victim.1, namespace: default}
involvedObject: {kind: Sandbox, name: victim, namespace: default}
reason: Refused
type: Warning
message: the program printed PLANTED-message
lastTimestamp: "2026-01-01T00:00:00Z"
reportingComponent: test
`

// plantedLog are lines of a server's log with secrets of known forms, of the files of credentials, and of the access log.
const plantedLog = `time=2026-01-01T00:00:00Z level=INFO msg="sandbox resumed" sandbox=iaaa
time=2026-01-01T00:00:00Z level=INFO msg=request method=GET path=/PLANTED-access
time=2026-01-01T00:00:00Z level=WARN msg="delivery refused" url=https://u:PLANTED-userinfo@hooks.example.com/services/PLANTED-path?key=PLANTED-query error="Authorization: Bearer PLANTED-bearer"
time=2026-01-01T00:00:00Z level=WARN msg="pull refused" error="{\"username\":\"u\",\"password\":\"PLANTED pass word\"}" api_key=PLANTED-api-key
time=2026-01-01T00:00:00Z level=WARN msg="key not known" text=e2b_PLANTED0123456789 other=PLANTEDcredential
{"time":"2026-01-01T00:00:00Z","msg":"token renewed","registryToken":"PLANTED-json"}
`

// server is the admin API's server, whose texts have secrets.
type server struct{ dir string }

func (s server) Status(context.Context) (adminclient.Status, error) {
	return adminclient.Status{
		Version: "1.2.3", PID: os.Getpid(), Ready: true, Phase: "ready", DataDir: s.dir,
		Conditions: []adminclient.Condition{{Name: "containerd", Reason: "it does not answer", Detail: "dial: password=PLANTED-condition"}},
	}, nil
}
func (s server) Doctor(context.Context) ([]adminclient.Check, error) { return nil, nil }
func (s server) Prepare(context.Context, adminclient.ShutdownRequest, func(adminclient.Event)) error {
	return nil
}
func (s server) Stop() {}

// noImages refuses all operations on images.
type noImages struct {
	adminapi.Images
	adminapi.ImageBuilder
}

// source has the real API server and the real admin API, with secrets in all places that can have one.
func source(t *testing.T) bundle.Config {
	t.Helper()
	dir, err := os.MkdirTemp("", "bundle") //nolint:usetesting // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	write(t, filepath.Join(dir, "credentials", "api-key"), "PLANTEDcredential\n")
	write(t, filepath.Join(dir, "log", "barchan.log"), plantedLog)
	metrics := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "barchan_build_info 1") }))
	t.Cleanup(metrics.Close)
	file := filepath.Join(dir, "config.yaml")
	write(t, file, "dataDir: "+dir+"\nacmeEmail: PLANTED@example.com\nacmeHook: /PLANTED-hook\notlpEndpoint: http://u:PLANTED-otlp@127.0.0.1:4317\n"+
		"registryMirrors: [\"*=https://PLANTED.example.com\"]\nmetricsAddr: "+strings.TrimPrefix(metrics.URL, "http://")+"\n")
	settings, err := config.Load(config.Options{File: file})
	if err != nil {
		t.Fatal(err)
	}
	if err := config.Save(settings.Config); err != nil {
		t.Fatal(err)
	}
	serveAdmin(t, settings)
	kube := startKube(t)
	return bundle.Config{
		Settings: settings, Version: map[string]string{"version": "1.2.3"}, Admin: adminclient.New(settings.AdminSocket(), dir),
		Doctor: func(context.Context) []adminclient.Check {
			return []adminclient.Check{{Name: "registry", State: adminclient.CheckFailed, Detail: "https://u:PLANTED-doctor@registry.example.com"}}
		},
		Kube: func(context.Context) (dynamic.Interface, error) { return kube, nil },
		Events: func(context.Context) ([]client.SandboxEvent, error) {
			return []client.SandboxEvent{{Type: "sandbox.lifecycle.created", SandboxID: "iaaa", Data: json.RawMessage(`{"metadata":"PLANTED-event"}`)}}, nil
		},
	}
}

func write(t *testing.T, name, content string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o700), os.WriteFile(name, []byte(content), 0o600)); err != nil {
		t.Fatal(err)
	}
}

func serveAdmin(t *testing.T, settings *config.Resolved) {
	t.Helper()
	api, err := adminapi.New(adminapi.Config{
		Socket: settings.AdminSocket(), Server: server{settings.DataDir}, Images: noImages{}, Build: noImages{}, Log: telemetry.Discard(),
		Diagnostics: func(context.Context) (adminclient.Diagnostics, error) {
			return adminclient.Diagnostics{Goroutines: "goroutine profile: total 1\n", Journal: []adminclient.JournalRow{{UID: "u", Name: "victim", Stage: "live"}}}, nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := api.Run(ctx); err != nil {
			t.Errorf("admin API: %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	for {
		if _, err := adminclient.New(settings.AdminSocket(), "").Status(t.Context()); err == nil {
			return
		}
	}
}

func startKube(t *testing.T) dynamic.Interface {
	t.Helper()
	api := embedded.Listen(t, "127.0.0.1:0")
	cfg, err := clientcmd.BuildConfigFromFlags("", api.AdminKubeconfig())
	if err != nil {
		t.Fatal(err)
	}
	kube, err := dynamic.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	objects, err := kubeobjects.Decode(strings.NewReader(planted))
	if err != nil {
		t.Fatal(err)
	}
	c, err := kubeobjects.New(cfg, kube, "default")
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range objects {
		if _, err := c.Apply(t.Context(), u, kubeobjects.Options{}); err != nil {
			t.Fatalf("apply %s: %v", kubeobjects.ID(u), err)
		}
	}
	sandboxes := kube.Resource(agents.GroupVersion.WithResource("sandboxes")).Namespace("default")
	u, err := sandboxes.Get(t.Context(), "victim", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	u.Object["status"] = map[string]any{
		"conditions": []any{map[string]any{
			"type": "Ready", "status": "False", "reason": "PullFailed", "message": "PLANTED-condition-message", "lastTransitionTime": "2026-01-01T00:00:00Z",
		}},
		"barchan": map[string]any{"phase": "Running", "containers": []any{map[string]any{
			"name": "main", "ready": true, "restartCount": int64(3),
			"state": map[string]any{"terminated": map[string]any{"exitCode": int64(7), "reason": "Error", "message": "PLANTED-termination"}},
		}}},
	}
	if _, err := sandboxes.UpdateStatus(t.Context(), u, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	return kube
}

// unpack returns the files of an archive by their names.
func unpack(t *testing.T, name string) map[string]string {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	zip, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for in := tar.NewReader(zip); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		_, rel, _ := strings.Cut(path.Clean(h.Name), "/")
		out[rel] = string(b)
	}
}

// TestBundleHasNoSecrets searches a whole archive for secrets that were planted wherever one can be.
func TestBundleHasNoSecrets(t *testing.T) {
	b, err := bundle.Collect(t.Context(), source(t))
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	size, err := b.WriteFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 || info.Size() != size {
		t.Errorf("%v, %v; %d bytes", info, err, size)
	}
	files := unpack(t, file)
	for name, content := range files {
		if at := strings.Index(content, plant); at >= 0 {
			t.Errorf("%s has a secret: …%s…", name, content[max(0, at-80):min(len(content), at+40)])
		}
	}
	for name, want := range map[string][]string{
		"manifest.json":            {`"server": "ready"`, `"name": "objects/sandboxes.json"`, "the server does not have this kind"},
		"version.json":             {"1.2.3"},
		"machine.json":             {`"kernel"`, "MemTotal", `"disks"`},
		"settings.json":            {`"acmeEmail": {`, `"value": "[removed]"`, `"sandboxCPU": {`, `"value": "2"`, "config.yaml:2"},
		"settings-last-start.json": {`"value": "[removed]"`},
		"doctor.json":              {"https://registry.example.com"},
		"status.json":              {"it does not answer", "password=[removed]"},
		"metrics.txt":              {"barchan_build_info 1"},
		"goroutines.txt":           {"goroutine profile"},
		"journal.json":             {`"stage": "live"`},
		"log.txt":                  {`msg="sandbox resumed" sandbox=iaaa`, "https://hooks.example.com/[removed]", "without 1 lines"},
		"lifecycle-events.json":    {"sandbox.lifecycle.created"},
		"objects/sandboxes.json": {
			`"name": "victim"`, `"cpu": "500m"`, `"reason": "PullFailed"`, `"phase": "Running"`, `"restartCount": 3`, `"exitCode": 7`, "barchan.local/base:latest",
		},
		"objects/sandboxtemplates.json": {`"name": "victim"`},
		"objects/sandboxwarmpools.json": {`"replicas": 2`},
		"objects/sandboxclaims.json":    {`"warmPoolRef"`},
		"objects/volumes.json":          {`"storageClassName": "nfs"`},
		"objects/events.json":           {`"reason": "Refused"`},
	} {
		text := files[name]
		if name == "log.txt" {
			text += files["manifest.json"]
		}
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%s lacks %q:\n%s", name, w, files[name])
			}
		}
	}
	if n := b.Manifest.Failed(); n != 0 {
		t.Errorf("%d parts failed: %+v", n, b.Manifest.Parts)
	}
}

// TestBundleWithoutServer checks that a bundle has what needs no server, and that failing parts are in its manifest alone.
func TestBundleWithoutServer(t *testing.T) {
	dir := t.TempDir()
	settings, err := config.Load(config.Options{LookupEnv: func(key string) (string, bool) { return dir, key == "BARCHAN_DATA_DIR" }})
	if err != nil {
		t.Fatal(err)
	}
	write(t, settings.LogFile(), "time=x msg=\"server ended\" error=\"disk full\"\n")
	cfg := bundle.Config{
		Settings: settings, Version: "1.2.3", Admin: adminclient.New(settings.AdminSocket(), dir),
		Doctor:  func(context.Context) []adminclient.Check { return []adminclient.Check{} },
		Journal: func() ([]adminclient.JournalRow, error) { return nil, errors.New("open node.db: token=PLANTED") },
	}
	b, err := bundle.Collect(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.Manifest.Server, "not running on "+dir) {
		t.Errorf("server: %q", b.Manifest.Server)
	}
	if n := b.Manifest.Failed(); n != 1 {
		t.Errorf("%d parts failed: %+v", n, b.Manifest.Parts)
	}
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	if _, err := b.WriteFile(file); err != nil {
		t.Fatal(err)
	}
	files := unpack(t, file)
	if !strings.Contains(files["log.txt"], "disk full") || !strings.Contains(files["manifest.json"], "open node.db: token=[removed]") {
		t.Errorf("%v", files)
	}
	if _, online := files["objects/sandboxes.json"]; online {
		t.Error("there are objects without a server")
	}

	if _, err := b.WriteFile(file); !errors.Is(err, errs.ErrConflict) || !strings.Contains(err.Error(), "--bundle: "+file+" exists") {
		t.Errorf("over an existing file: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := bundle.Collect(ctx, cfg); !errors.Is(err, context.Canceled) {
		t.Errorf("interrupted: %v", err)
	}
}

// TestBundleOfAFullDisk bounds the size of files in place of a full disk, which only root can have.
func TestBundleOfAFullDisk(t *testing.T) {
	settings, err := config.Load(config.Options{LookupEnv: func(key string) (string, bool) { return "/nonexistent", key == "BARCHAN_DATA_DIR" }})
	if err != nil {
		t.Fatal(err)
	}
	b, err := bundle.Collect(t.Context(), bundle.Config{
		Settings: settings, Admin: adminclient.New(settings.AdminSocket(), ""), Doctor: func(context.Context) []adminclient.Check { return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	signal.Ignore(unix.SIGXFSZ)
	defer signal.Reset(unix.SIGXFSZ)
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 512, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "b.tar.gz")
	_, err = b.WriteFile(file)
	if restored := unix.Setrlimit(unix.RLIMIT_FSIZE, &was); restored != nil {
		t.Fatal(restored)
	}
	if !errors.Is(err, unix.EFBIG) || !strings.Contains(err.Error(), "--bundle: ") {
		t.Errorf("error %v", err)
	}
	if _, err := os.Lstat(file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a half file is left: %v", err)
	}
}
