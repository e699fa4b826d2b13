// Package oci runs containers through the OCI command lines of runsc and runc, and writes the
// specifications that they read. It is the only user of both programs and of go-runc. It
// keeps no state of its own: what runs is asked of the runtimes and of the kernel.
//
// No process of ours stays beside a container. What a container prints before it can be asked
// over the network goes to a small [Console] of bounded size.
package oci

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	runc "github.com/containerd/go-runc"
	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/node/oci/cgroups"
)

// Class is a kind of runtime, by the names of spec.podTemplate.spec.runtimeClassName.
type Class string

// Classes.
const (
	GVisor Class = "gvisor"
	Runc   Class = "runc"
)

// Status is what a runtime says of a container.
type Status string

// Statuses.
const (
	Created Status = "created"
	Running Status = "running"
	Paused  Status = "paused"
	Stopped Status = "stopped"
	Absent  Status = "absent" // the runtime does not know it
)

// runtimeLog is the file in a bundle that a runtime writes its errors to.
const runtimeLog = "runtime.log"

// Config says which program to run for a class.
type Config struct {
	Class Class
	// Binary is the path of runsc or runc.
	Binary string
	// Root is the directory of the runtime's own state, one per instance.
	Root string
	// ExtraArgs go before the command, for debugging.
	ExtraArgs []string
}

// Runtime drives one program. It is safe for concurrent use, for different containers.
type Runtime struct {
	cfg  Config
	args []string

	mu    sync.Mutex
	known *builtFrom // +checklocks:mu
}

// New checks the configuration and starts nothing.
func New(cfg Config) (*Runtime, error) {
	if cfg.Class != GVisor && cfg.Class != Runc {
		return nil, fmt.Errorf("runtime class %q: want %s or %s: %w", cfg.Class, GVisor, Runc, errs.ErrInvalid)
	}
	if !filepath.IsAbs(cfg.Root) {
		return nil, fmt.Errorf("runtime root %q: must be absolute: %w", cfg.Root, errs.ErrInvalid)
	}
	binary, err := exec.LookPath(cfg.Binary)
	if err != nil {
		return nil, fmt.Errorf("runtime %s: program %q: %w: %w", cfg.Class, cfg.Binary, err, errs.ErrInvalid)
	}
	if cfg.Binary, err = filepath.Abs(binary); err != nil {
		return nil, fmt.Errorf("runtime %s: %w", cfg.Class, err)
	}
	return &Runtime{cfg: cfg, args: append(flags(cfg.Class), cfg.ExtraArgs...)}, nil
}

// flags are what a program needs for correctness, before its command.
//
// For gVisor: systrap needs no virtualisation of the machine; overlay2=none has every write
// land in the snapshot, where a checkpoint of files finds it, instead of a file that runsc
// hides; allow-suid lets sudo work for the sandbox's own users inside its kernel, while
// nothing of it ever gains a privilege on the machine; without live TCP migration connections
// to the outside end with every restore, and not only with most.
func flags(class Class) []string {
	if class == GVisor {
		return []string{
			"--platform=systrap", "--network=sandbox", "--overlay2=none", "--file-access=exclusive",
			"--allow-suid=true", "--host-settings=ignore", "--in-sandbox-cgroup=v2",
			"--allow-live-tcp-migration=false",
		}
	}
	return nil
}

// Class is what the runtime runs.
func (r *Runtime) Class() Class { return r.cfg.Class }

// cli is the command line for one container; dir takes its log, if given. It does not outlive
// us, so that whoever comes next finds the machine at rest; what it has started does.
func (r *Runtime) cli(dir string) *runc.Runc {
	c := &runc.Runc{
		Command: r.cfg.Binary, Root: r.cfg.Root, LogFormat: runc.JSON, ExtraArgs: r.args,
		Setpgid:      true, // a terminal's signals are for us
		PdeathSignal: syscall.SIGKILL,
	}
	if dir != "" {
		c.Log = filepath.Join(dir, runtimeLog)
	}
	return c
}

// Run creates and starts a container from its bundle and returns the number of the process
// that lives as long as it does: the sandbox's kernel, or the container's first process. The
// console takes what it prints.
func (r *Runtime) Run(ctx context.Context, id, bundle string, console *Console) (pid int, err error) {
	if err := os.MkdirAll(r.cfg.Root, 0o700); err != nil {
		return 0, fmt.Errorf("run container %s: %w", id, err)
	}
	if err := renewBootID(bundle); err != nil {
		return 0, fmt.Errorf("run container %s: %w", id, err)
	}
	pidFile := filepath.Join(bundle, "pid")
	cgroups.WithQuickMoves(func() {
		_, err = r.cli(bundle).Run(ctx, id, bundle, &runc.CreateOpts{IO: console, PidFile: pidFile, Detach: true})
	})
	if err != nil {
		return 0, fmt.Errorf("run container %s: %w", id, cause(bundle, console.Text(), err))
	}
	pid, err = runc.ReadPidFile(pidFile)
	if err != nil {
		return 0, fmt.Errorf("run container %s: %w", id, err)
	}
	return pid, nil
}

// cause adds to an error what the runtime wrote about it, and what was printed.
func cause(bundle, printed string, err error) error {
	text := loggedError(bundle)
	switch {
	case text == "":
		text = printed
	case printed != "":
		text += "; " + printed
	}
	if text == "" {
		return err
	}
	return fmt.Errorf("%w: %s", err, text)
}

