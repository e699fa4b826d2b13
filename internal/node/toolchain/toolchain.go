// Package toolchain finds the programs that a server runs, and checks whether the host has what sandboxes
// need. It installs and changes nothing: its errors contain the remedy, for an operator or make.
package toolchain

import (
	"cmp"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

// The programs.
const (
	Runsc      = "runsc"
	Runc       = "runc"
	Containerd = "containerd"
	Agent      = "barchan-agent"
	Mmdebstrap = "mmdebstrap"
	VolumeFS   = "barchan-volumefs"
)

// DefaultCache is the directory of make's results, unless EnvCache is set.
const (
	DefaultCache = "/var/cache/barchan"
	EnvCache     = "BARCHAN_CACHE"
)

// versionTimeout is far more than a program needs to print its version.
const versionTimeout = 20 * time.Second

// sources has each program's version flag, least version and source.
var sources = map[string]struct {
	flag   string
	least  []int
	static bool
	get    string
}{
	Runsc:      {flag: "--version", get: "run `make runtimes`"},
	Runc:       {flag: "--version", least: []int{1, 1}, get: "run `make deps` or `apt-get install runc`"},
	Containerd: {flag: "--version", least: []int{2, 0}, get: "run `make runtimes`"},
	Agent:      {flag: "--version", static: true, get: "run `make build`"},
	VolumeFS:   {flag: "--version", get: "run `make runtimes`"},
	Mmdebstrap: {flag: "--version", least: []int{1, 0}, get: "run `make deps` or `apt-get install mmdebstrap`"},
}

// Programs returns the names of all programs that a Finder knows.
func Programs() []string { return []string{Runsc, Runc, Containerd, Agent, Mmdebstrap} }

// Config configures a Finder. The zero value uses the default places.
type Config struct {
	// Paths are the operator's settings, by program. Such a path is used, or an error: there is no fallback.
	Paths map[string]string
	// CacheDir has a bin directory of built programs; empty is $BARCHAN_CACHE.
	CacheDir string
}

// Finder finds programs, in this order: the configured path; beside our own executable; in the cache's bin;
// in /var/cache/barchan/bin; in PATH. It is immutable and safe for concurrent use.
type Finder struct {
	paths map[string]string
	dirs  []string
}

// Program is a program that was found and runs.
type Program struct {
	Name    string `json:"name"`
	Path    string `json:"path"`
	Version string `json:"version"`
}

// New returns a Finder, or an error for an unknown configured program.
func New(cfg Config) (*Finder, error) {
	f := &Finder{paths: map[string]string{}}
	for name, path := range cfg.Paths {
		if _, ok := sources[name]; !ok {
			return nil, errs.Public(errs.ErrInvalid, fmt.Sprintf("unknown program %q: use one of %s",
				name, strings.Join(Programs(), ", ")))
		}
		if path != "" {
			f.paths[name] = path
		}
	}
	if self, err := os.Executable(); err == nil { // otherwise that place is skipped
		f.dirs = append(f.dirs, filepath.Dir(self))
	}
	f.dirs = append(f.dirs, filepath.Join(cmp.Or(cfg.CacheDir, CacheDir()), "bin"), filepath.Join(DefaultCache, "bin"))
	return f, nil
}

// CacheDir returns the directory of rebuildable files.
func CacheDir() string { return cmp.Or(os.Getenv(EnvCache), DefaultCache) }

// Find returns the absolute path of a program without running it. The error is an ErrUnavailable whose public
// message has the remedy.
func (f *Finder) Find(name string) (string, error) {
	k, ok := sources[name]
	if !ok {
		return "", fmt.Errorf("find program %q: %w", name, errs.ErrInvalid)
	}
	if path, ok := f.paths[name]; ok {
		if err := executable(path); err != nil {
			return "", unavailable(err, "%s is configured as %s, which cannot be run (%s): correct the path or remove the setting",
				name, path, reason(err))
		}
		return filepath.Abs(path)
	}
	tried := slices.Compact(slices.Clone(f.dirs))
	for _, dir := range tried {
		if path := filepath.Join(dir, name); executable(path) == nil {
			return path, nil
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", unavailable(err, "%s is missing (searched %s and PATH): %s, or set its path in the configuration",
			name, strings.Join(tried, ", "), k.get)
	}
	return filepath.Abs(path)
}

// Check finds a program, and compares its version with the least one. Errors are as Find's.
func (f *Finder) Check(ctx context.Context, name string) (Program, error) {
	path, err := f.Find(name)
	if err != nil {
		return Program{}, err
	}
	k := sources[name]
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, k.flag)
	cmd.WaitDelay = versionTimeout // on a stalled host its output is read late
	out, err := cmd.CombinedOutput()
	if err != nil {
		if cause := ctx.Err(); cause != nil {
			err = cause
		}
		return Program{}, unavailable(fmt.Errorf("run %s %s: %w", path, k.flag, err),
			"%s does not run (%s %s: %s): %s", name, path, k.flag, firstLine(out, err), k.get)
	}
	version := parseVersion(out)
	if version == "" {
		return Program{}, unavailable(nil, "%s prints no version (%s %s: %s): is it the right program? Otherwise %s",
			name, path, k.flag, firstLine(out, errors.New("no output")), k.get)
	}
	if !atLeast(version, k.least) {
		return Program{}, unavailable(nil, "%s %s at %s is too old, %s or newer is needed: %s",
			name, version, path, dotted(k.least), k.get)
	}
	if k.static {
		if err := checkStatic(path); err != nil {
			return Program{}, unavailable(err, "%s at %s cannot run in every image (%s): %s", name, path, reason(err), k.get)
		}
	}
	return Program{Name: name, Path: path, Version: version}, nil
}

