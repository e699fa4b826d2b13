package acme

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// DNS changes the TXT records of domains.
type DNS interface {
	// Add adds a value to those of the name, and returns when the authority can see it.
	Add(ctx context.Context, name, value string) error
	// Remove removes it; a missing value is no error.
	Remove(ctx context.Context, name, value string) error
}

// Hook runs an operator's program to change the records, with three arguments: present or cleanup, the
// record's name without a final dot, and its value. Errors contain its output. It inherits the
// environment, and its standard input is empty.
type Hook struct {
	Program string // absolute
}

// hookTime bounds one run of a hook.
const hookTime = 2 * time.Minute

// Add implements DNS.
func (h Hook) Add(ctx context.Context, name, value string) error {
	return h.run(ctx, "present", name, value)
}

// Remove implements DNS.
func (h Hook) Remove(ctx context.Context, name, value string) error {
	return h.run(ctx, "cleanup", name, value)
}

func (h Hook) run(ctx context.Context, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, hookTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, h.Program, args...)
	cmd.WaitDelay = time.Second // children of its own may hold the pipe
	cmd.Env = os.Environ()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		said := strings.TrimSpace(out.String())
		if len(said) > mostSaid {
			said = said[len(said)-mostSaid:]
		}
		return fmt.Errorf("%s %s: %w: %s: %w", h.Program, args[0], err, said, errs.ErrUnavailable)
	}
	return nil
}

// mostSaid bounds the part of a hook's output in an error.
const mostSaid = 500

// Delayed waits after adding a record, so that all servers of a domain have it before validation.
type Delayed struct {
	DNS
	Wait time.Duration
}

// Add implements DNS.
func (d Delayed) Add(ctx context.Context, name, value string) error {
	if err := d.DNS.Add(ctx, name, value); err != nil {
		return err
	}
	timer := time.NewTimer(d.Wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait until the record is seen: %w", context.Cause(ctx))
	}
}
