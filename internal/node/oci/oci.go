// Package oci runs containers through the OCI command lines of runsc and runc, and writes the
// specifications that they read. It is the only user of both programs and of go-runc. It keeps no
// state: it reads that of containers from the runtimes and the kernel.
//
// It leaves no shim process beside a container. A container's output goes to a [Console] of bounded
// size.
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
	"slices"
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

// Status is a runtime's status of a container.
type Status string

// Statuses.
const (
	Created Status = "created"
	Running Status = "running"
	Paused  Status = "paused"
	Stopped Status = "stopped"
	Absent  Status = "absent" // not known to the runtime
)

// runtimeLog is the file in a bundle with a runtime's errors.
const runtimeLog = "runtime.log"

// Config selects the program for a class.
type Config struct {
	Class Class
	// Binary is the path of runsc or runc.
	Binary string
	// Root is the runtime's state directory, one per instance.
	Root string
	// ExtraArgs precede the command, for debugging.
	ExtraArgs []string
}

// Runtime drives one program. It is safe for concurrent use, for different containers.
type Runtime struct {
	cfg  Config
	args []string

	mu     sync.Mutex
	cached *builtFrom // +checklocks:mu
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
	useStarter()
	return &Runtime{cfg: cfg, args: append(flags(cfg.Class), cfg.ExtraArgs...)}, nil
}

// flags are the flags before the command that correctness requires.
//
// For gVisor: systrap needs no hardware virtualization; overlay2=none makes writes land in the
// snapshot, where a checkpoint finds them, instead of a file that runsc hides; allow-suid lets sudo
// work for users inside the sandbox's kernel, without any privilege on the host; without live TCP
// migration every restore closes connections to the outside, and not only most.
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

// Class returns the class of the containers.
func (r *Runtime) Class() Class { return r.cfg.Class }

// cli is the command line for one container; dir receives its log, if given. The command ends with
// this process, so that the next one finds no concurrent change; containers it has started keep
// running.
func (r *Runtime) cli(dir string) *runc.Runc {
	c := &runc.Runc{
		Command: r.cfg.Binary, Root: r.cfg.Root, LogFormat: runc.JSON, ExtraArgs: r.args,
		Setpgid:      true, // a terminal's signals are for this process
		PdeathSignal: syscall.SIGKILL,
	}
	if dir != "" {
		c.Log = filepath.Join(dir, runtimeLog)
	}
	return c
}

// Run creates and starts a container from its bundle and returns the PID of the process that lives
// as long: the sandbox's kernel, or the container's first process. The console receives its output.
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

// cause adds the runtime's log and the output to an error.
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

// loggedError is the first line of the last error in the log of a bundle, if any.
func loggedError(bundle string) (text string) {
	f, err := os.Open(filepath.Join(bundle, runtimeLog))
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 16<<20) // runsc may print everything that it could not write
	for lines.Scan() {
		var line struct{ Level, Msg string }
		if json.Unmarshal(lines.Bytes(), &line) == nil && (line.Level == "error" || line.Level == "fatal") {
			text, _, _ = strings.Cut(strings.TrimSpace(line.Msg), "\n")
		}
	}
	return shorten(text)
}

func shorten(text string) string {
	const end = 300
	if len(text) <= 2*end {
		return text
	}
	return strings.ToValidUTF8(text[:end], "") + " ... " + strings.ToValidUTF8(text[len(text)-end:], "")
}

// State returns the status of a container.
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
		return "", fmt.Errorf("read state of container %s: %w", id, err)
	}
}

// Pause stops a container's processes; another process may Resume them. Neither is cut short by the
// end of ctx or of this process: after half a pause, a stopped container has the status running.
func (r *Runtime) Pause(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := r.detachedCLI().Pause(ctx, id); err != nil {
		return fmt.Errorf("pause container %s: %w", id, err)
	}
	return nil
}

// Resume continues a paused container.
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

