// Package programs keeps copies of the programs that sandboxes run by: the agent, and each build of runsc that
// a sandbox or a checkpoint still needs. An upgrade of the installed programs therefore changes no sandbox.
// It starts no container, and removes no build that its caller reports as needed.
//
// Runtimes.mu is held for no call out of this package except file operations.
package programs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/oci"
	"github.com/barchan-dev/barchan/internal/node/oci/memimage"
)

// Only the build of runsc that wrote the memory of a sandbox can restore it, and a container is driven by the
// build that started it. The copies are
//
//	<Dir>/<SHA-256>/runsc   one for each build that is needed
//	<Dir>/installed.json    the file of which the newest is a copy, so that a start need not hash it
//
// Rows of the journal name the build. Sweep removes a build that no row and no image names.
const (
	keptProgram   = "runsc"
	installedName = "installed.json"
	// ImageDescription is the file in an image of memory that names its build.
	ImageDescription = "image.json"
)

// Config configures the runtimes.
type Config struct {
	// Dir has the copies of runsc.
	Dir string
	// Runtimes are the classes that the node offers.
	Runtimes []oci.Config
	Log      *slog.Logger
}

// Runtimes are the runtimes of the offered classes, and the kept builds of runsc.
type Runtimes struct {
	dir     string
	log     *slog.Logger
	classes map[oci.Class]*oci.Runtime // Install replaces gVisor's, before the first container
	// base is the node's configuration of gVisor; only the program differs between builds.
	base oci.Config
	// current is the SHA-256 of the build for new containers; empty before Install.
	current string

	mu    sync.Mutex
	older map[string]*oci.Runtime // +checklocks:mu
}

// New checks the configuration and changes nothing on the host.
func New(cfg Config) (*Runtimes, error) {
	b := &Runtimes{dir: cfg.Dir, log: cfg.Log, classes: map[oci.Class]*oci.Runtime{}, older: map[string]*oci.Runtime{}}
	for _, c := range cfg.Runtimes {
		r, err := oci.New(c)
		if err != nil {
			return nil, err
		}
		b.classes[r.Class()] = r
		if c.Class == oci.GVisor {
			b.base = c
		}
	}
	return b, nil
}

// Offers reports whether the node has a runtime of a class.
func (b *Runtimes) Offers(c oci.Class) bool { return b.classes[c] != nil }

// Of returns the runtime for new containers of a class.
func (b *Runtimes) Of(c oci.Class) (*oci.Runtime, error) {
	r := b.classes[c]
	if r == nil {
		return nil, fmt.Errorf("this node no longer offers class %q: %w", c, errs.ErrUnavailable)
	}
	return r, nil
}

// All visits the runtimes of the offered classes.
func (b *Runtimes) All() iter.Seq2[oci.Class, *oci.Runtime] { return maps.All(b.classes) }

func (b *Runtimes) path(sha string) string { return filepath.Join(b.dir, sha, keptProgram) }

// installed identifies the file that the newest copy was made from.
type installed struct {
	Path   string    `json:"path"`
	Size   int64     `json:"size"`
	Inode  uint64    `json:"inode"`
	Mtime  time.Time `json:"mtime"`
	SHA256 string    `json:"sha256"`
}

// Install ensures that there is a copy of the installed runsc, and starts new containers by it. If programs
// cannot be run from Dir, it uses the installed one; memory on disk is then lost with an upgrade.
func (b *Runtimes) Install(ctx context.Context) error {
	if !b.Offers(oci.GVisor) {
		return nil
	}
	program, err := exec.LookPath(b.base.Binary)
	if err != nil {
		return fmt.Errorf("find runtime: %w", err)
	}
	sha, err := b.keep(program)
	if err != nil {
		return fmt.Errorf("copy runtime: %w", err)
	}
	b.current = sha
	if err := readInLargePages(b.path(sha)); err != nil {
		b.log.DebugContext(ctx, "runtime not read in large pages", "path", b.path(sha), telemetry.Error, err)
	}
	if err := unix.Access(b.path(sha), unix.X_OK); err != nil {
		b.log.WarnContext(ctx, "runtime not copied; upgrades will invalidate stored memory",
			"dir", b.dir, telemetry.Error, err)
		return nil
	}
	r, err := b.runtime(sha)
	if err != nil {
		return err
	}
	b.classes[oci.GVisor] = r
	return nil
}

// keep copies a program, unless there is a copy, and returns its SHA-256.
func (b *Runtimes) keep(program string) (sha string, err error) {
	if err := os.MkdirAll(b.dir, 0o755); err != nil {
		return "", err
	}
	now, err := identityOf(program)
	if err != nil {
		return "", err
	}
	if b.hasCopy(&now) {
		return now.SHA256, nil
	}
	from, err := os.Open(program)
	if err != nil {
		return "", err
	}
	defer func() { _ = from.Close() }()
	sum := sha256.New()
	if _, err := io.Copy(sum, from); err != nil {
		return "", err
	}
	now.SHA256 = hex.EncodeToString(sum.Sum(nil))
	if info, err := os.Stat(b.path(now.SHA256)); err != nil || info.Size() != now.Size {
		if _, err := from.Seek(0, io.SeekStart); err != nil {
			return "", err
		}
		if err := b.copy(from, now.SHA256); err != nil {
			return "", err
		}
	}
	text, err := json.Marshal(now)
	if err != nil {
		return "", err
	}
	return now.SHA256, durable.WriteFile(filepath.Join(b.dir, installedName), text, 0o644)
}

