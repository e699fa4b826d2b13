package baseimage

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// dpkgOptions apply to the build and stay in the image: no documentation, no fsync, and pip for all users.
func dpkgOptions() []string {
	return []string{
		"path-exclude=/usr/share/man/*", "path-exclude=/usr/share/info/*",
		"path-exclude=/usr/share/locale/*", "path-exclude=/usr/share/doc/*",
		"path-include=/usr/share/doc/*/copyright", "force-unsafe-io",
		// This file makes pip refuse to install outside a virtual environment.
		"path-exclude=/usr/lib/python3*/EXTERNALLY-MANAGED",
		// Large and not needed: a debugger of link-time optimization, Python as a static library.
		"path-exclude=/usr/bin/*-lto-dump-*", "path-exclude=/usr/lib/python3*/config-*/*.a",
	}
}

// envFiles has the directory of Config.Files for mmdebstrap's hook, whose shell would interpret its name.
const envFiles = "BARCHAN_IMAGE_FILES"

// stages maps prefixes of mmdebstrap's output to its step, and to the percentage of a build before it, as
// timed on a 2-core host.
var stages = []struct {
	prefix, step string
	percent      int
	mirror       bool // failures here are mostly of the mirror
}{
	{"running apt-get update", "read package lists", 2, true},
	{"downloading packages", "download packages", 8, true},
	{"extracting archives", "extract packages", 18, false},
	{"installing essential", "install essential packages", 24, false},
	{"installing remaining", "install packages", 36, true},
	{"running --customize-hook", "set up the user", 76, false},
	{"cleaning package lists", "clean up", 90, false},
	{"creating tarball", "write layer", 92, false},
}

// bootstrap runs mmdebstrap and writes the file system as a tar to w. work is a directory for the build's
// files.
//
// The program gets its own mount and process namespaces: killing it also ends its child processes and mounts.
func (c *Config) bootstrap(ctx context.Context, work string, w io.Writer, report *reporter) error {
	program, err := c.program()
	if err != nil {
		return err
	}
	hook := filepath.Join(work, "customize.sh")
	if err := os.WriteFile(hook, customize, 0o700); err != nil {
		return fmt.Errorf("write hook: %w", err)
	}
	files := ""
	if c.Files != nil {
		files = filepath.Join(work, "files")
		if err := os.CopyFS(files, c.Files); err != nil {
			return fmt.Errorf("write the image's own files: %w", err)
		}
	}
	epoch, err := c.epoch()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	output := &outputParser{report: report, name: c.Name}
	cmd := exec.CommandContext(ctx, program, c.arguments(hook, files)...)
	cmd.Dir = work
	cmd.Env = append(os.Environ(), proxies(ctx)...)
	cmd.Env = append(cmd.Env, "TMPDIR="+work, "LC_ALL=C.UTF-8", envFiles+"="+files,
		"SOURCE_DATE_EPOCH="+strconv.FormatInt(epoch.Unix(), 10))
	cmd.Stderr = output
	cmd.WaitDelay = 10 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:   syscall.CLONE_NEWPID,
		Unshareflags: syscall.CLONE_NEWNS,
		Setpgid:      true, // only this process gets a terminal's Ctrl-C
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("open pipe to mmdebstrap: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", program, err)
	}
	copyErr := copyRoot(w, out, epoch)
	if copyErr != nil {
		cancel() // there is no reader any more
	}
	waitErr := cmd.Wait()
	switch {
	case context.Cause(ctx) != nil && copyErr == nil:
		return fmt.Errorf("run mmdebstrap: %w", context.Cause(ctx))
	case copyErr != nil:
		return fmt.Errorf("write layer: %w", copyErr)
	case waitErr != nil:
		return output.failure(waitErr)
	}
	return nil
}

// program returns the path of mmdebstrap, or an error with the remedy.
func (c *Config) program() (string, error) {
	if os.Geteuid() != 0 {
		return "", errs.Public(errs.ErrForbidden, "building an image needs root: run it with sudo")
	}
	name := c.Mmdebstrap
	if name == "" {
		name = "mmdebstrap"
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", errs.Public(fmt.Errorf("%w: %w", errs.ErrUnavailable, err),
			"mmdebstrap is missing: install it with `apt-get install mmdebstrap` or `make deps`")
	}
	return path, nil
}