// loggedError is the first line of the last error in the log of a bundle, if there is one.
func loggedError(bundle string) (text string) {
	f, err := os.Open(filepath.Join(bundle, runtimeLog))
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 16<<20) // runsc may print all that it could not write
	for lines.Scan() {
		var line struct{ Level, Msg string }
		if json.Unmarshal(lines.Bytes(), &line) == nil && (line.Level == "error" || line.Level == "fatal") {
			text, _, _ = strings.Cut(strings.TrimSpace(line.Msg), "\n")
		}
	}
	return shorten(text)
}

// shorten takes the middle out of what is too long to be read.
func shorten(text string) string {
	const end = 300
	if len(text) <= 2*end {
		return text
	}
	return strings.ToValidUTF8(text[:end], "") + " ... " + strings.ToValidUTF8(text[len(text)-end:], "")
}

// State asks what a container does.
func (r *Runtime) State(ctx context.Context, id string) (Status, error) {
	if r.hasNoState(id) {
		return Absent, nil
	}
	c, err := r.cli("").State(ctx, id)
	switch {
	case err == nil:
		return Status(c.Status), nil
	case r.hasNoState(id):
		return Absent, nil
	default:
		return "", fmt.Errorf("ask state of container %s: %w", id, err)
	}
}

// Pause stops a container's processes where they are; Resume lets them go on. Neither needs
// the process that called the other. Once begun, neither is cut short by the end of ctx or by
// ours: half a pause is a container that stands still and that the runtime calls running.
func (r *Runtime) Pause(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := r.detachedCLI().Pause(ctx, id); err != nil {
		return fmt.Errorf("pause container %s: %w", id, err)
	}
	return nil
}

// Resume lets a paused container go on.
func (r *Runtime) Resume(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := r.detachedCLI().Resume(ctx, id); err != nil {
		return fmt.Errorf("resume container %s: %w", id, err)
	}
	return nil
}

// Kill sends a signal to a container's first process.
func (r *Runtime) Kill(ctx context.Context, id string, signal syscall.Signal) error {
	if err := r.cli("").Kill(ctx, id, int(signal), nil); err != nil {
		return fmt.Errorf("signal container %s: %w", id, err)
	}
	return nil
}

// Remove ends a container and removes what its runtime keeps of it, cgroups included. It asks
// neither the container's kernel, which may be stuck, nor the runtime, which an interrupted
// command may have left confused: it kills what is in the cgroups until nothing is. What is
// not there is success.
func (r *Runtime) Remove(ctx context.Context, id, cgroupsPath string) error {
	if err := cgroups.Thaw(cgroupsPath); err != nil {
		return fmt.Errorf("remove container %s: %w", id, err)
	}
	if err := cgroups.KillAll(ctx, cgroupsPath); err != nil {
		return fmt.Errorf("remove container %s: %w", id, err)
	}
	for _, path := range r.statePaths(id) {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove container %s: %w", id, err)
		}
	}
	if err := cgroups.RemoveIdle(ctx, cgroupsPath); err != nil {
		return fmt.Errorf("remove container %s: %w", id, err)
	}
	return nil
}

// statePaths are what a runtime keeps of a container in its root, the state first.
func (r *Runtime) statePaths(id string) []string {
	if r.cfg.Class == GVisor {
		base := filepath.Join(r.cfg.Root, id+"_sandbox:"+id)
		return []string{base + ".state", base + ".lock", filepath.Join(r.cfg.Root, "runsc-"+id+".sock")}
	}
	return []string{filepath.Join(r.cfg.Root, id)}
}

// List names the containers that the runtime knows.
func (r *Runtime) List() ([]string, error) {
	entries, err := os.ReadDir(r.cfg.Root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("list containers: %w", err)
	}
	var ids []string
	for _, e := range entries {
		name := e.Name()
		if r.cfg.Class == GVisor {
			// runsc keeps <sandbox>_sandbox:<container>.state and a lock beside it.
			var ok bool
			if name, ok = strings.CutSuffix(name, ".state"); !ok {
				continue
			}
			name = name[strings.LastIndexByte(name, ':')+1:]
		} else if !e.IsDir() {
			continue
		}
		ids = append(ids, name)
	}
	return ids, nil
}

// forgotten reports, without a process, that nothing of a container is in the runtime's root.
func (r *Runtime) hasNoState(id string) bool {
	_, err := os.Lstat(r.statePaths(id)[0])
	return errors.Is(err, fs.ErrNotExist)
}

// Destroy removes the runtime's root, when no container of it is left.
func (r *Runtime) Destroy() error {
	// runsc keeps an empty network namespace here, for what serves files to its sandboxes.
	shared := filepath.Join(r.cfg.Root, "null-netns")
	for { // once for each of its first sandboxes, if they began at the same time
		err := unix.Unmount(shared, unix.MNT_DETACH)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break
		} else if err != nil {
			return fmt.Errorf("unmount %s: %w", shared, err)
		}
	}
	if err := os.RemoveAll(r.cfg.Root); err != nil {
		return fmt.Errorf("remove root of runtime %s: %w", r.cfg.Class, err)
	}
	return nil
}

// Version is the program's own word for its build.
func (r *Runtime) Version(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, r.cfg.Binary, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("ask %s for its version: %w", r.cfg.Class, err)
	}
	first, _, _ := strings.Cut(string(out), "\n")
	return first, nil
}
