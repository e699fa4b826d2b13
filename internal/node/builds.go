package node

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
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/barchan-dev/barchan/internal/node/oci/memimage"

	"github.com/barchan-dev/barchan/internal/node/journal"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/base/telemetry"
	"github.com/barchan-dev/barchan/internal/node/oci"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
)

// The memory of a gVisor sandbox can be restored by the build of runsc alone that wrote it, and a
// container that runs is best driven by the one that started it. So the node runs sandboxes by
// copies of its own, which no upgrade takes away:
//
//	<DataDir>/runtimes/<SHA-256>/runsc   one for each build that something still needs
//	<DataDir>/runtimes/installed.json    of which file the newest is a copy, to be quick at the start
//
// Rows of the journal name the build. One that nothing on the node names is removed.
const (
	keptProgram   = "runsc"
	installedName = "installed.json"
	// imageDescription is the file in an image of memory that names its build.
	imageDescription = "image.json"
	// sweepBuildsEvery is how often builds that nothing needs are looked for; the first time is
	// the start.
	sweepBuildsEvery = 24 * time.Hour
)

// builds are the kept builds of runsc.
type builds struct {
	// dir, base and current are set before anything runs.
	dir string
	// base is how the node runs gVisor; only the program differs between builds.
	base oci.Config
	// current is the SHA-256 of the build that new containers are started by.
	current string

	mu    sync.Mutex
	older map[string]*oci.Runtime // +checklocks:mu
}

func (b *builds) path(sha string) string { return filepath.Join(b.dir, sha, keptProgram) }

// installed says of which file the newest copy was made.
type installed struct {
	Path   string    `json:"path"`
	Size   int64     `json:"size"`
	Inode  uint64    `json:"inode"`
	Mtime  time.Time `json:"mtime"`
	SHA256 string    `json:"sha256"`
}

// installRuntime makes sure that there is a copy of gVisor's program, and has the node run
// sandboxes by it. Where programs cannot be run from DataDir, the installed one is used as it is,
// and an upgrade leaves only the files of sandboxes that sleep.
func (n *Node) installRuntime(ctx context.Context) error {
	n.builds = &builds{dir: filepath.Join(n.cfg.DataDir, "runtimes"), older: map[string]*oci.Runtime{}}
	for _, c := range n.cfg.Runtimes {
		if c.Class != oci.GVisor {
			continue
		}
		n.builds.base = c
		program, err := exec.LookPath(c.Binary)
		if err != nil {
			return fmt.Errorf("find the runtime: %w", err)
		}
		sha, err := n.builds.keep(program)
		if err != nil {
			return fmt.Errorf("keep a copy of the runtime: %w", err)
		}
		n.builds.current = sha
		if err := unix.Access(n.builds.path(sha), unix.X_OK); err != nil {
			n.log.WarnContext(ctx, "no program can be run from the data directory; memory of sleeping sandboxes will not outlive an upgrade of the runtime",
				"dir", n.builds.dir, telemetry.Error, err)
			return nil
		}
		r, err := n.builds.runtime(sha)
		if err != nil {
			return err
		}
		n.runtimes[oci.GVisor] = r
	}
	return nil
}

// keep copies a program, unless there is a copy, and returns its SHA-256.
func (b *builds) keep(program string) (sha string, err error) {
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

// hasCopy reports whether the file is the one that was copied last, and completes its identity.
func (b *builds) hasCopy(now *installed) bool {
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

// copy makes a copy that is durable, name and all. It is no link: whoever overwrites the installed
// program in place changes that.
func (b *builds) copy(from io.Reader, sha string) error {
	dir := filepath.Dir(b.path(sha))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := durable.CopyProgram(from, b.path(sha)); err != nil {
		return err
	}
	for _, d := range []string{dir, b.dir} {
		f, err := os.Open(d)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// runtime is the one of a build that is kept. None is an errs.ErrConflict.
func (b *builds) runtime(sha string) (*oci.Runtime, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, err := os.Stat(b.path(sha)); errors.Is(err, fs.ErrNotExist) {
		delete(b.older, sha)
		return nil, fmt.Errorf("it needs the runtime's build with the SHA-256 %.12s, which is not on this machine any more: %w", sha, errs.ErrConflict)
	} else if err != nil {
		return nil, fmt.Errorf("find the runtime's build %.12s: %w: %w", sha, err, errs.ErrUnavailable)
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

// runtimeFor is gVisor's runtime of a build: the one that new containers are started by, or one
// that was kept. A build without a SHA-256 means the former. One that is not there is an
// errs.ErrConflict.
func (n *Node) runtimeFor(build memimage.Build) (*oci.Runtime, error) {
	if build.SHA256 == "" || n.builds == nil || build.SHA256 == n.builds.current {
		return n.runtimeOf(oci.GVisor)
	}
	return n.builds.runtime(build.SHA256)
}

// runtimeOfRow is the runtime that drives a sandbox's container.
func (n *Node) runtimeOfRow(r *journal.Row) (*oci.Runtime, error) {
	if r.Plan.Class != oci.GVisor {
		return n.runtimeOf(r.Plan.Class)
	}
	return n.runtimeFor(memimage.Build{SHA256: r.Build})
}

// buildNow is the build that a new container of a class is started by; empty where it does not
// matter.
func (n *Node) buildNow(c oci.Class) string {
	if c != oci.GVisor || n.builds == nil {
		return ""
	}
	return n.builds.current
}

// sweepBuilds removes the builds that neither a row of the node's database nor an image of memory
// names. Whatever cannot be read keeps all of them.
func (n *Node) sweepBuilds(ctx context.Context) {
	names, err := entries(n.builds.dir)
	for _, sha := range names {
		if err != nil || ctx.Err() != nil {
			break
		}
		if sha == n.builds.current || sha == installedName {
			continue
		}
		var needed bool
		if needed, err = n.needsBuild(sha); needed || err != nil {
			continue
		}
		n.log.InfoContext(ctx, "removing a build of the runtime that nothing needs any more", "sha256", sha)
		err = n.builds.remove(sha)
	}
	if err != nil {
		n.log.WarnContext(ctx, "builds of the runtime that nothing needs may be left", telemetry.Error, err)
	}
}

func (b *builds) remove(sha string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.older, sha)
	return os.RemoveAll(filepath.Join(b.dir, sha))
}

// needsBuild reports whether something names a build. Rows are searched as bytes, so that those
// that this version cannot read count too.
func (n *Node) needsBuild(sha string) (found bool, err error) {
	word := []byte(sha)
	err = n.db.View(func(tx *bolt.Tx) error {
		return tx.ForEach(func(_ []byte, b *bolt.Bucket) error {
			return b.ForEach(func(_, value []byte) error {
				found = found || bytes.Contains(value, word)
				return nil
			})
		})
	})
	if err != nil || found {
		return found, err
	}
	for _, dir := range []string{n.cfg.MemoryDir, filepath.Join(n.cfg.DataDir, "checkpoints")} {
		more, err := imagesName(dir, word)
		if err != nil || more {
			return more, err
		}
	}
	return false, nil
}

// imagesName reports whether the description of an image below a directory has a word.
func imagesName(dir string, word []byte) (found bool, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || d.IsDir() || filepath.Base(path) != imageDescription {
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
