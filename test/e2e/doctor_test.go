package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/client/adminclient"
	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestDoctorDeep leaves one of each kind behind on purpose; the audit must find just these: by the
// server, and without one.
func TestDoctorDeep(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newServer(t)
	s.start()
	s.must("image", "build", "base")
	s.keep("base", "true")
	s.findings(t)

	const stray = "i0leak0leak0leak0lea"
	tag, prefix, data := s.value("BARCHAN_BRIDGE_NAME"), s.value("BARCHAN_NETNS_PREFIX"), s.value("BARCHAN_DATA_DIR")
	cgroup := "/sys/fs/cgroup/" + tag + "/" + stray
	if _, err := os.Stat("/sys/fs/cgroup/memory/" + tag); err == nil {
		cgroup = "/sys/fs/cgroup/memory/" + tag + "/" + stray
	}
	files := []string{filepath.Join(data, "node", "sandboxes", stray), filepath.Join(data, "node", "memory", stray), filepath.Join(data, "node", "claims", stray), cgroup}
	temporary := filepath.Join(data, "credentials", ".api-key-1")
	sh := func(line string) {
		t.Helper()
		if out, err := exec.CommandContext(t.Context(), "sh", "-c", line).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out)
		}
	}
	sh("ip netns add " + prefix + stray)
	link := tag + "x0"
	sh("ip link add " + link + " type veth peer name " + link + "p && ip link set " + link + " master " + tag)
	for _, dir := range files {
		sh("mkdir -p " + dir)
	}
	mount := filepath.Join(files[0], "rootfs")
	sh("mkdir " + mount + " && mount -t tmpfs none " + mount)
	sh("touch " + temporary)
	undo := fmt.Sprintf("umount %s; ip netns del %s; ip link del %s; rmdir %s; rm -rf %s %s", mount, prefix+stray, link, cgroup, strings.Join(files[:3], " "), temporary)
	defer func() { _ = exec.Command("sh", "-c", undo).Run() }()

	onMachine := []string{
		"network namespace " + stray, "link " + link, "directory " + stray, "volume claims " + stray, "memory " + stray,
		"cgroup " + stray, "mount " + stray, temporary,
	}
	s.findings(t, onMachine...)
	if out, err := s.try("doctor", "--deep"); exitCode(err) != 1 || !strings.Contains(out, "REMEDY") {
		t.Errorf("doctor --deep = %v\n%s", err, out)
	}

	s.stop(syscall.SIGKILL)
	s.findings(t, onMachine...)
	sh(undo)
	s.findings(t)
}

// findings verifies that the audit finds just these.
func (s *server) findings(t *testing.T, want ...string) {
	t.Helper()
	slices.Sort(want)
	eventually.NoError(t, "the audit finds what is there", func() error {
		var found []adminclient.Finding
		out, err := s.stdout("doctor", "--deep", "--json")
		if code := exitCode(err); code != 1 && err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		if err := json.Unmarshal([]byte(out), &found); err != nil {
			return fmt.Errorf("%w\n%s", err, out)
		}
		var got []string
		for _, f := range found {
			got = append(got, f.What)
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			return fmt.Errorf("found %q, want %q", got, want)
		}
		return nil
	})
}

// stdout is what a command of ours writes to its standard output.
func (s *server) stdout(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, programs.barchan, args...)
	cmd.Env = s.env
	out, err := cmd.Output()
	return string(out), err
}
