package gateway

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestDeadClusters: what another process may use stays.
func TestDeadClusters(t *testing.T) {
	namespaces := []string{"bcl31sb", "bcl31r1", "bcl31r12", "bcl72r1", "bcl3", "bclxr1", "be123", "abcl31r1", "bcl31r1x"}
	for name, c := range map[string]struct {
		tests []int
		want  string
	}{
		"no user":      {nil, "map[bcl31:[bcl31sb bcl31r1 bcl31r12] bcl72:[bcl72r1]]"},
		"owner of 31":  {[]int{1003}, "map[]"}, // its further clusters may be 72
		"owner of 72":  {[]int{1007}, "map[bcl31:[bcl31sb bcl31r1 bcl31r12]]"},
		"another user": {[]int{1019}, "map[bcl31:[bcl31sb bcl31r1 bcl31r12] bcl72:[bcl72r1]]"},
	} {
		if got := fmt.Sprint(deadClusters(namespaces, c.tests)); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// TestSweepCluster: all of a cluster is removed.
func TestSweepCluster(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: network namespaces need root")
	}
	tag := fmt.Sprintf("bcl9%d", os.Getpid())
	must := func(line string) {
		t.Helper()
		args := strings.Fields(line)
		if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", line, err, out)
		}
	}
	must("ip netns add " + tag + "sb")
	must("ip netns add " + tag + "r1")
	must("ip link add " + tag + " type bridge")
	left := exec.CommandContext(t.Context(), "ip", "netns", "exec", tag+"r1", "sleep", "600")
	if err := left.Start(); err != nil {
		t.Fatal(err)
	}
	eventually.NoError(t, "its process is in the namespace", func() error {
		out, err := exec.CommandContext(t.Context(), "ip", "netns", "pids", tag+"r1").CombinedOutput()
		if err == nil && strings.TrimSpace(string(out)) != strconv.Itoa(left.Process.Pid) {
			err = fmt.Errorf("there are %q", out)
		}
		return err
	})
	if err := sweepCluster(t.Context(), tag, []string{tag + "sb", tag + "r1"}); err != nil {
		_ = left.Process.Kill()
		t.Error(err)
	}
	_ = left.Wait()
	for _, path := range []string{"/run/netns/" + tag + "sb", "/run/netns/" + tag + "r1", "/sys/class/net/" + tag} {
		if _, err := os.Stat(path); err == nil {
			t.Errorf("%s is left", path)
		}
	}
}

// TestSweepFiles: a directory is removed once it has no user.
func TestSweepFiles(t *testing.T) {
	held, gone := filepath.Join(t.TempDir(), "bcl-held"), filepath.Join(t.TempDir(), "bcl-gone")
	for _, dir := range []string{held, gone} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		long := time.Now().Add(-time.Hour)
		f, err := os.Create(filepath.Join(dir, "f"))
		if err != nil {
			t.Fatal(err)
		}
		if dir == gone {
			_ = f.Close()
		} else {
			defer func() { _ = f.Close() }()
		}
		if err := errors.Join(os.Chtimes(dir, long, long), sweepFiles(dir, []int{os.Getpid()})); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(held); err != nil {
		t.Errorf("a directory in use was removed: %v", err)
	}
	if _, err := os.Stat(gone); err == nil {
		t.Error("an unused directory is left")
	}
}