// Stop stops all processes of a gVisor container but the first one, by SIGSTOP.
func (r *Runtime) Stop(ctx context.Context, id string) error {
	if err := r.cli("").Kill(ctx, id, int(syscall.SIGSTOP), &runc.KillOpts{All: true}); err != nil {
		return fmt.Errorf("stop processes of container %s: %w", id, err)
	}
	if err := r.cli("").Kill(ctx, id, int(syscall.SIGCONT), &runc.KillOpts{ExtraArgs: []string{"-pid", "1"}}); err != nil {
		return fmt.Errorf("continue first process of container %s: %w", id, err)
	}
	return nil
}

// Continue continues all processes of a container that Stop has stopped.
func (r *Runtime) Continue(ctx context.Context, id string) error {
	if err := r.cli("").Kill(ctx, id, int(syscall.SIGCONT), &runc.KillOpts{All: true}); err != nil {
		return fmt.Errorf("continue processes of container %s: %w", id, err)
	}
	return nil
}

// Remove ends a container and removes its runtime state and cgroups. It queries neither the
// container's kernel, which may be stuck, nor the runtime, whose state may be inconsistent: it
// kills the processes in the cgroups until there are none. A missing container is success.
func (r *Runtime) Remove(ctx context.Context, id, cgroupsPath string) error {
	if err := cgroups.Thaw(cgroupsPath); err != nil {
		return fmt.Errorf("remove container %s: %w", id, err)
	}
	if err := cgroups.KillAll(ctx, cgroupsPath); err != nil {
		return fmt.Errorf("remove container %s: %w", id, err)
	}
	for _, path := range append(r.statePaths(id), r.joinedPaths(id)...) {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove container %s: %w", id, err)
		}
	}
	if err := cgroups.RemoveIdle(ctx, cgroupsPath); err != nil {
		return fmt.Errorf("remove container %s: %w", id, err)
	}
	return nil
}

// statePaths are the files of a container in the runtime's root, the state first.
func (r *Runtime) statePaths(id string) []string {
	if r.cfg.Class == GVisor {
		base := filepath.Join(r.cfg.Root, id+"_sandbox:"+id)
		return []string{base + ".state", base + ".lock", filepath.Join(r.cfg.Root, "runsc-"+id+".sock")}
	}
	return []string{filepath.Join(r.cfg.Root, id)}
}

// joinedPaths are the files of the other containers of a sandbox in the runtime's root.
func (r *Runtime) joinedPaths(id string) []string {
	if r.cfg.Class != GVisor {
		return nil
	}
	found, _ := filepath.Glob(filepath.Join(r.cfg.Root, "*_sandbox:"+id+".*")) // the pattern is valid
	return found
}

// List names the runtime's sandboxes, by the IDs of their first containers.
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
			// runsc keeps <container>_sandbox:<sandbox>.state and a lock beside it.
			var ok bool
			if name, ok = strings.CutSuffix(name, ".state"); !ok {
				continue
			}
			if name = name[strings.LastIndexByte(name, ':')+1:]; slices.Contains(ids, name) {
				continue // of several containers
			}
		} else if !e.IsDir() {
			continue
		}
		ids = append(ids, name)
	}
	return ids, nil
}

// hasNoState reports, without a process, that the runtime's root has nothing of a container.
func (r *Runtime) hasNoState(id string) bool {
	_, err := os.Lstat(r.statePaths(id)[0])
	return errors.Is(err, fs.ErrNotExist)
}

// Destroy removes the runtime's root, which must have no containers.
func (r *Runtime) Destroy() error {
	// runsc keeps an empty network namespace here, for its gofers.
	shared := filepath.Join(r.cfg.Root, "null-netns")
	for { // one mount for each of its first, concurrent sandboxes
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

// Version is the program's version string.
func (r *Runtime) Version(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, r.cfg.Binary, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("read version of %s: %w", r.cfg.Class, err)
	}
	first, _, _ := strings.Cut(string(out), "\n")
	return first, nil
}
