package lifecycle

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

func TestProcessIsToldFromALaterOne(t *testing.T) {
	c, err := StartChild(exec.CommandContext(t.Context(), "sleep", "1000"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Reap) // the test's context has ended it by then
	if !c.Alive() {
		t.Error("a running process is not alive")
	}
	for _, other := range []Process{
		{PID: c.PID, Started: c.Started + 1, Boot: c.Boot}, {PID: c.PID, Started: c.Started, Boot: "another boot"},
	} {
		if other.Alive() {
			t.Errorf("%+v taken for %+v", other, c.Process)
		}
		if err := other.Signal(syscall.SIGKILL); err != nil || !c.Alive() {
			t.Errorf("a signal for %+v: %v", other, err)
		}
		if err := other.Wait(t.Context()); err != nil {
			t.Errorf("wait for what is not there: %v", err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := c.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("wait for a running process: %v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait(t.Context()) }()
	if err := c.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if c.Alive() {
		t.Error("a zombie is alive")
	}
}

func TestProcessOfNobody(t *testing.T) {
	if _, err := ProcessOf(1 << 30); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v", err)
	}
	if _, err := StartChild(exec.CommandContext(t.Context(), "/none")); err == nil {
		t.Error("started what does not exist")
	}
}