func unavailable(cause error, format string, args ...any) error {
	message := fmt.Sprintf(format, args...)
	if cause == nil {
		return errs.Public(errs.ErrUnavailable, message)
	}
	return errs.Public(fmt.Errorf("%w: %w", errs.ErrUnavailable, cause), message)
}

func executable(path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return err
	case info.IsDir():
		return errors.New("is a directory")
	case info.Mode()&0o111 == 0:
		return errors.New("not executable")
	}
	return nil
}

// reason is an error without its path, which the message already has.
func reason(err error) string {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err.Error()
	}
	return err.Error()
}

func firstLine(out []byte, err error) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return cmp.Or(line, err.Error())
}

// A version is digits with dots, with or without a leading v, and includes a suffix such as in 1.1.5+ds1.
// Releases of runsc are named release-20260105.0.
var versionPattern = regexp.MustCompile(`(?:^|\s)(v?\d+\.\d+\S*|release-\d\S*)`)

func parseVersion(out []byte) string {
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	m := versionPattern.FindStringSubmatch(line)
	if m == nil {
		return ""
	}
	return strings.TrimPrefix(m[1], "v")
}

// atLeast compares as many numbers of a version as least has.
func atLeast(version string, least []int) bool {
	parts := strings.FieldsFunc(version, func(r rune) bool { return r < '0' || r > '9' })
	for i, want := range least {
		if i >= len(parts) {
			return false
		}
		have, err := strconv.Atoi(parts[i])
		if err != nil {
			return false
		}
		if have != want {
			return have > want
		}
	}
	return true
}

func dotted(version []int) string {
	parts := make([]string, len(version))
	for i, n := range version {
		parts[i] = strconv.Itoa(n)
	}
	return strings.Join(parts, ".")
}

// checkStatic refuses a dynamically linked program: images have another loader, or none.
func checkStatic(path string) error {
	file, err := elf.Open(path)
	if err != nil {
		return fmt.Errorf("read as ELF: %w", err)
	}
	defer func() { _ = file.Close() }()
	for _, p := range file.Progs {
		if p.Type == elf.PT_INTERP {
			return errors.New("not static: build it with CGO_ENABLED=0")
		}
	}
	return nil
}
