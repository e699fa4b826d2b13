package e2e

import (
	"os"
	"syscall"
	"testing"
)

// TestVolumes is what the unmodified SDK does with volumes, before and after a restart of the server.
func TestVolumes(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: a whole server needs root")
	}
	s := newServer(t)
	s.set("BARCHAN_STORE_AFTER", "100ms")
	s.start()
	s.must("image", "build", "base")
	t.Run("the unmodified SDK", func(t *testing.T) { runSDK(t, "volumes.test.mjs", s.in(t).clientEnv()) })
	var list []struct{ ID string }
	s.read(&list, "ls")
	if len(list) != 1 {
		t.Fatalf("sandboxes: %v", list)
	}
	s.stop(syscall.SIGKILL)
	s.start()
	t.Run("after a restart", func(t *testing.T) {
		runSDK(t, "volumes.test.mjs", append(s.in(t).clientEnv(), "PART=after", "SANDBOX="+list[0].ID))
	})
}