// epoch returns the modification time of the build's files.
func (c *Config) epoch() (time.Time, error) {
	if !c.Epoch.IsZero() {
		return c.Epoch.UTC(), nil
	}
	if v := os.Getenv("SOURCE_DATE_EPOCH"); v != "" {
		sec, err := strconv.ParseInt(v, 10, 64)
		if err != nil || sec < 0 {
			return time.Time{}, invalid("SOURCE_DATE_EPOCH=%s: use seconds since 1970", v)
		}
		return time.Unix(sec, 0).UTC(), nil
	}
	return time.Now().UTC().Truncate(24 * time.Hour), nil
}

// arguments returns those of mmdebstrap. The directory files, if any, is copied into the root before the hook runs.
func (c *Config) arguments(hook, files string) []string {
	packages := c.Packages
	if c.debianNode {
		packages = slices.Concat(packages, debianNode())
	}
	args := []string{
		"--variant=minbase", "--mode=root", "--format=tar", "--skip=output/dev",
		"--include=" + strings.Join(packages, ","),
		`--aptopt=Acquire::Retries "3"`,
		`--aptopt=Acquire::http::Timeout "30"`,
		`--aptopt=Acquire::https::Timeout "30"`,
	}
	if files != "" {
		args = append(args, `--customize-hook=cp -R --no-preserve=ownership "$`+envFiles+`"/. "$1"/`)
	}
	args = append(args, "--customize-hook="+hook)
	for _, o := range dpkgOptions() {
		args = append(args, "--dpkgopt="+o)
	}
	args = append(args, c.Suite, "-")
	return append(args, c.Sources...)
}

// copyRoot writes an empty /dev, which mmdebstrap omits and runtimes mount over, and then the root file
// system.
func copyRoot(w io.Writer, root io.Reader, epoch time.Time) error {
	t := tar.NewWriter(w)
	err := t.WriteHeader(&tar.Header{
		Typeflag: tar.TypeDir, Name: "./dev/", Mode: 0o755, ModTime: epoch, Format: tar.FormatUSTAR,
	})
	if err := errors.Join(err, t.Flush()); err != nil { // no Close: the archive continues
		return err
	}
	_, err = io.Copy(w, root)
	return err
}

// outputParser reads mmdebstrap's output: stages become progress, and the last lines are kept for an error.
type outputParser struct {
	report *reporter
	name   string // of the image

	mu     sync.Mutex
	part   []byte   // +checklocks:mu
	tail   []string // +checklocks:mu
	stage  string   // +checklocks:mu
	mirror bool     // +checklocks:mu
}

const tailLines = 12

// Write implements io.Writer; lines may end in \n or, of progress bars, in \r.
func (l *outputParser) Write(p []byte) (int, error) {
	l.mu.Lock()
	l.part = append(l.part, p...)
	var reached []int
	for {
		i := bytes.IndexAny(l.part, "\r\n")
		if i < 0 {
			break
		}
		if at := l.lineLocked(strings.TrimSpace(string(l.part[:i]))); at >= 0 {
			reached = append(reached, at)
		}
		l.part = l.part[i+1:]
	}
	if len(l.part) > 64<<10 {
		l.part = l.part[:0] // too long to be useful
	}
	l.mu.Unlock()
	for _, at := range reached {
		l.report.step(stages[at].step, stages[at].percent)
	}
	return len(p), nil
}

// lineLocked handles a line and returns the stage that it begins, or -1.
// +checklocks:l.mu
func (l *outputParser) lineLocked(line string) int {
	if line == "" || line == "done" {
		return -1
	}
	info, isInfo := strings.CutPrefix(line, "I: ")
	for i, s := range stages {
		if isInfo && strings.HasPrefix(info, s.prefix) {
			l.stage, l.mirror = s.step, s.mirror
			return i
		}
	}
	if !isInfo {
		if l.tail = append(l.tail, line); len(l.tail) > tailLines {
			l.tail = l.tail[1:]
		}
	}
	return -1
}

// failure returns an error for users with the last output.
func (l *outputParser) failure(cause error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b strings.Builder
	fmt.Fprintf(&b, "building image %s failed at %q", l.name, l.stage)
	if l.mirror {
		b.WriteString("; if a package mirror cannot be reached, check the network and /etc/apt, or name another one")
	}
	for _, line := range l.tail {
		b.WriteString("\n  " + line)
	}
	return errs.Public(fmt.Errorf("mmdebstrap: %w: %w", errs.ErrUnavailable, cause), b.String())
}
