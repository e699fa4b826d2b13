package proc

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/barchan-dev/barchan/internal/testkit/eventually"
)

// TestWith: a program is found by an argument until it has ended.
func TestWith(t *testing.T) {
	argument := fmt.Sprintf("600.%d", os.Getpid())
	cmd := exec.CommandContext(t.Context(), "sleep", argument)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually.NoError(t, "the program is found", func() error {
		pid, err := With("sleep", argument)
		if err == nil && pid != cmd.Process.Pid {
			err = fmt.Errorf("found %d, want %d", pid, cmd.Process.Pid)
		}
		return err
	})
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if pid, err := With("sleep", argument); err == nil {
		t.Errorf("found %d after its end", pid)
	}
}

// TestField: wrk indents its names, the kernel does not.
func TestField(t *testing.T) {
	const text = "Pss_Anon:  1 kB\nPss:   12 kB\n  Requests/sec:  123.4\n"
	for name, want := range map[string]string{"Pss": "12 kB", "Requests/sec": "123.4", "Rss": ""} {
		if got := Field(text, name); got != want {
			t.Errorf("%s = %q, want %q", name, got, want)
		}
	}
}
