// Package ownnet runs a test in a process with its own network and mounts, where public addresses
// can lead to the test's own hosts. It sets up nothing inside.
package ownnet

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

const env = "BARCHAN_TEST_OWN_NET"

// Inside reports whether this process is the one of the test; outside it starts that process, and
// fails the test as it does. Without root it skips the test.
func Inside(t *testing.T) bool {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root for network namespaces")
	}
	if os.Getenv(env) == t.Name() {
		return true
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v=true", "-test.timeout=10m")
	cmd.WaitDelay = eventually.Patience // for children that keep our end of the output
	cmd.Env = append(os.Environ(), env+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("in its own network: %v\n%s", err, out)
	} else if !strings.Contains(string(out), "PASS: "+t.Name()) {
		t.Errorf("did not run in its own network:\n%s", out)
	}
	return false
}