// hasCopy reports whether the file is the last one copied, and completes its identity.
func (b *Runtimes) hasCopy(now *installed) bool {
	var last installed
	text, err := os.ReadFile(filepath.Join(b.dir, installedName))
	if err != nil || json.Unmarshal(text, &last) != nil || last.SHA256 == "" {
		return false
	}
	info, err := os.Stat(b.path(last.SHA256))
	if err != nil || info.Size() != now.Size || !last.Mtime.Equal(now.Mtime) ||
		last.Path != now.Path || last.Size != now.Size || last.Inode != now.Inode {
		return false
	}
	now.SHA256 = last.SHA256
	return true
}

func identityOf(program string) (installed, error) {
	info, err := os.Stat(program)
	if err != nil {
		return installed{}, err
	}
	i := installed{Path: program, Size: info.Size(), Mtime: info.ModTime().UTC()}
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		i.Inode = s.Ino
	}
	return i, nil
}

// copy creates a durable copy, of which nothing is cached. It is no link: an overwrite of the installed program in place would change
// that.
func (b *Runtimes) copy(from io.Reader, sha string) error {
	dir := filepath.Dir(b.path(sha))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := durable.CopyProgram(from, b.path(sha)); err != nil {
		return err
	}
	_ = evict(b.path(sha)) // else it starts containers more slowly
	return durable.SyncDirs(dir, b.dir)
}

// runtime returns a kept build's runtime. None is an errs.ErrConflict.
func (b *Runtimes) runtime(sha string) (*oci.Runtime, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, err := os.Stat(b.path(sha)); errors.Is(err, fs.ErrNotExist) {
		delete(b.older, sha)
		return nil, fmt.Errorf("requires runtime build with SHA-256 %.12s, which is no longer on this host: %w", sha, errs.ErrConflict)
	} else if err != nil {
		return nil, fmt.Errorf("find runtime build %.12s: %w: %w", sha, err, errs.ErrUnavailable)
	}
	if r := b.older[sha]; r != nil {
		return r, nil
	}
	c := b.base
	c.Binary = b.path(sha)
	r, err := oci.New(c)
	if err == nil {
		b.older[sha] = r
	}
	return r, err
}

// ForBuild returns gVisor's runtime of a build: that of new containers, or a kept one. A build without a
// SHA-256 means the former. A missing build is an errs.ErrConflict.
func (b *Runtimes) ForBuild(build memimage.Build) (*oci.Runtime, error) {
	if build.SHA256 == "" || b.current == "" || build.SHA256 == b.current {
		return b.Of(oci.GVisor)
	}
	return b.runtime(build.SHA256)
}

// Driving returns the runtime of a container that a build of a class has started.
func (b *Runtimes) Driving(c oci.Class, build string) (*oci.Runtime, error) {
	if c != oci.GVisor {
		return b.Of(c)
	}
	return b.ForBuild(memimage.Build{SHA256: build})
}

// BuildOf returns the build for new containers of a class; empty if it does not matter.
func (b *Runtimes) BuildOf(c oci.Class) string {
	if c != oci.GVisor {
		return ""
	}
	return b.current
}

// Identify computes the build of gVisor before the first sandbox needs it.
func (b *Runtimes) Identify(ctx context.Context) {
	if r := b.classes[oci.GVisor]; r != nil {
		if _, err := r.Build(ctx); err != nil && ctx.Err() == nil {
			b.log.WarnContext(ctx, "runtime build unknown", "class", oci.GVisor, telemetry.Error, err)
		}
	}
}

// Sweep removes the builds that needed does not report. On failure all are kept.
func (b *Runtimes) Sweep(ctx context.Context, needed func(sha string) (bool, error)) {
	names, err := b.kept()
	for _, sha := range names {
		if err != nil || ctx.Err() != nil {
			break
		}
		if sha == b.current {
			continue
		}
		var is bool
		if is, err = needed(sha); is || err != nil {
			continue
		}
		b.log.InfoContext(ctx, "removing unused runtime build", "sha256", sha)
		err = b.remove(sha)
	}
	if err != nil {
		b.log.WarnContext(ctx, "cannot remove unused runtime builds", telemetry.Error, err)
	}
}

// kept returns the SHA-256 sums of the builds with a copy.
func (b *Runtimes) kept() (sums []string, err error) {
	found, err := os.ReadDir(b.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list kept builds: %w", err)
	}
	for _, e := range found {
		if e.Name() != installedName {
			sums = append(sums, e.Name())
		}
	}
	return sums, nil
}

func (b *Runtimes) remove(sha string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.older, sha)
	return os.RemoveAll(filepath.Join(b.dir, sha))
}

// ImagesMention reports whether the manifest of a memory image below one of the directories has a word.
func ImagesMention(word string, dirs ...string) (bool, error) {
	for _, dir := range dirs {
		if found, err := imagesName(dir, []byte(word)); err != nil || found {
			return found, err
		}
	}
	return false, nil
}

func imagesName(dir string, word []byte) (found bool, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || d.IsDir() || filepath.Base(path) != ImageDescription {
			return err
		}
		text, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		found = found || bytes.Contains(text, word)
		return err
	})
	return found, err
}
