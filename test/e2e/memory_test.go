package e2e

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestMemoryGoesToDisk has a sandbox sleep on disk over a restart of the server: afterwards the same
// process counts on.
func TestMemoryGoesToDisk(t *testing.T) {
	skipInFast(t)
	t.Parallel()
	s := newServer(t)
	s.env = append(s.env, "BARCHAN_STORE_AFTER=100ms")
	s.start()
	s.must("image", "build", "base")
	id, _ := s.keep("base", "true")
	s.exec(id, "nohup sh -c 'i=0; while :; do i=$((i+1)); echo $$ $i > /tmp/count; sleep 0.05; done' >/dev/null 2>&1 &")
	count := func() (pid string, n int) {
		t.Helper()
		var out string
		eventually.NoError(t, "it counts", func() error {
			out = s.exec(id, "cat /tmp/count 2>/dev/null || true") // it may not have begun
			if len(strings.Fields(out)) != 2 {
				return fmt.Errorf("%q", out)
			}
			return nil
		})
		n, err := strconv.Atoi(strings.Fields(out)[1])
		if err != nil {
			t.Fatal(err)
		}
		return strings.Fields(out)[0], n
	}
	pid, before := count()
	s.must("pause", id)
	eventually.NoError(t, "its memory is on disk", func() error {
		out := s.mustKubectl("", "get", "sandboxes", "-o", `jsonpath={.items[0].status.conditions[?(@.type=="Suspended")].message}`)
		if !strings.Contains(out, "disk") {
			return errors.New(out)
		}
		return nil
	})
	if out, err := s.try("exec", id, "true"); err == nil {
		t.Errorf("a command ran in a paused sandbox: %s", out)
	}
	s.stop(syscall.SIGKILL)
	s.start()
	s.must("resume", id)
	after, n := count()
	if after != pid || n < before {
		t.Errorf("process %s counted to %d, before its sleep process %s to %d", after, n, pid, before)
	}
	s.must("kill", id)
}
