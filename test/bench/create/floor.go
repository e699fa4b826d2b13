package create

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/test/bench/harness"
	"github.com/barchan-dev/barchan/test/bench/report"
)

// withBare calls f with the smallest container of the bare runtime: one static program that prints a line, no network, no image, no
// limits. No sandbox of this runtime can be made in less.
func withBare(ctx context.Context, b *harness.Bench, class string, f func(bare) error) (err error) {
	c := bare{name: filepath.Base(b.Server.Cgroup), dir: filepath.Join(b.Server.Dir, "floor-"+class), program: b.Server.Paths["runc"]}
	if class == "gvisor" {
		c.program = b.Server.Paths["runsc"]
		c.flags = []string{"--platform=systrap", "--network=none", "--ignore-cgroups"}
	}
	c.flags = append(c.flags, "--root", filepath.Join(c.dir, "state"))
	if err := c.bundle(ctx, b.Server.Dir); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.remove()) }()
	return f(c)
}

// bare is a runtime without us.
type bare struct {
	name, dir, program string
	flags              []string
}

// oneByOne runs the container to its end, n times.
func (c bare) oneByOne(ctx context.Context, n int) (took report.Samples, err error) {
	for i := range n + 1 {
		began := time.Now()
		if err := c.run(ctx, i); err != nil {
			return nil, err
		}
		if i > 0 { // the first one only warms
			took = append(took, report.Millis(time.Since(began)))
		}
	}
	return took, nil
}

// atOnce runs n of them at once, and returns when the last has ended.
func (c bare) atOnce(ctx context.Context, n int) error {
	group, ctx := errgroup.WithContext(ctx)
	for i := range n {
		group.Go(func() error { return c.run(ctx, i) })
	}
	return group.Wait()
}

// bundle writes a container of the agent's program, which can print its version.
func (c bare) bundle(ctx context.Context, programs string) error {
	root := filepath.Join(c.dir, "rootfs")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return fmt.Errorf("make bundle: %w", err)
	}
	if err := os.Link(filepath.Join(programs, "barchan-agent"), filepath.Join(root, "agent")); err != nil {
		return fmt.Errorf("make bundle: %w", err)
	}
	if out, err := exec.CommandContext(ctx, c.program, "spec", "--bundle", c.dir).CombinedOutput(); err != nil {
		return fmt.Errorf("%s spec: %w: %s", c.program, err, out)
	}
	file := filepath.Join(c.dir, "config.json")
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read spec: %w", err)
	}
	var spec map[string]any
	if err := json.Unmarshal(text, &spec); err != nil {
		return fmt.Errorf("read spec: %w", err)
	}
	process, ok := spec["process"].(map[string]any)
	if !ok {
		return fmt.Errorf("%s wrote a spec without a process", c.program)
	}
	process["terminal"], process["args"] = false, []string{"/agent", "-version"}
	if text, err = json.Marshal(spec); err != nil {
		return fmt.Errorf("write spec: %w", err)
	}
	return os.WriteFile(file, text, 0o600)
}

// remove takes away the files, and the mount that runsc makes beside its state for all of its
// containers together.
func (c bare) remove() error {
	mount := filepath.Join(c.dir, "state", "null-netns")
	if err := unix.Unmount(mount, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("unmount %s: %w", mount, err)
	}
	return os.RemoveAll(c.dir)
}

// run runs the container; if that fails, or is interrupted, nothing of it stays.
func (c bare) run(ctx context.Context, number int) error {
	id := fmt.Sprintf("%s-floor-%d", c.name, number)
	out, err := exec.CommandContext(ctx, c.program, append(c.flags, "run", "--bundle", c.dir, id)...).CombinedOutput()
	if err == nil {
		return nil
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if left, undoErr := exec.CommandContext(undo, c.program, append(c.flags, "delete", "--force", id)...).CombinedOutput(); undoErr != nil {
		err = errors.Join(err, fmt.Errorf("delete container %s: %w: %s", id, undoErr, left))
	}
	return fmt.Errorf("run a bare container: %w: %s", err, out)
}

// processStarts starts /bin/true on the host and waits for its end, n times.
func processStarts(ctx context.Context, n int) (report.Samples, error) {
	var took report.Samples
	for range n {
		began := time.Now()
		if err := exec.CommandContext(ctx, "/bin/true").Run(); err != nil {
			return nil, fmt.Errorf("start a process: %w", err)
		}
		took = append(took, report.Millis(time.Since(began)))
	}
	return took, nil
}
