package main

import (
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/guest/envd"
	testkit "github.com/barchan-dev/barchan/internal/testkit/program"
)

// The agent is in every sandbox, so what it links is paid for as often.
func TestAgentStaysSmall(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for dep := range strings.Lines(string(out)) {
		for _, heavy := range []string{
			"k8s.io/", "sigs.k8s.io/", "github.com/containerd/", "go.etcd.io/", "google.golang.org/grpc",
			"github.com/prometheus/", "go.opentelemetry.io/", "github.com/vishvananda/", "github.com/spf13/",
		} {
			if strings.HasPrefix(dep, heavy) {
				t.Errorf("links %s", strings.TrimSpace(dep))
			}
		}
	}
	bin := buildAgent(t)
	st, err := os.Stat(bin)
	if err != nil {
		t.Fatal(err)
	}
	if st.Size() > 20<<20 {
		t.Errorf("%d bytes are more than 20 MiB", st.Size())
	}
	version, err := exec.CommandContext(t.Context(), bin, "-version").Output()
	if err != nil || strings.TrimSpace(string(version)) != "0.6.13" {
		t.Errorf("version %q, %v", version, err)
	}
}

func buildAgent(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "agent")
	build := exec.CommandContext(t.Context(), "go", "build", "-ldflags", "-s -w", "-o", bin, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return bin
}

// In a container that is not its own, the agent is copied into a volume and started by a hook, which
// ends once the agent answers.
func TestBesideAnotherProgram(t *testing.T) {
	volume := t.TempDir()
	if out, err := exec.CommandContext(t.Context(), buildAgent(t), "-install", volume).CombinedOutput(); err != nil {
		t.Fatalf("install: %v: %s", err, out)
	}
	bin := filepath.Join(volume, program)
	if files, err := os.ReadDir(volume); err != nil || len(files) != 1 {
		t.Errorf("the volume has %v, %v", files, err)
	}
	port := freePort(t)
	config := fmt.Sprintf(`{"port":%d,"listenAddress":"127.0.0.1","sandboxID":"s1","accessTokenSHA256":%q}`, port, envd.TokenSHA256("secret"))
	hook := exec.CommandContext(t.Context(), bin, "-detach", config, "/bin/sh", "-c", "echo after")
	hook.Env = append(os.Environ(), "OF_THE_CONTAINER=yes")
	out, err := hook.CombinedOutput() // returns only if the agent holds none of its files
	if err != nil || string(out) != "after\n" {
		t.Fatalf("the hook: %v: %q", err, out)
	}
	t.Cleanup(func() { endAgent(t, port) })

	again, err := exec.CommandContext(t.Context(), bin, "-detach", config).CombinedOutput()
	if err == nil || !strings.Contains(string(again), "is in use by another agent") {
		t.Errorf("a second agent on the port: %v: %s", err, again)
	}
	checkToken(t, port)
}

// checkToken has an agent accept the token whose hash it was given, and no other.
func checkToken(t *testing.T, port int) {
	t.Helper()
	client := func(token string) *envd.Client {
		c, err := envd.NewClient(envd.ClientConfig{
			HTTP: &http.Client{}, BaseURL: fmt.Sprintf("http://127.0.0.1:%d", port), Token: func() string { return token },
		})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if _, err := client("other").Envs(t.Context()); err == nil {
		t.Error("another token was accepted")
	}
	if err := client("other").Init(t.Context(), envd.InitRequest{AccessToken: "other"}); err == nil {
		t.Error("another token was set")
	}
	if env, err := client("secret").Envs(t.Context()); err != nil || env["OF_THE_CONTAINER"] != "yes" || env["E2B_SANDBOX_ID"] != "s1" {
		t.Errorf("environment %v, %v", env, err)
	}
	if err := client("secret").Restored(t.Context(), time.Now()); err == nil {
		t.Error("an agent without a configuration file read one again")
	}
	if err := client("").Init(t.Context(), envd.InitRequest{AccessToken: "secret"}); err != nil {
		t.Errorf("the token: %v", err)
	}
	if _, err := client("secret").Envs(t.Context()); err != nil {
		t.Errorf("after the token was set: %v", err)
	}
}

func TestDetachRefusesAnInvalidConfiguration(t *testing.T) {
	bin := buildAgent(t)
	for config, want := range map[string]string{
		`{"accessTokenSHA256":"x"}`:                    "accessTokenSHA256: is not a SHA-256 in hex",
		`{"accessToken":"x","accessTokenSHA256":"00"}`: "accessTokenSHA256: cannot come with",
		`{"nonesuch":1}`:                               "nonesuch",
	} {
		out, err := exec.CommandContext(t.Context(), bin, "-detach", config).CombinedOutput()
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v: %s", config, err, out)
		}
	}
}

func freePort(t *testing.T) int {
	t.Helper()
	return int(netip.MustParseAddrPort(testkit.Address(t)).Port())
}

// endAgent ends the process that listens on a port of the loopback device.
func endAgent(t *testing.T, port int) {
	t.Helper()
	pids, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range pids {
		text, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(text), fmt.Sprintf(`{"port":%d,`, port)) || !strings.Contains(string(text), "-beside") {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		for range 500 {
			if left, err := os.ReadFile(file); err != nil || len(left) == 0 { // a zombie has none
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		t.Errorf("agent %d did not end", pid)
		return
	}
	t.Error("no agent found")
}
