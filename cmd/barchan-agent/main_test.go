package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
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
	bin := filepath.Join(t.TempDir(), "agent")
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", bin, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
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
