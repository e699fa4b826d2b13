// Package builds keeps what a template's build has besides its object: the uploaded archives that its steps copy, and its
// log. Both are files of one server. Secrets of builds are in its memory alone. It runs no build, reads no archive, and deletes no log by itself.
//
//	files/<namespace>/<hash>   an archive; its modification time is its last use
//	logs/<UID>                 a build's log, one entry of JSON a line
//
// mu orders the operations on files that change what is kept. It is held during short ones, never while an archive is read.
package builds

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/barchan-dev/barchan/internal/base/durable"
	"github.com/barchan-dev/barchan/internal/base/errs"
)

// Defaults of a Config, in bytes.
const (
	defaultMaxFiles = 2 << 30
	defaultMaxTotal = 20 << 30
	defaultMaxLog   = 16 << 20
)

const (
	dirMode     = 0o700
	privateMode = 0o600
	// partial begins the names of archives that are not complete; no hash or UID begins so.
	partial = ".partial-"
)

// Config configures a Store.
type Config struct {
	// Dir is required. It belongs to this process alone.
	Dir string
	// MaxFiles bounds one archive, in bytes. Default 2 GiB.
	MaxFiles int64
	// MaxTotal bounds all archives together, in bytes, also those that are being uploaded. The least recently used are
	// removed first. Default 20 GiB.
	MaxTotal int64
	// MaxLog bounds one log, in bytes. A last entry then says that the rest is left out. Default 16 MiB.
	MaxLog int64
}

// Store has the files of all builds of a server. It is safe for concurrent use.
type Store struct {
	cfg   Config
	files string // directory of archives
	logs  string // directory of logs

	mu sync.Mutex
	// archives are all that are complete.
	// +checklocks:mu
	archives map[archive]*state
	// total is the size of the archives, and of those that are being uploaded.
	// +checklocks:mu
	total int64
	// ends has where the last read of each log ended, since the next one mostly begins there.
	// +checklocks:mu
	ends map[types.UID]position
	// secrets are in memory alone.
	// +checklocks:mu
	secrets map[types.UID]map[string][]byte
}

// position is a place in a log: after so many entries, which take so many bytes.
type position struct {
	entries int
	bytes   int64
}

// archive names an uploaded archive.
type archive struct{ namespace, hash string }

// state is what is known of an archive.
type state struct {
	size int64
	used time.Time
}

// Open reads a directory, or makes it, and removes what an earlier process left half-written.
func Open(cfg Config) (*Store, error) {
	if cfg.Dir == "" || min(cfg.MaxFiles, cfg.MaxTotal, cfg.MaxLog) < 0 {
		return nil, fmt.Errorf("builds: Dir is required, and limits must be positive: %w", errs.ErrInvalid)
	}
	cfg.MaxFiles, cfg.MaxTotal, cfg.MaxLog = cmp.Or(cfg.MaxFiles, defaultMaxFiles), cmp.Or(cfg.MaxTotal, defaultMaxTotal), cmp.Or(cfg.MaxLog, defaultMaxLog)
	s := &Store{cfg: cfg, files: filepath.Join(cfg.Dir, "files"), logs: filepath.Join(cfg.Dir, "logs"), archives: map[archive]*state{}, ends: map[types.UID]position{}, secrets: map[types.UID]map[string][]byte{}}
	for _, dir := range []string{cfg.Dir, s.files, s.logs} {
		if err := makeDir(dir); err != nil {
			return nil, err
		}
	}
	if err := s.load(); err != nil {
		return nil, fmt.Errorf("read archives of builds: %w", err)
	}
	return s, nil
}

// Free returns how many bytes of the disk are free for processes without privileges.
func (s *Store) Free() (int64, error) {
	return durable.Free(s.cfg.Dir)
}

// makeDir makes a directory with the mode of all, also if it exists with another.
func makeDir(dir string) error {
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return fmt.Errorf("make directory of builds: %w", err)
	}
	if err := os.Chmod(dir, dirMode); err != nil {
		return fmt.Errorf("make directory of builds: %w", err)
	}
	return nil
}

// load finds the complete archives, and removes everything else.
func (s *Store) load() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	namespaces, err := os.ReadDir(s.files)
	if err != nil {
		return err
	}
	for _, ns := range namespaces {
		dir := filepath.Join(s.files, ns.Name())
		if !ns.IsDir() {
			if err := os.Remove(dir); err != nil {
				return err
			}
			continue
		}
		found, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, f := range found {
			a := archive{ns.Name(), f.Name()}
			info, err := f.Info()
			if err != nil {
				return err
			}
			if a.check() != nil || !info.Mode().IsRegular() {
				if err := os.RemoveAll(filepath.Join(dir, f.Name())); err != nil {
					return err
				}
				continue
			}
			s.archives[a] = &state{size: info.Size(), used: info.ModTime()}
			s.total += info.Size()
		}
		_ = os.Remove(dir) // if it is empty
	}
	return s.shrinkLocked(0)
}

// hashForm is that of a hash.
var hashForm = regexp.MustCompile(`^[0-9a-f]{64}$`)

// check refuses names that could be paths.
func (a archive) check() error {
	if problems := validation.IsDNS1123Label(a.namespace); len(problems) > 0 {
		return fmt.Errorf("namespace %.64q: %s: %w", a.namespace, strings.Join(problems, "; "), errs.ErrInvalid)
	}
	return CheckHash(a.hash)
}

// CheckHash refuses a hash that is not of the form of archives', as an errs.ErrInvalid.
func CheckHash(hash string) error {
	if !hashForm.MatchString(hash) {
		return errs.Public(errs.ErrInvalid, fmt.Sprintf("hash: %.80q must be 64 lower-case hex digits", hash))
	}
	return nil
}

func (s *Store) path(a archive) string { return filepath.Join(s.files, a.namespace, a.hash) }

// shrinkLocked removes the least recently used archives until n more bytes fit, or the error is an errs.ErrExhausted.
// +checklocks:s.mu
func (s *Store) shrinkLocked(n int64) error {
	for s.total+n > s.cfg.MaxTotal {
		var oldest archive
		for a, st := range s.archives {
			if oldest.hash == "" || st.used.Before(s.archives[oldest].used) {
				oldest = a
			}
		}
		if oldest.hash == "" {
			return errs.Public(errs.ErrExhausted, "there is no room for more files of template builds; try again when other uploads have ended")
		}
		if err := s.removeLocked(oldest); err != nil {
			return err
		}
	}
	return nil
}

// removeLocked removes an archive that is kept. One whose file is gone is no error.
// +checklocks:s.mu
func (s *Store) removeLocked(a archive) error {
	if err := os.Remove(s.path(a)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove archive: %w", err)
	}
	s.total -= s.archives[a].size
	delete(s.archives, a)
	return nil
}
